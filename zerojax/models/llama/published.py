"""Shapes of published relatives of Llama. This module is a table: preset -> config, as in the config.json that its authors publish."""

import functools
import math

from zerojax.models.llama.mla import Latent
from zerojax.models.llama.model import LlamaConfig
from zerojax.models.llama.rope import Rope, Scaling

_NEAR, _ALL = 4096, 0
_gemma = functools.partial(
    LlamaConfig,
    rope_theta=10000.0,
    norm_eps=1e-6,
    tie_embeddings=True,
    activation="gelu_pytorch_tanh",
    norm_offset=1.0,
    norm_places="both",
)
# Gemma 2, arXiv:2408.00118, table 1.
_gemma2 = functools.partial(
    _gemma, 256000, max_seq_len=8192, windows=(_NEAR, _ALL), score_cap=50.0, logits_cap=30.0, model_type="gemma2"
)
# Gemma 3, arXiv:2503.19786: five layers with a window, then one without.
_gemma3 = functools.partial(
    _gemma,
    head_dim=256,
    score_scale=256**-0.5,
    rope_theta=1e6,
    window_rope=Rope(10000.0),
    qk_norm=True,
    model_type="gemma3_text",
)
_phi3 = functools.partial(
    LlamaConfig, 32064, max_seq_len=4096, rope_theta=10000.0, is_fused=True, model_type="phi3"
)  # arXiv:2404.14219
_olmo2 = functools.partial(
    LlamaConfig,
    100352,
    max_seq_len=4096,
    rope_theta=500000.0,
    norm_eps=1e-6,
    norm_places="after",
    qk_norm=True,
    qk_norm_joint=True,
    model_type="olmo2",
)  # arXiv:2501.00656
_granite = functools.partial(
    LlamaConfig,
    49155,
    40,
    num_heads=32,
    num_kv_heads=8,
    max_seq_len=131072,
    tie_embeddings=True,
    embed_scale=12.0,
    model_type="granite",
)  # Granite 3.1

# Mixtral, arXiv:2401.04088, table 1.
_mixtral = functools.partial(
    LlamaConfig,
    head_dim=128,
    num_kv_heads=8,
    rope_theta=1e6,
    num_experts=8,
    experts_per_token=2,
    model_type="mixtral",
)
# Qwen3, arXiv:2505.09388, table 2.
_qwen3_moe = functools.partial(
    LlamaConfig,
    151936,
    num_kv_heads=4,
    head_dim=128,
    max_seq_len=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    model_type="qwen3_moe",
)

# gpt-oss, arXiv:2508.10925, table 1.
_gpt_oss = functools.partial(
    LlamaConfig,
    201088,
    embed_dim=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    mlp_dim=2880,
    max_seq_len=131072,
    rope_theta=150000.0,
    rope_scaling=Scaling("yarn", 32.0, 1.0, 32.0, 4096, 0.1 * math.log(32) + 1, is_whole=False),
    windows=(128, _ALL),
    qkv_bias=True,
    o_bias=True,
    has_sinks=True,
    experts_per_token=4,
    expert_dim=2880,
    clamp=(7.0, 1.702),
    model_type="gpt_oss",
)

_YARN_40 = 0.1 * math.log(40) + 1  # of DeepSeek-V3's scores, squared
# DeepSeek-V3, arXiv:2412.19437, section 4.2.
_deepseek_v3 = functools.partial(
    LlamaConfig,
    head_dim=192,
    shared_dim=2048,
    router_score="sigmoid",
    has_choice_bias=True,
    is_shared_gated=False,
    model_type="deepseek_v3",
)

PRESETS: dict[str, LlamaConfig] = {
    "deepseek_v3": _deepseek_v3(
        129280,
        61,
        embed_dim=7168,
        num_heads=128,
        num_kv_heads=128,
        mlp_dim=18432,
        max_seq_len=163840,
        rope_theta=10000.0,
        norm_eps=1e-6,
        rope_scaling=Scaling("yarn", 40.0, 1.0, 32.0, 4096),
        score_scale=192**-0.5 * _YARN_40**2,
        latent=Latent(512, 1536, 128, 64, 128),
        num_experts=256,
        experts_per_token=8,
        expert_dim=2048,
        dense_layers=(0, 1, 2),
        router_groups=(8, 4),
        router_scale=2.5,
    ),
    "moonlight_16b_a3b": _deepseek_v3(  # Moonlight-16B-A3B, arXiv:2502.16982: DeepSeek-V3's class, no latent of queries
        163840,
        27,
        embed_dim=2048,
        num_heads=16,
        num_kv_heads=16,
        mlp_dim=11264,
        max_seq_len=8192,
        rope_theta=50000.0,
        latent=Latent(512, 0, 128, 64, 128),
        num_experts=64,
        experts_per_token=6,
        expert_dim=1408,
        shared_dim=2816,
        dense_layers=(0,),
        router_scale=2.446,
    ),
    "gpt_oss_20b": _gpt_oss(24, num_experts=32),
    "gpt_oss_120b": _gpt_oss(36, num_experts=128),
    "mixtral_8x7b": _mixtral(
        32000, 32, embed_dim=4096, num_heads=32, mlp_dim=14336, expert_dim=14336, max_seq_len=32768
    ),
    "mixtral_8x22b": _mixtral(
        32768, 56, embed_dim=6144, num_heads=48, mlp_dim=16384, expert_dim=16384, max_seq_len=65536
    ),
    "qwen2_moe_a3b": LlamaConfig(  # Qwen1.5-MoE-A2.7B
        151936,
        24,
        embed_dim=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        mlp_dim=5632,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        num_experts=60,
        experts_per_token=4,
        expert_dim=1408,
        shared_dim=5632,
        is_normalised=False,
        model_type="qwen2_moe",
    ),
    "qwen3_30b_a3b": _qwen3_moe(48, embed_dim=2048, num_heads=32, mlp_dim=6144, expert_dim=768),
    "qwen3_235b_a22b": _qwen3_moe(94, embed_dim=4096, num_heads=64, mlp_dim=12288, expert_dim=1536),
    "olmoe_1b_7b": LlamaConfig(  # arXiv:2409.02060, table 10
        50304,
        16,
        embed_dim=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        mlp_dim=1024,
        max_seq_len=4096,
        rope_theta=10000.0,
        qk_norm=True,
        qk_norm_joint=True,
        num_experts=64,
        experts_per_token=8,
        expert_dim=1024,
        is_normalised=False,
        model_type="olmoe",
    ),
    "gemma2_2b": _gemma2(
        26,
        embed_dim=2304,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        mlp_dim=9216,
        embed_scale=2304**0.5,
        score_scale=256**-0.5,
    ),
    "gemma2_9b": _gemma2(
        42,
        embed_dim=3584,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        mlp_dim=14336,
        embed_scale=3584**0.5,
        score_scale=256**-0.5,
    ),
    "gemma2_27b": _gemma2(
        46,
        embed_dim=4608,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        mlp_dim=36864,
        embed_scale=4608**0.5,
        score_scale=144**-0.5,
    ),
    "gemma3_1b": _gemma3(
        262144,
        26,
        embed_dim=1152,
        num_heads=4,
        num_kv_heads=1,
        mlp_dim=6912,
        max_seq_len=32768,
        embed_scale=1152**0.5,
        windows=(512,) * 5 + (_ALL,),
    ),
    "gemma3_4b": _gemma3(
        262208,
        34,
        embed_dim=2560,
        num_heads=8,
        num_kv_heads=4,
        mlp_dim=10240,
        max_seq_len=131072,
        embed_scale=2560**0.5,
        windows=(1024,) * 5 + (_ALL,),
        rope_scaling=Scaling("linear", 8.0),
    ),
    "phi3_mini": _phi3(32, embed_dim=3072, num_heads=32, num_kv_heads=32, head_dim=96, mlp_dim=8192, windows=(2047,)),
    "phi3_medium": _phi3(
        40, embed_dim=5120, num_heads=40, num_kv_heads=10, head_dim=128, mlp_dim=17920, windows=(2047,)
    ),
    "olmo2_7b": _olmo2(32, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, mlp_dim=11008),
    "olmo2_13b": _olmo2(40, embed_dim=5120, num_heads=40, num_kv_heads=40, head_dim=128, mlp_dim=13824),
    "granite3_2b": _granite(
        embed_dim=2048,
        head_dim=64,
        mlp_dim=8192,
        rope_theta=5e6,
        residual_scale=0.22,
        score_scale=0.015625,
        logits_scale=1 / 8,
    ),
    "granite3_8b": _granite(
        embed_dim=4096,
        head_dim=128,
        mlp_dim=12800,
        rope_theta=1e7,
        residual_scale=0.22,
        score_scale=0.0078125,
        logits_scale=1 / 16,
    ),
    "smollm3_3b": LlamaConfig(
        128256,
        36,
        embed_dim=2048,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        mlp_dim=11008,
        max_seq_len=65536,
        rope_theta=5e6,
        norm_eps=1e-6,
        tie_embeddings=True,
        rotated=(True, True, True, False),
        model_type="smollm3",
    ),
}
