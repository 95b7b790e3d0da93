"""Rotary positions (RoPE, arXiv:2104.09864). This module computes their frequencies, stretched or not, and rotates queries and keys.

Shapes: B batch, T length, H heads, N head dim, F frequencies, of pairs of dims.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Stretches positions by `factor`, so that a model reads longer texts than it was first trained on.

    Attributes:
      kind: "linear" divides all frequencies (arXiv:2306.15595). "llama3" divides those whose wavelength is longer than
        `original_length / low_factor` tokens, keeps those below `original_length / high_factor`, and blends between
        (arXiv:2407.21783). "yarn" divides pairs that turn less than `low_factor` times in `original_length` tokens, keeps those that turn
        more than `high_factor` times, and blends between, by the number of the pair (arXiv:2309.00071, section 3.2). "dynamic" raises the
        base in texts longer than `original_length` (NTK-aware scaling). "longrope" divides each pair by a number of its own
        (arXiv:2402.13753). "proportional" divides all frequencies, and turns the first `low_factor` share of pairs alone.
      factor: the stretch.
      low_factor, high_factor, original_length: see `kind`; "linear" does not read them.
      attention_factor: multiplies rotated queries and keys.
      is_whole: "yarn" blends between whole numbers of pairs.
      short, long: the divisors of "longrope" in texts of up to `original_length` tokens, and in longer ones: all positions of a text
        have the same.
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope", "proportional"]
    factor: float
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192
    attention_factor: float = 1.0
    is_whole: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    @property
    def reads_length(self) -> bool:
        """Returns whether frequencies depend on the length of the text."""
        return self.kind in ("dynamic", "longrope")


class Rope(NamedTuple):
    """The rotation of a layer's queries and keys: its base, and what stretches it."""

    theta: float
    scaling: Scaling | None = None


@dataclasses.dataclass(frozen=True)
class Rotation:
    """The rotations of a model's layers.

    Attributes:
      theta, scaling: of a layer's `Rope`.
      in_windows: the rotation in layers with a window; None: that of the others.
      dims: of a head that are rotated; 0: all.
      is_interleaved: whether neighbouring dims are rotated as a pair, and not the two halves.
      layers: for each layer, whether its queries and keys are rotated; () for all layers True. Fewer than there are layers are repeated.
    """

    theta: float = 500000.0
    scaling: Scaling | None = None
    in_windows: Rope | None = None
    dims: int = 0
    is_interleaved: bool = False
    layers: tuple[bool, ...] = ()

    def of(self, layer: int, *, has_window: bool) -> Rope | None:
        """Returns the rotation of a layer; None if it has none."""
        if self.layers and not self.layers[layer % len(self.layers)]:
            return None
        return self.in_windows if has_window and self.in_windows is not None else Rope(self.theta, self.scaling)


def frequencies(
    head_dim: int, theta: float, scaling: Scaling | None = None, length: int | jax.Array | None = None
) -> jax.Array:
    """Returns the angle by which one position turns each pair: theta^(-2i/N), stretched. float32[N / 2], or [..., N / 2] of lengths [...].

    Args:
      head_dim: N, the dims of a head that are rotated.
      theta: the base.
      scaling: the stretch.
      length: tokens of the text, or int32[...] of several; of a scaling that reads it.
    """
    half = head_dim // 2
    exponent_F = -jnp.arange(half, dtype=jnp.float32) / half
    if scaling is None:
        return theta**exponent_F
    if scaling.reads_length:
        assert length is not None, "a scaling that reads the length of a text"
        return _of_length(head_dim, theta, scaling, jnp.asarray(length))
    frequency_F = theta**exponent_F
    stretched_F = frequency_F / scaling.factor
    if scaling.kind == "linear":
        return stretched_F
    if scaling.kind == "proportional":
        return jnp.where(jnp.arange(half) < int(scaling.low_factor * head_dim // 2), stretched_F, 0.0)
    if scaling.kind == "yarn":
        kept_F = _kept_by_yarn(head_dim, theta, scaling)
        return (1 - kept_F) * stretched_F + kept_F * frequency_F
    turns_F = scaling.original_length * frequency_F / (2 * math.pi)  # of the pair over the original length
    between = scaling.high_factor - scaling.low_factor or 1.0  # if they are equal, no pair is between
    kept_F = (turns_F - scaling.low_factor) / between
    blended_F = (1 - kept_F) * stretched_F + kept_F * frequency_F
    return jnp.where(
        turns_F < scaling.low_factor, stretched_F, jnp.where(turns_F > scaling.high_factor, frequency_F, blended_F)
    )


def _of_length(head_dim: int, theta: float, scaling: Scaling, lengths: jax.Array) -> jax.Array:
    half, original, lengths = head_dim // 2, scaling.original_length, lengths[..., None]
    exponent_F = -jnp.arange(half, dtype=jnp.float32) / half
    if scaling.kind == "longrope":
        long_F, short_F = (jnp.asarray(divisors, jnp.float32) for divisors in (scaling.long, scaling.short))
        return theta**exponent_F / jnp.where(lengths > original, long_F, short_F)
    stretch = scaling.factor * jnp.maximum(lengths, original) / original - (scaling.factor - 1)
    return (theta * stretch ** (head_dim / (head_dim - 2))) ** exponent_F


def _kept_by_yarn(head_dim: int, theta: float, scaling: Scaling) -> jax.Array:
    """Returns the share of each frequency that is not stretched: float32[N / 2]."""

    def pair(turns: float) -> float:  # that turns so often in the original length
        return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.high_factor), pair(scaling.low_factor)
    if scaling.is_whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    return 1 - jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - first) / width, 0, 1)


def halved(x_BTHN: jax.Array, dims: int) -> jax.Array:
    """Returns queries or keys whose first `dims` dims are in another order: pairs of neighbours become pairs of the halves (`rotate`)."""
    turned = [x_BTHN[..., :dims:2], x_BTHN[..., 1:dims:2]]
    return jnp.concatenate(turned + ([x_BTHN[..., dims:]] if dims < x_BTHN.shape[-1] else []), axis=-1)


def rotate(
    x_BTHN: jax.Array, frequency_F: jax.Array, positions_BT: jax.Array | None = None, factor: float = 1.0
) -> jax.Array:
    """Rotates pairs (x_i, x_{i + F}) by position * frequency_i (the pairing is Hugging Face's), and leaves dims from 2 F on.

    Args:
      x_BTHN: queries or keys.
      frequency_F: float32[F], [B, F] of rows, or [B, T or 1, F] of tokens, with 2 F up to N.
      positions_BT: by default 0, 1, ...
      factor: multiplies what is rotated.
    """
    if positions_BT is None:
        positions_BT = jnp.arange(x_BTHN.shape[1])[None]
    frequency_F = frequency_F[:, None] if frequency_F.ndim == 2 else frequency_F
    angle_BTF = positions_BT.astype(jnp.float32)[..., None] * frequency_F
    sin, cos = jnp.sin(angle_BTF)[:, :, None, :], jnp.cos(angle_BTF)[:, :, None, :]
    if factor != 1:
        sin, cos = sin * factor, cos * factor
    pairs = angle_BTF.shape[-1]
    first, second, *rest = jnp.split(
        x_BTHN.astype(jnp.float32), list(range(pairs, x_BTHN.shape[-1], pairs))[:2], axis=-1
    )
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest], axis=-1)
    return rotated.astype(x_BTHN.dtype)
