"""Draws random bits from a counter and rounds with them. This module works the same inside and outside of kernels.

The bits of an element are a hash of its index in the global array and of a seed, so they depend neither on the sharding nor on the
kernel's blocks (counter-based generators: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from typing import Any

import jax
import jax.numpy as jnp

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: moves a counter far from its neighbours


def mix(x: jax.Array) -> jax.Array:
    """Returns a permutation of uint32 in which every input bit flips about half of the output bits.

    It is the two-multiplication hash "lowbias32" of Wellons, hash-prospector.
    """
    x = (x ^ (x >> _u32(16))) * _u32(0x7FEB352D)
    x = (x ^ (x >> _u32(15))) * _u32(0x846CA68B)
    return x ^ (x >> _u32(16))


def fold(seed: jax.Array, word: Any) -> jax.Array:
    """Returns the seed with a number folded in, such as a step count or a leaf's index. Both are uint32."""
    return mix(mix(seed + _u32(GOLDEN)) ^ jnp.asarray(word).astype(jnp.uint32))


def noise(index: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns three draws of 16 bits for each element.

    Args:
      index: uint32 of any shape, the element's index in the global array, modulo 2**32.
      seed: uint32, one for each array and step.
    """
    first = mix(index ^ seed)
    second = mix(first + _u32(GOLDEN))
    low = _u32(0xFFFF)
    return first & low, first >> _u32(16), second & low


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two nearest bfloat16, up with a probability equal to the fraction: the expected value is x.

    Adds 16 random bits below the last place and truncates. NaN and infinities are unchanged.

    Args:
      x: float32 of any shape.
      bits: uint32 of that shape, below 2**16.
    """
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (raw + bits) & _u32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    is_finite = (raw & _u32(0x7F800000)) != _u32(0x7F800000)
    return jnp.where(is_finite, rounded, x).astype(jnp.bfloat16)


def _u32(value: int) -> jax.Array:
    return jnp.uint32(value)
