"""Checks the presets of Llama's relatives against published sizes. This module tests zerojax.models.llama.published."""

import pytest
import runs

from zerojax.models.llama import family, gpt2, published
from zerojax.models.llama import model as llama

PUBLISHED = {
    # As transformers 5.23 counts the published config.json; the model cards round them.
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "qwen2_moe_a3b": 14_315_784_192,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,  # by its shapes; the model card says 80B
    "qwen3_5_9b": 8_953_803_264,  # as transformers 5.24 counts its class's own sizes
    "qwen3_5_35b_a3b": 34_660_610_688,
    "granite4_h_tiny": 6_939_037_248,
    "lfm2_1.2b": 1_170_340_608,
    "nemotron_nano_9b_v2": 8_888_227_328,
    "nemotron_nano_12b_v2": 12_310_001_152,
    "nemotron3_nano_30b_a3b": 31_577_937_344 + 23 * 128,
    "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v3": 671_026_404_352 + 58 * 256,  # transformers counts no biases of the choice
    "kimi_k2": 1_026_408_209_408 + 60 * 384,
    "moonlight_16b_a3b": 15_960_108_544 + 26 * 64,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "llama4_scout": 107_769_861_120,  # as transformers 5.24 counts its text model, and so below
    "llama4_maverick": 400_711_848_960,
    "gemma3n_e2b": 4_435_182_688,
    "gemma3n_e4b": 6_835_235_568,
    "gemma4_e2b": 4_628_569_344 + 35,  # transformers counts no scales of layers
    "gemma4_e4b": 7_463_013_376 + 42,
    "gemma4_31b": 30_697_345_280 + 60,
    "gemma4_26b_a4b": 25_233_141_760 + 30,
    "phi3_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "exaone4_1b": 1_279_391_488,
    "exaone4_32b": 32_003_216_384,
    "seed_oss_36b": 36_151_104_512,
    "internlm3_8b": 8_804_241_408,
    "glm4_9b": 9_400_279_040,
    "glm4_32b": 32_566_081_536,
    "ernie4_5_0_3b": 360_748_032,
    "command_r7b": 8_028_033_024,
    "starcoder2_3b": 3_030_371_328,
    "starcoder2_7b": 7_173_923_840,
    "starcoder2_15b": 15_957_889_024,
    "ministral3_3b": 3_429_006_336,
    "ministral3_8b": 8_489_553_920,
    "ministral3_14b": 13_506_073_600,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "glm4_5_air": 106_852_245_504 + 45 * 128,
    "glm4_5": 352_797_814_784 + 89 * 160,
    "ernie4_5_21b_a3b": 21_825_437_888,
    "minimax_m2": 228_689_748_992 + 62 * 256,
    "granite3_1b_a400m": 1_334_628_352,
    "granite3_3b_a800m": 3_298_793_472,
    "granite3_2b": 2_533_531_648,
    "granite3_8b": 8_170_848_256,
    "smollm3_3b": 3_075_098_624,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
NEMOTRON = {name: shape for name, shape in published.NEMOTRON.items() if shape.vocab_size}
SHAPES = published.PRESETS | gpt2.PRESETS | NEMOTRON


# Presets of an architecture whose first one is counted by default.
AGAIN = {
    "mixtral_8x22b", "qwen3_235b_a22b", "moonlight_16b_a3b", "gpt_oss_120b", "gemma_7b", "gemma2_9b", "gemma2_27b", "gemma3_4b",
    "phi3_medium", "olmo2_13b", "olmo3_32b", "exaone4_1b", "kimi_k2", "glm4_32b", "deepseek_v2", "glm4_5", "granite3_3b_a800m",
    "llama4_maverick", "gemma3n_e4b", "gemma4_e4b", "gemma4_31b", "qwen3_5_35b_a3b", "nemotron_nano_9b_v2", "nemotron3_nano_30b_a3b",
    "starcoder2_7b", "starcoder2_15b", "ministral3_8b", "ministral3_14b", "granite3_8b", "gpt2_medium", "gpt2_large", "gpt2_xl",
}  # fmt: skip


@pytest.mark.parametrize("name", runs.cases(PUBLISHED, long=AGAIN))
def test_a_preset_has_its_published_number_of_weights(name):
    assert llama.count_params(SHAPES[name]) == PUBLISHED[name]


def test_every_preset_is_published_and_in_the_family():
    assert SHAPES.keys() == PUBLISHED.keys()
    assert published.PRESETS.items() <= family.PRESETS.items()


@pytest.mark.parametrize("name", ["gemma2_27b", "gemma3_4b", "smollm3_3b"])
def test_patterns_of_layers_are_repeated(name):
    shape = SHAPES[name]
    period = len(shape.heads.windows) or len(shape.rotation.layers)
    for layer in range(shape.num_layers - period):
        assert shape.window_of(layer) == shape.window_of(layer + period)
        assert shape.rope_of(layer) == shape.rope_of(layer + period)
    assert len({(shape.window_of(i), shape.rope_of(i)) for i in range(period)}) == 2
