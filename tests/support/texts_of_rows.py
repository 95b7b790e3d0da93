"""Texts of a row, whose gradients must be those of each alone. This module compares them for a model's loss."""

import arrays
import jax
import jax.numpy as jnp
import numpy as np

SIZES = 70, 30, 12  # of two texts and padding: the second begins amid a chunk
ROUNDING = 1e-5  # float32 sums in another order


def assert_learned_as_each_alone(gradients, params, vocab_size):
    """Compares by f(params, batch) -> (loss, gradients)."""
    tokens = np.array(arrays.integers(1, (1, sum(SIZES)), 0, vocab_size))
    segments, at = np.repeat([1, 2, 0], SIZES)[None], np.arange(sum(SIZES))[None]
    labeled = (segments > 0) & (at != 0) & (at != SIZES[0])
    batch = {"tokens": tokens, "segments": segments, "labeled": labeled.astype(np.int32)}
    found, total = gradients(params, batch), []
    for text, size in zip(np.split(tokens, np.cumsum(SIZES)[:-1], axis=1), SIZES[:2]):
        alone = {"tokens": np.pad(text, ((0, 0), (0, at.size - size))), "segments": at < size}
        alone["labeled"] = alone["segments"] & (at > 0)
        own = gradients(params, {name: array.astype(np.int32) for name, array in alone.items()})
        total.append(jax.tree.map(lambda leaf, count=size - 1: leaf * count / labeled.sum(), own))
    for one, other in zip(*map(jax.tree.leaves, (found, jax.tree.map(jnp.add, *total))), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING * max(1, np.abs(other).max()))
