"""Compares the convolution with sums over each text alone. This module tests zerojax.ops.short_convolution."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.ops import short_convolution

ROUNDING = 1e-6
WINDOW, CHANNELS = 4, 3
RANDOM = np.random.default_rng(0)
KERNEL = RANDOM.normal(size=(WINDOW, CHANNELS)).astype(np.float32)
X = RANDOM.normal(size=(2, 9, CHANNELS)).astype(np.float32)
convolve = jax.jit(short_convolution.convolve)


def plain(text):
    return np.stack([np.convolve(text[:, c], KERNEL[::-1, c])[: len(text)] for c in range(CHANNELS)], axis=1)


def test_a_token_sees_itself_and_the_three_before_it_in_its_text():
    y, _ = convolve(X, KERNEL)
    np.testing.assert_allclose(y, np.stack([plain(row) for row in X]), atol=ROUNDING)
    sizes = [[1, 2, 6], [5, 3, 1]]
    segments = np.stack([np.repeat([1, 2, 0], size) for size in sizes]).astype(np.int32)
    packed, _ = convolve(X, KERNEL, segments_BT=segments)
    for row, found, size in zip(X, packed, sizes):
        texts = np.split(row, np.cumsum(size)[:-1])
        np.testing.assert_allclose(found, np.concatenate([plain(text) for text in texts]), atol=ROUNDING)


def test_a_text_in_parts_is_the_text():
    """Row 0 has 2 tokens in the first part and row 1 has 5, of 5; then both have one, two and one."""
    whole, _ = convolve(X, KERNEL)
    counts = np.array([2, 5])
    y, before = convolve(X[:, :5], KERNEL, counts_B=counts)
    np.testing.assert_allclose(y[0, :2], whole[0, :2], atol=ROUNDING)
    for size in (1, 2, 1):
        part = np.stack([row[at : at + size] for row, at in zip(X, counts)])
        y, before = convolve(part, KERNEL, before)
        for row, at, found in zip(whole, counts, y):
            np.testing.assert_allclose(found, row[at : at + size], atol=ROUNDING)
        counts = counts + size
    _, held = convolve(part, KERNEL, before, counts_B=jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(held, before)
