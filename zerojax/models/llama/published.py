"""Shapes of published relatives of Llama. This module is a table: preset -> config, as in the config.json that its authors publish.

A row begins with the fields of `LlamaConfig` in their order: the sizes of the vocabulary, the layers, the embedding, heads of queries,
heads of keys and values, a head and the MLP.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from zerojax.models.llama.altup import AltUp
from zerojax.models.llama.config import Heads, LlamaConfig, MixtureForm, MLPForm, Norms, Scales, Sizes
from zerojax.models.llama.convolution import Convolution
from zerojax.models.llama.delta import Delta
from zerojax.models.llama.hybrid_fields import shortest
from zerojax.models.llama.layer_inputs import Inputs
from zerojax.models.llama.mla import Latent
from zerojax.models.rope import Rope, Rotation, Scaling
from zerojax.models.scan_mixer import Scan

_NEAR, _ALL = 4096, 0
_YARN_40 = 0.1 * math.log(40) + 1  # of DeepSeek-V3's scores, squared
_EPS = Norms(eps=1e-6)
_MAKE: Callable[..., LlamaConfig] = LlamaConfig


def _gemma(
    num_words: int, num_layers: int, embed_dim: int, *sizes: int, norms: Norms, cap: float = 0.0, **others: Any
) -> LlamaConfig:
    own = {"norms": dataclasses.replace(norms, eps=1e-6, offset=1.0), "mlp": MLPForm("gelu_pytorch_tanh")}
    own |= {"scales": Scales(embed_dim**0.5, logits_cap=cap)}
    return _MAKE(num_words, num_layers, embed_dim, *sizes, tie_embeddings=True, **own, **others)


def _new_gemma(
    *sizes: int, period: int, window: int = 512, inputs: int = 262144, full: Scaling | None = None, **others: Any
) -> LlamaConfig:
    """Returns the config of a Gemma 3n or 4, of whose layers the last of each `period` has no window."""
    heads = Heads(norm="each", windows=(window,) * (period - 1) + (_ALL,), scale=1.0, has_value_norm=True)
    own: dict[str, Any] = {"norms": Norms(eps=1e-6, places="both"), "mlp": MLPForm("gelu_pytorch_tanh")}
    own |= {"rotation": Rotation(1e6, full, in_windows=Rope(1e4)), "scales": Scales(sizes[2] ** 0.5, logits_cap=30.0)}
    own |= {"inputs": Inputs(256, inputs) if inputs else None, "heads": heads}
    return _MAKE(*sizes, tie_embeddings=True, **own | others)


def _gemma3n(layers: int, mlp_dim: int, sharing_layers: int) -> LlamaConfig:
    own = [Sizes(256, 2, mlp_dim, 0.95 if layer < 10 else 0.0) for layer in range(layers)]
    return _new_gemma(
        262400,
        layers,
        2048,
        8,
        2,
        256,
        mlp_dim,
        period=5,
        max_seq_len=32768,
        sizes=shortest(own),
        sharing_layers=sharing_layers,
        altup=AltUp(4, 0, 64),
        model_type="gemma3n_text",
    )


def _gemma4(
    layers: int, dim: int, heads: int, kv_heads: int, mlp_dim: int, *, wide: int = 0, period: int = 6, **others: Any
) -> LlamaConfig:
    """Returns the config of a Gemma 4; `wide` key and value heads of layers without a window make both keys and values, unless 0. Layers
    that share keys and values have an MLP of twice the width where `period` is 5, as E2B alone has it."""
    sharing, is_double = others.get("sharing_layers", 0), period == 5
    own = []
    for layer in range(layers):
        width = mlp_dim * (2 if is_double and layer >= layers - sharing else 1)
        own.append(Sizes(256, kv_heads, width) if (layer + 1) % period else Sizes(512, wide or kv_heads, width))
    length, beside = (262144, {"window": 1024, "inputs": 0}) if wide else (131072, {})
    found = _new_gemma(
        262144,
        layers,
        dim,
        heads,
        kv_heads,
        256,
        mlp_dim,
        period=period,
        full=Scaling("proportional", 1.0, 0.25),
        max_seq_len=length,
        sizes=shortest(own),
        has_layer_scale=True,
        model_type="gemma4_text",
        **beside,
        **others,
    )
    return found.changed(heads={"values_are_keys": bool(wide)})


def _granite(*sizes: int, theta: float, scale: float, logits: float) -> LlamaConfig:  # Granite 3.1
    own = {"rotation": Rotation(theta), "heads": Heads(scale=scale), "scales": Scales(12.0, 0.22, logits)}
    return _MAKE(*sizes, max_seq_len=131072, tie_embeddings=True, model_type="granite", **own)


def _convolved(layers: int, *attending: int) -> tuple[bool, ...]:
    """Returns the pattern of a hybrid whose layers of these numbers attend."""
    return shortest([layer not in attending for layer in range(layers)])


_BALANCED: Any = {"is_shared_gated": False, "score": "sigmoid", "has_choice_bias": True}


def _nemotron(
    letters: str, num_words: int, *sizes: int | Scan, length: int = 131072, mixture: MixtureForm | None = None
) -> LlamaConfig:
    """Returns the config of a Nemotron-H; `letters` are those of its layers."""
    *others, scan = sizes
    assert isinstance(scan, Scan)
    if mixture is not None:
        dense = tuple(i for i, letter in enumerate(letters) if letter != "E")
        mixture = dataclasses.replace(mixture, dense_layers=dense)
    return _MAKE(
        num_words,
        len(letters),
        *others,
        max_seq_len=length,
        rotation=Rotation(1e4, layers=(False,)),
        mlp=MLPForm("relu2", is_gated=False),
        mixture=mixture,
        recurrent=dataclasses.replace(scan, steps=(1e-3, math.inf), pattern=shortest([one == "M" for one in letters])),
        branches=shortest(["mlp" if letter in "-E" else "alone" for letter in letters]),
        model_type="nemotron_h",
    )


# What the rows of a class have in common.
# fmt: off
_BOTH = Norms(places="both")
_gemma1 = functools.partial(  # arXiv:2403.08295, table 1
    _gemma, max_seq_len=8192, rotation=Rotation(1e4), norms=Norms(), model_type="gemma",
)
_gemma2 = functools.partial(  # arXiv:2408.00118, table 1
    _gemma, max_seq_len=8192, rotation=Rotation(1e4), norms=_BOTH, cap=30.0, model_type="gemma2",
)
_near2 = functools.partial(Heads, windows=(_NEAR, _ALL), cap=50.0)
# arXiv:2503.19786: five layers with a window, then one without
_gemma3 = functools.partial(_gemma, norms=_BOTH, model_type="gemma3_text")
_near3 = functools.partial(Heads, norm="each", scale=256**-0.5)
_phi3 = functools.partial(  # arXiv:2404.14219
    LlamaConfig, max_seq_len=4096, rotation=Rotation(1e4), heads=Heads(windows=(2047,), is_fused=True),
    mlp=MLPForm(is_fused=True), model_type="phi3",
)
_olmo2 = functools.partial(  # arXiv:2501.00656
    LlamaConfig, max_seq_len=4096, norms=Norms(eps=1e-6, places="after"), heads=Heads(norm="joint"), model_type="olmo2",
)
_mixtral = functools.partial(LlamaConfig, rotation=Rotation(1e6), model_type="mixtral")  # arXiv:2401.04088, table 1
_qwen3_moe = functools.partial(  # arXiv:2505.09388, table 2
    LlamaConfig, max_seq_len=40960, rotation=Rotation(1e6), norms=_EPS, heads=Heads(norm="each"), model_type="qwen3_moe",
)
_gpt_oss = functools.partial(  # arXiv:2508.10925, table 1
    LlamaConfig, max_seq_len=131072, heads=Heads(True, True, windows=(128, _ALL), has_sinks=True),
    rotation=Rotation(150000.0, Scaling("yarn", 32.0, 1.0, 32.0, 4096, 0.1 * math.log(32) + 1, is_whole=False)),
    model_type="gpt_oss",
)
_clamped = functools.partial(MixtureForm, per_token=4, width=2880, clamp=(7.0, 1.702))
_sigmoid = functools.partial(  # arXiv:2412.19437, section 4.2
    MixtureForm, score="sigmoid", has_choice_bias=True, is_shared_gated=False,
)

_olmo3 = functools.partial(  # arXiv:2512.13961: three layers with a window, then one whose positions are stretched
    LlamaConfig, max_seq_len=65536, norms=Norms(eps=1e-6, places="after"), model_type="olmo3",
    heads=Heads(norm="joint", windows=(_NEAR,) * 3 + (_ALL,)),
    rotation=Rotation(5e5, Scaling("yarn", 8.0, 1.0, 32.0, 8192, 0.1 * math.log(8) + 1), in_windows=Rope(5e5)),
)
_exaone4 = functools.partial(  # arXiv:2507.11407
    LlamaConfig, 102400, norms=Norms(places="after"), model_type="exaone4",
)
_stretched_16 = functools.partial(Rotation, 1e6, Scaling("llama3", 16.0, 1.0, 4.0, 8192))
_glm4 = functools.partial(
    LlamaConfig, 151552, max_seq_len=32768, norms=Norms(places="both"), mlp=MLPForm(is_fused=True), model_type="glm4",
    rotation=Rotation(1e4, dims=64, is_interleaved=True),
)
_PLAIN = MLPForm("gelu_pytorch_tanh", is_gated=False, has_biases=True)
_starcoder2 = functools.partial(  # arXiv:2402.19173
    LlamaConfig, 49152, norms=Norms("layer"), heads=Heads(True, True, windows=(_NEAR,)), mlp=_PLAIN, max_seq_len=16384,
    model_type="starcoder2",
)
_ministral3 = functools.partial(
    LlamaConfig, 131072, max_seq_len=262144, heads=Heads(growth=(0.1, 16384)), model_type="ministral3",
)
_yarn_16 = Scaling("yarn", 16.0, 1.0, 32.0, 16384)
_granitemoe = functools.partial(  # Granite 3.1
    LlamaConfig, 49155, max_seq_len=131072, norms=_EPS, rotation=Rotation(1.5e6), heads=Heads(scale=1 / 64),
    scales=Scales(12.0, 0.22, 1 / 6), tie_embeddings=True, model_type="granitemoe",
)
_llama4 = functools.partial(
    LlamaConfig, 202048, 48, 5120, 40, 8, 128, 16384, model_type="llama4_text",
)
_chunked = functools.partial(Heads, chunks=(8192,) * 3 + (_ALL,), growth=(0.1, 8192), grows_unrotated=True)
_turned = functools.partial(Rotation, 5e5, is_interleaved=True, layers=(True, True, True, False))
_reading = functools.partial(
    MixtureForm, per_token=1, width=8192, shared_dim=8192, is_shared_gated=False, is_normalised=False, score="sigmoid",
    is_fused=True, scales_inputs=True,
)
_YARN_40_V2 = 0.1 * 0.707 * math.log(40) + 1
_deepseek_v2 = functools.partial(  # arXiv:2405.04434
    LlamaConfig, 102400, max_seq_len=163840, rotation=Rotation(1e4, Scaling("yarn", 40.0, 1.0, 32.0, 4096)), norms=_EPS,
    model_type="deepseek_v2",
)
_latent_v2 = functools.partial(Heads, scale=192**-0.5 * _YARN_40_V2**2)
_greedy = functools.partial(MixtureForm, is_normalised=False, is_shared_gated=False, best_of_group=1, dense_layers=(0,))
_glm4_moe = functools.partial(  # arXiv:2508.06471, table 1
    LlamaConfig, 151552, max_seq_len=131072, rotation=Rotation(1e6, dims=64), model_type="glm4_moe",
)

PRESETS: dict[str, LlamaConfig] = {
    "deepseek_v3": LlamaConfig(
        129280, 61, 7168, 128, 128, 192, 18432, max_seq_len=163840, norms=_EPS,
        rotation=Rotation(1e4, Scaling("yarn", 40.0, 1.0, 32.0, 4096)),
        heads=Heads(scale=192**-0.5 * _YARN_40**2, latent=Latent(512, 1536, 128, 64, 128)),
        mixture=_sigmoid(256, 8, 2048, shared_dim=2048, dense_layers=(0, 1, 2), groups=(8, 4), scale=2.5),
        model_type="deepseek_v3",
    ),
    "kimi_k2": LlamaConfig(  # arXiv:2507.20534: a trillion weights, with fewer heads than DeepSeek-V3 and more experts
        163840, 61, 7168, 64, 64, 192, 18432, max_seq_len=131072, norms=_EPS,
        rotation=Rotation(50000.0, Scaling("yarn", 32.0, 1.0, 1.0, 4096)),
        heads=Heads(scale=192**-0.5 * (0.1 * math.log(32) + 1) ** 2, latent=Latent(512, 1536, 128, 64, 128)),
        mixture=_sigmoid(384, 8, 2048, shared_dim=2048, dense_layers=(0,), scale=2.827), model_type="kimi_k2",
    ),
    "moonlight_16b_a3b": LlamaConfig(  # Moonlight-16B-A3B, arXiv:2502.16982: DeepSeek-V3's class, no latent of queries
        163840, 27, 2048, 16, 16, 192, 11264, max_seq_len=8192, rotation=Rotation(50000.0),
        heads=Heads(latent=Latent(512, 0, 128, 64, 128)),
        mixture=_sigmoid(64, 6, 1408, shared_dim=2816, dense_layers=(0,), scale=2.446), model_type="deepseek_v3",
    ),
    "gpt_oss_20b": _gpt_oss(201088, 24, 2880, 64, 8, 64, 2880, mixture=_clamped(32)),
    "gpt_oss_120b": _gpt_oss(201088, 36, 2880, 64, 8, 64, 2880, mixture=_clamped(128)),
    "deepseek_v2_lite": _deepseek_v2(
        27, 2048, 16, 16, 192, 10944, heads=_latent_v2(latent=Latent(512, 0, 128, 64, 128)),
        mixture=_greedy(64, 6, 1408, shared_dim=2816),
    ),
    "deepseek_v2": _deepseek_v2(
        60, 5120, 128, 128, 192, 12288, heads=_latent_v2(latent=Latent(512, 1536, 128, 64, 128)),
        mixture=_greedy(160, 6, 1536, shared_dim=3072, groups=(8, 3), scale=16.0),
    ),
    "glm4_5_air": _glm4_moe(
        46, 4096, 96, 8, 128, 10944, heads=Heads(qkv_bias=True),
        mixture=_sigmoid(128, 8, 1408, shared_dim=1408, dense_layers=(0,)),
    ),
    "glm4_5": _glm4_moe(
        92, 5120, 96, 8, 128, 12288, heads=Heads(qkv_bias=True, norm="each"),
        mixture=_sigmoid(160, 8, 1536, shared_dim=1536, dense_layers=(0, 1, 2), scale=2.5),
    ),
    "ernie4_5_21b_a3b": LlamaConfig(
        103424, 28, 2560, 20, 4, 128, 12288, max_seq_len=131072, rotation=Rotation(5e5, is_interleaved=True),
        mixture=MixtureForm(
            64, 6, 1536, shared_dim=3072, is_shared_gated=False, dense_layers=(0,), has_choice_bias=True,
        ),
        tie_embeddings=True, model_type="ernie4_5_moe",
    ),
    "minimax_m2": LlamaConfig(
        200064, 62, 3072, 48, 8, 128, 1536, max_seq_len=196608, norms=_EPS, rotation=Rotation(5e6, dims=64),
        heads=Heads(norm="joint"), mixture=MixtureForm(256, 8, 1536, score="sigmoid", has_choice_bias=True),
        model_type="minimax_m2",
    ),
    "granite3_1b_a400m": _granitemoe(24, 1024, 16, 8, 64, 512, mixture=MixtureForm(32, 8, 512, is_fused=True)),
    "granite3_3b_a800m": _granitemoe(32, 1536, 24, 8, 64, 512, mixture=MixtureForm(40, 8, 512, is_fused=True)),
    "mixtral_8x7b": _mixtral(32000, 32, 4096, 32, 8, 128, 14336, max_seq_len=32768, mixture=MixtureForm(8, 2, 14336)),
    "mixtral_8x22b": _mixtral(32768, 56, 6144, 48, 8, 128, 16384, max_seq_len=65536, mixture=MixtureForm(8, 2, 16384)),
    "qwen2_moe_a3b": LlamaConfig(  # Qwen1.5-MoE-A2.7B
        151936, 24, 2048, 16, 16, 128, 5632, rotation=Rotation(1e6), norms=_EPS, heads=Heads(qkv_bias=True),
        mixture=MixtureForm(60, 4, 1408, shared_dim=5632, is_normalised=False), model_type="qwen2_moe",
    ),
    "qwen3_30b_a3b": _qwen3_moe(151936, 48, 2048, 32, 4, 128, 6144, mixture=MixtureForm(128, 8, 768)),
    "qwen3_235b_a22b": _qwen3_moe(151936, 94, 4096, 64, 4, 128, 12288, mixture=MixtureForm(128, 8, 1536)),
    "qwen3_next_80b_a3b": LlamaConfig(
        151936, 48, 2048, 16, 2, 256, 5120, max_seq_len=262144, rotation=Rotation(1e7, dims=64),
        heads=Heads(norm="each", is_gated=True), norms=Norms(eps=1e-6, offset=1.0),
        mixture=MixtureForm(512, 10, 512, shared_dim=512), recurrent=Delta(16, 32, 128, 128), model_type="qwen3_next",
    ),
    "qwen3_5_9b": LlamaConfig(
        248320, 32, 4096, 16, 4, 256, 12288, max_seq_len=262144, rotation=Rotation(1e7, dims=64),
        heads=Heads(norm="each", is_gated=True), norms=Norms(eps=1e-6, offset=1.0),
        recurrent=Delta(16, 32, 128, 128, is_fused=False), model_type="qwen3_5_text",
    ),
    "qwen3_5_35b_a3b": LlamaConfig(
        248320, 40, 2048, 16, 2, 256, 512, max_seq_len=262144, rotation=Rotation(1e7, dims=64),
        heads=Heads(norm="each", is_gated=True), norms=Norms(eps=1e-6, offset=1.0),
        mixture=MixtureForm(256, 8, 512, shared_dim=512), recurrent=Delta(16, 32, 128, 128, is_fused=False),
        model_type="qwen3_5_moe_text",
    ),
    "granite4_h_tiny": LlamaConfig(
        100352, 40, 1536, 12, 4, 128, 512, max_seq_len=131072, rotation=Rotation(1e4, layers=(False,)),
        heads=Heads(scale=1 / 128), mlp=MLPForm(is_fused=True), scales=Scales(12.0, 0.22, 1 / 6), tie_embeddings=True,
        mixture=MixtureForm(64, 6, 512, shared_dim=1024, is_shared_gated=False, is_fused=True),
        recurrent=Scan(48, pattern=(True,) * 5 + (False,) + (True,) * 4), model_type="granitemoehybrid",
    ),
    "lfm2_1.2b": LlamaConfig(
        65536, 16, 2048, 32, 8, 64, 8192, max_seq_len=128000, rotation=Rotation(1e6), heads=Heads(norm="each"),
        recurrent=Convolution(2048, pattern=_convolved(16, 2, 5, 8, 10, 12, 14)), tie_embeddings=True, model_type="lfm2",
    ),
    "olmoe_1b_7b": LlamaConfig(  # arXiv:2409.02060, table 10
        50304, 16, 2048, 16, 16, 128, 1024, max_seq_len=4096, rotation=Rotation(1e4), heads=Heads(norm="joint"),
        mixture=MixtureForm(64, 8, 1024, is_normalised=False), model_type="olmoe",
    ),
    "gemma_2b": _gemma1(256000, 18, 2048, 8, 1, 256, 16384),
    "gemma_7b": _gemma1(256000, 28, 3072, 16, 16, 256, 24576),
    "gemma2_2b": _gemma2(256000, 26, 2304, 8, 4, 256, 9216, heads=_near2(scale=256**-0.5)),
    "gemma2_9b": _gemma2(256000, 42, 3584, 16, 8, 256, 14336, heads=_near2(scale=256**-0.5)),
    "gemma2_27b": _gemma2(256000, 46, 4608, 32, 16, 128, 36864, heads=_near2(scale=144**-0.5)),
    "gemma3_1b": _gemma3(
        262144, 26, 1152, 4, 1, 256, 6912, max_seq_len=32768, heads=_near3(windows=(512,) * 5 + (_ALL,)),
        rotation=Rotation(1e6, in_windows=Rope(1e4)),
    ),
    "gemma3_4b": _gemma3(
        262208, 34, 2560, 8, 4, 256, 10240, max_seq_len=131072, heads=_near3(windows=(1024,) * 5 + (_ALL,)),
        rotation=Rotation(1e6, Scaling("linear", 8.0), in_windows=Rope(1e4)),
    ),
    "llama4_scout": _llama4(
        max_seq_len=10485760, rotation=_turned(scaling=Scaling("llama3", 16.0, 1.0, 1.0, 8192)), heads=_chunked(norm="unit"),
        mixture=_reading(16),
    ),
    "llama4_maverick": _llama4(
        max_seq_len=1048576, rotation=_turned(), heads=_chunked(), mixture=_reading(128, dense_layers=tuple(range(0, 48, 2))),
    ),
    "gemma3n_e2b": _gemma3n(30, 8192, 10),
    "gemma3n_e4b": _gemma3n(35, 16384, 15),
    "gemma4_e2b": _gemma4(35, 1536, 8, 1, 6144, period=5, sharing_layers=20),
    "gemma4_e4b": _gemma4(42, 2560, 8, 2, 10240, sharing_layers=18),
    "gemma4_31b": _gemma4(60, 5376, 32, 16, 21504, wide=4),
    "gemma4_26b_a4b": _gemma4(
        30, 2816, 16, 8, 2112, wide=2, mixture=MixtureForm(128, 8, 704, is_fused=True, is_beside_mlp=True),
    ),
    "phi3_mini": _phi3(32064, 32, 3072, 32, 32, 96, 8192),
    "phi3_medium": _phi3(32064, 40, 5120, 40, 10, 128, 17920),
    "olmo2_7b": _olmo2(100352, 32, 4096, 32, 32, 128, 11008),
    "olmo2_13b": _olmo2(100352, 40, 5120, 40, 40, 128, 13824),
    "olmo3_7b": _olmo3(100278, 32, 4096, 32, 32, 128, 11008),
    "olmo3_32b": _olmo3(100278, 64, 5120, 40, 8, 128, 27648),
    "exaone4_1b": _exaone4(
        30, 2048, 32, 8, 64, 4096, max_seq_len=65536, tie_embeddings=True, heads=Heads(norm="each"),
        rotation=_stretched_16(),
    ),
    "exaone4_32b": _exaone4(
        64, 5120, 40, 8, 128, 27392, max_seq_len=131072, heads=Heads(norm="each", windows=(_NEAR,) * 3 + (_ALL,)),
        rotation=_stretched_16(layers=(True, True, True, False)),
    ),
    "seed_oss_36b": LlamaConfig(
        155136, 64, 5120, 80, 8, 128, 27648, max_seq_len=524288, rotation=Rotation(1e7), norms=_EPS,
        heads=Heads(qkv_bias=True), model_type="seed_oss",
    ),
    "internlm3_8b": LlamaConfig(
        128512, 48, 4096, 32, 2, 128, 10240, max_seq_len=32768, model_type="internlm3",
        rotation=Rotation(5e7, Scaling("dynamic", 6.0, original_length=32768)),
    ),
    "glm4_9b": _glm4(40, 4096, 32, 2, 128, 13696, heads=Heads(qkv_bias=True)),
    "glm4_32b": _glm4(61, 6144, 48, 2, 128, 23040),
    "ernie4_5_0_3b": LlamaConfig(
        103424, 18, 1024, 16, 2, 128, 3072, max_seq_len=131072, rotation=Rotation(5e5, is_interleaved=True),
        tie_embeddings=True, model_type="ernie4_5",
    ),
    "command_r7b": LlamaConfig(  # Command R7B, arXiv:2504.00698
        256000, 32, 4096, 32, 8, 128, 14336, max_seq_len=132096, norms=Norms("unbiased", places="shared"),
        rotation=Rotation(50000.0, is_interleaved=True, layers=(True, True, True, False)), scales=Scales(logits=0.25),
        heads=Heads(windows=(_NEAR,) * 3 + (_ALL,)), tie_embeddings=True, model_type="cohere2",
    ),
    "starcoder2_3b": _starcoder2(30, 3072, 24, 2, 128, 12288, rotation=Rotation(999999.4420358813), tie_embeddings=True),
    "starcoder2_7b": _starcoder2(32, 4608, 36, 4, 128, 18432, rotation=Rotation(1e6), tie_embeddings=True),
    "starcoder2_15b": _starcoder2(40, 6144, 48, 4, 128, 24576, rotation=Rotation(1e5)),
    "ministral3_3b": _ministral3(26, 3072, 32, 8, 128, 9216, rotation=Rotation(1e6, _yarn_16), tie_embeddings=True),
    "ministral3_8b": _ministral3(34, 4096, 32, 8, 128, 14336, rotation=Rotation(1e6, _yarn_16)),
    "ministral3_14b": _ministral3(40, 5120, 32, 8, 128, 16384, rotation=Rotation(1e9, _yarn_16)),
    "granite3_2b": _granite(49155, 40, 2048, 32, 8, 64, 8192, theta=5e6, scale=1 / 64, logits=1 / 8),
    "granite3_8b": _granite(49155, 40, 4096, 32, 8, 128, 12800, theta=1e7, scale=1 / 128, logits=1 / 16),
    "smollm3_3b": LlamaConfig(
        128256, 36, 2048, 16, 4, 128, 11008, max_seq_len=65536, norms=_EPS, tie_embeddings=True,
        rotation=Rotation(5e6, layers=(True, True, True, False)), model_type="smollm3",
    ),
}
# fmt: on

# Nemotron-H (arXiv:2504.03624): a letter for each layer, M for Mamba-2, * for attention, - for an MLP and E for a mixture.
NEMOTRON: dict[str, LlamaConfig] = {
    "nemotron_test": _nemotron(
        "ME*-",
        0,
        64,
        4,
        2,
        16,
        128,
        Scan(4, 32, 16, 2),
        length=512,
        mixture=MixtureForm(4, 2, 32, shared_dim=48, latent_dim=32, **_BALANCED),
    ),
    "nemotron_nano_9b_v2": _nemotron(  # arXiv:2508.14444
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        131072,
        4480,
        40,
        8,
        128,
        15680,
        Scan(128, 80, 128, 8),
    ),
    "nemotron_nano_12b_v2": _nemotron(
        "M-M-M-M*-" * 6 + "M-M-M-M-", 131072, 5120, 40, 8, 128, 20480, Scan(128, 80, 128, 8)
    ),
    "nemotron3_nano_30b_a3b": _nemotron(
        "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
        131072,
        2688,
        32,
        2,
        128,
        1856,
        Scan(64, 64, 128, 8),
        length=262144,
        mixture=MixtureForm(128, 6, 1856, shared_dim=3712, scale=2.5, **_BALANCED),
    ),
}
# fmt: on
