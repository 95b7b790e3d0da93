"""BART as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zerojax.models import config_json, encoder_decoder, family, parallel
from zerojax.models.bart import model
from zerojax.models.bart.model import BartConfig
from zerojax.models.family import Tensor


class _Kind(NamedTuple):
    """A model_type: its class in transformers, that without a head, and the fields of the config that it fixes."""

    architecture: str
    bare: str
    fields: dict[str, Any]


_FIRST = {"norm_first": True, "has_final_norm": True}
_MBART: dict[str, Any] = {**_FIRST, "starts_with_last": True, "model_type": "mbart"}
_PEGASUS: dict[str, Any] = {**_FIRST, "has_embed_norm": False, "has_fixed_positions": True, "model_type": "pegasus"}
_MARIAN: dict[str, Any] = {"has_embed_norm": False, "has_sinusoids": True, "model_type": "marian"}
KINDS: dict[str, _Kind] = {
    "bart": _Kind("BartForConditionalGeneration", "BartModel", {}),
    "mbart": _Kind("MBartForConditionalGeneration", "MBartModel", _MBART),
    "pegasus": _Kind("PegasusForConditionalGeneration", "PegasusModel", _PEGASUS),
    "marian": _Kind("MarianMTModel", "MarianModel", _MARIAN),
}

_scaled = functools.partial(BartConfig, activation="relu", scale_embeddings=True)

# The sizes of the vocabulary, the layers, the embedding, heads and the MLP.
PRESETS: dict[str, BartConfig] = {
    "bart_test": BartConfig(0, 2, 64, 4, 128, max_seq_len=512),
    "bart_base": BartConfig(50265, 6, 768, 12, 3072),
    "bart_large": BartConfig(50265, 12, 1024, 16, 4096),
    "mbart_large_50": _scaled(250054, 12, 1024, 16, 4096, **_MBART),  # arXiv:2008.00401
    "pegasus_large": _scaled(96103, 16, 1024, 16, 4096, **_PEGASUS),  # arXiv:1912.08777
}
MARIAN_PRESETS: dict[str, BartConfig] = {
    # Helsinki-NLP/opus-mt-en-de
    "opus_mt": _scaled(58101, 6, 512, 8, 2048, max_seq_len=512, activation="swish", **_MARIAN),
}

HEAD, EMBED, BIAS = "lm_head.weight", "model.shared.weight", "final_logits_bias"
OWN_EMBEDS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")


def _linear(ours: str, theirs: str, inputs: int = 1) -> dict[str, Tensor]:
    return {f"{ours}/kernel": Tensor(f"{theirs}.weight", inputs), f"{ours}/bias": Tensor(f"{theirs}.bias", form="flat")}


def _norm(ours: str, theirs: str) -> dict[str, Tensor]:
    return {f"{ours}/scale": Tensor(f"{theirs}.weight"), f"{ours}/bias": Tensor(f"{theirs}.bias")}


def _attention(ours: str, theirs: str) -> dict[str, Tensor]:
    found = _linear(f"{ours}/o", f"{theirs}.out_proj", 2)
    for name in "qkv":
        found |= _linear(f"{ours}/{name}", f"{theirs}.{name}_proj")
    return found | _norm(f"{ours}_norm", f"{theirs}_layer_norm")


def _tensors(config: BartConfig) -> dict[str, Tensor]:
    found = {"embed/embedding": Tensor(EMBED), "head/kernel": Tensor(HEAD, 1)}
    # A buffer, which is 0 in nearly all models and missing in files of a model without its head.
    found["logits_bias/bias"] = Tensor(BIAS, form="row", is_optional=True)
    for side in ("encoder", "decoder"):
        ours, theirs = f"{side}_{{}}", f"model.{side}.layers.{{}}"
        found[f"{side}_embed/embedding"] = Tensor(f"model.{side}.embed_tokens.weight")
        found[f"{side}_positions/embedding"] = Tensor(f"model.{side}.embed_positions.weight")
        found |= _norm(f"{side}_norm", f"model.{side}.layernorm_embedding")
        found |= _norm(f"{side}_final_norm", f"model.{side}.layer_norm")
        found |= _attention(f"{ours}/attention", f"{theirs}.self_attn")
        found |= _linear(f"{ours}/mlp/up", f"{theirs}.fc1") | _linear(f"{ours}/mlp/down", f"{theirs}.fc2")
        found |= _norm(f"{ours}/mlp_norm", f"{theirs}.final_layer_norm")
    return found | _attention("decoder_{}/cross", "model.decoder.layers.{}.encoder_attn")


def _write(config: BartConfig) -> dict[str, Any]:
    c = config
    found: dict[str, Any] = {"architectures": [KINDS[c.model_type].architecture], "model_type": c.model_type}
    for side, (depth, heads, mlp_dim) in (("encoder", c.encoder_shape), ("decoder", c.decoder_shape)):
        found |= {f"{side}_layers": depth, f"{side}_attention_heads": heads, f"{side}_ffn_dim": mlp_dim}
        found[f"{side}_layerdrop"] = 0.0
    return found | {
        "vocab_size": c.vocab_size,
        "d_model": c.embed_dim,
        "max_position_embeddings": c.max_seq_len,
        "activation_function": c.activation,
        "scale_embedding": c.scale_embeddings,
        "init_std": c.stddev,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "tie_word_embeddings": c.tie_embeddings,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "forced_eos_token_id": None,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> BartConfig:
    f = config_json.Fields(raw)
    for side in ("encoder", "decoder"):
        f.heads("d_model", f"{side}_attention_heads")
    kind = f.choice("model_type", KINDS, "bart")
    if kind == "marian" and not f.flag("share_encoder_decoder_embeddings", True):
        raise f.refuse("share_encoder_decoder_embeddings", "true, since one table embeds inputs and targets")
    return BartConfig(
        f.count("vocab_size"),
        f.depth("encoder_layers"),
        embed_dim=f.count("d_model"),
        num_heads=f.count("encoder_attention_heads"),
        mlp_dim=f.count("encoder_ffn_dim"),
        decoder_layers=f.depth("decoder_layers"),
        decoder_heads=f.count("decoder_attention_heads"),
        decoder_mlp_dim=f.count("decoder_ffn_dim"),
        max_seq_len=f.count("max_position_embeddings", 1024),
        activation=f.activation("activation_function", "gelu"),
        scale_embeddings=f.flag("scale_embedding", False),
        tie_embeddings=f.flag("tie_word_embeddings", True) and HEAD not in names,
        separate_embeddings=set(OWN_EMBEDS) <= set(names),
        stddev=f.number("init_std", 0.02),
        **KINDS[kind].fields,
    )


def _repeated(config: BartConfig) -> dict[str, str]:
    """Returns the tables of the encoder and the decoder, which transformers ties to the shared one only if the head is tied too."""
    return {} if config.tie_embeddings or config.separate_embeddings else dict.fromkeys(OWN_EMBEDS, EMBED)


def _classes(*kinds: str) -> dict[str, tuple[str, ...]]:
    return {kind: (KINDS[kind].architecture, KINDS[kind].bare) for kind in kinds}


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    **encoder_decoder.calls(model.Bart, model.flops_per_row),
    positions=lambda config: config.max_seq_len,
    attention=("xla", "cudnn"),
    huggingface=family.HuggingFace(
        architectures=_classes("bart", "mbart", "pegasus"),
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("q_proj", "v_proj"),
        repeated=_repeated,
        starts={"bart": 2, "marian": 58_100, "pegasus": 0},
        copies=lambda raw: {
            r"model\.(encoder|decoder)\.embed_tokens\.weight": EMBED,
            **({HEAD: EMBED} if raw.get("tie_word_embeddings", True) else {}),
        },
        prefix="model.",
        outside=(HEAD, BIAS),
    ),
    parallel=parallel.Parallel(
        weights=(*parallel.WEIGHTS, (r"positions/embedding", ("model",)), (r"logits_bias/bias", ("model",))),
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            (r"(en|de)coder_\d+/(attention|cross|mlp)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"((en|de)coder_)?embed|(en|de)coder_((final_)?norm|\d+(/(attention|cross|mlp)_norm)?)", parallel.TOKENS),
        ),
    ),
)

# Files may hold the table of sines and cosines, which transformers makes anew where it is missing.
MARIAN = dataclasses.replace(
    FAMILY,
    presets=MARIAN_PRESETS,
    huggingface=dataclasses.replace(
        FAMILY.huggingface,
        architectures=_classes("marian"),
        ignored=r"model\.(encoder|decoder)\.embed_positions\.weight",
    ),
)
