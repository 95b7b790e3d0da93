"""Rounds float32 arrays to bfloat16 at random. This module draws the bits of whole arrays outside of an optimizer's update.

Up or down with a probability equal to the fraction, so that the expected value is exact. The bits of an element are a hash of its index and
of a seed (`pallas_kernels.rounding`): the same arguments give the same result.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import rounding


def seed(*words: Any) -> jax.Array:
    """Returns uint32[], a seed that all the words, whole numbers, decide."""
    found = jnp.uint32(0)
    for word in words:
        found = rounding.fold(found, jnp.asarray(word).astype(jnp.uint32))
    return found


def to_bfloat16(array: jax.Array, chosen: jax.Array) -> jax.Array:
    """Returns a float32 array rounded with the bits of a seed."""
    index, run = jnp.zeros(array.shape, jnp.uint32), 1
    for dim in reversed(range(array.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim) * jnp.uint32(run % 2**32)
        run *= array.shape[dim]
    bits, _, _ = rounding.noise(index, chosen)
    return rounding.stochastic_round(array, bits)
