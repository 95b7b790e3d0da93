"""Llama as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
from collections.abc import Mapping
from typing import Any, cast

import jax

from zerojax.models import family
from zerojax.models.llama import model
from zerojax.models.llama.model import LlamaConfig

# The rotary base of 500,000 supports up to 32,768 positions (arXiv:2407.21783, section 3.2).
_llama3 = functools.partial(LlamaConfig, 128256, rope_theta=500000.0, max_seq_len=32768)

PRESETS: dict[str, LlamaConfig] = {
    "test": LlamaConfig(0, 2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, max_seq_len=512),
    "tiny": LlamaConfig(0, 4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, max_seq_len=2048),
    "llama3_1b": _llama3(16, embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192),
    "llama3_8b": _llama3(32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336),
    "llama3_70b": _llama3(80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28672),
}

# Query and key need no permutation: like Hugging Face's, the model rotates the first half of a head's dims against the second.
TENSORS = {
    "embed/embedding": ("model.embed_tokens.weight", 0),
    "norm/scale": ("model.norm.weight", 0),
    "head/kernel": ("lm_head.weight", 1),
    "layer_{}/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", 0),
    "layer_{}/attention/q/kernel": ("model.layers.{}.self_attn.q_proj.weight", 1),
    "layer_{}/attention/k/kernel": ("model.layers.{}.self_attn.k_proj.weight", 1),
    "layer_{}/attention/v/kernel": ("model.layers.{}.self_attn.v_proj.weight", 1),
    "layer_{}/attention/o/kernel": ("model.layers.{}.self_attn.o_proj.weight", 2),
    "layer_{}/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", 0),
    "layer_{}/mlp/gate/kernel": ("model.layers.{}.mlp.gate_proj.weight", 1),
    "layer_{}/mlp/up/kernel": ("model.layers.{}.mlp.up_proj.weight", 1),
    "layer_{}/mlp/down/kernel": ("model.layers.{}.mlp.down_proj.weight", 1),
}


def _loss(config: LlamaConfig, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    return cast(jax.Array, model.Llama(config).apply({"params": params}, batch["tokens"], method="loss"))


def _logits(config: LlamaConfig, params: Any, inputs: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    assert not inputs, "a decoder's prompt has no other arrays than its tokens"
    return cast(jax.Array, model.Llama(config).apply({"params": params}, tokens))


def _flops_per_token(config: LlamaConfig, lengths: Mapping[str, int]) -> float:
    return model.flops_per_token(config, lengths["tokens"] - 1)


def _huggingface_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
    }


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="next_token",
    loss=_loss,
    logits=_logits,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla", "cudnn", "splash"),
    flops_per_token=_flops_per_token,
    huggingface=family.HuggingFace(lambda config: TENSORS, _huggingface_config),
)
