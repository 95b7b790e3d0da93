"""Checks learned positions in rows of several texts. This module tests zerojax.models.llama.gpt2."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.interop import layout
from zerojax.models import family
from zerojax.models.llama import gpt2
from zerojax.models.llama import model as llama

CONFIG = dataclasses.replace(
    gpt2.PRESETS["gpt2"], vocab_size=61, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=24
)


def test_each_text_of_a_row_begins_at_position_0():
    random = np.random.default_rng(0)
    shapes = family.abstract_params(llama.parts, CONFIG)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32), shapes)
    tokens = random.integers(0, 61, (1, 9))
    hidden = jax.jit(
        lambda tokens, segments: llama.Llama(CONFIG).apply({"params": params}, tokens, None, segments, method="hidden")
    )
    packed = hidden(tokens, np.repeat([[1, 2, 0]], [4, 3, 2], axis=1))
    alone = hidden(np.concatenate([tokens[:, 4:7], tokens[:, :6]], axis=1), np.repeat([[1, 2]], [3, 6], axis=1))
    np.testing.assert_allclose(packed[:, 4:7], alone[:, :3], atol=1e-5)
    with pytest.raises(UserError, match="set `pack=False` or `context=1`"):
        llama.Llama(CONFIG).apply({"params": params}, tokens, None, tokens, tokens, method="hidden")


def test_its_matrices_are_stored_with_inputs_first():
    kernel = next(t for t in layout.tensors(gpt2.FAMILY, CONFIG) if t.path.endswith("qkv/kernel"))
    leaf = np.arange(16 * 48.0).reshape(kernel.leaf_shape)
    assert kernel.leaf_shape == (16, 3, 2, 8) and kernel.shape == (16, 48)
    np.testing.assert_array_equal(kernel.to_theirs(leaf), leaf.reshape(16, 48))
