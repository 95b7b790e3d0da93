"""Mamba-2 as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

from zerojax.models import config_json, family, parallel
from zerojax.models.family import Tensor
from zerojax.models.mamba2 import model
from zerojax.models.mamba2.model import Mamba2Config

_published = functools.partial(Mamba2Config, 50288, tie_embeddings=True)

# The sizes of arXiv:2405.21060, section 9.2: layers, the embedding, and heads.
PRESETS: dict[str, Mamba2Config] = {
    "mamba2_test": Mamba2Config(0, 2, 64, 4, head_dim=32, state_dim=16),
    "mamba2_130m": _published(24, 768, 24),
    "mamba2_370m": _published(48, 1024, 32),
    "mamba2_780m": _published(48, 1536, 48),
    "mamba2_1.3b": _published(48, 2048, 64),
    "mamba2_2.7b": _published(64, 2560, 80),
}

EMBED, HEAD = "backbone.embeddings.weight", "lm_head.weight"


def _tensors(config: Mamba2Config) -> dict[str, Tensor]:
    layer = "backbone.layers.{}"
    found = {
        "embed/embedding": Tensor(EMBED),
        "head/kernel": Tensor(HEAD, 1),
        "norm/scale": Tensor("backbone.norm_f.weight"),
        "layer_{}/norm/scale": Tensor(f"{layer}.norm.weight"),
        "layer_{}/mixer/norm/scale": Tensor(f"{layer}.mixer.norm.weight"),
        "layer_{}/mixer/conv/weight": Tensor(f"{layer}.mixer.conv1d.weight"),
        "layer_{}/mixer/conv/bias": Tensor(f"{layer}.mixer.conv1d.bias"),
    }
    found |= {f"layer_{{}}/mixer/{name}": Tensor(f"{layer}.mixer.{name}") for name in ("A_log", "D", "dt_bias")}
    for name in ("in_proj", "out_proj"):
        found[f"layer_{{}}/mixer/{name}/kernel"] = Tensor(f"{layer}.mixer.{name}.weight", 1)
        found[f"layer_{{}}/mixer/{name}/bias"] = Tensor(f"{layer}.mixer.{name}.bias")
    return found


def _write(config: Mamba2Config) -> dict[str, Any]:
    c = config
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.num_layers,
        "num_heads": c.num_heads,
        "head_dim": c.head_dim,
        "expand": c.inner_dim / c.embed_dim if c.inner_dim % c.embed_dim else c.inner_dim // c.embed_dim,
        "state_size": c.state_dim,
        "n_groups": c.groups,
        "conv_kernel": c.window,
        "time_step_limit": list(c.steps),
        "hidden_act": c.activation,
        "layer_norm_epsilon": c.norm_eps,
        "use_bias": c.has_bias,
        "use_conv_bias": c.has_conv_bias,
        "residual_in_fp32": c.has_float32_residual,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> Mamba2Config:
    f = config_json.Fields(raw)
    found = Mamba2Config(
        f.count("vocab_size", 32768),
        f.depth("num_hidden_layers", 64),
        embed_dim=f.count("hidden_size", 4096),
        num_heads=f.count("num_heads", 128),
        head_dim=f.count("head_dim", 64),
        state_dim=f.count("state_size", 128),
        groups=f.count("n_groups", 8),
        window=f.count("conv_kernel", 4),
        steps=_read_steps(f),
        activation=f.activation("hidden_act", "silu"),
        norm_eps=f.number("layer_norm_epsilon", 1e-5),
        has_bias=f.flag("use_bias", False),
        has_conv_bias=f.flag("use_conv_bias", True),
        has_float32_residual=f.flag("residual_in_fp32", True),
        tie_embeddings=f.flag("tie_word_embeddings", False),
    )
    if int(f.number("expand", 2) * found.embed_dim) != found.inner_dim:
        raise f.refuse("expand", f"num_heads * head_dim / hidden_size = {found.inner_dim} / {found.embed_dim}")
    if found.num_heads % found.groups:
        raise f.refuse("n_groups", f"a divisor of num_heads={found.num_heads}")
    return found


def _read_steps(f: config_json.Fields) -> tuple[float, float]:
    """Reads the least and the largest dt, of which the latter is by default infinite."""
    told = f.raw.get("time_step_limit")
    values = [0.0, math.inf] if told is None else told
    if isinstance(values, list):  # as JSON has no infinity, newer files name it
        values = [math.inf if value == {"__float__": "Infinity"} else value for value in values]
    is_of_numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    if not is_of_numbers or len(values) != 2 or not 0 <= values[0] <= values[1]:
        raise f.refuse("time_step_limit", "two numbers, at least 0, of which the second is the larger")
    return float(values[0]), float(values[1])


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="next_token",
    loss=model.loss,
    logits=model.logits,
    start=model.start,
    extend=model.extend,
    caches=model.caches,
    positions=lambda config: None,
    is_encoder_decoder=False,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla",),  # no layer attends
    flops_per_token=lambda config, lengths, per_weight=6.0: model.flops_per_token(config, per_weight),
    huggingface=family.HuggingFace(
        architectures={"mamba2": ("Mamba2ForCausalLM", "Mamba2Model")},
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=lambda config: ("in_proj",),
        copies=lambda raw: {HEAD: EMBED} if raw.get("tie_word_embeddings") else {},
        renamed=((r"backbone\.embedding\.", "backbone.embeddings."),),
        prefix="backbone.",
        outside=(HEAD,),
    ),
    parallel=parallel.Parallel(),  # a layer's projections are each of several parts, which no axis shards alike
)
