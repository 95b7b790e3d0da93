"""Draws arrays for tests with NumPy. This module compiles nothing: `jax.random` compiles a program for each shape, in 0.1 s, and
`jnp.asarray` does too."""

from typing import Any

import jax
import numpy as np


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> jax.Array:
    """Returns an array of draws from the standard normal distribution."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def uniform(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns a float32 array of draws from 0 to 1."""
    return jax.device_put(np.random.default_rng(seed).random(shape, np.float32))


def integers(seed: int, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Returns an int32 array of draws from `low` up to, and without, `high`."""
    return jax.device_put(np.random.default_rng(seed).integers(low, high, shape, np.int32))
