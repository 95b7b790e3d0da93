"""Compares attention in chunks with attention under a mask. This module tests zerojax.ops.attention_chunks."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import attention, attention_chunks

ROUNDING = 1e-5  # float32 sums in another order
CHUNK, LENGTH = 4, 11


def drawn():
    shapes = {0: (2, LENGTH, 4, 8), 1: (2, LENGTH, 2, 8), 2: (2, LENGTH, 2, 8)}
    return [jnp.asarray(arrays.normal(seed, shape)) for seed, shape in shapes.items()]


CASES = {
    "rows that begin with a chunk": ({}, np.tile(np.arange(LENGTH), (2, 1)), np.ones((2, LENGTH), int)),
    "texts amid rows": (
        {"segments_BT": np.array([[1] * 7 + [2] * 4, [1] * 2 + [2] * 9])},
        np.array([[*range(7), *range(4)], [*range(2), *range(9)]]),
        np.array([[1] * 7 + [2] * 4, [1] * 2 + [2] * 9]),
    ),
    "padding before a text": (
        {"mask_BT": np.array([[False] * 3 + [True] * 8, [True] * 11])},
        np.array([[*range(-3, 8)], [*range(11)]]),
        np.array([[0] * 3 + [1] * 8, [1] * 11]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_token_sees_its_chunk_alone(case):
    given, positions, texts = CASES[case]
    q, k, v = drawn()
    found = jax.jit(lambda q, k, v: attention_chunks.attend(q, k, v, "xla", CHUNK, **given))(q, k, v)
    is_near = positions[:, :, None] // CHUNK == positions[:, None] // CHUNK
    seen = is_near & (texts[:, :, None] == texts[:, None]) & np.tril(np.ones((LENGTH, LENGTH), bool))
    wanted = attention.attend(q, k, v, "xla", is_causal=False, mask=jnp.asarray(seen))
    np.testing.assert_allclose(found[texts > 0], wanted[texts > 0], rtol=0, atol=ROUNDING)


def test_a_chunk_as_long_as_the_row_is_plain_attention():
    q, k, v = drawn()
    found = attention_chunks.attend(q, k, v, "xla", LENGTH, scale=0.3)
    np.testing.assert_array_equal(found, attention.attend(q, k, v, "xla", is_causal=True, scale=0.3))
