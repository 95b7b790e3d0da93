"""BART as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from zerojax.models import config_json, encoder_decoder, family, parallel
from zerojax.models.bart import model
from zerojax.models.bart.model import BartConfig
from zerojax.models.family import Tensor

_published = functools.partial(BartConfig, 50265)

PRESETS: dict[str, BartConfig] = {
    "bart_test": BartConfig(0, 2, embed_dim=64, num_heads=4, mlp_dim=128, max_seq_len=512),
    "bart_base": _published(6, embed_dim=768, num_heads=12, mlp_dim=3072),
    "bart_large": _published(12, embed_dim=1024, num_heads=16, mlp_dim=4096),
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
        found |= _attention(f"{ours}/attention", f"{theirs}.self_attn")
        found |= _linear(f"{ours}/mlp/up", f"{theirs}.fc1") | _linear(f"{ours}/mlp/down", f"{theirs}.fc2")
        found |= _norm(f"{ours}/mlp_norm", f"{theirs}.final_layer_norm")
    return found | _attention("decoder_{}/cross", "model.decoder.layers.{}.encoder_attn")


def _write(config: BartConfig) -> dict[str, Any]:
    c = config
    found: dict[str, Any] = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}
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
    )


def _repeated(config: BartConfig) -> dict[str, str]:
    """Returns the tables of the encoder and the decoder, which transformers ties to the shared one only if the head is tied too."""
    return {} if config.tie_embeddings or config.separate_embeddings else dict.fromkeys(OWN_EMBEDS, EMBED)


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="span_corruption",
    loss=functools.partial(encoder_decoder.loss, model.Bart),
    logits=functools.partial(encoder_decoder.logits, model.Bart),
    start=functools.partial(encoder_decoder.start, model.Bart),
    extend=functools.partial(encoder_decoder.extend, model.Bart),
    positions=lambda config: config.max_seq_len,
    is_encoder_decoder=True,
    blocks=r"(encoder|decoder)_\d+",
    heads="head",
    attention=("xla", "cudnn"),
    flops_per_token=functools.partial(encoder_decoder.flops_per_token, model.flops_per_row),
    huggingface=family.HuggingFace(
        architectures={"bart": ("BartForConditionalGeneration", "BartModel")},
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("q_proj", "v_proj"),
        repeated=_repeated,
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
            (r"((en|de)coder_)?embed|(en|de)coder_(norm|\d+(/(attention|cross|mlp)_norm)?)", parallel.TOKENS),
        ),
    ),
)
