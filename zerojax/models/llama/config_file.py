"""The config.json of Llama's relatives at Hugging Face. This module reads and writes them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from zerojax.models import config_json, rope
from zerojax.models.llama import gemma_fields, hybrid_fields, mla
from zerojax.models.llama.config import Heads, LlamaConfig, MixtureForm, MLPForm, Norms, Scales
from zerojax.models.llama.model_types import ROWS, SCORED

HEAD = "lm_head.weight"
PARTS = {
    "rotation": rope.Rotation,
    "heads": Heads,
    "norms": Norms,
    "mlp": MLPForm,
    "mixture": MixtureForm,
    "scales": Scales,
}
Found = Mapping[str, Mapping[str, Any]]  # name of a part -> its fields
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
# Where a config.json tells none.
_ROPES: Mapping[str, Mapping[str, Any]] = {
    "gemma4_text": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt_oss": {**_YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "ministral3": {
        **_YARN,
        "rope_theta": 1e6,
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    },
}
_IN_ALL = (
    "mistral",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "starcoder2",
    "ministral3",
    "phimoe",
)  # a window is that of every layer


def write(config: LlamaConfig) -> dict[str, Any]:
    """Returns the contents of a config.json; see `family.HuggingFace`."""
    c, heads, m, row = config, config.heads, config.mixture, ROWS[config.model_type]
    found: dict[str, Any] = {
        "architectures": [
            row.architecture.replace("ForCausalLM", {"value": SCORED, "states": "Model"}.get(c.output, "ForCausalLM"))
        ],
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_seq_len,
        "rope_theta": c.rotation.theta,
        "rms_norm_eps": c.norms.eps,
        row.activation[0]: c.mlp.activation,
        "attention_bias": (heads.o_bias and "attention_out_bias" not in row.reads)
        or ("attention_bias" in row.reads and heads.qkv_bias),
        "mlp_bias": c.mlp.has_biases,
        "tie_word_embeddings": c.tie_embeddings,
        "pad_token_id": None,  # that of some classes is beyond a smaller vocabulary
    }
    windows = [c.window_of(layer) for layer in range(c.num_layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "query_pre_attn_scalar": lambda: {
            "query_pre_attn_scalar": round(heads.scale**-2) if heads.scale else c.head_dim,
            "attn_logit_softcapping": heads.cap or None,
            "final_logit_softcapping": c.scales.logits_cap or None,
        },
        "attention_multiplier": lambda: {
            "attention_multiplier": heads.scale or c.head_dim**-0.5,
            "embedding_multiplier": c.scales.embed,
            "residual_multiplier": c.scales.residual,
            "logits_scaling": 1 / c.scales.logits,
        },
        "logit_scale": lambda: {"logit_scale": c.scales.logits},
        "no_rope_layers": lambda: {"no_rope_layers": [int(c.rope_of(i) is not None) for i in range(c.num_layers)]},
        "partial_rotary_factor": lambda: {"partial_rotary_factor": (c.rotation.dims or c.head_dim) / c.head_dim},
        "layer_types": lambda: {"layer_types": kinds},
        "attention_chunk_size": lambda: _write_chunks(c),
        "num_kv_shared_layers": lambda: gemma_fields.write(c),
        "qkv_bias": lambda: {"qkv_bias": heads.qkv_bias},
        "lm_head_bias": lambda: {"lm_head_bias": c.has_logits_bias},
        "attention_out_bias": lambda: {"attention_out_bias": heads.o_bias},
        "position_embedding_type": lambda: {"position_embedding_type": "nope" if c.rotation.layers else "rope"},
        "shared_intermediate_size": lambda: {"shared_intermediate_size": c.mlp_dim if m is None else m.shared_dim},
        **dict.fromkeys(hybrid_fields.READ, lambda: hybrid_fields.write(c)),
    }
    if m is not None:
        own |= {
            "num_local_experts": lambda: {"num_local_experts": m.experts},
            "num_experts": lambda: {"num_experts": m.experts},
            "moe_intermediate_size": lambda: {
                "moe_intermediate_size": m.width,
                "mlp_only_layers": list(m.dense_layers),
            },
            "shared_expert_intermediate_size": lambda: {"shared_expert_intermediate_size": m.shared_dim},
            "n_routed_experts": lambda: _write_groups(m, c.num_layers),
            "topk_method": lambda: {"topk_method": "group_limited_greedy" if m.groups[0] > 1 else "greedy"},
            "use_qk_norm": lambda: {"use_qk_norm": heads.norm == "each"},
            "moe_layer_interval": lambda: _write_interval(m, c.num_layers),
            "router_jitter_noise": lambda: {"router_jitter_noise": m.tolerance / 2},
            "swiglu_limit": lambda: dict(zip(("swiglu_limit", "swiglu_alpha"), m.clamp or ())),
        }
    for name in row.reads:
        found |= own.get(name, dict)()
    if c.output == "value":
        found |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": "regression"}
    if heads.latent is not None:
        found |= _write_latent(heads.latent)
    if m is not None:
        found |= {"num_experts_per_tok": m.per_token, "norm_topk_prob": m.is_normalised}
    elif "shared_intermediate_size" in row.reads:
        found |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    scaling = c.rotation.scaling
    if c.rotation.in_windows is not None:
        del found["rope_theta"]
        ropes = {"full_attention": rope.Rope(c.rotation.theta, scaling), "sliding_attention": c.rotation.in_windows}
        found["rope_parameters"] = {
            kind: {"rope_theta": own.theta} | _write_scaling(own.scaling) for kind, own in ropes.items()
        }
    elif scaling is not None or c.model_type in _ROPES:
        found["rope_scaling"] = _write_scaling(scaling)
        if heads.growth is not None and not heads.grows_unrotated:
            found["rope_scaling"] |= dict(
                zip(("llama_4_scaling_beta", "original_max_position_embeddings"), heads.growth)
            )
        if heads.latent is not None and scaling is not None and heads.scale:
            grown = math.sqrt(heads.scale * math.sqrt(c.head_dim)) - 1
            found["rope_scaling"]["mscale_all_dim"] = grown / (0.1 * math.log(scaling.factor))
        if c.model_type == "phimoe" and scaling is not None:
            found["rope_scaling"] |= dict.fromkeys(("short_mscale", "long_mscale"), scaling.attention_factor)
        if c.model_type == "phi3" and scaling is not None:
            found["original_max_position_embeddings"] = scaling.original_length
    if any(windows):
        found |= {"sliding_window": max(windows), "use_sliding_window": True, "max_window_layers": windows.count(0)}
        found["layer_types"] = kinds
    elif c.model_type in ("mistral", "ministral3") or (c.model_type == "exaone4" and not c.rotation.layers):
        found["sliding_window"] = None  # else the class has a window of its own
    return {row.names.get(name, name): value for name, value in found.items()}


def _write_chunks(config: LlamaConfig) -> dict[str, Any]:
    c, m, growth = config, config.mixture, config.heads.growth
    chunks = [c.chunk_of(layer) for layer in range(c.num_layers)]
    found: dict[str, Any] = {
        "layer_types": ["chunked_attention" if chunk else "full_attention" for chunk in chunks],
        "attention_chunk_size": max(chunks) or None,
        "use_qk_norm": c.heads.norm == "unit",
        "attn_temperature_tuning": growth is not None,
        "intermediate_size_mlp": c.mlp_dim,
        "intermediate_size": c.mlp_dim if m is None else m.width,
        "moe_layers": [layer for layer in range(c.num_layers) if c.has_experts(layer)],
    }
    return found if growth is None else found | {"attn_scale": growth[0], "floor_scale": growth[1]}


def _write_latent(shape: mla.Latent) -> dict[str, Any]:
    return {
        "head_dim": shape.rotary_dim,
        "kv_lora_rank": shape.rank,
        "q_lora_rank": shape.query_rank or None,
        "qk_nope_head_dim": shape.plain_dim,
        "qk_rope_head_dim": shape.rotary_dim,
        "v_head_dim": shape.value_dim,
        "rope_interleave": shape.is_interleaved,
    }


def _write_groups(mixture: MixtureForm, layers: int) -> dict[str, Any]:
    """Returns the fields of a mixture of DeepSeek's."""
    m = mixture
    return {
        "n_routed_experts": m.experts,
        "moe_intermediate_size": m.width,
        "n_shared_experts": m.shared_dim // m.width,
        "n_group": m.groups[0],
        "topk_group": m.groups[1],
        "routed_scaling_factor": m.scale,
        "first_k_dense_replace": sum(layer < layers for layer in m.dense_layers),
    }


def _write_interval(mixture: MixtureForm, layers: int) -> dict[str, Any]:
    """Returns which layers of ERNIE 4.5 are mixtures, and the widths of these."""
    m, own = mixture, [layer for layer in range(layers) if layer not in mixture.dense_layers]
    found = (
        {"moe_layer_start_index": own[0], "moe_layer_end_index": own[-1]} if own else {"moe_layer_start_index": layers}
    )
    return found | {
        "moe_layer_interval": own[1] - own[0] if len(own) > 1 else 1,
        "moe_intermediate_size": m.width,
        "moe_num_shared_experts": m.shared_dim // m.width,
    }


def _write_scaling(scaling: rope.Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "proportional":
        return found | {"partial_rotary_factor": scaling.low_factor}
    if scaling.kind in ("linear", "dynamic"):
        return found
    found["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        return found | {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    found["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        return found | {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    return found | {"beta_slow": scaling.low_factor, "beta_fast": scaling.high_factor, "truncate": scaling.is_whole}


def read(raw: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    """Returns the config of a config.json; see `family.HuggingFace`."""
    kind = config_json.Fields(raw).choice("model_type", ROWS, "")
    row = ROWS[kind]
    raw = hybrid_fields.completed(raw) if kind == "nemotron_h" else raw
    f = config_json.Fields({**row.defaults, **raw}, names=row.names)
    heads, has_biases = (
        f.count("num_attention_heads"),
        "attention_bias" in row.reads and f.flag("attention_bias", False),
    )
    if kind == "internlm3" and has_biases != f.flag("mlp_bias", False):
        raise f.refuse("mlp_bias", f"{str(has_biases).lower()}, as attention's biases are")
    latent = _read_latent(f) if "kv_lora_rank" in row.reads else None
    head_dim = _head_dim(f) if latent is None else latent.rotary_dim
    windows = _read_windows(f, kind)
    own: Found = {
        "norms": {"eps": f.number("rms_norm_eps", 1e-6)},
        "heads": {"qkv_bias": has_biases, "o_bias": has_biases, "windows": windows},
        "mlp": {
            "activation": row.meant.get(str(f.raw.get(row.activation[0])), "") or f.activation(*row.activation),
            "has_biases": "mlp_bias" in row.reads and f.flag("mlp_bias", False),
        },
    }
    ropes = _read_ropes(f, head_dim, nested="rope_local_base_freq" in row.reads)
    parts: list[Found] = [
        own,
        {"rotation": ropes},
        _read_multipliers(f, row.reads),
        mixture := _read_experts(f, row.reads),
        {name: fixed for name, fixed in row.parts.items() if name != "mixture" or name in mixture},
    ]
    if latent is not None:
        parts.append({"heads": _read_latent_heads(f, latent)})
    if kind == "qwen3_5_moe_text" and any(name.endswith("mlp.experts.gate_up_proj") for name in names):
        parts.append({"mixture": {"is_fused": True}})
    if "use_qk_norm" in row.reads and f.flag("use_qk_norm", False):
        parts.append({"heads": {"norm": "unit" if kind == "llama4_text" else "each"}})
    if "attention_chunk_size" in row.reads:
        parts.append({"heads": _read_chunks(f, _read_rotated(f))})
    recurrent = next((hybrid_fields.read(f, field) for field in hybrid_fields.READ if field in row.reads), None)
    if "position_embedding_type" in row.reads and f.raw.get("position_embedding_type") != "rope":
        parts.append({"rotation": {"layers": (False,)}})
    if "attention_out_bias" in row.reads:
        parts.append({"heads": {"o_bias": f.flag("attention_out_bias", False)}})
    if kind == "cohere2" or (kind == "exaone4" and f.raw["sliding_window"] is not None):
        parts.append({"rotation": {"layers": tuple(map(bool, windows)) or (False,)}})
    if kind == "nemotron_h" and f.flag("tie_word_embeddings", False) and HEAD not in names:
        raise f.refuse("tie_word_embeddings", f"false where no {HEAD} is in the files, as the class ties none")
    kv_heads = f.count("num_key_value_heads", heads)
    others: dict[str, Any] = (
        gemma_fields.read(f, windows, head_dim, kv_heads)
        if "num_kv_shared_layers" in row.reads
        else {"mlp_dim": hybrid_fields.mlp_dim(f, row.reads)}
    )
    found = LlamaConfig(
        f.count("vocab_size"),
        f.depth("num_hidden_layers"),
        f.count("hidden_size"),
        heads,
        kv_heads,
        head_dim,
        max_seq_len=f.count("max_position_embeddings"),
        recurrent=recurrent,
        branches=hybrid_fields.branches(f) if kind == "nemotron_h" else (),
        output=_output(f, names),
        has_logits_bias="lm_head_bias" in row.reads and f.flag("lm_head_bias", False),
        tie_embeddings=f.flag("tie_word_embeddings", False) and HEAD not in names,
        model_type=kind,
        **others,
        **_made(*parts),
    )
    if latent is not None:
        found = dataclasses.replace(found, head_dim=latent.plain_dim + latent.rotary_dim, num_kv_heads=heads)
    if found.num_heads % found.num_kv_heads:
        raise f.refuse("num_attention_heads", f"a multiple of num_key_value_heads={found.num_kv_heads}")
    return found


def _output(f: config_json.Fields, names: Collection[str]) -> Literal["tokens", "value", "states"]:
    """Returns what the class gives: one value a text, or states where the files of a class without a head lack it."""
    classes = [str(name) for name in f.raw.get("architectures") or ()]
    if any(name.endswith(SCORED) for name in classes):
        if len(f.group("id2label").raw or range(f.count("num_labels", 2))) != 1:
            raise f.refuse("id2label", "one label: the value of a text, as of a reward model (num_labels=1)")
        return "value"
    lacks_head = bool(names) and HEAD not in names and not f.flag("tie_word_embeddings", False)
    return "states" if lacks_head and any(name.endswith("Model") for name in classes) else "tokens"


def _made(*found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the parts of a config. Each of `found` has fields by the name of the part; those of later ones replace earlier ones."""
    fields: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for own in found:
        for name, values in own.items():
            fields[name] |= values
    return {name: PARTS[name](**values) for name, values in fields.items()}


def _read_latent(f: config_json.Fields) -> mla.Latent:
    heads = f.count("num_attention_heads")
    if f.count("num_key_value_heads", heads) != heads:
        raise f.refuse("num_key_value_heads", f"{heads}, as there are heads of queries")
    if f.count("qk_rope_head_dim", 64) % 2:
        raise f.refuse("qk_rope_head_dim", "even, since positions rotate pairs of dims")
    has_queries = f.raw.get("q_lora_rank", 1536) is not None
    return mla.Latent(
        rank=f.count("kv_lora_rank", 512),
        query_rank=f.count("q_lora_rank", 1536) if has_queries else 0,
        plain_dim=f.count("qk_nope_head_dim", 128),
        rotary_dim=f.count("qk_rope_head_dim", 64),
        value_dim=f.count("v_head_dim", 128),
        is_interleaved="rope_interleave" not in ROWS[f.raw["model_type"]].reads or f.flag("rope_interleave", True),
    )


def _read_latent_heads(f: config_json.Fields, latent: mla.Latent) -> dict[str, Any]:
    head_dim = latent.plain_dim + latent.rotary_dim
    rope_group = f.group("rope_scaling" if f.raw.get("rope_scaling") else "rope_parameters")
    kind = rope_group.raw.get("rope_type", rope_group.raw.get("type", "default"))
    if kind in ("dynamic", "longrope"):
        raise rope_group.refuse("rope_type", "default, linear, llama3 or yarn, since the cache holds rotated keys")
    heads: dict[str, Any] = {"latent": latent, "qkv_bias": False}
    if kind != "default" and rope_group.raw.get("mscale_all_dim"):
        factor = max(rope_group.number("factor"), 1.0)
        grown = 0.1 * rope_group.number("mscale_all_dim") * math.log(factor) + 1
        heads["scale"] = head_dim**-0.5 * grown**2 if factor > 1 else 0.0
    return heads


def _read_groups(f: config_json.Fields, reads: Collection[str]) -> dict[str, Any]:
    """Reads a mixture of DeepSeek's."""
    experts, width = f.count("n_routed_experts"), f.count("moe_intermediate_size")
    groups, own, taken = f.count("n_group", 1), f.count("topk_group", 1), f.count("num_experts_per_tok")
    if "topk_method" in reads and f.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "greedy":
        groups, own = 1, 1
    if experts % groups or not (experts // groups > 1 or groups == 1):
        raise f.refuse("n_group", f"a divisor of n_routed_experts={experts} that leaves a group two experts")
    if own > groups or taken > experts // groups * own:
        raise f.refuse(
            "topk_group", f"{groups} at most, with num_experts_per_tok={taken} experts or more in its groups"
        )
    layers, dense = f.depth("num_hidden_layers"), f.raw.get("first_k_dense_replace")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise f.refuse("first_k_dense_replace", "a number of layers")
    return {
        "experts": experts,
        "per_token": taken,
        "width": width,
        "shared_dim": width * f.count("n_shared_experts"),
        "is_normalised": f.flag("norm_topk_prob", False),
        "dense_layers": tuple(range(min(dense, layers))),
        "groups": (groups, own) if groups > 1 else (1, 1),
        "scale": f.number("routed_scaling_factor"),
    }


def _head_dim(f: config_json.Fields) -> int:
    found = f.heads("hidden_size", "num_attention_heads") if f.raw.get("head_dim") is None else f.count("head_dim")
    if found % 2:
        raise f.refuse("head_dim", "even, since positions rotate pairs of dims")
    return found


def _read_multipliers(f: config_json.Fields, reads: Collection[str]) -> Found:
    """Reads what Gemma and Granite multiply and bound, and which layers of SmolLM3 are not rotated."""
    if "num_kv_shared_layers" in reads:
        cap = 0.0 if f.raw.get("final_logit_softcapping") is None else f.number("final_logit_softcapping")
        is_equal = f.raw["model_type"] == "gemma4_text" and f.flag("attention_k_eq_v", False)
        return {
            "scales": {"embed": f.count("hidden_size") ** 0.5, "logits_cap": cap},
            "heads": {"values_are_keys": is_equal},
        }
    if "use_bidirectional_attention" in reads:
        if f.flag("use_bidirectional_attention", False):
            raise f.refuse("use_bidirectional_attention", "false, since a decoder's tokens see no later ones")
        embed_scale = f.count("hidden_size") ** 0.5
        if "query_pre_attn_scalar" not in reads:
            return {"scales": {"embed": embed_scale}}
        caps = ("final_logit_softcapping", "attn_logit_softcapping")
        logits_cap, cap = (0.0 if f.raw.get(name) is None else f.number(name) for name in caps)
        cap = cap if f.raw["model_type"] == "gemma2" else 0.0  # Gemma 3's class has the field, and does not read it
        return {
            "scales": {"embed": embed_scale, "logits_cap": logits_cap},
            "heads": {"scale": f.number("query_pre_attn_scalar") ** -0.5, "cap": cap},
        }
    if "attention_multiplier" in reads:
        return {
            "scales": {
                "embed": f.number("embedding_multiplier", 1.0),
                "residual": f.number("residual_multiplier", 1.0),
                "logits": 1 / f.number("logits_scaling", 1.0),
            },
            "heads": {"scale": f.number("attention_multiplier", 1.0)},
        }
    if "logit_scale" in reads:
        return {"scales": {"logits": f.number("logit_scale", 0.0625)}}
    if "llama_4_scaling_beta" in reads:
        group = _rope_group(f)
        grown = group.number("llama_4_scaling_beta"), group.count("original_max_position_embeddings")
        return {"heads": {"growth": grown}}
    return {"rotation": {"layers": _read_rotated(f)}} if "no_rope_layers" in reads else {}


def _read_experts(f: config_json.Fields, reads: Collection[str]) -> Found:
    """Reads the mixture of experts of the rows that have one."""
    if "mamba_num_heads" in reads:
        dense = hybrid_fields.dense_layers(f)
        if len(dense) == f.depth("num_hidden_layers"):
            return {}
        shared, latent = f.count("moe_shared_expert_intermediate_size"), f.raw.get("moe_latent_size")
        own = {"shared_dim": shared, "dense_layers": dense, "latent_dim": f.count("moe_latent_size") if latent else 0}
        return {"mixture": _read_groups(f, reads) | own}
    if "n_routed_experts" in reads:
        return {"mixture": _read_groups(f, reads)}
    if "enable_moe_block" in reads:
        return gemma_fields.read_mixture(f)
    count = next((name for name in ("num_local_experts", "num_experts") if name in reads), None)
    if count is None or ("shared_intermediate_size" in reads and f.raw.get(count) == 0):
        return {}
    # The name that transformers 5 writes for some
    count = "num_local_experts" if "num_local_experts" in f.raw else count
    for name in ("output_router_logits", "router_jitter_noise", "clip_qkv"):
        if f.raw.get(name) and not (name in reads and name == "router_jitter_noise"):
            raise f.refuse(
                name, "false, 0 or null: the loss has no balance loss, the router no noise, and nothing is clipped"
            )
    layers, step = f.depth("num_hidden_layers"), 1
    only: list[Any] = []
    if "moe_intermediate_size" in reads:
        only, step = f.raw.get("mlp_only_layers") or [], f.count("decoder_sparse_step", 1)
        if not isinstance(only, list) or not {*map(str, only)} <= {*map(str, range(layers))}:
            raise f.refuse("mlp_only_layers", f"a list of numbers of layers from 0 to {layers - 1}")
    found: dict[str, Any] = {
        "experts": f.count(count),
        "per_token": f.count("num_experts_per_tok"),
        "width": f.count("moe_intermediate_size" if "moe_intermediate_size" in reads else "intermediate_size"),
        "is_normalised": f.flag("norm_topk_prob", False) or f.raw["model_type"] in ("mixtral", "gpt_oss"),
        "dense_layers": tuple(i for i in range(layers) if (i + 1) % step or i in only),
    }
    if "intermediate_size_mlp" in reads:
        found |= _read_moe_layers(f, layers)
    if "moe_layer_interval" in reads:
        found |= _read_interval(f, layers)
    if "router_jitter_noise" in reads:
        found["tolerance"] = 2 * f.number("router_jitter_noise")
        if found["per_token"] != 2:
            raise f.refuse("num_experts_per_tok", "2, as the router takes no other number")
    if found["per_token"] > found["experts"]:
        raise f.refuse("num_experts_per_tok", f"at most {count}={found['experts']}")
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if name in reads:
            found["shared_dim"] = f.count(name)
    if "swiglu_limit" in reads:
        found["clamp"] = f.number("swiglu_limit", 7.0), f.number("swiglu_alpha", 1.702)
    heads = {"qkv_bias": f.flag("qkv_bias", True)} if "qkv_bias" in reads else {}
    return {"mixture": found, "heads": heads}


def _read_moe_layers(f: config_json.Fields, layers: int) -> dict[str, Any]:
    """Reads which layers of Llama 4 are mixtures."""
    own, step = f.raw.get("moe_layers"), f.count("interleave_moe_layer_step", 1)
    own = list(range(step - 1, layers, step)) if own is None else own
    if not isinstance(own, list) or not {*map(str, own)} <= {*map(str, range(layers))}:
        raise f.refuse("moe_layers", f"a list of numbers of layers from 0 to {layers - 1}")
    shared = f.count("intermediate_size")
    return {"dense_layers": tuple(i for i in range(layers) if i not in own), "shared_dim": shared}


def _read_interval(f: config_json.Fields, layers: int) -> dict[str, Any]:
    """Reads which layers of ERNIE 4.5 are mixtures, and the widths of these."""
    if f.flag("mlp_bias", False):
        raise f.refuse("mlp_bias", "false, as the head has no bias")
    if f.number("moe_norm_min", 1e-12) > 1e-6:
        raise f.refuse("moe_norm_min", "1e-06 at most, as no sum of weights is that small")
    bounds: list[Any] = []
    for name in ("moe_layer_start_index", "moe_layer_end_index"):
        bounds.append(f.raw.get(name))
        if not isinstance(bounds[-1], int) or isinstance(bounds[-1], bool):
            raise f.refuse(name, "a number of a layer")
    first, last = bounds[0], layers - 1 if bounds[1] == -1 else bounds[1]
    step, width = f.count("moe_layer_interval", 1), f.count("moe_intermediate_size")
    return {
        "width": width,
        "shared_dim": width * f.count("moe_num_shared_experts") if f.raw.get("moe_num_shared_experts") else 0,
        "dense_layers": tuple(i for i in range(layers) if (i + 1) % step or not first <= i <= last),
    }


def _read_rotated(f: config_json.Fields) -> tuple[bool, ...]:
    """Returns for each layer of SmolLM3 whether its queries and keys are rotated."""
    layers, told = f.depth("num_hidden_layers"), f.raw.get("no_rope_layers")
    if told is None:
        interval = f.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if told == [] and "attention_chunk_size" in ROWS[f.raw["model_type"]].reads:
        return _read_rotated(config_json.Fields({**f.raw, "no_rope_layers": None}))
    if not isinstance(told, list) or len(told) < layers or not {*map(str, told)} <= {"0", "1", "True", "False"}:
        raise f.refuse("no_rope_layers", f"{layers} of 0 (not rotated) or 1")
    return tuple(bool(is_rotated) for is_rotated in told[:layers])


def _read_chunks(f: config_json.Fields, rotated: tuple[bool, ...]) -> dict[str, Any]:
    """Reads which layers of Llama 4 attend in chunks, and how queries of layers without rotation grow."""
    size = f.count("attention_chunk_size") if f.raw["attention_chunk_size"] is not None else 0
    known = {"full_attention": 0, "chunked_attention": size} if size else {"full_attention": 0}
    if f.raw.get("layer_types") is None:
        chunks = [size * is_rotated for is_rotated in rotated]
    else:
        chunks = hybrid_fields.kinds(f, "layer_types", known)
    found: dict[str, Any] = {"chunks": hybrid_fields.shortest(chunks) if any(chunks) else ()}
    if f.flag("attn_temperature_tuning", True):
        found["growth"] = f.number("attn_scale", 0.1), f.count("floor_scale", 8192)
    return found


def _read_ropes(f: config_json.Fields, head_dim: int, *, nested: bool) -> dict[str, Any]:
    """Reads the forms of transformers 5 (rope_parameters) and of earlier versions (rope_theta, rope_scaling)."""
    group = _rope_group(f)
    theta = f.number("rope_theta", 10000.0)
    if nested:  # a rotation for layers with a window, and one for the others
        kind = f.raw["model_type"]
        # OLMo 3's class reads no such field, and has that base whatever the file says
        local = (
            ROWS[kind].defaults["rope_local_base_freq"] if kind == "olmo3" else f.number("rope_local_base_freq", 1e4)
        )
        if kind == "gemma4_text" and f.raw.get("rope_scaling"):
            raise f.refuse("rope_scaling", "absent, as the class reads rope_parameters alone")
        is_new = bool(f.raw.get("rope_parameters")) and not f.raw.get("rope_scaling")
        is_new = is_new or kind == "gemma4_text"
        full, near = (
            (group.group("full_attention"), group.group("sliding_attention")) if is_new else (group, f.group(""))
        )
        if not is_new and "rope_type" not in group.raw and group.raw.get("type", "default") != "default":
            raise group.refuse("type", "named rope_type, since transformers reads no other name in layers of two kinds")
        if is_new and (odd := group.raw.keys() - {"full_attention", "sliding_attention"}):
            raise group.refuse(min(odd), "in full_attention or sliding_attention")
        if apart := next((one for one in (full, near) if not one.flag("truncate", True)), None):
            raise apart.refuse("truncate", "true, since transformers reads it of rotations that all layers share alone")
        (own, dims), (window, _) = _read_rope(f, full, theta, head_dim), _read_rope(f, near, local, head_dim)
        return {"theta": own.theta, "scaling": own.scaling, "in_windows": window, "dims": dims}
    odd = {name for name, value in group.raw.items() if isinstance(value, Mapping)}
    if odd:
        raise group.refuse(min(odd), "a number or a name, as all layers have the same positions")
    own, dims = _read_rope(f, group, theta, head_dim)
    return {"theta": own.theta, "scaling": own.scaling, "dims": dims}


def _rope_group(f: config_json.Fields) -> config_json.Fields:
    told = [name for name in ("rope_scaling", "rope_parameters") if f.raw.get(name)]
    if len(told) == 2 and f.raw[told[0]] != f.raw[told[1]]:
        raise f.refuse("rope_scaling", "absent where there are rope_parameters")
    if not told and (usual := _ROPES.get(f.raw["model_type"])):
        f = config_json.Fields({**f.raw, "rope_parameters": usual})
    return f.group(told[0] if told else "rope_parameters")


def _read_rope(f: config_json.Fields, group: config_json.Fields, theta: float, head_dim: int) -> tuple[rope.Rope, int]:
    """Returns a rotation, and the dims of a head that are rotated (0: all)."""
    is_phi = f.raw["model_type"] == "phi3"
    reads = ROWS[f.raw["model_type"]].reads
    is_part = "partial_rotary_factor" in reads
    usual = f.count("rotary_dim") / head_dim if f.raw.get("rotary_dim") and "rotary_dim" in reads else 1.0
    theta, share = group.number("rope_theta", theta), f.number("partial_rotary_factor", usual)
    share = group.number("partial_rotary_factor", share)  # as transformers: the group's, where both are told
    dims = int(head_dim * share)
    name = "rope_type" if "rope_type" in group.raw else "type"
    if f.raw["model_type"] == "gemma4_text" and group.raw.get(name) == "proportional":
        return rope.Rope(theta, rope.Scaling("proportional", group.number("factor", 1.0), share)), 0
    if share != 1 and (not is_part or dims % 2 or not 0 < dims <= head_dim):
        raise (group if "partial_rotary_factor" in group.raw else f).refuse(
            "partial_rotary_factor", f"a share of {head_dim} dims that gives pairs" if is_part else "1"
        )
    rotary = 0 if dims == head_dim else dims
    if is_phi:
        kind = group.choice(name, ("default", "longrope", "su", "yarn"), "default")
        kind = kind if kind == "default" else "longrope"
    else:
        kind = group.choice(name, ("default", "linear", "llama3", "yarn", "dynamic", "longrope"), "default")
    return rope.Rope(theta, None if kind == "default" else _read_scaling(f, group, kind, dims)), rotary


def _read_scaling(f: config_json.Fields, group: config_json.Fields, kind: str, dims: int) -> rope.Scaling:
    longest = f.count("max_position_embeddings")
    if kind == "linear":
        return rope.Scaling("linear", group.number("factor"))
    if kind == "dynamic":
        return rope.Scaling("dynamic", group.number("factor"), original_length=longest)
    original = group.count("original_max_position_embeddings", None if kind == "llama3" else longest)
    told = f.count("original_max_position_embeddings", original)
    if told != original and "original_max_position_embeddings" in group.raw:
        raise f.refuse("original_max_position_embeddings", f"{original}, as in {group.place}")
    original = told
    if kind == "llama3":
        low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
        if high < low:
            raise group.refuse("high_freq_factor", f"at least low_freq_factor={low:g}")
        return rope.Scaling("llama3", group.number("factor"), low, high, original)
    factor = group.number("factor", longest / original)
    if kind == "yarn":
        own, other = (group.raw.get(name) for name in ("mscale", "mscale_all_dim"))
        grown = lambda scale: 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1  # noqa: E731
        usual = grown(group.number("mscale")) / grown(group.number("mscale_all_dim")) if own and other else grown(1.0)
        return rope.Scaling(
            "yarn",
            factor,
            group.number("beta_slow", 1.0),
            group.number("beta_fast", 32.0),
            original,
            group.number("attention_factor", usual),
            group.flag("truncate", True),
        )
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (group.numbers(name, dims // 2) for name in ("short_factor", "long_factor"))
    if f.raw["model_type"] == "phimoe":
        usual = group.number("short_mscale")
        if group.number("long_mscale") != usual:
            raise group.refuse("long_mscale", f"short_mscale={usual:g}, as rotations of all lengths have one factor")
    attention = group.number("attention_factor", usual)
    return rope.Scaling("longrope", factor, 1.0, 4.0, original, attention, True, short, long)


def _read_windows(f: config_json.Fields, kind: str) -> tuple[int, ...]:
    layers, types = f.depth("num_hidden_layers"), f.raw.get("layer_types")
    if "layer_types" in ROWS[kind].reads:
        return _windows_by_type(f, kind, layers)
    if "sliding_window" not in ROWS[kind].reads:
        return ()
    is_all = kind in _IN_ALL
    is_window_read = (is_all and kind != "qwen3_moe") or f.flag("use_sliding_window", False)
    has_window = is_window_read and f.raw.get("sliding_window", 4096) is not None
    window = f.count("sliding_window", 4096) if has_window else 0
    if types is None or (is_all and kind not in ("mistral", "ministral3")):
        first = 0 if is_all else f.count("max_window_layers", 28) if f.raw.get("max_window_layers", 28) else 0
        windows = tuple(window if layer >= first else 0 for layer in range(layers))
    else:
        known = {} if window and is_all else {"full_attention": 0}
        known |= {"sliding_attention": window} if window else {}
        windows = tuple(f.kinds("layer_types", known, layers))
    return windows if any(windows) else ()


def _windows_by_type(f: config_json.Fields, kind: str, layers: int) -> tuple[int, ...]:
    """Reads the windows of classes that have one in the layers that `layer_types` names, or else in every so many."""
    types = f.raw.get("layer_types")
    if types is None and kind == "ministral":
        has_window = [f.raw.get("sliding_window", 4096) is not None] * layers
    elif types is None:
        every = {"gemma2": 2, "gpt_oss": 2, "olmo3": 4, "gemma3n_text": 5, "gemma4_text": 6}.get(kind) or f.count(
            "sliding_window_pattern", 6
        )
        has_window = [(layer + 1) % every != 0 for layer in range(layers)]
        if kind == "smollm3":
            is_read = f.flag("use_sliding_window", False) and f.raw["sliding_window"] is not None
            has_window = [is_read and not is_rotated for is_rotated in _read_rotated(f)]
    else:
        has_window = f.kinds("layer_types", {"full_attention": False, "sliding_attention": True}, layers)
    if kind == "gemma4_text":  # as its class has it, whatever the types say
        has_window[-1] = False
    return tuple(f.count("sliding_window") if has else 0 for has in has_window) if any(has_window) else ()
