"""The model_types of Llama and its relatives. This module says what each class of transformers has beside what its config.json tells."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

SCORED = "ForSequenceClassification"  # ends the name of a class whose models give texts values


@dataclasses.dataclass(frozen=True)
class ModelType:
    """One model_type."""

    architecture: str  # its class in transformers
    # name of a part of `LlamaConfig` -> those of its fields that the class fixes
    parts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    reads: tuple[str, ...] = ()  # fields of config.json that not all classes read
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of fields that a config.json may lack
    # the name of the field with the MLP's activation, and its default
    activation: tuple[str, str] = ("hidden_act", "silu")
    # names of activations that the class takes for others
    meant: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # the usual name of a field -> this class's
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: tuple[str, ...] = ()  # other names of its class

    @property
    def classes(self) -> tuple[str, ...]:
        """Returns the classes of transformers that are read: with the head, without, and with one value of a text in its place."""
        names = (self.architecture, *self.aliases)
        return (*names, *(name.replace("ForCausalLM", end) for end in ("Model", SCORED) for name in names))


_BIASES = ("attention_bias", "mlp_bias")
_WINDOW = ("sliding_window",)
_EACH: Any = {"norm": "each"}  # of heads
_JOINT: Any = {"norm": "joint"}
_GEMMA = {"norms": {"offset": 1.0, "places": "both"}}
_GEMMA_READS = ("attention_bias", "use_bidirectional_attention", "query_pre_attn_scalar", "layer_types")
_NEW_GEMMA: Any = {"norms": {"places": "both"}, "heads": {"norm": "each", "scale": 1.0, "has_value_norm": True}}
_INTERLEAVED: Any = {"rotation": {"is_interleaved": True}}
_AFTER: Any = {"norms": {"places": "after"}}
_NEXT: Any = {"heads": {"norm": "each", "is_gated": True}, "norms": {"offset": 1.0}}
_TANH = "gelu_pytorch_tanh"
_GELU = ("hidden_activation", _TANH)


def _told(length: int, kv_heads: int | None = 0, **others: Any) -> dict[str, Any]:
    """Returns the defaults of a class: its number of positions, of key and value heads unless 0, and others."""
    heads = {} if kv_heads == 0 else {"num_key_value_heads": kv_heads}
    return {"max_position_embeddings": length, **heads, **others}


_gemma = functools.partial(
    _told, kv_heads=4, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096, tie_word_embeddings=True
)

# fmt: off
_BALANCED: Any = {"score": "sigmoid", "has_choice_bias": True, "is_shared_gated": False}
_DEEPSEEK = ModelType(
    "DeepseekV3ForCausalLM", {"mixture": _BALANCED}, ("attention_bias", "kv_lora_rank", "rope_interleave", "n_routed_experts"),
    _told(
        4096, None, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, norm_topk_prob=True,
        n_group=8, topk_group=4, n_shared_experts=1, first_k_dense_replace=3, routed_scaling_factor=2.5,
    ),
)

# model_type in Hugging Face's config.json -> its row
ROWS: dict[str, ModelType] = {
    "llama": ModelType("LlamaForCausalLM", {}, _BIASES, _told(2048)),
    "mistral": ModelType("MistralForCausalLM", {}, _WINDOW, _told(131072, 8)),
    "qwen2": ModelType("Qwen2ForCausalLM", {"heads": {"qkv_bias": True}}, _WINDOW, _told(32768, 32)),
    "qwen3": ModelType("Qwen3ForCausalLM", {"heads": _EACH}, ("attention_bias", *_WINDOW), _told(32768, 32, head_dim=128)),
    "gemma": ModelType(
        "GemmaForCausalLM", {"norms": {"offset": 1.0}}, ("attention_bias", "use_bidirectional_attention"),
        _told(8192, 16, head_dim=256, tie_word_embeddings=True), ("hidden_act", _TANH), {"gelu": _TANH},
    ),
    "gemma2": ModelType(
        "Gemma2ForCausalLM", _GEMMA, _GEMMA_READS,
        _gemma(8192, final_logit_softcapping=30.0, attn_logit_softcapping=50.0), _GELU,
    ),
    "gemma3_text": ModelType(
        "Gemma3ForCausalLM", _GEMMA | {"heads": _EACH}, (*_GEMMA_READS, "rope_local_base_freq"),
        _gemma(131072, rope_theta=1e6, rope_local_base_freq=1e4), _GELU,
    ),
    "gemma3n_text": ModelType(
        "Gemma3nForCausalLM", _NEW_GEMMA, ("attention_bias", "layer_types", "rope_local_base_freq", "num_kv_shared_layers"),
        _gemma(
            32768, kv_heads=2, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window=512, final_logit_softcapping=30.0,
            intermediate_size=16384, vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, num_kv_shared_layers=15,
            altup_num_inputs=4, altup_active_idx=0, laurel_rank=64,
        ), _GELU,
    ),
    "gemma4_text": ModelType(
        "Gemma4ForCausalLM", _NEW_GEMMA | {"mixture": {"is_fused": True, "is_beside_mlp": True}},
        ("attention_bias", "layer_types", "rope_local_base_freq", "num_kv_shared_layers", "enable_moe_block"),
        _gemma(
            131072, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window=512, intermediate_size=9216,
            vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, num_kv_shared_layers=0,
        ), _GELU, names={"num_experts_per_tok": "top_k_experts"},
    ),
    "phi3": ModelType(
        "Phi3ForCausalLM", {"heads": {"is_fused": True}, "mlp": {"is_fused": True}}, ("partial_rotary_factor", *_WINDOW),
        _told(4096, original_max_position_embeddings=4096, sliding_window=None, rms_norm_eps=1e-5),
    ),
    "olmo2": ModelType(
        "Olmo2ForCausalLM", _AFTER | {"heads": _JOINT}, ("attention_bias",), _told(2048, rms_norm_eps=1e-5),
    ),
    "olmo3": ModelType(
        "Olmo3ForCausalLM", _AFTER | {"heads": _JOINT}, ("attention_bias", "layer_types", "rope_local_base_freq"),
        _told(2048, rms_norm_eps=1e-5, sliding_window=4096, rope_theta=5e5, rope_local_base_freq=5e5),
    ),
    "exaone4": ModelType(
        "Exaone4ForCausalLM", _AFTER | {"heads": _EACH}, ("layer_types",),
        _told(2048, 32, rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4),
    ),
    "seed_oss": ModelType(
        "SeedOssForCausalLM", {}, (*_BIASES, "attention_out_bias"), _told(524288, 8, head_dim=128, attention_bias=True),
    ),
    "internlm3": ModelType(
        "InternLM3ForCausalLM", {}, _BIASES, _told(32768, 2, head_dim=128, rms_norm_eps=1e-5),
        names={"attention_bias": "qkv_bias", "mlp_bias": "bias"}, aliases=("LlamaForCausalLM",),
    ),
    "mixtral": ModelType(
        "MixtralForCausalLM", {}, ("num_local_experts", *_WINDOW),
        _told(
            131072, 8, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_local_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True,
        ),
    ),
    "qwen2_moe": ModelType(
        "Qwen2MoeForCausalLM", {},
        ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "qkv_bias", *_WINDOW),
        _told(
            32768, 16, moe_intermediate_size=1408, shared_expert_intermediate_size=5632, num_experts=60,
            num_experts_per_tok=4, qkv_bias=True,
        ),
    ),
    "qwen3_moe": ModelType(
        "Qwen3MoeForCausalLM", {"heads": _EACH},
        ("attention_bias", "num_experts", "moe_intermediate_size", *_WINDOW),
        _told(32768, 4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    ),
    "qwen3_next": ModelType(
        "Qwen3NextForCausalLM", _NEXT,
        (
            "attention_bias", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
            "partial_rotary_factor", "linear_num_key_heads",
        ),
        _told(
            32768, 2, head_dim=256, partial_rotary_factor=0.25, moe_intermediate_size=512, num_experts=512,
            shared_expert_intermediate_size=512, num_experts_per_tok=10, norm_topk_prob=True,
        ),
    ),
    "qwen3_5_text": ModelType(
        "Qwen3_5ForCausalLM", _NEXT, ("attention_bias", "partial_rotary_factor", "linear_num_key_heads"),
        _told(32768, 4, head_dim=256, partial_rotary_factor=0.25),
    ),
    "qwen3_5_moe_text": ModelType(
        "Qwen3_5MoeForCausalLM", {**_NEXT, "mixture": {"is_normalised": True, "dense_layers": ()}},
        (
            "attention_bias", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
            "partial_rotary_factor", "linear_num_key_heads",
        ),
        _told(
            32768, 2, head_dim=256, partial_rotary_factor=0.25, intermediate_size=512, moe_intermediate_size=512,
            num_experts=256, shared_expert_intermediate_size=512, num_experts_per_tok=8,
        ),
    ),
    "olmoe": ModelType(
        "OlmoeForCausalLM", {"heads": _JOINT}, ("attention_bias", "num_experts", "clip_qkv"),
        _told(4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8),
    ),
    "gpt_oss": ModelType(
        "GptOssForCausalLM", {"heads": {"has_sinks": True}}, ("attention_bias", "layer_types", "num_local_experts", "swiglu_limit"),
        _told(
            131072, 8, head_dim=64, sliding_window=128, rms_norm_eps=1e-5, rope_theta=150000.0, attention_bias=True,
            num_local_experts=128, num_experts_per_tok=4, norm_topk_prob=True,
        ),
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v2": ModelType(
        "DeepseekV2ForCausalLM", {"mixture": {"is_shared_gated": False, "is_normalised": False, "best_of_group": 1}},
        (*_BIASES, "kv_lora_rank", "n_routed_experts", "topk_method"),
        _told(
            2048, None, n_routed_experts=64, moe_intermediate_size=1407, n_shared_experts=2, first_k_dense_replace=0,
            routed_scaling_factor=1.0,
        ),
    ),
    "glm4_moe": ModelType(
        "Glm4MoeForCausalLM", {"mixture": _BALANCED, "heads": {"o_bias": False}},
        ("attention_bias", "partial_rotary_factor", "n_routed_experts", "use_qk_norm"),
        _told(
            131072, 8, rms_norm_eps=1e-5, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408,
            norm_topk_prob=True, n_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=1.0,
            partial_rotary_factor=0.5,
        ),
    ),
    "ernie4_5_moe": ModelType(
        "Ernie4_5_MoeForCausalLM",
        {"mixture": {"has_choice_bias": True, "is_shared_gated": False, "is_normalised": True}} | _INTERLEAVED,
        (*_BIASES, "num_experts", "moe_layer_interval"),
        _told(
            131072, 4, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True, moe_intermediate_size=1536,
            moe_num_experts=64, moe_k=6, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1,
        ),
        names=dict.fromkeys(_BIASES, "use_bias") | {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "minimax_m2": ModelType(
        "MiniMaxM2ForCausalLM",
        {"heads": _JOINT, "mixture": {"score": "sigmoid", "has_choice_bias": True, "is_normalised": True}},
        ("num_local_experts", "partial_rotary_factor", "rotary_dim"),
        _told(196608, 8, head_dim=128, rope_theta=5e6, num_local_experts=256, num_experts_per_tok=8),
    ),
    "glm4": ModelType(
        "Glm4ForCausalLM",
        {"norms": {"places": "both"}, "heads": {"o_bias": False}, "mlp": {"is_fused": True}} | _INTERLEAVED,
        ("attention_bias", "partial_rotary_factor"),
        _told(131072, 2, head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True, partial_rotary_factor=0.5),
    ),
    "ernie4_5": ModelType(
        "Ernie4_5ForCausalLM", _INTERLEAVED, _BIASES,
        _told(131072, 2, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True),
        names=dict.fromkeys(_BIASES, "use_bias"),
    ),
    "cohere2": ModelType(
        "Cohere2ForCausalLM", {"norms": {"kind": "unbiased", "places": "shared"}} | _INTERLEAVED,
        ("attention_bias", "layer_types", "logit_scale"),
        _told(
            8192, None, rms_norm_eps=1e-5, sliding_window=4096, sliding_window_pattern=4, tie_word_embeddings=True,
        ),
        names={"rms_norm_eps": "layer_norm_eps"},
    ),
    "starcoder2": ModelType(
        "Starcoder2ForCausalLM", {"norms": {"kind": "layer"}, "mlp": {"is_gated": False}}, (*_BIASES, *_WINDOW),
        _told(
            4096, 2, rms_norm_eps=1e-5, sliding_window=None, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        ),
        ("hidden_act", _TANH), names={"rms_norm_eps": "norm_epsilon"} | dict.fromkeys(_BIASES, "use_bias"),
    ),
    "ministral": ModelType("MinistralForCausalLM", {}, ("layer_types", *_WINDOW), _told(131072, 8)),
    "llama4_text": ModelType(
        "Llama4ForCausalLM",
        {
            "heads": {"grows_unrotated": True},
            "mixture": {"score": "sigmoid", "is_normalised": False, "is_shared_gated": False, "is_fused": True, "scales_inputs": True},
            **_INTERLEAVED,
        },
        ("attention_bias", "num_local_experts", "intermediate_size_mlp", "no_rope_layers", "use_qk_norm", "attention_chunk_size"),
        _told(
            131072, 8, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5, num_local_experts=16, num_experts_per_tok=1,
            intermediate_size=8192, intermediate_size_mlp=16384, attention_chunk_size=8192, use_qk_norm=True,
        ),
    ),
    "ministral3": ModelType(
        "Ministral3ForCausalLM", {}, ("llama_4_scaling_beta", *_WINDOW),
        _told(262144, 8, head_dim=128, rms_norm_eps=1e-5, sliding_window=None),
    ),
    "phimoe": ModelType(
        "PhimoeForCausalLM", {"norms": {"kind": "layer"}, "mixture": {"score": "sparsemixer", "is_normalised": False}},
        ("attention_bias", "num_local_experts", "lm_head_bias", "router_jitter_noise", *_WINDOW),
        _told(
            131072, 8, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, num_local_experts=16,
            num_experts_per_tok=2, router_jitter_noise=0.01,
        ),
    ),
    "granitemoe": ModelType(
        "GraniteMoeForCausalLM", {"mixture": {"is_fused": True, "is_normalised": True}},
        ("attention_bias", "attention_multiplier", "num_local_experts"),
        _told(2048, None, num_local_experts=8, num_experts_per_tok=2),
    ),
    "granitemoehybrid": ModelType(
        "GraniteMoeHybridForCausalLM",
        {"mixture": {"is_fused": True, "is_normalised": True, "is_shared_gated": False}, "mlp": {"is_fused": True}},
        (
            "attention_bias", "attention_multiplier", "num_local_experts", "position_embedding_type",
            "shared_intermediate_size", "mamba_n_heads",
        ),
        _told(
            2048, None, intermediate_size=11008, num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=1024,
        ),
    ),
    "nemotron_h": ModelType(
        "NemotronHForCausalLM",
        {"mixture": _BALANCED, "mlp": {"is_gated": False}, "rotation": {"layers": (False,)}},
        ("mlp_bias", "n_routed_experts", "mamba_num_heads"),
        _told(
            4096, 8, vocab_size=131072, hidden_size=4096, num_attention_heads=32, head_dim=128, intermediate_size=21504,
            layer_norm_epsilon=1e-5, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=0,
            moe_intermediate_size=7688, moe_shared_expert_intermediate_size=7688, norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
        ("mlp_hidden_act", "relu2"), names={"rms_norm_eps": "layer_norm_epsilon"},
    ),
    "lfm2": ModelType(
        "Lfm2ForCausalLM", {"heads": _EACH, "mlp": {"activation": "silu"}}, ("conv_L_cache",),
        _told(128000, 8, norm_eps=1e-5, rope_theta=1e6, tie_word_embeddings=True),
        names={"rms_norm_eps": "norm_eps", "intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"},
    ),
    "granite": ModelType("GraniteForCausalLM", {}, (*_BIASES, "attention_multiplier"), _told(2048)),
    "smollm3": ModelType(
        "SmolLM3ForCausalLM", {}, (*_BIASES, "no_rope_layers", "layer_types"),
        _told(32768, 4, rope_theta=2e6, sliding_window=None, tie_word_embeddings=True),
    ),
}
# fmt: on
