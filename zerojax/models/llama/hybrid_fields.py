"""The fields of config.json about layers that have a recurrence in place of attention. This module reads and writes them, for each kind of
recurrence, by the name of a field that its classes alone have."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from zerojax.models import config_json, scan_mixer
from zerojax.models.llama import convolution, delta
from zerojax.models.llama.config import Branches, LlamaConfig, Recurrent

_OLD = {"mamba": "linear_attention", "attention": "full_attention"}  # names of older files
_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}  # of Nemotron-H
_OLD_FIELDS = {  # of Nemotron-H
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of a config.json of Nemotron-H with the names and numbers that its class makes of older ones."""
    raw = {**raw, **{new: raw[old] for old, new in _OLD_FIELDS.items() if old in raw}}
    pattern, told = raw.get("hybrid_override_pattern"), raw.get("layers_block_type", raw.get("layer_types"))
    if told is None and isinstance(pattern, str):
        told = [_BLOCKS.get(letter, letter) for letter in pattern]
    if told is not None:
        raw["layers_block_type"] = told
    if isinstance(told, list):
        raw["num_hidden_layers"] = len(told)
    return raw


def kinds(f: config_json.Fields, field: str, known: Mapping[str, Any]) -> list[Any]:
    """Returns what `known` says of the kind of each layer that a field names."""
    return f.kinds(field, known, f.depth("num_hidden_layers"), _OLD)


def shortest(pattern: list[Any]) -> tuple[Any, ...]:
    """Returns the beginning of a pattern that is repeated."""
    size = next(
        size for size in range(1, len(pattern) + 1) if all(one == pattern[i % size] for i, one in enumerate(pattern))
    )
    return tuple(pattern[:size])


def read(f: config_json.Fields, field: str) -> Recurrent:
    """Returns the shape of the layers with a recurrence; `field` is a name in `READ`."""
    return READ[field](f)


def _read_delta(f: config_json.Fields) -> delta.Delta:
    layers = f.depth("num_hidden_layers")
    if f.raw.get("layer_types") is None:
        every = f.count("full_attention_interval", 4)
        pattern = [(layer + 1) % every != 0 for layer in range(layers)]
    else:
        pattern = kinds(f, "layer_types", {"full_attention": False, "linear_attention": True})
    groups, heads = f.count("linear_num_key_heads", 16), f.count("linear_num_value_heads", 32)
    if heads % groups:
        raise f.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads={groups}")
    return delta.Delta(
        groups=groups,
        heads=heads,
        key_dim=f.count("linear_key_head_dim", 128),
        value_dim=f.count("linear_value_head_dim", 128),
        window=f.count("linear_conv_kernel_dim", 4),
        activation=f.activation("hidden_act", "silu"),
        is_fused=f.raw["model_type"] == "qwen3_next",
        pattern=shortest(pattern),
    )


def _read_scan(f: config_json.Fields) -> scan_mixer.Scan:
    has_types = f.raw.get("layer_types") is not None
    pattern = kinds(f, "layer_types", {"full_attention": False, "linear_attention": True}) if has_types else [True]
    inner, heads = int(f.number("mamba_expand", 2) * f.count("hidden_size")), f.count("mamba_n_heads", 128)
    width = inner // heads if f.raw.get("mamba_d_head", "auto") == "auto" else f.count("mamba_d_head")
    if heads * width != inner:
        raise f.refuse(
            "mamba_n_heads", f"such that mamba_n_heads * mamba_d_head is mamba_expand * hidden_size = {inner}"
        )
    found = scan_mixer.Scan(
        heads,
        width,
        f.count("mamba_d_state", 256),
        f.count("mamba_n_groups", 1),
        f.count("mamba_d_conv", 4),
        f.bounds("time_step_limit"),
        f.activation("hidden_act", "silu"),
        f.flag("mamba_proj_bias", False),
        f.flag("mamba_conv_bias", True),
        shortest(pattern),
    )
    return _grouped(f, found, "mamba_n_groups")


def _read_nemotron(f: config_json.Fields) -> scan_mixer.Scan:
    pattern = kinds(f, "layers_block_type", {name: name == "linear_attention" for name in _BLOCKS.values()})
    found = scan_mixer.Scan(
        f.count("mamba_num_heads", 128),
        f.count("mamba_head_dim", 64),
        f.count("ssm_state_size", 128),
        f.count("n_groups", 8),
        f.count("conv_kernel", 4),
        (f.number("time_step_min", 0.001), float("inf")),  # the class reads no other bound
        f.activation("mamba_hidden_act", "silu"),
        f.flag("use_bias", False),
        f.flag("use_conv_bias", True),
        shortest(pattern),
    )
    return _grouped(f, found, "n_groups")


def branches(f: config_json.Fields) -> tuple[Branches, ...]:
    """Returns the residual branches of each layer of Nemotron-H."""
    known: dict[str, Branches] = {"linear_attention": "alone", "full_attention": "alone", "mlp": "mlp", "moe": "mlp"}
    return shortest(kinds(f, "layers_block_type", known))


def dense_layers(f: config_json.Fields) -> tuple[int, ...]:
    """Returns the numbers of the layers of Nemotron-H that are no mixtures."""
    is_moe = kinds(f, "layers_block_type", {name: name == "moe" for name in _BLOCKS.values()})
    return tuple(layer for layer, is_so in enumerate(is_moe) if not is_so)


def mlp_dim(f: config_json.Fields, reads: Collection[str]) -> int:
    """Returns the width of the MLP: of Granite's hybrids without experts that of the shared expert, of LFM2 one that is made of others."""
    if "shared_intermediate_size" in reads and f.raw.get("num_local_experts") == 0:
        return f.count("shared_intermediate_size")
    width = f.count("intermediate_size_mlp" if "intermediate_size_mlp" in reads else "intermediate_size")
    if "conv_L_cache" not in reads or not f.flag("block_auto_adjust_ff_dim", True):
        return width
    width, part = int(2 * width / 3), f.count("block_multiple_of", 256)
    if f.raw.get("block_ffn_dim_multiplier", 1.0) is None:
        return width
    return -(-int(f.number("block_ffn_dim_multiplier", 1.0) * width) // part) * part


def _grouped(f: config_json.Fields, found: scan_mixer.Scan, name: str) -> scan_mixer.Scan:
    if found.heads % found.groups:
        raise f.refuse(name, f"a divisor of {found.heads} heads")
    return found


def _read_convolution(f: config_json.Fields) -> convolution.Convolution:
    layers, told = f.depth("num_hidden_layers"), f.raw.get("full_attn_idxs")
    if f.raw.get("layer_types") is not None:
        pattern = kinds(f, "layer_types", {"full_attention": False, "conv": True})
    elif told is None:
        pattern = [False] * layers
    elif not isinstance(told, list) or not {*map(type, told)} <= {int}:
        raise f.refuse("full_attn_idxs", "a list of numbers of layers")
    else:
        pattern = [layer not in told for layer in range(layers)]
    width, window = f.count("hidden_size"), f.count("conv_L_cache", 3)
    return convolution.Convolution(width, window, f.flag("conv_bias", False), shortest(pattern))


# a field that the classes of a kind alone have -> what reads the layers
READ: Mapping[str, Callable[[config_json.Fields], Recurrent]] = {
    "linear_num_key_heads": _read_delta,
    "mamba_n_heads": _read_scan,
    "mamba_num_heads": _read_nemotron,
    "conv_L_cache": _read_convolution,
}


def write(config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of a config.json about layers with a recurrence."""
    shape, layers = config.recurrent, range(config.num_layers)
    assert shape is not None
    is_recurrent = [config.is_recurrent(layer) for layer in layers]
    types = {"layer_types": [("full_attention", "linear_attention")[own] for own in is_recurrent]}
    if isinstance(shape, convolution.Convolution):
        types = {"layer_types": [("full_attention", "conv")[own] for own in is_recurrent]}
        adjusted = {"block_auto_adjust_ff_dim": False}
        return types | {"conv_L_cache": shape.window, "conv_bias": shape.has_bias} | adjusted
    if isinstance(shape, delta.Delta):
        return types | {
            "linear_num_key_heads": shape.groups,
            "linear_num_value_heads": shape.heads,
            "linear_key_head_dim": shape.key_dim,
            "linear_value_head_dim": shape.value_dim,
            "linear_conv_kernel_dim": shape.window,
        }
    if config.model_type == "nemotron_h":
        own = [
            "linear_attention"
            if config.is_recurrent(i)
            else "full_attention"
            if config.attends(i)
            else "moe"
            if config.has_experts(i)
            else "mlp"
            for i in layers
        ]
        m = config.mixture
        of_experts: dict[str, Any] = {"n_shared_experts": 1}
        if m is not None:
            of_experts |= {"moe_shared_expert_intermediate_size": m.shared_dim, "moe_latent_size": m.latent_dim or None}
        return of_experts | {
            "layers_block_type": own,
            "mamba_num_heads": shape.heads,
            "mamba_head_dim": shape.head_dim,
            "ssm_state_size": shape.state_dim,
            "n_groups": shape.groups,
            "conv_kernel": shape.window,
            "time_step_min": shape.steps[0],
            "mamba_hidden_act": shape.activation,
            "use_bias": shape.has_bias,
            "use_conv_bias": shape.has_conv_bias,
        }
    return types | {
        "mamba_n_heads": shape.heads,
        "mamba_d_head": shape.head_dim,
        "mamba_expand": shape.inner_dim // config.embed_dim,
        "mamba_d_state": shape.state_dim,
        "mamba_n_groups": shape.groups,
        "mamba_d_conv": shape.window,
        "time_step_limit": list(shape.steps),
        "mamba_proj_bias": shape.has_bias,
        "mamba_conv_bias": shape.has_conv_bias,
    }
