"""Checks the presets against published sizes. This module tests zerojax.models.llama.family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models.llama import family as presets
from zerojax.models.llama import gpt2
from zerojax.models.llama import model as llama

# Llama 3 model cards; the 1B shape is 3.2's with an output projection of its own (1.24 B + 128256 * 2048).
PUBLISHED = {
    "llama3_1b": 1_498_482_688,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_14b": 14_770_033_664,
    # As transformers 5.23 counts the published config.json; the model cards round them.
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "phi3_mini": 3_821_079_552,
    "phi3_medium": 13_960_238_080,
    "olmo2_7b": 7_298_617_344,
    "olmo2_13b": 13_716_198_400,
    "granite3_2b": 2_533_531_648,
    "granite3_8b": 8_170_848_256,
    "smollm3_3b": 3_075_098_624,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
}
SHAPES = presets.PRESETS | gpt2.PRESETS


@pytest.mark.parametrize("name", PUBLISHED)
def test_big_presets_have_their_published_number_of_weights(name):
    shape = SHAPES[name]
    parts, sizes = llama.parts(shape).values(), {}
    for module, inputs in parts:
        if module not in sizes:  # layers are equal modules
            made = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
            sizes[module] = sum(leaf.size for leaf in jax.tree.leaves(made))
    assert sum(sizes[module] for module, _ in parts) == PUBLISHED[name] == llama.count_params(shape)


@pytest.mark.parametrize("name", SHAPES)
def test_every_preset_runs(name):
    shape = SHAPES[name]
    shape = dataclasses.replace(shape, vocab_size=shape.vocab_size or 257, num_layers=2)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    logits, _ = jax.eval_shape(llama.Llama(shape).init_with_output, jax.random.key(0), tokens)
    assert logits.shape == (2, 16, shape.vocab_size) and logits.dtype == jnp.float32
    assert shape.num_heads % shape.num_kv_heads == 0


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.startswith("llama")])
def test_the_written_config_of_every_row_is_read_back(name):
    table = (gpt2 if name in gpt2.PRESETS else presets).FAMILY.huggingface
    shape = dataclasses.replace(SHAPES[name], num_layers=8)
    found = table.read(table.write(shape), ())
    assert [found.window_of(i) for i in range(8)] == [shape.window_of(i) for i in range(8)]
    assert [found.rope_of(i) for i in range(8)] == [shape.rope_of(i) for i in range(8)]
    same = dataclasses.replace(found, windows=shape.windows, rotated=shape.rotated)
    for field in ("embed_scale", "score_scale", "logits_scale"):
        assert getattr(found, field) == pytest.approx(getattr(shape, field), rel=1e-9)
        same = dataclasses.replace(same, **{field: getattr(shape, field)})
    assert same == shape


def test_windows_are_counted_in_operations():
    near = dataclasses.replace(presets.PRESETS["test"], vocab_size=61, windows=(4, 0))
    full = dataclasses.replace(near, windows=())
    seen = np.tril(np.ones((16, 16)))
    near_seen = seen - np.tril(seen, -4)
    fewer = 12 * near.num_heads * near.head_dim * (seen.sum() - near_seen.sum()) / 16
    # Half of the diagonal is left out by the usual formula of causal attention, and of both.
    found = llama.flops_per_token(full, 16) - llama.flops_per_token(near, 16)
    assert found == pytest.approx(fewer, rel=0.1)
