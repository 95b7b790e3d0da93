"""The fields of config.json that Gemma 3n and 4 have beside Gemma 3's. This module reads and writes them."""

from typing import Any

from zerojax.models import config_json
from zerojax.models.llama import altup
from zerojax.models.llama.config import LlamaConfig, Sizes
from zerojax.models.llama.hybrid_fields import shortest
from zerojax.models.llama.layer_inputs import Inputs


def read(f: config_json.Fields, windows: tuple[int, ...], head_dim: int, kv_heads: int) -> dict[str, Any]:
    """Returns fields of `LlamaConfig`: the sizes of layers, which share keys and values, and what all have."""
    kind, layers = f.raw["model_type"], f.depth("num_hidden_layers")
    has_window = [bool(windows) and windows[layer % len(windows)] > 0 for layer in range(layers)]
    sharing = f.raw["num_kv_shared_layers"]
    if not isinstance(sharing, int) or isinstance(sharing, bool) or not 0 <= sharing < layers:
        raise f.refuse("num_kv_shared_layers", f"a number of layers below {layers}")
    if sharing and {*has_window[: layers - sharing]} != {*has_window}:
        raise f.refuse("num_kv_shared_layers", "one that leaves a layer of each of the layer_types keys of its own")
    width = (
        0
        if kind == "gemma4_text" and f.raw["hidden_size_per_layer_input"] == 0
        else f.count("hidden_size_per_layer_input")
    )
    found: dict[str, Any] = {"sharing_layers": sharing}
    if width:
        found["inputs"] = Inputs(width, f.count("vocab_size_per_layer_input"))
    if width and kind == "gemma4_text" and found["inputs"].vocab_size < f.count("vocab_size"):
        raise f.refuse("vocab_size_per_layer_input", "vocab_size at least, as every token has a row")
    if kind == "gemma3n_text":
        sizes = _read_sparse(f, head_dim, kv_heads)
        active = f.raw["altup_active_idx"]
        streams = f.count("altup_num_inputs")
        if not isinstance(active, int) or isinstance(active, bool) or not 0 <= active < streams:
            raise f.refuse("altup_active_idx", f"from 0 to {streams - 1}")
        found["altup"] = altup.AltUp(streams, active, f.count("laurel_rank"), f.flag("altup_correct_scale", True))
    else:
        if f.raw.get("use_bidirectional_attention") not in (None, "vision"):
            raise f.refuse("use_bidirectional_attention", "null or vision, since a decoder's tokens see no later ones")
        sizes = _read_wide(f, has_window, head_dim, kv_heads, layers - sharing)
        found["has_layer_scale"] = True
    mlp_dim = sizes[0].mlp_dim
    is_one = {*sizes} == {Sizes(head_dim, kv_heads, mlp_dim)}
    return found | {"mlp_dim": mlp_dim, "sizes": () if is_one else shortest(sizes)}


def read_mixture(f: config_json.Fields) -> dict[str, dict[str, Any]]:
    """Reads the mixture of experts beside each layer's MLP, if Gemma 4 has one."""
    if not f.flag("enable_moe_block", False):
        return {}
    experts, own = f.count("num_experts"), f.count("num_experts_per_tok")
    if own > experts:
        raise f.refuse("num_experts_per_tok", f"at most num_experts={experts}")
    return {"mixture": {"experts": experts, "per_token": own, "width": f.count("moe_intermediate_size")}}


def _read_sparse(f: config_json.Fields, head_dim: int, kv_heads: int) -> list[Sizes]:
    """Reads the sizes of Gemma 3n's layers, of which some have few gates that are not 0."""
    layers, told, shares = (
        f.depth("num_hidden_layers"),
        f.raw.get("intermediate_size"),
        f.raw.get("activation_sparsity_pattern"),
    )
    if not isinstance(told, list):
        told = [f.count("intermediate_size")] * layers
    if len(told) != layers or not all(type(width) is int and 0 < width <= config_json.MOST for width in told):
        raise f.refuse("intermediate_size", f"a whole number above 0, or {layers} of them")
    if shares is None:
        shares = [0.95 if layers > 10 and layer < 10 else 0.0 for layer in range(layers)]
    if (
        not isinstance(shares, list)
        or len(shares) != layers
        or not all(type(s) in (int, float) and s < 1 for s in shares)
    ):
        raise f.refuse("activation_sparsity_pattern", f"{layers} numbers below 1")
    return [Sizes(head_dim, kv_heads, width, max(float(share), 0.0)) for width, share in zip(told, shares)]


def _read_wide(f: config_json.Fields, has_window: list[bool], head_dim: int, kv_heads: int, own: int) -> list[Sizes]:
    """Reads the sizes of Gemma 4's layers: those without a window have other heads, and the MLP of those without own keys may be wide."""
    told, width = f.raw.get("per_layer_config"), f.count("intermediate_size")
    if told is None:
        wide = {"head_dim": f.count("global_head_dim", 512)}
        if f.flag("attention_k_eq_v", False) and f.raw.get("num_global_key_value_heads") is not None:
            wide["num_key_value_heads"] = f.count("num_global_key_value_heads")
        told = {str(layer): wide for layer, has in enumerate(has_window) if not has}
    # transformers pads the numbers of a deep model: "04"
    numbers = {str(key): int(key) for key in told if str(key).isdecimal()} if isinstance(told, dict) else {}
    if not isinstance(told, dict) or len(numbers) < len(told) or not {*numbers.values()} <= {*range(len(has_window))}:
        raise f.refuse("per_layer_config", "a group of numbers of layers")
    told = {str(numbers[str(key)]): value for key, value in told.items()}
    found, is_double = [], f.flag("use_double_wide_mlp", False)
    for layer in range(len(has_window)):
        group = config_json.Fields({"per_layer_config": told}).group("per_layer_config").group(str(layer))
        if odd := group.raw.keys() - {"head_dim", "num_key_value_heads"}:
            raise group.refuse(min(odd), "absent: head_dim and num_key_value_heads of a layer alone are read")
        heads = group.count("head_dim", head_dim), group.count("num_key_value_heads", kv_heads)
        if f.count("num_attention_heads") % heads[1] or heads[0] % 2:
            raise group.refuse("num_key_value_heads", "a divisor of num_attention_heads, and head_dim even")
        found.append(Sizes(*heads, width * (2 if is_double and layer >= own else 1)))
    for has in (False, True):
        if len({(one.head_dim, one.num_kv_heads) for one, own_has in zip(found, has_window) if own_has == has}) > 1:
            raise f.refuse("per_layer_config", "equal for all layers of one of the layer_types")
    return found


def write(config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of a config.json."""
    c, sizes = config, [config.of_layer(layer) for layer in range(config.num_layers)]
    found: dict[str, Any] = {
        "num_kv_shared_layers": c.sharing_layers,
        "hidden_size_per_layer_input": 0 if c.inputs is None else c.inputs.width,
        "vocab_size_per_layer_input": c.vocab_size if c.inputs is None else c.inputs.vocab_size,
        "final_logit_softcapping": c.scales.logits_cap or None,
    }
    if c.altup is not None:
        return found | {
            "intermediate_size": [own.mlp_dim for own in sizes],
            "activation_sparsity_pattern": [own.mlp.sparsity for own in sizes],
            "altup_num_inputs": c.altup.streams,
            "altup_active_idx": c.altup.active,
            "altup_correct_scale": c.altup.has_scale,
            "laurel_rank": c.altup.rank,
        }
    heads = {
        str(layer): {"head_dim": own.head_dim, "num_key_value_heads": own.num_kv_heads}
        for layer, own in enumerate(sizes)
        if (own.head_dim, own.num_kv_heads) != (c.head_dim, c.num_kv_heads)
    }
    is_double = any(own.mlp_dim != c.mlp_dim for own in sizes)
    return found | {
        "per_layer_config": heads,
        "use_double_wide_mlp": is_double,
        "attention_k_eq_v": c.heads.values_are_keys,
        "enable_moe_block": c.mixture is not None,
        "num_experts": c.mixture and c.mixture.experts,
        "moe_intermediate_size": c.mixture and c.mixture.width,
    }
