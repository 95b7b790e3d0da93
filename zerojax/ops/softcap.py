"""Bounds scores smoothly. This module holds c tanh(x / c) and its derivative (Gemma 2, arXiv:2408.00118, section 2)."""

import jax
import jax.numpy as jnp


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """Returns cap * tanh(x / cap), which is between -cap and cap; `x` itself where the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def slope(capped: jax.Array, cap: float) -> jax.Array | float:
    """Returns the derivative of `softcap` where it returned `capped`: 1 - (capped / cap)^2; 1 where the cap is 0."""
    return 1 - (capped / cap) ** 2 if cap else 1.0
