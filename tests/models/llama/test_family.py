"""Checks the presets against published sizes. This module tests zerojax.models.llama.family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.errors import UserError
from zerojax.models.llama import family as presets
from zerojax.models.llama import model as llama
from zerojax.models.llama.config import Heads

# Llama 3 model cards; the 1B shape is 3.2's with an output projection of its own (1.24 B + 128256 * 2048).
PUBLISHED = {
    "llama3_1b": 1_498_482_688,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen2_14b": 14_770_033_664,
}


@pytest.mark.parametrize("name", runs.cases(PUBLISHED, long=["llama3_1b", "llama3_70b"]))
def test_big_presets_have_their_published_number_of_weights(name):
    shape = presets.PRESETS[name]
    parts, sizes = llama.parts(shape).values(), {}
    for module, inputs in parts:
        if module not in sizes:  # layers are equal modules
            made = jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]
            sizes[module] = sum(leaf.size for leaf in jax.tree.leaves(made))
    assert sum(sizes[module] for module, _ in parts) == PUBLISHED[name] == llama.count_params(shape)


# Presets of an architecture of which another runs by default.
AGAIN = {"mixtral_8x22b", "qwen3_235b_a22b", "moonlight_16b_a3b", "gpt_oss_120b", "qwen2_14b"}


@pytest.mark.parametrize("name", runs.cases(presets.PRESETS, long=AGAIN))
def test_every_preset_runs(name):
    shape = presets.PRESETS[name]
    layers = shape.num_layers if shape.sharing_layers else 2
    shape = dataclasses.replace(shape, vocab_size=shape.vocab_size or 257, num_layers=layers)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    logits, _ = jax.eval_shape(llama.Llama(shape).init_with_output, jax.random.key(0), tokens)
    assert logits.shape == (2, 16, shape.vocab_size) and logits.dtype == jnp.float32
    assert shape.num_heads % shape.num_kv_heads == 0


def test_a_layer_that_shares_the_keys_of_none_is_refused():
    shape = dataclasses.replace(presets.PRESETS["gemma3n_test"], vocab_size=257)
    with pytest.raises(UserError, match="num_layers: is 2, and the last 2 "):
        llama.parts(dataclasses.replace(shape, num_layers=2, sharing_layers=2))


def test_windows_are_counted_in_operations():
    near = dataclasses.replace(presets.PRESETS["test"], vocab_size=61, heads=Heads(windows=(4, 0)))
    full = dataclasses.replace(near, heads=Heads())
    seen = np.tril(np.ones((16, 16)))
    near_seen = seen - np.tril(seen, -4)
    fewer = 12 * near.num_heads * near.head_dim * (seen.sum() - near_seen.sum()) / 16
    # Half of the diagonal is left out by the usual formula of causal attention, and of both.
    found = llama.flops_per_token(full, 16) - llama.flops_per_token(near, 16)
    assert found == pytest.approx(fewer, rel=0.1)
