"""Rotary positions (RoPE, arXiv:2104.09864). This module computes their frequencies, stretched or not, and rotates queries and keys.

Shapes: B batch, T length, H heads, N head dim, F = N / 2 frequencies.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Stretches positions by `factor`, so that a model reads longer texts than it was first trained on.

    Attributes:
      kind: "linear" divides all frequencies (arXiv:2306.15595). "llama3" divides those whose wavelength is longer than
        `original_length / low_factor` tokens, keeps those below `original_length / high_factor`, and blends between (Llama 3.1).
      factor: the stretch.
      low_factor, high_factor, original_length: see `kind`; "linear" does not read them.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192


def frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> jax.Array:
    """Returns the angle by which one position turns each pair: theta^(-2i/N), stretched. float32[N / 2]."""
    half = head_dim // 2
    frequency_F = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency_F
    stretched_F = frequency_F / scaling.factor
    if scaling.kind == "linear":
        return stretched_F
    turns_F = scaling.original_length * frequency_F / (2 * math.pi)  # of the pair over the original length
    kept_F = (turns_F - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    blended_F = (1 - kept_F) * stretched_F + kept_F * frequency_F
    return jnp.where(
        turns_F < scaling.low_factor,
        stretched_F,
        jnp.where(turns_F > scaling.high_factor, frequency_F, blended_F),
    )


def rotate(x_BTHN: jax.Array, frequency_F: jax.Array, positions_BT: jax.Array | None = None) -> jax.Array:
    """Rotates pairs (x_i, x_{i + N/2}) by position * frequency_i (the pairing is Hugging Face's). Positions: by default 0, 1, ..."""
    if positions_BT is None:
        positions_BT = jnp.arange(x_BTHN.shape[1])[None]
    angle_BTF = positions_BT.astype(jnp.float32)[..., None] * frequency_F
    sin, cos = jnp.sin(angle_BTF)[:, :, None, :], jnp.cos(angle_BTF)[:, :, None, :]
    first, second = jnp.split(x_BTHN.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHN.dtype)
