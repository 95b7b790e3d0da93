"""Llama as a family. This module holds its presets, the names of its tensors at Hugging Face, and its `Family`."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

from zerojax.models import experts, family, parallel, rope
from zerojax.models.family import Tensor
from zerojax.models.llama import altup, config_file, delta, model, one_row, published
from zerojax.models.llama.config import Heads, LlamaConfig, MixtureForm, MLPForm, Norms, Recurrent, Scales, Sizes
from zerojax.models.llama.config_file import HEAD
from zerojax.models.llama.convolution import Convolution
from zerojax.models.llama.layer_inputs import Inputs
from zerojax.models.llama.model_types import ROWS

# The rotary base of 500,000 supports up to 32,768 positions (arXiv:2407.21783, section 3.2).
_llama3 = functools.partial(LlamaConfig, 128256, max_seq_len=32768)
_TEST = LlamaConfig(0, 2, 64, 4, 2, 16, 128, 512)
_GEMMA = dataclasses.replace(
    _TEST,
    num_layers=4,
    rotation=rope.Rotation(1e6, rope.Scaling("proportional", 1.0, 0.25), in_windows=rope.Rope(1e4)),
    heads=Heads(norm="each", windows=(8, 0), scale=1.0, has_value_norm=True),
    norms=Norms(eps=1e-6, places="both"),
    mlp=MLPForm("gelu_pytorch_tanh"),
    scales=Scales(8.0),
    sharing_layers=2,
    inputs=Inputs(8, 320),
    tie_embeddings=True,
)

# The sizes of the layers, the embedding, heads of queries, heads of keys and values, a head and the MLPForm, after that of the vocabulary.
PRESETS: dict[str, LlamaConfig] = {
    "test": _TEST,
    "moe_test": dataclasses.replace(
        _TEST, heads=Heads(norm="each"), mixture=MixtureForm(4, 2, 32, shared_dim=32), model_type="qwen2_moe"
    ),
    "hybrid_test": dataclasses.replace(
        _TEST,
        rotation=rope.Rotation(dims=8),
        heads=Heads(norm="each", is_gated=True),
        norms=Norms(offset=1.0),
        mixture=MixtureForm(4, 2, 32, shared_dim=32),
        recurrent=delta.Delta(2, 4, 16, 16, pattern=(True, False)),
        model_type="qwen3_next",
    ),
    "lfm2_test": dataclasses.replace(
        _TEST,
        heads=Heads(norm="each"),
        recurrent=Convolution(64, pattern=(True, False)),
        tie_embeddings=True,
        model_type="lfm2",
    ),
    "llama4_test": dataclasses.replace(
        _TEST,
        rotation=rope.Rotation(is_interleaved=True, layers=(True, False)),
        heads=Heads(norm="unit", chunks=(8, 0), growth=(0.1, 4), grows_unrotated=True),
        mixture=MixtureForm(4, 1, 32, 32, False, (0,), False, "sigmoid", is_fused=True, scales_inputs=True),
        model_type="llama4_text",
    ),
    "gemma4_test": dataclasses.replace(
        _GEMMA, sizes=(Sizes(16, 2, 128), Sizes(32, 1, 128)), has_layer_scale=True, model_type="gemma4_text"
    ),
    "gemma4_moe_test": dataclasses.replace(
        _GEMMA,
        sizes=(Sizes(16, 2, 128), Sizes(32, 1, 128)),
        mixture=MixtureForm(4, 2, 32, is_fused=True, is_beside_mlp=True),
        sharing_layers=0,
        inputs=None,
        has_layer_scale=True,
        model_type="gemma4_text",
    ),
    "gemma3n_test": dataclasses.replace(
        _GEMMA,
        rotation=rope.Rotation(1e6, in_windows=rope.Rope(1e4)),
        sizes=(Sizes(16, 2, 128, 0.5), Sizes(16, 2, 128)),
        altup=altup.AltUp(2, 0, 8),
        model_type="gemma3n_text",
    ),
    "tiny": LlamaConfig(0, 4, 128, 4, 2, 32, 384, 2048),
    "llama3_1b": _llama3(16, 2048, 32, 8, 64, 8192),
    "llama3_8b": _llama3(32, 4096, 32, 8, 128, 14336),
    # The rotary base of Gradient AI's Llama 3 8B Instruct 1048k, from which it was trained on up to 1,048,576 positions.
    "llama3_8b_1m": _llama3(32, 4096, 32, 8, 128, 14336, rotation=rope.Rotation(3580165449.0), max_seq_len=1048576),
    # Llama 3's report, arXiv:2407.21783, table 3.
    "llama3_405b": _llama3(126, 16384, 128, 8, 128, 53248),
    "llama3_70b": _llama3(80, 8192, 64, 8, 128, 28672),
    # Qwen2.5 technical report, arXiv:2412.15115, table 1.
    "qwen2_14b": LlamaConfig(
        152064,
        48,
        5120,
        40,
        8,
        128,
        13824,
        32768,
        rope.Rotation(1e6),
        Heads(qkv_bias=True),
        Norms(eps=1e-6),
        model_type="qwen2",
    ),
    **published.PRESETS,
}

EMBED, SCORE = "model.embed_tokens.weight", "score.weight"
# model_type -> pairs (regex in a usual name of a tensor, what its files have there)
RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "granitemoehybrid": (
        (r"\.(mlp|block_sparse_moe\.shared_experts)\.gate_up_proj", ".shared_mlp.input_linear"),
        (r"\.(mlp|block_sparse_moe\.shared_experts)\.down_proj", ".shared_mlp.output_linear"),
    ),
    "gemma4_text": (
        (r"\.mlp\.gate\.", ".router.proj."),
        (r"\.mlp\.(router|experts)\.", r".\1."),
        (r"\.mlp\.shared_expert\.", ".mlp."),
    ),
    "lfm2": (
        (r"^model\.norm\.", "model.embedding_norm."),
        (r"\.input_layernorm", ".operator_norm"),
        (r"\.post_attention_layernorm", ".ffn_norm"),
        (r"\.mlp\.gate_proj", ".feed_forward.w1"),
        (r"\.mlp\.up_proj", ".feed_forward.w3"),
        (r"\.mlp\.down_proj", ".feed_forward.w2"),
        (r"self_attn\.o_proj", "self_attn.out_proj"),
        (r"\.(q|k)_norm", r".\1_layernorm"),
    ),
    "llama4_text": (
        (r"\.mlp\.gate\.", ".feed_forward.router."),
        (r"\.mlp\.shared_experts", ".feed_forward.shared_expert"),
        (r"\.mlp\.", ".feed_forward."),
    ),
    "nemotron_h": (
        (r"^model\.embed_tokens", "backbone.embeddings"),
        (r"^model\.norm\.", "backbone.norm_f."),
        (r"^model\.(layers\.\{\}\.)(input|post_attention)_layernorm", r"backbone.\1norm"),
        (r"^model\.(layers\.\{\}\.)(self_attn|mlp|mamba)\.", r"backbone.\1mixer."),
    ),
}


def _tensors(config: LlamaConfig) -> dict[str, Tensor]:
    """Returns Hugging Face's names.

    Query and key need no permutation: like Hugging Face's, the model rotates the first half of a head's dims against the second.
    """
    c, attention, mlp = config, "model.layers.{}.self_attn", "model.layers.{}.mlp"
    found = {
        "embed/embedding": Tensor(EMBED),
        "head/kernel": Tensor(HEAD, 1),
        "logits_bias/bias": Tensor("lm_head.bias"),
        "score/kernel": Tensor(SCORE, 1, is_optional=True, drawn=0.02),
    }
    norms = {"norm": "model.norm"} | {f"layer_{{}}/{ours}": f"model.layers.{{}}.{theirs}" for ours, theirs in _norms(c)}
    for ours, theirs in norms.items():
        found |= {f"{ours}/scale": Tensor(f"{theirs}.weight"), f"{ours}/bias": Tensor(f"{theirs}.bias")}
    if c.heads.latent is not None:
        found |= _latent_tensors(c, attention)
    for name in () if c.heads.latent is not None else ("qkv",) if c.heads.is_fused else ("q", "k", "v"):
        found |= _linear(f"layer_{{}}/attention/{name}", f"{attention}.{name}_proj", 1, c.heads.qkv_bias)
    found |= _linear("layer_{}/attention/o", f"{attention}.o_proj", 2, c.heads.o_bias)
    if c.heads.norm in ("each", "joint"):
        form: Literal["flat", "same"] = "flat" if c.heads.norm == "joint" else "same"
        found |= {
            f"layer_{{}}/attention/{name}/scale": Tensor(f"{attention}.{name}.weight", form=form)
            for name in ("q_norm", "k_norm")
        }
    if c.recurrent is not None:
        found |= _recurrent_tensors(c.recurrent)
    found |= {"layer_{}/attention/sinks": Tensor(f"{attention}.sinks")} if c.heads.has_sinks else {}
    found |= _expert_tensors(c, c.mixture) if c.mixture is not None else {}
    names = {name: f"{name}_proj" for name in ("gate_up", "gate", "up", "down")}
    if c.model_type == "starcoder2":
        names = {"up": "c_fc", "down": "c_proj"}
    for ours, theirs in names.items():
        found |= _linear(f"layer_{{}}/mlp/{ours}", f"{mlp}.{theirs}", 1, c.mlp.has_biases)
    found |= _gemma_tensors() if c.altup is not None or c.inputs is not None or c.has_layer_scale else {}
    for pattern, name in RENAMED.get(c.model_type, ()):
        found = {place: own._replace(name=re.sub(pattern, name, own.name)) for place, own in found.items()}
    return found


def _expert_tensors(config: LlamaConfig, mixture: MixtureForm) -> dict[str, Tensor]:
    """Returns the names of a mixture's tensors; the files have one of each expert, but those of gpt-oss one of all."""
    if mixture.clamp is not None:
        mlp = "model.layers.{}.mlp"
        own = ("gate_up", "gate_up_bias", "down", "down_bias")
        stored = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        found = {f"layer_{{}}/mlp/experts/{o}": Tensor(f"{mlp}.experts.{t}") for o, t in zip(own, stored)}
        for name in own[:2]:
            place = f"layer_{{}}/mlp/experts/{name}"
            found[place] = found[place]._replace(form="pairs")
        router = {"router": Tensor(f"{mlp}.router.weight", 1), "router_bias": Tensor(f"{mlp}.router.bias")}
        return found | {f"layer_{{}}/mlp/experts/{name}": tensor for name, tensor in router.items()}
    is_mixtral = config.model_type in ("mixtral", "granitemoe", "granitemoehybrid", "minimax_m2", "phimoe")
    mlp = f"model.layers.{{}}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {"layer_{}/mlp/experts/router": Tensor(f"{mlp}.gate.weight", 1)}
    for ours, theirs in zip(("gate", "up", "down"), names):
        found[f"layer_{{}}/mlp/experts/{ours}"] = Tensor(f"{mlp}.experts.{{expert}}.{theirs}.weight", 1)
    shared = "shared_expert" if mixture.is_shared_gated else "shared_experts"
    for ours in ("gate", "up", "gate_up", "down"):
        found |= _linear(f"layer_{{}}/mlp/shared/{ours}", f"{mlp}.{shared}.{ours}_proj", 1, config.mlp.has_biases)
    for ours, theirs in (("to", "fc1"), ("from", "fc2")):
        found |= _linear(f"layer_{{}}/mlp/experts/{ours}_latent", f"{mlp}.{theirs}_latent_proj", 1, False)
    bias = {"minimax_m2": "", "ernie4_5_moe": "moe_statics."}.get(config.model_type, "gate.")
    form: Literal["row", "same"] = "row" if config.model_type == "ernie4_5_moe" else "same"
    found["layer_{}/mlp/experts/choice_bias"] = Tensor(f"{mlp}.{bias}e_score_correction_bias", form=form)
    if mixture.scales_inputs:
        found["layer_{}/mlp/experts/gate_up"] = Tensor(f"{mlp}.experts.gate_up_proj", form="halves")
        found["layer_{}/mlp/experts/down"] = Tensor(f"{mlp}.experts.down_proj")
    elif mixture.is_fused and not is_mixtral:
        for ours in ("gate_up", "down"):
            found[f"layer_{{}}/mlp/experts/{ours}"] = Tensor(f"{mlp}.experts.{ours}_proj", form="stack")
    elif mixture.is_fused:
        found["layer_{}/mlp/experts/router"] = Tensor(f"{mlp}.router.layer.weight", 1)
        for ours, theirs in (("gate_up", "input_linear"), ("down", "output_linear")):
            found[f"layer_{{}}/mlp/experts/{ours}"] = Tensor(f"{mlp}.{theirs}.weight", form="stack")
    if mixture.is_beside_mlp:
        found["layer_{}/mlp/experts/scales"] = Tensor(f"{mlp}.router.per_expert_scale")
        norms = {"router": f"{mlp}.router.scale", "shared": "pre_feedforward_layernorm.weight"}
        norms |= {"shared_post": "post_feedforward_layernorm_1.weight"}
        norms |= {
            "experts": "pre_feedforward_layernorm_2.weight",
            "experts_post": "post_feedforward_layernorm_2.weight",
        }
        for ours, theirs in norms.items():
            found[f"layer_{{}}/mlp/{ours}_norm/scale"] = Tensor(
                theirs if mlp in theirs else f"model.layers.{{}}.{theirs}"
            )
    return found | _linear("layer_{}/mlp/shared_gate", f"{mlp}.shared_expert_gate", 1, False)


def _gemma_tensors() -> dict[str, Tensor]:
    """Returns the names of what Gemma 3n and 4 have beside Gemma 3's weights."""
    layer = "model.layers.{}"
    names = {
        "inputs/to_input": "per_layer_input_gate",
        "inputs/from_input": "per_layer_projection",
        "altup/router": "altup.modality_router",
        "altup/predicting": "altup.prediction_coefs",
        "altup/correcting": "altup.correction_coefs",
        "laurel/left": "laurel.linear_left",
        "laurel/right": "laurel.linear_right",
    }
    found = {f"layer_{{}}/{ours}/kernel": Tensor(f"{layer}.{theirs}.weight", 1) for ours, theirs in names.items()}
    norms = {"inputs": "post_per_layer_input_norm", "altup": "altup.router_norm", "laurel": "laurel.post_laurel_norm"}
    found |= {f"layer_{{}}/{ours}/norm/scale": Tensor(f"{layer}.{theirs}.weight") for ours, theirs in norms.items()}
    return found | {
        "layer_{}/altup/correct_scale": Tensor(f"{layer}.altup.correct_output_scale"),
        "layer_{}/layer_scale": Tensor(f"{layer}.layer_scalar"),
        "layer_inputs/embed/embedding": Tensor("model.embed_tokens_per_layer.weight"),
        "layer_inputs/project/kernel": Tensor("model.per_layer_model_projection.weight", 1),
        "layer_inputs/norm/scale": Tensor("model.per_layer_projection_norm.weight"),
        "altup_in/stream_{}/kernel": Tensor("model.altup_projections.{}.weight", 1),
        "altup_out/stream_{}/kernel": Tensor("model.altup_unembed_projections.{}.weight", 1),
    }


def _recurrent_tensors(shape: Recurrent) -> dict[str, Tensor]:
    ours, conv = f"layer_{{}}/{shape.NAME}", "conv" if isinstance(shape, Convolution) else "conv1d"
    theirs = "model.layers.{}." + {"delta": "linear_attn", "convolution": "conv"}.get(shape.NAME, shape.NAME)
    found = {f"{ours}/{name}": Tensor(f"{theirs}.{name}") for name in ("A_log", "dt_bias", "D")}
    found |= {f"{ours}/conv/{name}": Tensor(f"{theirs}.{conv}.{name}") for name in ("weight", "bias")}
    found |= {f"{ours}/norm/scale": Tensor(f"{theirs}.norm.weight")}
    names = {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba", "keys": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b"}
    names |= {"a": "in_proj_a", "in_proj": "in_proj", "out_proj": "out_proj"}
    for own, name in names.items():
        found |= _linear(f"{ours}/{own}", f"{theirs}.{name}", 1, not isinstance(shape, delta.Delta) and shape.has_bias)
    return found | _linear(f"{ours}/out", f"{theirs}.out_proj", 2, False)


def _latent_tensors(config: LlamaConfig, attention: str) -> dict[str, Tensor]:
    names = {"q": ("q_proj", False), "q_a": ("q_a_proj", config.heads.o_bias), "q_b": ("q_b_proj", False)}
    names |= {"kv_a": ("kv_a_proj_with_mqa", config.heads.o_bias), "kv_b": ("kv_b_proj", False)}
    found = {
        f"layer_{{}}/attention/{name}_norm/scale": Tensor(f"{attention}.{name}_layernorm.weight")
        for name in ("q_a", "kv_a")
    }
    for ours, (theirs, has_bias) in names.items():
        found |= _linear(f"layer_{{}}/attention/{ours}", f"{attention}.{theirs}", 1, has_bias)
    return found


def _norms(config: LlamaConfig) -> list[tuple[str, str]]:
    """Returns the names of a layer's norms: ours, and theirs."""
    after = [("attention_post_norm", "post_attention_layernorm"), ("mlp_post_norm", "post_feedforward_layernorm")]
    if config.norms.places == "after":
        return after
    if config.model_type == "glm4":
        own = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
        return list(zip(("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"), own))
    if config.norms.places == "both":
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


def _copies(raw: Mapping[str, Any]) -> dict[str, str]:
    row = ROWS.get(raw.get("model_type", ""))
    is_tied = raw.get("tie_word_embeddings", row is not None and row.defaults.get("tie_word_embeddings"))
    return {HEAD: EMBED} if is_tied else {}


def _unused(raw: Mapping[str, Any]) -> str:
    """Returns the names of keys and values of layers that share those of others."""
    layers, sharing = raw.get("num_hidden_layers"), raw.get("num_kv_shared_layers")
    if not isinstance(layers, int) or not isinstance(sharing, int) or not 0 < sharing < layers <= 1000:
        return ""
    numbers = "|".join(map(str, range(layers - sharing, layers)))
    return rf"model\.layers\.({numbers})\.self_attn\.[kv]_(proj|norm)\..*"


def _further(raw: Mapping[str, Any]) -> str:
    """Returns the names of layers after the last one of DeepSeek-V3's relatives, which predict tokens further ahead (arXiv:2412.19437,
    section 2.2)."""
    if raw.get("model_type") in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h"):
        return r"mtp\..*"
    layers, count = raw.get("num_hidden_layers"), raw.get("num_nextn_predict_layers")
    if (
        raw.get("model_type") not in ("deepseek_v3", "kimi_k2", "glm4_moe")
        or not isinstance(layers, int)
        or not isinstance(count, int)
    ):
        return ""
    return rf"model\.layers\.({'|'.join(map(str, range(layers, layers + min(count, 8))))})\..*" if count > 0 else ""


def _adapted(config: LlamaConfig) -> tuple[str, ...]:
    """Returns PEFT's default targets. For layers that have a recurrence it has none: these are their projections but those of gates."""
    layers, found = range(config.num_layers), dict[str, None]()
    if any(map(config.attends, layers)):
        found = dict.fromkeys(_adapted_in_attention(config))
    if any(map(config.is_recurrent, layers)):
        shape = config.recurrent
        names: tuple[str, ...] = ("in_proj",)
        if isinstance(shape, delta.Delta):
            names = ("in_proj_qkvz",) if shape.is_fused else ("in_proj_qkv", "in_proj_z")
        found |= dict.fromkeys((*names, *(() if config.model_type == "nemotron_h" else ("out_proj",))))
    return tuple(found)


def _adapted_in_attention(config: LlamaConfig) -> tuple[str, ...]:
    if config.heads.latent is not None:
        return ("q_b_proj" if config.heads.latent.query_rank else "q_proj", "kv_b_proj")
    if config.model_type == "nemotron_h":
        return "q_proj", "k_proj", "v_proj", "o_proj"
    return ("qkv_proj",) if config.heads.is_fused else ("q_proj", "v_proj")


def _parameters(config: LlamaConfig) -> dict[str, family.Parameter]:
    """Returns what PEFT adapts of a mixture as parameters, by path (`HuggingFace.parameters`)."""
    mixture, kind = config.mixture, config.model_type
    if mixture is None:
        return {}
    mlp = f"model.layers.{{}}.{'block_sparse_moe' if kind.startswith('granite') else 'mlp'}"
    joined = experts.JOINED
    forms: tuple[family.Form, family.Form] = ("experts_a", "experts_b")
    if mixture.clamp is not None or mixture.is_fused:
        joined = {"gate_up": ("gate_up",), "down": ("down",)}
    if mixture.is_fused:  # PEFT takes Llama 4's matrices [inputs, outputs] for [outputs, inputs]
        forms = ("turned_b", "turned_a") if mixture.scales_inputs else ("experts_a", "halves_b")
    found = {
        name: family.Parameter(f"{mlp}.experts.{end}", own, *forms)
        for (name, own), end in zip(joined.items(), ("gate_up_proj", "down_proj"))
    }
    is_router = mixture.clamp is not None or kind == "phimoe" or kind.startswith("granite")
    found[experts.ROUTER] = family.Parameter(f"{mlp}.{'router' if is_router else 'gate'}.weight", (experts.ROUTER,))
    for pattern, name in RENAMED.get(kind, ()):
        found = {place: own._replace(name=re.sub(pattern, name, own.name)) for place, own in found.items()}
    ours = "layer_{}/mlp/experts"
    return {
        f"{ours}/{place}": own._replace(paths=tuple(f"{ours}/{part}" for part in own.paths))
        for place, own in found.items()
    }


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
    caches=model.caches,
    positions=lambda config: config.max_seq_len if config.has_positions else None,
    stretch=_stretch,
    is_encoder_decoder=False,
    blocks=r"layer_\d+",
    heads="head",
    attention=("xla", "cudnn", "splash"),
    flops_per_token=_flops_per_token,
    huggingface=family.HuggingFace(
        architectures={kind: row.classes for kind, row in ROWS.items() if kind != "nemotron_h"},
        tensors=_tensors,
        write=config_file.write,
        read=config_file.read,
        adapted=_adapted,
        parameters=_parameters,
        copies=_copies,
        ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
        unused=_unused,
        prefix="model.",
        saved=("score",),
        outside=(HEAD, "lm_head.bias", SCORE),
        further=_further,
        quantized=(("gpt_oss", "mxfp4"), ("deepseek_v3", "fp8"), ("kimi_k2", "fp8"), ("minimax_m2", "fp8")),
    ),
    parallel=parallel.Parallel(
        weights=(
            # In MXFP4: [experts, width, 2, inputs / 2] and [experts, outputs, width / 2], and their exponents
            (r"/experts/gate_up/(mxfp4|exponents)", ("expert", "model")),
            (r"/experts/down/mxfp4", ("expert", None, "model")),
            (r"/experts/down/exponents", ("expert",)),  # of 32 inputs each, which few axes divide
            (r"/experts/gate_up(_adapter/lora_b)?$", ("expert", None, "model")),  # [experts, inputs, width, 2]
            *parallel.WEIGHTS,
            (r"positions/embedding|attention/sinks|logits_bias/bias", ("model",)),
            (r"/experts/gate_up_bias", ("expert", "model")),
            (r"/experts/down_bias", ("expert",)),
            (r"/attention/(q_b|kv_b)/(kernel|lora_b)", (None, "model")),  # [rank, heads, width]
            (r"/attention/(q_a|kv_a)/(kernel|bias)", (None,)),
            *parallel.RECURRENT,
            (r"/(to|from)_latent/kernel", (None,)),
            (r"/(inputs|laurel|altup)/(?!norm)|layer_scale|altup_(in|out)/|layer_inputs/project", (None,)),
        ),
        activations=(
            *parallel.HEADS,
            *parallel.WIDTH,
            *parallel.FUSED,
            (r".*/attention/(q_b|kv_b)", (None, None, "model")),
            (r".*/attention/(q_a|kv_a)(_norm)?", parallel.ALL_TOKENS),
            (r"layer_\d+/(attention|mlp)", parallel.TOKENS, parallel.ALL_TOKENS, parallel.OF_RINGS),
            *parallel.OF_RECURRENT,
            (r".*/(to|from)_latent", parallel.ALL_TOKENS),
            (r"(layer_inputs|altup_in|altup_out)(/(embed|project|norm|stream_\d+))?", parallel.TOKENS),
            (r"layer_\d+/(inputs|laurel|altup)(/\w+)?", parallel.TOKENS),
            (r"layer_\d+/mlp/(experts|shared|shared_gate)", parallel.TOKENS, parallel.ALL_TOKENS),
            (r"layer_\d+/mlp/\w+_norm", parallel.TOKENS),
            (r"embed|positions|norm|layer_\d+(/(attention|mlp)(_post)?_norm)?", parallel.TOKENS),
        ),
    ),
)

# Nemotron-H: the same decoder, under other names
NEMOTRON = dataclasses.replace(
    FAMILY,
    presets=published.NEMOTRON,
    huggingface=dataclasses.replace(
        FAMILY.huggingface,
        architectures={"nemotron_h": ROWS["nemotron_h"].classes},
        prefix="backbone.",
        in_modules=((r"^backbone\.", "model."),),
        refused=("out_proj",),
    ),
)
