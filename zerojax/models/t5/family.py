"""T5 as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
from collections.abc import Collection, Mapping
from typing import Any

from zerojax.models import config_json, encoder_decoder, family, layers, parallel
from zerojax.models.family import Tensor
from zerojax.models.t5 import model
from zerojax.models.t5.model import T5Config

_v1_1 = functools.partial(T5Config, 32128, head_dim=64)

PRESETS: dict[str, T5Config] = {
    "t5_test": T5Config(0, 2, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=128),
    "t5_tiny": T5Config(0, 2, embed_dim=128, num_heads=4, head_dim=32, mlp_dim=256),
    "t5_v1_1_small": _v1_1(8, embed_dim=512, num_heads=6, mlp_dim=1024),
    "t5_v1_1_base": _v1_1(12, embed_dim=768, num_heads=12, mlp_dim=2048),
    "t5_v1_1_large": _v1_1(24, embed_dim=1024, num_heads=16, mlp_dim=2816),
    "t5_v1_1_xl": _v1_1(24, embed_dim=2048, num_heads=32, mlp_dim=5120),
    "t5_v1_1_xxl": _v1_1(24, embed_dim=4096, num_heads=64, mlp_dim=10240),
}


# The rows: model_type in Hugging Face's config.json -> its class in transformers
ROWS: dict[str, tuple[str, ...]] = {"t5": ("T5ForConditionalGeneration",), "mt5": ("MT5ForConditionalGeneration",)}
HEAD, EMBED = "lm_head.weight", "shared.weight"


def _attention(ours: str, theirs: str) -> dict[str, Tensor]:
    kernels = {f"{ours}/{name}/kernel": Tensor(f"{theirs}.{name}.weight", 1) for name in "qkv"}
    return kernels | {f"{ours}/o/kernel": Tensor(f"{theirs}.o.weight", 2)}


def _mlp(ours: str, theirs: str, config: T5Config) -> dict[str, Tensor]:
    names = {"gate": "wi_0", "up": "wi_1"} if config.mlp.startswith("gated_") else {"up": "wi"}
    return {
        f"{ours}/{name}/kernel": Tensor(f"{theirs}.{other}.weight", 1)
        for name, other in {**names, "down": "wo"}.items()
    }


def _tensors(config: T5Config) -> dict[str, Tensor]:
    """Returns Hugging Face's names. There, the first layer of a stack holds the table of relative biases, and the others read it."""
    return {
        "embed/embedding": Tensor(EMBED),
        "encoder_bias/embedding": Tensor("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        "encoder_norm/scale": Tensor("encoder.final_layer_norm.weight"),
        "decoder_bias/embedding": Tensor("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        "decoder_norm/scale": Tensor("decoder.final_layer_norm.weight"),
        "head/kernel": Tensor(HEAD, 1),
        "encoder_{}/attention_norm/scale": Tensor("encoder.block.{}.layer.0.layer_norm.weight"),
        **_attention("encoder_{}/attention", "encoder.block.{}.layer.0.SelfAttention"),
        "encoder_{}/mlp_norm/scale": Tensor("encoder.block.{}.layer.1.layer_norm.weight"),
        **_mlp("encoder_{}/mlp", "encoder.block.{}.layer.1.DenseReluDense", config),
        "decoder_{}/attention_norm/scale": Tensor("decoder.block.{}.layer.0.layer_norm.weight"),
        **_attention("decoder_{}/attention", "decoder.block.{}.layer.0.SelfAttention"),
        "decoder_{}/cross_norm/scale": Tensor("decoder.block.{}.layer.1.layer_norm.weight"),
        **_attention("decoder_{}/cross", "decoder.block.{}.layer.1.EncDecAttention"),
        "decoder_{}/mlp_norm/scale": Tensor("decoder.block.{}.layer.2.layer_norm.weight"),
        **_mlp("decoder_{}/mlp", "decoder.block.{}.layer.2.DenseReluDense", config),
    }


def _write(config: T5Config) -> dict[str, Any]:
    c = config
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": c.vocab_size,
        "d_model": c.embed_dim,
        "d_kv": c.head_dim,
        "d_ff": c.mlp_dim,
        "num_layers": c.num_layers,
        "num_decoder_layers": model.depth_of_decoder(c),
        "num_heads": c.num_heads,
        "relative_attention_num_buckets": c.buckets,
        "relative_attention_max_distance": c.max_distance,
        "layer_norm_epsilon": c.norm_eps,
        "feed_forward_proj": c.mlp.replace("gated_", "gated-"),
        "dropout_rate": 0.0,
        "tie_word_embeddings": c.tie_embeddings,
        "scale_decoder_outputs": c.tie_embeddings if c.scale_outputs is None else c.scale_outputs,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> T5Config:
    """Reads a config.json. transformers 5 always says that embeddings are tied; the files then have a head where they are not."""
    f = config_json.Fields(raw)
    is_mt5 = raw.get("model_type") == "mt5"
    is_tied, says_scale = f.flag("tie_word_embeddings", not is_mt5), "scale_decoder_outputs" in raw
    if not f.flag("is_encoder_decoder", True):
        raise f.refuse("is_encoder_decoder", "true, since a decoder alone would not read the encoder")
    # null is no default here: transformers does not scale.
    scales = f.flag("scale_decoder_outputs", False if says_scale else is_tied)
    buckets, max_distance = _read_distances(f)
    return T5Config(
        f.count("vocab_size"),
        f.depth("num_layers"),
        embed_dim=f.count("d_model"),
        num_heads=f.count("num_heads"),
        head_dim=f.count("d_kv"),
        mlp_dim=f.count("d_ff"),
        mlp=_read_mlp(f, "gated-gelu" if is_mt5 else "relu"),
        tie_embeddings=(is_tied or says_scale) and HEAD not in names,
        scale_outputs=is_tied and _is_of_version_4(raw) if is_mt5 else scales,
        decoder_layers=f.depth("num_decoder_layers", f.depth("num_layers")),
        buckets=buckets,
        max_distance=max_distance,
        norm_eps=f.number("layer_norm_epsilon", 1e-6),
    )


def _read_distances(f: config_json.Fields) -> tuple[int, int]:
    """Reads the number of buckets of distances and the longest distance that has one of its own."""
    buckets, longest = f.count("relative_attention_num_buckets", 32), f.count("relative_attention_max_distance", 128)
    if buckets < 4:
        raise f.refuse("relative_attention_num_buckets", "4 or more, since an encoder's are shared by two directions")
    if longest <= buckets // 2:
        raise f.refuse("relative_attention_max_distance", f"above {buckets // 2}, half of the buckets")
    return buckets, longest


def _read_mlp(f: config_json.Fields, default: str) -> str:
    """Reads the MLP's activation and gate, which newer files say twice."""
    known = [f"{gate}{name}" for gate in ("", "gated-") for name in layers.ACTIVATIONS]
    found = f.choice("feed_forward_proj", known, default)
    activation = "gelu_new" if found == "gated-gelu" else found.removeprefix("gated-")
    for name, told in (("dense_act_fn", activation), ("is_gated_act", found.startswith("gated-"))):
        if f.raw.get(name) not in (None, told):
            raise f.refuse(name, f"{told!r} where feed_forward_proj is {found!r}")
    return found.replace("gated-", "gated_")


def _is_of_version_4(raw: Mapping[str, Any]) -> bool:
    """Returns whether a version of transformers before 5 wrote the file. Those scale the outputs of a tied mT5, and later ones never do."""
    return str(raw.get("transformers_version") or "4").split(".")[0] in ("2", "3", "4")


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    **encoder_decoder.calls(model.T5, model.flops_per_row),
    positions=lambda config: None,
    attention=("xla",),  # cuDNN's kernel is not tested with a learned bias
    huggingface=family.HuggingFace(
        architectures=ROWS,
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("q", "v"),
        starts={"mt5": 0},
        copies=lambda raw: {
            r"(encoder|decoder)\.embed_tokens\.weight": EMBED,
            **({HEAD: EMBED} if raw.get("tie_word_embeddings", True) else {}),
        },
        ignored=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # read by no version
    ),
    parallel=parallel.Parallel(
        weights=(*parallel.WEIGHTS, (r"coder_bias/embedding", (None, "model"))),
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            (r"(en|de)coder_\d+/(attention|cross|mlp)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"embed|(en|de)coder_(norm|\d+(/(attention|cross|mlp)_norm)?)", parallel.TOKENS),
        ),
    ),
)
