"""T5 as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
from collections.abc import Mapping
from typing import Any, cast

import jax

from zerojax.models import family
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


def _attention(ours: str, theirs: str) -> dict[str, tuple[str, int]]:
    kernels = {f"{ours}/{name}/kernel": (f"{theirs}.{name}.weight", 1) for name in "qkv"}
    return kernels | {f"{ours}/o/kernel": (f"{theirs}.o.weight", 2)}


def _mlp(ours: str, theirs: str, config: T5Config) -> dict[str, tuple[str, int]]:
    names = {"gate": "wi_0", "up": "wi_1"} if config.mlp == "gated_gelu" else {"up": "wi"}
    return {f"{ours}/{name}/kernel": (f"{theirs}.{other}.weight", 1) for name, other in {**names, "down": "wo"}.items()}


def _tensors(config: T5Config) -> dict[str, tuple[str, int]]:
    """Returns Hugging Face's names. There, the first layer of a stack holds the table of relative biases, and the others read it."""
    return {
        "embed/embedding": ("shared.weight", 0),
        "encoder_bias/embedding": ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 0),
        "encoder_norm/scale": ("encoder.final_layer_norm.weight", 0),
        "decoder_bias/embedding": ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", 0),
        "decoder_norm/scale": ("decoder.final_layer_norm.weight", 0),
        "head/kernel": ("lm_head.weight", 1),
        "encoder_{}/attention_norm/scale": ("encoder.block.{}.layer.0.layer_norm.weight", 0),
        **_attention("encoder_{}/attention", "encoder.block.{}.layer.0.SelfAttention"),
        "encoder_{}/mlp_norm/scale": ("encoder.block.{}.layer.1.layer_norm.weight", 0),
        **_mlp("encoder_{}/mlp", "encoder.block.{}.layer.1.DenseReluDense", config),
        "decoder_{}/attention_norm/scale": ("decoder.block.{}.layer.0.layer_norm.weight", 0),
        **_attention("decoder_{}/attention", "decoder.block.{}.layer.0.SelfAttention"),
        "decoder_{}/cross_norm/scale": ("decoder.block.{}.layer.1.layer_norm.weight", 0),
        **_attention("decoder_{}/cross", "decoder.block.{}.layer.1.EncDecAttention"),
        "decoder_{}/mlp_norm/scale": ("decoder.block.{}.layer.2.layer_norm.weight", 0),
        **_mlp("decoder_{}/mlp", "decoder.block.{}.layer.2.DenseReluDense", config),
    }


def _loss(config: T5Config, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    applied = model.T5(config).apply({"params": params}, batch["inputs"], batch["targets"], method="loss")
    return cast(jax.Array, applied)


def _logits(config: T5Config, params: Any, inputs: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    return cast(jax.Array, model.T5(config).apply({"params": params}, inputs["inputs"], tokens))


def _flops_per_token(config: T5Config, lengths: Mapping[str, int]) -> float:
    return model.flops_per_row(config, lengths["inputs"], lengths["targets"] - 1) / lengths["inputs"]


def _huggingface_config(config: T5Config) -> dict[str, Any]:
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.embed_dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.buckets,
        "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": config.mlp.replace("_", "-"),
        "dropout_rate": 0.0,
        "tie_word_embeddings": config.tie_embeddings,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="span_corruption",
    loss=_loss,
    logits=_logits,
    blocks=r"(encoder|decoder)_\d+",
    heads="head",
    attention=("xla",),  # cuDNN's kernel is not tested with a learned bias
    flops_per_token=_flops_per_token,
    huggingface=family.HuggingFace(_tensors, _huggingface_config),
)
