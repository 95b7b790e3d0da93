"""Mamba-2 as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

from collections.abc import Collection, Mapping
from typing import Any

from zerojax.models import config_json, family, parallel
from zerojax.models.family import Tensor
from zerojax.models.mamba2 import model
from zerojax.models.mamba2.model import Mamba2Config
from zerojax.models.scan_mixer import Scan


def _published(layers: int, embed_dim: int, heads: int) -> Mamba2Config:
    return Mamba2Config(50288, layers, embed_dim, Scan(heads), tie_embeddings=True)


# The sizes of arXiv:2405.21060, section 9.2: layers, the embedding, and heads.
PRESETS: dict[str, Mamba2Config] = {
    "mamba2_test": Mamba2Config(0, 2, 64, Scan(4, head_dim=32, state_dim=16)),
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
    c, scan = config, config.scan
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.num_layers,
        "num_heads": scan.heads,
        "head_dim": scan.head_dim,
        "expand": scan.inner_dim / c.embed_dim if scan.inner_dim % c.embed_dim else scan.inner_dim // c.embed_dim,
        "state_size": scan.state_dim,
        "n_groups": scan.groups,
        "conv_kernel": scan.window,
        "time_step_limit": list(scan.steps),
        "hidden_act": scan.activation,
        "layer_norm_epsilon": c.norm_eps,
        "use_bias": scan.has_bias,
        "use_conv_bias": scan.has_conv_bias,
        "residual_in_fp32": c.has_float32_residual,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> Mamba2Config:
    f = config_json.Fields(raw)
    scan = Scan(
        heads=f.count("num_heads", 128),
        head_dim=f.count("head_dim", 64),
        state_dim=f.count("state_size", 128),
        groups=f.count("n_groups", 8),
        window=f.count("conv_kernel", 4),
        steps=f.bounds("time_step_limit"),
        activation=f.activation("hidden_act", "silu"),
        has_bias=f.flag("use_bias", False),
        has_conv_bias=f.flag("use_conv_bias", True),
    )
    found = Mamba2Config(
        f.count("vocab_size", 32768),
        f.depth("num_hidden_layers", 64),
        embed_dim=f.count("hidden_size", 4096),
        scan=scan,
        norm_eps=f.number("layer_norm_epsilon", 1e-5),
        has_float32_residual=f.flag("residual_in_fp32", True),
        tie_embeddings=f.flag("tie_word_embeddings", False),
    )
    if int(f.number("expand", 2) * found.embed_dim) != scan.inner_dim:
        raise f.refuse("expand", f"num_heads * head_dim / hidden_size = {scan.inner_dim} / {found.embed_dim}")
    if scan.heads % scan.groups:
        raise f.refuse("n_groups", f"a divisor of num_heads={scan.heads}")
    return found


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
        refused=("out_proj",),
        copies=lambda raw: {HEAD: EMBED} if raw.get("tie_word_embeddings") else {},
        renamed=((r"backbone\.embedding\.", "backbone.embeddings."),),
        prefix="backbone.",
        outside=(HEAD,),
    ),
    parallel=parallel.Parallel(
        weights=(*parallel.WEIGHTS, *parallel.RECURRENT),
        activations=(*parallel.OF_RECURRENT, (r"embed|(layer_\d+/)?norm", parallel.TOKENS)),
    ),
)
