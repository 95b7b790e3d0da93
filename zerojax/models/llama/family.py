"""Llama as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from zerojax.models import config_json, family, parallel
from zerojax.models.family import Tensor
from zerojax.models.llama import mla, model, one_row, published, rope
from zerojax.models.llama.model import LlamaConfig
from zerojax.models.llama.model_types import ROWS

# The rotary base of 500,000 supports up to 32,768 positions (arXiv:2407.21783, section 3.2).
_llama3 = functools.partial(LlamaConfig, 128256, max_seq_len=32768)
_TEST = LlamaConfig(0, 2, 64, 4, 2, 16, 128, 512)

# The sizes of the layers, the embedding, heads of queries, heads of keys and values, a head and the MLP, after that of the vocabulary.
PRESETS: dict[str, LlamaConfig] = {
    "test": _TEST,
    "moe_test": dataclasses.replace(
        _TEST, qk_norm=True, num_experts=4, experts_per_token=2, expert_dim=32, shared_dim=32, model_type="qwen2_moe"
    ),
    "tiny": LlamaConfig(0, 4, 128, 4, 2, 32, 384, 2048),
    "llama3_1b": _llama3(16, 2048, 32, 8, 64, 8192),
    "llama3_8b": _llama3(32, 4096, 32, 8, 128, 14336),
    # The rotary base of Gradient AI's Llama 3 8B Instruct 1048k, from which it was trained on up to 1,048,576 positions.
    "llama3_8b_1m": _llama3(32, 4096, 32, 8, 128, 14336, rope_theta=3580165449.0, max_seq_len=1048576),
    # Llama 3's report, arXiv:2407.21783, table 3.
    "llama3_405b": _llama3(126, 16384, 128, 8, 128, 53248),
    "llama3_70b": _llama3(80, 8192, 64, 8, 128, 28672),
    # Qwen2.5 technical report, arXiv:2412.15115, table 1.
    "qwen2_14b": LlamaConfig(
        152064, 48, 5120, 40, 8, 128, 13824, 32768, 1e6, norm_eps=1e-6, qkv_bias=True, model_type="qwen2"
    ),
    **published.PRESETS,
}

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
# Where a config.json tells none.
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}


def _tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Returns Hugging Face's names.

    Query and key need no permutation: like Hugging Face's, the model rotates the first half of a head's dims against the second.
    """
    c, attention, mlp = config, "model.layers.{}.self_attn", "model.layers.{}.mlp"
    found = {
        "embed/embedding": Tensor(EMBED),
        "norm/scale": Tensor("model.norm.weight"),
        "head/kernel": Tensor(HEAD, 1),
    }
    found |= {f"layer_{{}}/{ours}/scale": Tensor(f"model.layers.{{}}.{theirs}.weight") for ours, theirs in _norms(c)}
    if c.latent is not None:
        found |= _latent_tensors(c, attention)
    for name in () if c.latent is not None else ("qkv",) if c.is_fused else ("q", "k", "v"):
        found |= _linear(f"layer_{{}}/attention/{name}", f"{attention}.{name}_proj", 1, c.qkv_bias)
    found |= _linear("layer_{}/attention/o", f"{attention}.o_proj", 2, c.o_bias)
    if c.qk_norm:
        form: Literal["flat", "same"] = "flat" if c.qk_norm_joint else "same"
        found |= {
            f"layer_{{}}/attention/{name}/scale": Tensor(f"{attention}.{name}.weight", form=form)
            for name in ("q_norm", "k_norm")
        }
    found |= {"layer_{}/attention/sinks": Tensor(f"{attention}.sinks")} if c.has_sinks else {}
    found |= _expert_tensors(c) if c.num_experts else {}
    for name in ("gate_up", "down") if c.is_fused else ("gate", "up", "down"):
        found |= _linear(f"layer_{{}}/mlp/{name}", f"{mlp}.{name}_proj", 1, c.mlp_bias)
    return found


def _expert_tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Returns the names of a mixture's tensors; the files have one of each expert, but those of gpt-oss one of all."""
    if config.clamp is not None:
        mlp = "model.layers.{}.mlp"
        own = ("gate_up", "gate_up_bias", "down", "down_bias")
        stored = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        found = {f"layer_{{}}/mlp/experts/{o}": Tensor(f"{mlp}.experts.{t}") for o, t in zip(own, stored)}
        for name in own[:2]:
            place = f"layer_{{}}/mlp/experts/{name}"
            found[place] = found[place]._replace(form="pairs")
        router = {"router": Tensor(f"{mlp}.router.weight", 1), "router_bias": Tensor(f"{mlp}.router.bias")}
        return found | {f"layer_{{}}/mlp/experts/{name}": tensor for name, tensor in router.items()}
    is_mixtral = config.model_type == "mixtral"
    mlp = f"model.layers.{{}}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {"layer_{}/mlp/experts/router": Tensor(f"{mlp}.gate.weight", 1)}
    for ours, theirs in zip(("gate", "up", "down"), names):
        found[f"layer_{{}}/mlp/experts/{ours}"] = Tensor(f"{mlp}.experts.{{expert}}.{theirs}.weight", 1)
        shared = "shared_expert" if config.is_shared_gated else "shared_experts"
        found |= _linear(f"layer_{{}}/mlp/shared/{ours}", f"{mlp}.{shared}.{ours}_proj", 1, False)
    found["layer_{}/mlp/experts/choice_bias"] = Tensor(f"{mlp}.gate.e_score_correction_bias")
    return found | _linear("layer_{}/mlp/shared_gate", f"{mlp}.shared_expert_gate", 1, False)


def _latent_tensors(config: LlamaConfig, attention: str) -> dict[str, Tensor]:
    names = {"q": ("q_proj", False), "q_a": ("q_a_proj", config.o_bias), "q_b": ("q_b_proj", False)}
    names |= {"kv_a": ("kv_a_proj_with_mqa", config.o_bias), "kv_b": ("kv_b_proj", False)}
    found = {
        f"layer_{{}}/attention/{name}_norm/scale": Tensor(f"{attention}.{name}_layernorm.weight")
        for name in ("q_a", "kv_a")
    }
    for ours, (theirs, has_bias) in names.items():
        found |= _linear(f"layer_{{}}/attention/{ours}", f"{attention}.{theirs}", 1, has_bias)
    return found


def _norms(config: LlamaConfig) -> list[tuple[str, str]]:
    """Returns the names of a layer's norms: ours, and theirs."""
    after = [
        ("attention_post_norm", "post_attention_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    ]
    if config.norm_places == "after":
        return after
    if config.norm_places == "both":
        return [("attention_norm", "input_layernorm"), ("mlp_norm", "pre_feedforward_layernorm"), *after]
    return [("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]


def _linear(ours: str, theirs: str, inputs: int, has_bias: bool) -> dict[str, Tensor]:
    found = {f"{ours}/kernel": Tensor(f"{theirs}.weight", inputs)}
    return found | {f"{ours}/bias": Tensor(f"{theirs}.bias", form="flat")} if has_bias else found


def _stretch(config: LlamaConfig) -> family.Stretch | None:
    if not (read := config.by_length):
        return None
    return family.Stretch(min(one.original_length for one in read), any(one.kind == "longrope" for one in read))


def _flops_per_token(config: LlamaConfig, lengths: Mapping[str, int], per_weight: float = 6.0) -> float:
    return model.flops_per_token(config, lengths["tokens"] - 1, per_weight)


def _write(config: LlamaConfig) -> dict[str, Any]:
    c, row = config, ROWS[config.model_type]
    found = {
        "architectures": [row.architecture],
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.embed_dim,
        "intermediate_size": c.mlp_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_seq_len,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        row.activation[0]: c.activation,
        "attention_bias": c.o_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": c.tie_embeddings,
        "pad_token_id": None,  # that of some classes is beyond a smaller vocabulary
    }
    windows = [c.window_of(layer) for layer in range(c.num_layers)]
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    own: dict[str, Callable[[], dict[str, Any]]] = {
        "query_pre_attn_scalar": lambda: {
            "query_pre_attn_scalar": round(c.score_scale**-2) if c.score_scale else c.head_dim,
            "attn_logit_softcapping": c.score_cap or None,
            "final_logit_softcapping": c.logits_cap or None,
        },
        "attention_multiplier": lambda: {
            "attention_multiplier": c.score_scale or c.head_dim**-0.5,
            "embedding_multiplier": c.embed_scale,
            "residual_multiplier": c.residual_scale,
            "logits_scaling": 1 / c.logits_scale,
        },
        "no_rope_layers": lambda: {"no_rope_layers": [int(c.rope_of(i) is not None) for i in range(c.num_layers)]},
        "partial_rotary_factor": lambda: {"partial_rotary_factor": (c.rotary_dim or c.head_dim) / c.head_dim},
        "layer_types": lambda: {"layer_types": kinds},
        "num_local_experts": lambda: {"num_local_experts": c.num_experts},
        "num_experts": lambda: {"num_experts": c.num_experts},
        "moe_intermediate_size": lambda: {
            "moe_intermediate_size": c.expert_dim,
            "mlp_only_layers": list(c.dense_layers),
        },
        "shared_expert_intermediate_size": lambda: {"shared_expert_intermediate_size": c.shared_dim},
        "qkv_bias": lambda: {"qkv_bias": c.qkv_bias},
        "swiglu_limit": lambda: dict(zip(("swiglu_limit", "swiglu_alpha"), c.clamp or ())),
    }
    for name in row.reads:
        found |= own.get(name, dict)()
    if c.latent is not None:
        found |= _write_latent(c)
    if c.num_experts:
        found |= {"num_experts_per_tok": c.experts_per_token, "norm_topk_prob": c.is_normalised}
    if c.window_rope is not None:
        del found["rope_theta"]
        ropes = {"full_attention": rope.Rope(c.rope_theta, c.rope_scaling), "sliding_attention": c.window_rope}
        found["rope_parameters"] = {
            kind: {"rope_theta": own.theta} | _write_scaling(own.scaling) for kind, own in ropes.items()
        }
    elif c.rope_scaling is not None or c.model_type == "gpt_oss":  # whose class scales where nothing is told
        found["rope_scaling"] = scaling = _write_scaling(c.rope_scaling)
        if c.latent is not None and c.rope_scaling is not None and c.score_scale:
            grown = math.sqrt(c.score_scale * math.sqrt(c.head_dim)) - 1
            scaling["mscale_all_dim"] = grown / (0.1 * math.log(c.rope_scaling.factor))
        if c.model_type == "phi3" and c.rope_scaling is not None:
            found["original_max_position_embeddings"] = c.rope_scaling.original_length
    if any(windows):
        found |= {"sliding_window": max(windows), "use_sliding_window": True, "max_window_layers": windows.count(0)}
        found["layer_types"] = kinds
    elif c.model_type == "mistral":
        found["sliding_window"] = None  # else the class has a window of its own
    return found


def _write_latent(config: LlamaConfig) -> dict[str, Any]:
    c, shape = config, config.latent
    assert shape is not None
    return {
        "head_dim": shape.rotary_dim,
        "kv_lora_rank": shape.rank,
        "q_lora_rank": shape.query_rank or None,
        "qk_nope_head_dim": shape.plain_dim,
        "qk_rope_head_dim": shape.rotary_dim,
        "v_head_dim": shape.value_dim,
        "rope_interleave": shape.is_interleaved,
        "n_routed_experts": c.num_experts,
        "moe_intermediate_size": c.expert_dim,
        "n_shared_experts": c.shared_dim // c.expert_dim,
        "n_group": c.router_groups[0],
        "topk_group": c.router_groups[1],
        "routed_scaling_factor": c.router_scale,
        "first_k_dense_replace": len(c.dense_layers),
    }


def _write_scaling(scaling: rope.Scaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("linear", "dynamic"):
        return found
    found["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        return found | {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    found["attention_factor"] = scaling.attention_factor
    if scaling.kind == "longrope":
        return found | {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
    return found | {
        "beta_slow": scaling.low_factor,
        "beta_fast": scaling.high_factor,
        "truncate": scaling.is_whole,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    kind = config_json.Fields(raw).choice("model_type", ROWS, "")
    row = ROWS[kind]
    f = config_json.Fields({**row.defaults, **raw})
    heads, has_biases = (
        f.count("num_attention_heads"),
        "attention_bias" in row.reads and f.flag("attention_bias", False),
    )
    latent = _read_latent(f) if "kv_lora_rank" in row.reads else None
    head_dim = _head_dim(f, kind) if latent is None else latent.rotary_dim
    fields = {
        "embed_dim": f.count("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": f.count("num_key_value_heads", heads),
        "head_dim": head_dim,
        "mlp_dim": f.count("intermediate_size"),
        "max_seq_len": f.count("max_position_embeddings"),
        "norm_eps": f.number("rms_norm_eps", 1e-6),
        "tie_embeddings": f.flag("tie_word_embeddings", False) and HEAD not in names,
        "qkv_bias": has_biases,
        "o_bias": has_biases,
        "mlp_bias": "mlp_bias" in row.reads and f.flag("mlp_bias", False),
        "windows": _read_windows(f, kind),
        "activation": row.meant.get(str(f.raw.get(row.activation[0])), "") or f.activation(*row.activation),
        "model_type": kind,
        **_read_ropes(f, head_dim, nested=bool({"rope_local_base_freq"} & {*row.reads})),
        **_read_multipliers(f, row.reads),
        **_read_experts(f, row.reads),
        **row.fields,
    }
    if latent is not None:
        fields |= _read_deepseek(f, latent)
    found = LlamaConfig(f.count("vocab_size"), f.depth("num_hidden_layers"), **fields)
    if found.num_heads % found.num_kv_heads:
        raise f.refuse("num_attention_heads", f"a multiple of num_key_value_heads={found.num_kv_heads}")
    return found


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
        is_interleaved=f.flag("rope_interleave", True),
    )


def _read_deepseek(f: config_json.Fields, latent: mla.Latent) -> dict[str, Any]:
    """Reads what DeepSeek-V3's class has beside a decoder's fields: its heads, and its experts."""
    experts, width = f.count("n_routed_experts"), f.count("moe_intermediate_size")
    groups, own, taken = f.count("n_group", 8), f.count("topk_group", 4), f.count("num_experts_per_tok")
    if experts % groups or not (experts // groups > 1 or groups == 1):
        raise f.refuse("n_group", f"a divisor of n_routed_experts={experts} that leaves a group two experts")
    if own > groups or taken > experts // groups * own:
        raise f.refuse(
            "topk_group", f"{groups} at most, with num_experts_per_tok={taken} experts or more in its groups"
        )
    layers, dense = f.depth("num_hidden_layers"), f.raw.get("first_k_dense_replace", 3)
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise f.refuse("first_k_dense_replace", "a number of layers")
    head_dim = latent.plain_dim + latent.rotary_dim
    rope_group = f.group("rope_scaling" if f.raw.get("rope_scaling") else "rope_parameters")
    kind = rope_group.raw.get("rope_type", rope_group.raw.get("type", "default"))
    if kind in ("dynamic", "longrope"):
        raise rope_group.refuse("rope_type", "default, linear, llama3 or yarn, since the cache holds rotated keys")
    found: dict[str, Any] = {}
    if kind != "default" and rope_group.raw.get("mscale_all_dim"):
        factor = max(rope_group.number("factor"), 1.0)
        grown = 0.1 * rope_group.number("mscale_all_dim") * math.log(factor) + 1
        found["score_scale"] = head_dim**-0.5 * grown**2 if factor > 1 else 0.0
    return found | {
        "latent": latent,
        "head_dim": head_dim,
        "num_kv_heads": f.count("num_attention_heads"),
        "qkv_bias": False,
        "num_experts": experts,
        "experts_per_token": taken,
        "expert_dim": width,
        "shared_dim": width * f.count("n_shared_experts", 1),
        "is_normalised": f.flag("norm_topk_prob", True),
        "dense_layers": tuple(range(min(dense, layers))),
        "router_groups": (groups, own) if groups > 1 else (1, 1),
        "router_scale": f.number("routed_scaling_factor", 2.5),
    }


def _head_dim(f: config_json.Fields, kind: str) -> int:
    found = f.heads("hidden_size", "num_attention_heads") if f.raw.get("head_dim") is None else f.count("head_dim")
    if found % 2:
        raise f.refuse("head_dim", "even, since positions rotate pairs of dims")
    return found


def _read_multipliers(f: config_json.Fields, reads: Collection[str]) -> dict[str, Any]:
    """Reads what Gemma and Granite multiply and bound, and which layers of SmolLM3 are not rotated."""
    if "use_bidirectional_attention" in reads:
        if f.flag("use_bidirectional_attention", False):
            raise f.refuse("use_bidirectional_attention", "false, since a decoder's tokens see no later ones")
        embed_scale = f.count("hidden_size") ** 0.5
        if "query_pre_attn_scalar" not in reads:
            return {"embed_scale": embed_scale}
        caps = {"logits_cap": "final_logit_softcapping"}
        if f.raw["model_type"] == "gemma2":  # Gemma 3's class has the field, and does not read it
            caps["score_cap"] = "attn_logit_softcapping"
        return {
            "embed_scale": embed_scale,
            "score_scale": f.number("query_pre_attn_scalar") ** -0.5,
            **{ours: 0.0 if f.raw.get(theirs) is None else f.number(theirs) for ours, theirs in caps.items()},
        }
    if "attention_multiplier" in reads:
        return {
            "embed_scale": f.number("embedding_multiplier", 1.0),
            "residual_scale": f.number("residual_multiplier", 1.0),
            "score_scale": f.number("attention_multiplier", 1.0),
            "logits_scale": 1 / f.number("logits_scaling", 1.0),
        }
    return {"rotated": _read_rotated(f)} if "no_rope_layers" in reads else {}


def _read_experts(f: config_json.Fields, reads: Collection[str]) -> dict[str, Any]:
    """Reads the mixture of experts of the rows that have one."""
    count = next((name for name in ("num_local_experts", "num_experts") if name in reads), None)
    if count is None:
        return {}
    # The name that transformers 5 writes for some
    count = "num_local_experts" if "num_local_experts" in f.raw else count
    for name in ("output_router_logits", "router_jitter_noise", "clip_qkv"):
        if f.raw.get(name):
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
        "num_experts": f.count(count),
        "experts_per_token": f.count("num_experts_per_tok"),
        "expert_dim": f.count("moe_intermediate_size" if "moe_intermediate_size" in reads else "intermediate_size"),
        "is_normalised": f.flag("norm_topk_prob", False) or f.raw["model_type"] in ("mixtral", "gpt_oss"),
        "dense_layers": tuple(i for i in range(layers) if (i + 1) % step or i in only),
    }
    if found["experts_per_token"] > found["num_experts"]:
        raise f.refuse("num_experts_per_tok", f"at most {count}={found['num_experts']}")
    if "shared_expert_intermediate_size" in reads:
        found["shared_dim"] = f.count("shared_expert_intermediate_size")
    if "qkv_bias" in reads:
        found["qkv_bias"] = f.flag("qkv_bias", True)
    if "swiglu_limit" in reads:
        found["clamp"] = f.number("swiglu_limit", 7.0), f.number("swiglu_alpha", 1.702)
    return found


def _read_rotated(f: config_json.Fields) -> tuple[bool, ...]:
    """Returns for each layer of SmolLM3 whether its queries and keys are rotated."""
    layers, told = f.depth("num_hidden_layers"), f.raw.get("no_rope_layers")
    if told is None:
        interval = f.count("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(told, list) or len(told) < layers or not {*map(str, told)} <= {"0", "1", "True", "False"}:
        raise f.refuse("no_rope_layers", f"{layers} of 0 (not rotated) or 1")
    return tuple(bool(is_rotated) for is_rotated in told[:layers])


def _read_ropes(f: config_json.Fields, head_dim: int, *, nested: bool) -> dict[str, Any]:
    """Reads the forms of transformers 5 (rope_parameters) and of earlier versions (rope_theta, rope_scaling)."""
    told = [name for name in ("rope_scaling", "rope_parameters") if f.raw.get(name)]
    if len(told) == 2 and f.raw[told[0]] != f.raw[told[1]]:
        raise f.refuse("rope_scaling", "absent where there are rope_parameters")
    if not told and f.raw["model_type"] == "gpt_oss":
        f = config_json.Fields({**f.raw, "rope_parameters": _GPT_OSS_ROPE})
    group = f.group(told[0] if told else "rope_parameters")
    theta = f.number("rope_theta", 10000.0)
    if nested:  # a rotation for layers with a window, and one for the others
        local = f.number("rope_local_base_freq", 10000.0)
        is_new = told == ["rope_parameters"]
        full, near = (
            (group.group("full_attention"), group.group("sliding_attention")) if is_new else (group, f.group(""))
        )
        if is_new and (odd := group.raw.keys() - {"full_attention", "sliding_attention"}):
            raise group.refuse(min(odd), "in full_attention or sliding_attention")
        (own, dims), (window, _) = _read_rope(f, full, theta, head_dim), _read_rope(f, near, local, head_dim)
        return {"rope_theta": own.theta, "rope_scaling": own.scaling, "window_rope": window, "rotary_dim": dims}
    odd = {name for name, value in group.raw.items() if isinstance(value, Mapping)}
    if odd:
        raise group.refuse(min(odd), "a number or a name, as all layers have the same positions")
    own, dims = _read_rope(f, group, theta, head_dim)
    return {"rope_theta": own.theta, "rope_scaling": own.scaling, "rotary_dim": dims}


def _read_rope(f: config_json.Fields, group: config_json.Fields, theta: float, head_dim: int) -> tuple[rope.Rope, int]:
    """Returns a rotation, and the dims of a head that are rotated (0: all)."""
    is_phi = f.raw["model_type"] == "phi3"
    theta, share = group.number("rope_theta", theta), f.number("partial_rotary_factor", 1.0)
    share = group.number("partial_rotary_factor", share)  # as transformers: the group's, where both are told
    dims = int(head_dim * share)
    if share != 1 and (not is_phi or dims % 2 or not 0 < dims <= head_dim):
        raise (group if "partial_rotary_factor" in group.raw else f).refuse(
            "partial_rotary_factor", f"a share of {head_dim} dims that gives pairs" if is_phi else "1"
        )
    rotary = 0 if dims == head_dim else dims
    name = "rope_type" if "rope_type" in group.raw else "type"
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
        if high <= low:
            raise group.refuse("high_freq_factor", f"above low_freq_factor={low:g}")
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
    attention = group.number("attention_factor", usual)
    return rope.Scaling("longrope", factor, 1.0, 4.0, original, attention, True, short, long)


def _read_windows(f: config_json.Fields, kind: str) -> tuple[int, ...]:
    layers, types = f.depth("num_hidden_layers"), f.raw.get("layer_types")
    if kind in ("llama", "gemma", "olmo2", "granite", "olmoe", "deepseek_v3"):
        return ()
    if kind in ("gemma2", "gemma3_text", "smollm3", "gpt_oss"):
        return _windows_by_type(f, kind, layers)
    is_all = kind in ("mistral", "phi3", "mixtral", "qwen3_moe")  # the class has the window in every layer
    is_window_read = kind in ("mistral", "phi3", "mixtral") or f.flag("use_sliding_window", False)
    has_window = is_window_read and f.raw.get("sliding_window", 4096) is not None
    window = f.count("sliding_window", 4096) if has_window else 0
    if types is None or kind in ("phi3", "mixtral", "qwen3_moe"):
        first = 0 if is_all else f.count("max_window_layers", 28) if f.raw.get("max_window_layers", 28) else 0
        windows = tuple(window if layer >= first else 0 for layer in range(layers))
    else:
        known: tuple[str, ...] = ("full_attention", "sliding_attention") if window else ("full_attention",)
        known = known[1:] if window and kind == "mistral" else known  # its class has the window in every layer
        if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*known}:
            raise f.refuse("layer_types", f"{layers} of {' or '.join(known)}")
        windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


def _windows_by_type(f: config_json.Fields, kind: str, layers: int) -> tuple[int, ...]:
    """Reads the windows of classes that have one in the layers that `layer_types` names, or else in every so many."""
    types, known = f.raw.get("layer_types"), {"full_attention": False, "sliding_attention": True}
    if types is None:
        every = 2 if kind in ("gemma2", "gpt_oss") else f.count("sliding_window_pattern", 6)
        has_window = [(layer + 1) % every != 0 for layer in range(layers)]
        if kind == "smollm3":
            is_read = f.flag("use_sliding_window", False) and f.raw["sliding_window"] is not None
            has_window = [is_read and not is_rotated for is_rotated in _read_rotated(f)]
    elif not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*known}:
        raise f.refuse("layer_types", f"{layers} of {' or '.join(known)}")
    else:
        has_window = [known[name] for name in types]
    return tuple(f.count("sliding_window") if has else 0 for has in has_window) if any(has_window) else ()


def _copies(raw: Mapping[str, Any]) -> dict[str, str]:
    row = ROWS.get(raw.get("model_type", ""))
    is_tied = raw.get("tie_word_embeddings", row is not None and row.defaults.get("tie_word_embeddings"))
    return {HEAD: EMBED} if is_tied else {}


def _further(raw: Mapping[str, Any]) -> str:
    """Returns the names of DeepSeek-V3's layers after the last one, which predict tokens further ahead (arXiv:2412.19437, section 2.2)."""
    layers, count = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    if raw.get("model_type") != "deepseek_v3" or not isinstance(layers, int) or not isinstance(count, int):
        return ""
    return rf"model\.layers\.({'|'.join(map(str, range(layers, layers + min(count, 8))))})\..*" if count > 0 else ""


def _adapted(config: LlamaConfig) -> tuple[str, ...]:
    if config.latent is not None:
        return ("q_b_proj" if config.latent.query_rank else "q_proj", "kv_b_proj")
    return ("qkv_proj",) if config.is_fused else ("q_proj", "v_proj")


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="next_token",
    loss=model.loss,
    logits=model.logits,
    start=model.start,
    extend=model.extend,
    one_row=lambda config, params, ways: one_row.extend if one_row.takes(config, params, ways) else None,
    transposed=lambda *given: one_row.with_transposed if one_row.reads_transposed(*given) else None,
    positions=lambda config: config.max_seq_len if config.has_positions else None,
    stretch=_stretch,
    is_encoder_decoder=False,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla", "cudnn", "splash"),
    flops_per_token=_flops_per_token,
    huggingface=family.HuggingFace(
        architectures={
            kind: (row.architecture, row.architecture.replace("ForCausalLM", "Model")) for kind, row in ROWS.items()
        },
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=_adapted,
        copies=_copies,
        ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        prefix="model.",
        outside=(HEAD,),
        further=_further,
        quantized=(("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8")),
    ),
    parallel=parallel.Parallel(
        weights=(
            *parallel.WEIGHTS,
            (r"positions/embedding|attention/sinks", ("model",)),
            (r"/experts/gate_up$", ("expert", None, "model")),  # [experts, inputs, width, 2]
            (r"/experts/gate_up_bias", ("expert", "model")),
            (r"/experts/down_bias", ("expert",)),
            (r"/attention/(q_b|kv_b)/(kernel|lora_b)", (None, "model")),  # [rank, heads, width]
            (r"/attention/(q_a|kv_a)/(kernel|bias)", (None,)),
        ),
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            *parallel.FUSED,
            (r".*/attention/(q_b|kv_b)", (None, None, "model")),
            (r".*/attention/(q_a|kv_a)(_norm)?", parallel.ALL_TOKENS),
            (r"layer_\d+/(attention|mlp)", parallel.TOKENS, parallel.ALL_TOKENS, parallel.OF_RINGS),
            (r"layer_\d+/mlp/(experts|shared|shared_gate)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"embed|positions|norm|layer_\d+(/(attention|mlp)(_post)?_norm)?", parallel.TOKENS),
        ),
    ),
)
