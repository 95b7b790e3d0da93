"""Shapes of published relatives of Llama. This module is a table: preset -> config, as in the config.json that its authors publish.

A row begins with the fields of `LlamaConfig` in their order: the sizes of the vocabulary, the layers, the embedding, heads of queries,
heads of keys and values, a head and the MLP.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from zerojax.models.llama.mla import Latent
from zerojax.models.llama.model import LlamaConfig
from zerojax.models.llama.rope import Rope, Scaling

_NEAR, _ALL = 4096, 0
_YARN_40 = 0.1 * math.log(40) + 1  # of DeepSeek-V3's scores, squared


def _gemma(vocab_size: int, num_layers: int, embed_dim: int, *sizes: Any, **others: Any) -> LlamaConfig:
    fixed: dict[str, Any] = {"norm_eps": 1e-6, "tie_embeddings": True, "activation": "gelu_pytorch_tanh"}
    fixed |= {"norm_offset": 1.0, "norm_places": "both", "embed_scale": embed_dim**0.5} | others
    make: Callable[..., LlamaConfig] = LlamaConfig
    return make(vocab_size, num_layers, embed_dim, *sizes, **fixed)


# What the rows of a class have in common.
# fmt: off
_gemma1 = functools.partial(  # arXiv:2403.08295, table 1
    _gemma, max_seq_len=8192, rope_theta=1e4, norm_places="before", model_type="gemma",
)
_gemma2 = functools.partial(  # arXiv:2408.00118, table 1
    _gemma, max_seq_len=8192, rope_theta=1e4, windows=(_NEAR, _ALL), score_cap=50.0, logits_cap=30.0, model_type="gemma2",
)
_gemma3 = functools.partial(  # arXiv:2503.19786: five layers with a window, then one without
    _gemma, score_scale=256**-0.5, rope_theta=1e6, window_rope=Rope(1e4), qk_norm=True, model_type="gemma3_text",
)
_phi3 = functools.partial(  # arXiv:2404.14219
    LlamaConfig, max_seq_len=4096, rope_theta=1e4, windows=(2047,), is_fused=True, model_type="phi3",
)
_olmo2 = functools.partial(  # arXiv:2501.00656
    LlamaConfig, max_seq_len=4096, norm_eps=1e-6, norm_places="after", qk_norm=True, qk_norm_joint=True, model_type="olmo2",
)
_granite = functools.partial(  # Granite 3.1
    LlamaConfig, max_seq_len=131072, tie_embeddings=True, embed_scale=12.0, residual_scale=0.22, model_type="granite",
)
# arXiv:2401.04088, table 1
_mixtral = functools.partial(LlamaConfig, rope_theta=1e6, num_experts=8, experts_per_token=2, model_type="mixtral")
_qwen3_moe = functools.partial(  # arXiv:2505.09388, table 2
    LlamaConfig, max_seq_len=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, num_experts=128, experts_per_token=8,
    model_type="qwen3_moe",
)
_gpt_oss = functools.partial(  # arXiv:2508.10925, table 1
    LlamaConfig, max_seq_len=131072, rope_theta=150000.0, windows=(128, _ALL), qkv_bias=True, o_bias=True, has_sinks=True,
    rope_scaling=Scaling("yarn", 32.0, 1.0, 32.0, 4096, 0.1 * math.log(32) + 1, is_whole=False),
    experts_per_token=4, expert_dim=2880, clamp=(7.0, 1.702), model_type="gpt_oss",
)
_deepseek_v3 = functools.partial(  # arXiv:2412.19437, section 4.2
    LlamaConfig, router_score="sigmoid", has_choice_bias=True, is_shared_gated=False, model_type="deepseek_v3",
)

PRESETS: dict[str, LlamaConfig] = {
    "deepseek_v3": _deepseek_v3(
        129280, 61, 7168, 128, 128, 192, 18432, max_seq_len=163840, rope_theta=1e4, norm_eps=1e-6,
        rope_scaling=Scaling("yarn", 40.0, 1.0, 32.0, 4096), score_scale=192**-0.5 * _YARN_40**2,
        latent=Latent(512, 1536, 128, 64, 128), num_experts=256, experts_per_token=8, expert_dim=2048, shared_dim=2048,
        dense_layers=(0, 1, 2), router_groups=(8, 4), router_scale=2.5,
    ),
    "moonlight_16b_a3b": _deepseek_v3(  # Moonlight-16B-A3B, arXiv:2502.16982: DeepSeek-V3's class, no latent of queries
        163840, 27, 2048, 16, 16, 192, 11264, max_seq_len=8192, rope_theta=50000.0, latent=Latent(512, 0, 128, 64, 128),
        num_experts=64, experts_per_token=6, expert_dim=1408, shared_dim=2816, dense_layers=(0,), router_scale=2.446,
    ),
    "gpt_oss_20b": _gpt_oss(201088, 24, 2880, 64, 8, 64, 2880, num_experts=32),
    "gpt_oss_120b": _gpt_oss(201088, 36, 2880, 64, 8, 64, 2880, num_experts=128),
    "mixtral_8x7b": _mixtral(32000, 32, 4096, 32, 8, 128, 14336, expert_dim=14336, max_seq_len=32768),
    "mixtral_8x22b": _mixtral(32768, 56, 6144, 48, 8, 128, 16384, expert_dim=16384, max_seq_len=65536),
    "qwen2_moe_a3b": LlamaConfig(  # Qwen1.5-MoE-A2.7B
        151936, 24, 2048, 16, 16, 128, 5632, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, num_experts=60,
        experts_per_token=4, expert_dim=1408, shared_dim=5632, is_normalised=False, model_type="qwen2_moe",
    ),
    "qwen3_30b_a3b": _qwen3_moe(151936, 48, 2048, 32, 4, 128, 6144, expert_dim=768),
    "qwen3_235b_a22b": _qwen3_moe(151936, 94, 4096, 64, 4, 128, 12288, expert_dim=1536),
    "olmoe_1b_7b": LlamaConfig(  # arXiv:2409.02060, table 10
        50304, 16, 2048, 16, 16, 128, 1024, max_seq_len=4096, rope_theta=1e4, qk_norm=True, qk_norm_joint=True,
        num_experts=64, experts_per_token=8, expert_dim=1024, is_normalised=False, model_type="olmoe",
    ),
    "gemma_2b": _gemma1(256000, 18, 2048, 8, 1, 256, 16384),
    "gemma_7b": _gemma1(256000, 28, 3072, 16, 16, 256, 24576),
    "gemma2_2b": _gemma2(256000, 26, 2304, 8, 4, 256, 9216, score_scale=256**-0.5),
    "gemma2_9b": _gemma2(256000, 42, 3584, 16, 8, 256, 14336, score_scale=256**-0.5),
    "gemma2_27b": _gemma2(256000, 46, 4608, 32, 16, 128, 36864, score_scale=144**-0.5),
    "gemma3_1b": _gemma3(262144, 26, 1152, 4, 1, 256, 6912, max_seq_len=32768, windows=(512,) * 5 + (_ALL,)),
    "gemma3_4b": _gemma3(
        262208, 34, 2560, 8, 4, 256, 10240, max_seq_len=131072, windows=(1024,) * 5 + (_ALL,),
        rope_scaling=Scaling("linear", 8.0),
    ),
    "phi3_mini": _phi3(32064, 32, 3072, 32, 32, 96, 8192),
    "phi3_medium": _phi3(32064, 40, 5120, 40, 10, 128, 17920),
    "olmo2_7b": _olmo2(100352, 32, 4096, 32, 32, 128, 11008),
    "olmo2_13b": _olmo2(100352, 40, 5120, 40, 40, 128, 13824),
    "granite3_2b": _granite(49155, 40, 2048, 32, 8, 64, 8192, rope_theta=5e6, score_scale=1 / 64, logits_scale=1 / 8),
    "granite3_8b": _granite(49155, 40, 4096, 32, 8, 128, 12800, rope_theta=1e7, score_scale=1 / 128, logits_scale=1 / 16),
    "smollm3_3b": LlamaConfig(
        128256, 36, 2048, 16, 4, 128, 11008, max_seq_len=65536, rope_theta=5e6, norm_eps=1e-6, tie_embeddings=True,
        rotated=(True, True, True, False), model_type="smollm3",
    ),
}
# fmt: on
