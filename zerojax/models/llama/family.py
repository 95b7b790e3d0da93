"""Llama as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import functools
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax

from zerojax.models import config_json, decoding, family, parallel
from zerojax.models.family import Tensor
from zerojax.models.llama import model, rope
from zerojax.models.llama.model import LlamaConfig

# The rotary base of 500,000 supports up to 32,768 positions (arXiv:2407.21783, section 3.2).
_llama3 = functools.partial(LlamaConfig, 128256, rope_theta=500000.0, max_seq_len=32768)

PRESETS: dict[str, LlamaConfig] = {
    "test": LlamaConfig(0, 2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, max_seq_len=512),
    "tiny": LlamaConfig(0, 4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, max_seq_len=2048),
    "llama3_1b": _llama3(16, embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192),
    "llama3_8b": _llama3(32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336),
    # The rotary base of Gradient AI's Llama 3 8B Instruct 1048k, from which it was trained on up to 1,048,576 positions.
    "llama3_8b_1m": _llama3(
        32,
        embed_dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=14336,
        rope_theta=3580165449.0,
        max_seq_len=1048576,
    ),
    "llama3_70b": _llama3(80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28672),
    # Qwen2.5 technical report, arXiv:2412.15115, table 1.
    "qwen2_14b": LlamaConfig(
        152064,
        48,
        embed_dim=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=13824,
        max_seq_len=32768,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        model_type="qwen2",
    ),
}

# The rows: model_type in Hugging Face's config.json -> its class in transformers
ROWS: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def _tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Returns Hugging Face's names.

    Query and key need no permutation: like Hugging Face's, the model rotates the first half of a head's dims against the second.
    """
    c, attention, mlp = config, "model.layers.{}.self_attn", "model.layers.{}.mlp"
    norms = [("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
    found = {
        "embed/embedding": Tensor(EMBED),
        "norm/scale": Tensor("model.norm.weight"),
        "head/kernel": Tensor(HEAD, 1),
    }
    found |= {f"layer_{{}}/{ours}/scale": Tensor(f"model.layers.{{}}.{theirs}.weight") for ours, theirs in norms}
    for name, inputs, has_bias in (
        ("q", 1, c.qkv_bias),
        ("k", 1, c.qkv_bias),
        ("v", 1, c.qkv_bias),
        ("o", 2, c.o_bias),
    ):
        found |= _linear(f"layer_{{}}/attention/{name}", f"{attention}.{name}_proj", inputs, has_bias)
    if c.qk_norm:
        found |= {
            f"layer_{{}}/attention/{name}/scale": Tensor(f"{attention}.{name}.weight") for name in ("q_norm", "k_norm")
        }
    for name in ("gate", "up", "down"):
        found |= _linear(f"layer_{{}}/mlp/{name}", f"{mlp}.{name}_proj", 1, c.mlp_bias)
    return found


def _linear(ours: str, theirs: str, inputs: int, has_bias: bool) -> dict[str, Tensor]:
    found = {f"{ours}/kernel": Tensor(f"{theirs}.weight", inputs)}
    return found | {f"{ours}/bias": Tensor(f"{theirs}.bias", form="flat")} if has_bias else found


def _loss(config: LlamaConfig, params: Any, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
    """Returns the mean loss of the next tokens. There is no dropout, for which `key` would be."""
    arrays = (batch["tokens"], *map(batch.get, ("segments", "labeled", "labels", "positions")))
    return cast(jax.Array, model.Llama(config).apply({"params": params}, *arrays, method="loss"))


def _logits(config: LlamaConfig, params: Any, inputs: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
    return cast(jax.Array, model.Llama(config).apply({"params": params}, tokens, inputs.get("mask")))


def _start(
    config: LlamaConfig, params: Any, inputs: Mapping[str, jax.Array], tokens: jax.Array, lengths: jax.Array, slots: int
) -> Any:
    assert not inputs, "a decoder's prompt has no other arrays than its tokens"
    return model.Llama(config).apply({"params": params}, tokens, lengths, slots, method="start")


def _extend(config: LlamaConfig, params: Any, caches: Any, step: decoding.Step, tokens: jax.Array) -> Any:
    return model.Llama(config).apply({"params": params}, caches, step, tokens, method="extend")


def _flops_per_token(config: LlamaConfig, lengths: Mapping[str, int], per_weight: float = 6.0) -> float:
    return model.flops_per_token(config, lengths["tokens"] - 1, per_weight)


def _write(config: LlamaConfig) -> dict[str, Any]:
    c = config
    found = {
        "architectures": [ROWS[c.model_type]],
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
        "hidden_act": c.activation,
        "attention_bias": c.o_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": c.tie_embeddings,
    }
    if c.rope_scaling is not None:
        found["rope_scaling"] = _write_scaling(c.rope_scaling)
    if any(c.windows):
        found |= {"sliding_window": max(c.windows), "use_sliding_window": True, "max_window_layers": c.windows.count(0)}
        found["layer_types"] = ["sliding_attention" if window else "full_attention" for window in c.windows]
    elif c.model_type == "mistral":
        found["sliding_window"] = None  # else the class has a window of its own
    return found


def _write_scaling(scaling: rope.Scaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_factor,
        "high_freq_factor": scaling.high_factor,
        "original_max_position_embeddings": scaling.original_length,
    }


def _read(raw: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    f = config_json.Fields(raw)
    row = f.choice("model_type", ROWS, "")
    heads, has_biases = f.count("num_attention_heads"), f.flag("attention_bias", False)
    theta, scaling = _read_rope(f)
    model_config = LlamaConfig(
        f.count("vocab_size"),
        f.depth("num_hidden_layers"),
        embed_dim=f.count("hidden_size"),
        num_heads=heads,
        num_kv_heads=f.count("num_key_value_heads", {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(row, heads)),
        head_dim=_head_dim(f, row),
        mlp_dim=f.count("intermediate_size"),
        max_seq_len=f.count("max_position_embeddings", {"llama": 2048, "mistral": 131072}.get(row, 32768)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=f.number("rms_norm_eps", 1e-6),
        tie_embeddings=f.flag("tie_word_embeddings", False) and HEAD not in names,
        qkv_bias=row == "qwen2" or (has_biases and row != "mistral"),
        o_bias=has_biases and row in ("llama", "qwen3"),
        mlp_bias=row == "llama" and f.flag("mlp_bias", False),
        qk_norm=row == "qwen3",
        windows=_read_windows(f, row),
        activation=f.activation("hidden_act", "silu"),
        model_type=row,
    )
    if model_config.num_heads % model_config.num_kv_heads:
        raise f.refuse("num_attention_heads", f"a multiple of num_key_value_heads={model_config.num_kv_heads}")
    return model_config


def _head_dim(f: config_json.Fields, row: str) -> int:
    is_derived = f.raw.get("head_dim") is None and row != "qwen3"
    found = f.heads("hidden_size", "num_attention_heads") if is_derived else f.count("head_dim", 128)
    if found % 2:
        raise f.refuse("head_dim", "even, since positions rotate pairs of dims")
    return found


def _read_rope(f: config_json.Fields) -> tuple[float, rope.Scaling | None]:
    """Reads the forms of transformers 5 (rope_parameters) and of earlier versions (rope_theta, rope_scaling)."""
    told = [name for name in ("rope_scaling", "rope_parameters") if f.raw.get(name)]
    if len(told) == 2 and f.raw[told[0]] != f.raw[told[1]]:
        raise f.refuse("rope_scaling", "absent where there are rope_parameters")
    group = f.group(told[0] if told else "rope_parameters")
    nested = next((name for name, value in group.raw.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise group.refuse(nested, "a number or a name, as all layers have the same positions")
    theta = group.number("rope_theta", f.number("rope_theta", 10000.0))
    for fields in (f, group):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.refuse("partial_rotary_factor", "1")
    name = "rope_type" if "rope_type" in group.raw else "type"
    kind = group.choice(name, ("default", "linear", "llama3"), "default")
    if kind == "default":
        return theta, None
    factor = group.number("factor")
    if kind == "linear":
        return theta, rope.Scaling("linear", factor)
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    if high <= low:
        raise group.refuse("high_freq_factor", f"above low_freq_factor={low:g}")
    original = group.count("original_max_position_embeddings")
    if f.count("original_max_position_embeddings", original) != original:
        raise f.refuse("original_max_position_embeddings", f"{original}, as in {group.place}")
    return theta, rope.Scaling("llama3", factor, low, high, original)


def _read_windows(f: config_json.Fields, row: str) -> tuple[int, ...]:
    layers = f.depth("num_hidden_layers")
    is_window_read = row == "mistral" or (row != "llama" and f.flag("use_sliding_window", False))
    has_window = is_window_read and f.raw.get("sliding_window", 4096) is not None
    window = f.count("sliding_window", 4096) if has_window else 0
    types = f.raw.get("layer_types")
    if types is None or row == "llama":
        first = 0 if row == "mistral" else f.count("max_window_layers", 28) if f.raw.get("max_window_layers", 28) else 0
        windows = tuple(window if layer >= first else 0 for layer in range(layers))
    else:
        known: tuple[str, ...] = ("full_attention", "sliding_attention") if window else ("full_attention",)
        known = known[1:] if window and row == "mistral" else known  # its class has the window in every layer
        if not isinstance(types, list) or len(types) != layers or not set(types) <= set(known):
            raise f.refuse("layer_types", f"{layers} of {' or '.join(known)}")
        windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return windows if any(windows) else ()


FAMILY = family.Family(
    presets=PRESETS,
    parts=model.parts,
    objective="next_token",
    loss=_loss,
    logits=_logits,
    start=_start,
    extend=_extend,
    positions=lambda config: None,
    is_encoder_decoder=False,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla", "cudnn", "splash"),
    flops_per_token=_flops_per_token,
    huggingface=family.HuggingFace(
        architectures={row: (name, name.replace("ForCausalLM", "Model")) for row, name in ROWS.items()},
        tensors=_tensors,
        write=_write,
        read=_read,
        adapted=("q_proj", "v_proj"),
        copies=lambda raw: {HEAD: EMBED} if raw.get("tie_word_embeddings") else {},
        ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        prefix="model.",
        outside=(HEAD,),
    ),
    parallel=parallel.Parallel(
        weights=parallel.WEIGHTS,
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            (r"layer_\d+/(attention|mlp)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"embed|norm|layer_\d+(/(attention|mlp)_norm)?", parallel.TOKENS),
        ),
    ),
)
