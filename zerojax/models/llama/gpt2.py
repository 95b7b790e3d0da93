"""GPT-2 as a family: the decoder with LayerNorm, learned positions and plain MLPs. This module holds its presets and its names at Hugging
Face."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from zerojax.models import config_json, family
from zerojax.models.family import Tensor
from zerojax.models.llama.config import Heads, LlamaConfig, MLPForm, Norms
from zerojax.models.llama.family import FAMILY as LLAMA

EMBED, HEAD = "transformer.wte.weight", "lm_head.weight"
_HEADS = Heads(qkv_bias=True, o_bias=True, is_fused=True)
_MLP = MLPForm("gelu_new", is_gated=False, has_biases=True)


def _shape(num_layers: int, num_heads: int, embed_dim: int) -> LlamaConfig:
    return LlamaConfig(
        50257,
        num_layers,
        embed_dim,
        num_heads,
        num_heads,
        embed_dim // num_heads,
        4 * embed_dim,
        max_seq_len=1024,
        tie_embeddings=True,
        heads=_HEADS,
        norms=Norms("layer"),
        mlp=_MLP,
        has_positions=True,
        model_type="gpt2",
    )


# Language Models are Unsupervised Multitask Learners (2019), table 2.
PRESETS: dict[str, LlamaConfig] = {
    "gpt2": _shape(12, 12, 768),
    "gpt2_medium": _shape(24, 16, 1024),
    "gpt2_large": _shape(36, 20, 1280),
    "gpt2_xl": _shape(48, 25, 1600),
}


def _tensors(config: LlamaConfig) -> dict[str, Tensor]:
    block, found = "transformer.h.{}", {"embed/embedding": Tensor(EMBED), "head/kernel": Tensor(HEAD, 1)}
    found["positions/embedding"] = Tensor("transformer.wpe.weight")
    norms = {
        "norm": "transformer.ln_f",
        "layer_{}/attention_norm": f"{block}.ln_1",
        "layer_{}/mlp_norm": f"{block}.ln_2",
    }
    for ours, theirs in norms.items():
        found |= {f"{ours}/scale": Tensor(f"{theirs}.weight"), f"{ours}/bias": Tensor(f"{theirs}.bias")}
    linear = {
        "attention/qkv": ("attn.c_attn", 1),
        "attention/o": ("attn.c_proj", 2),
        "mlp/up": ("mlp.c_fc", 1),
        "mlp/down": ("mlp.c_proj", 1),
    }
    for ours, (theirs, inputs) in linear.items():
        found[f"layer_{{}}/{ours}/kernel"] = Tensor(f"{block}.{theirs}.weight", inputs, inputs_first=True)
        found[f"layer_{{}}/{ours}/bias"] = Tensor(f"{block}.{theirs}.bias", form="flat")
    return found


def _write(config: LlamaConfig) -> dict[str, Any]:
    c = config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_embd": c.embed_dim,
        "n_inner": c.mlp_dim,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_positions": c.max_seq_len,
        "layer_norm_epsilon": c.norms.eps,
        "activation_function": c.mlp.activation,
        "scale_attn_weights": not c.heads.scale,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    f = config_json.Fields(raw)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if f.flag(name, False):
            raise f.refuse(name, "false")
    heads, width = f.count("n_head", 12), f.count("n_embd", 768)
    if width % heads:
        raise f.refuse("n_embd", f"a multiple of n_head={heads}")
    return LlamaConfig(
        f.count("vocab_size", 50257),
        f.depth("n_layer", 12),
        width,
        heads,
        heads,
        width // heads,
        f.count("n_inner", 4 * width),
        max_seq_len=f.count("n_positions", 1024),
        tie_embeddings=f.flag("tie_word_embeddings", True) and HEAD not in names,
        heads=dataclasses.replace(_HEADS, scale=0.0 if f.flag("scale_attn_weights", True) else 1.0),
        norms=Norms("layer", f.number("layer_norm_epsilon", 1e-5)),
        mlp=dataclasses.replace(_MLP, activation=f.activation("activation_function", "gelu_new")),
        has_positions=True,
        model_type="gpt2",
    )


FAMILY = dataclasses.replace(
    LLAMA,
    presets=PRESETS,
    huggingface=family.HuggingFace(
        architectures={"gpt2": ("GPT2LMHeadModel", "GPT2Model")},
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("c_attn",),
        copies=lambda raw: {HEAD: EMBED} if raw.get("tie_word_embeddings", True) else {},
        ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
        prefix="transformer.",
        outside=(HEAD,),
    ),
)
