"""Rounds float32 arrays to bfloat16 at random. This module draws the bits of whole arrays outside of an optimizer's update.

Up or down with a probability equal to the fraction, so that the expected value is exact. The bits of an element are a hash of its index and
of a seed (`pallas_kernels.rounding`): the same arguments give the same result.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import rounding


def seed(*words: Any) -> jax.Array:
    """Returns uint32[], a seed that all the words, whole numbers, decide."""
    found = jnp.uint32(0)
    for word in words:
        found = rounding.fold(found, jnp.asarray(word).astype(jnp.uint32))
    return found


class Place(NamedTuple):
    """Where a shard is in its array: the index of its first element, and the array's shape."""

    start: tuple[jax.Array | int, ...]
    shape: tuple[int, ...]


def to_bfloat16(array: jax.Array, chosen: jax.Array, place: Place | None = None) -> jax.Array:
    """Returns a float32 array rounded with the bits of a seed. A shard that is told its place has the bits of the array there."""
    start, shape = place or Place((0,) * array.ndim, array.shape)
    index, run = jnp.zeros(array.shape, jnp.uint32), 1
    for dim in reversed(range(array.ndim)):
        own = jax.lax.broadcasted_iota(jnp.uint32, array.shape, dim) + jnp.asarray(start[dim]).astype(jnp.uint32)
        index += own * jnp.uint32(run % 2**32)
        run *= shape[dim]
    bits, _, _ = rounding.noise(index, chosen)
    return rounding.stochastic_round(array, bits)
