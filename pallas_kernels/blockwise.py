"""Stores moments as 8-bit codes with one float32 scale a block. This module holds the code, for use inside and outside of kernels.

A block is BLOCK neighbours along the last dim of a weight; the last block of a row may be shorter. Its scale is its largest magnitude
(block-wise quantization: Dettmers et al., 8-bit optimizers via block-wise quantization, arXiv:2110.02861, section 2.1). As there, codes are
dense near zero, since moments of one block span many powers of ten. Instead of the paper's table (dynamic tree quantization, section 2.2)
a code is a power, which a kernel computes without a table:

    mu (signed, int8):     x = scale * sign(code) * (|code| / 127)**2     the smallest is 6e-5 of the scale
    nu (unsigned, uint8):  x = scale * (code / 255)**4                    the smallest is 2e-10 of the scale

Near the scale, neighbouring values differ by 1.6% in both. The update divides by nu, so a nu above zero never becomes zero: its code is at
least 1. Blocks have 256 values instead of the paper's 2,048. Their scales cost 1/64 byte a value, and a block fits a row of a kernel's
tile.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCK = 256
SMALLEST_SCALE = 1e-28  # of a block; 255**4 / scale is a float32 above it
_SIGNED, _UNSIGNED = 127.0, 255.0


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns float32 values. The dtype of the codes, int8 or uint8, selects one of the two codes.

    Args:
      codes: int8 or uint8 [..., BLOCK].
      scales: float32 [...].
    """
    c = codes.astype(jnp.float32)
    if codes.dtype == jnp.int8:
        return c * jnp.abs(c) * (scales * (1 / _SIGNED**2))[..., None]
    return (c * c) * (c * c) * (scales * (1 / _UNSIGNED**4))[..., None]


def encode(
    x: jax.Array,
    scales: jax.Array,
    dtype: jnp.dtype,
    bits: jax.Array | None = None,
    sqrt: Callable[[jax.Array], jax.Array] = jnp.sqrt,
) -> jax.Array:
    """Returns codes.

    Args:
      x: float32 [..., BLOCK], at most `scales` in magnitude.
      scales: float32 [...]. A block whose scale is below SMALLEST_SCALE is coded as if its values were next to zero.
      dtype: int8 or uint8 (x is then not negative).
      bits: uint32 [..., BLOCK] below 2**16, random: the code is one of the two nearest, and its expected value is x. None: the nearest
        code.
      sqrt: the square root to use.
    """
    # A kernel spends its time here: as much as possible is computed once a block, and no element is a divisor.
    is_signed = dtype == jnp.int8
    levels, power = (_SIGNED, 2) if is_signed else (_UNSIGNED, 4)
    inverse = jnp.where(scales >= SMALLEST_SCALE, levels**power / scales, 0.0)
    r = jnp.abs(x) * inverse[..., None]  # a code's value is code**power in this unit
    level = sqrt(r) if is_signed else sqrt(sqrt(r))
    if bits is None:
        code = jnp.floor(level + 0.5)
    else:
        low = jnp.floor(level)
        high = low + 1
        below = low * low if is_signed else (low * low) * (low * low)
        gap = low + high if is_signed else (high * high) * (high * high) - below
        code = jnp.where(bits.astype(jnp.float32) * (1 / 65536) * gap < r - below, high, low)
    code = jnp.minimum(code, levels)
    code = jnp.where(x < 0, -code, code) if is_signed else jnp.maximum(code, (x > 0).astype(jnp.float32))
    # Through int32, because backends differ in direct casts of floats to uint8.
    return code.astype(jnp.int32).astype(dtype)


def scales_of(x: jax.Array) -> jax.Array:
    """Returns the scales, float32 [...], of x: float32 [..., BLOCK]."""
    return jnp.max(jnp.abs(x), axis=-1)


@dataclasses.dataclass(frozen=True)
class BlockView:
    """Views a local array [..., n] as [..., parts, part], each part inside one block.

    A part is a block, and the last one is padded with zeros. If shards of the last dim end inside blocks, `joins` names the mesh axes of
    that dim. Parts are then shorter, scales are replicated along the last dim, and devices exchange the largest magnitudes of their parts.
    """

    shape: tuple[int, ...]
    joins: tuple[str, ...] = ()

    @property
    def part(self) -> int:
        return math.gcd(self.shape[-1], BLOCK) if self.joins else BLOCK

    def split(self, x: jax.Array) -> jax.Array:
        """Returns [..., parts, part] of [..., n]."""
        parts = -(-self.shape[-1] // self.part)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, parts * self.part - self.shape[-1])])
        return x.reshape(*self.shape[:-1], parts, self.part)

    def join(self, x: jax.Array) -> jax.Array:
        """Undoes `split`."""
        return x.reshape(*self.shape[:-1], -1)[..., : self.shape[-1]]

    def scales_of(self, x: jax.Array) -> jax.Array:
        """Returns the scale of each part's block."""
        return self.local_scales(self.row_scales(scales_of(x)))

    def local_scales(self, scales: jax.Array) -> jax.Array:
        """Returns the scales [..., parts] of this device's parts, from those of global rows [..., blocks]."""
        if not self.joins:
            return scales
        parts = self.shape[-1] // self.part
        spread = jnp.repeat(scales, BLOCK // self.part, axis=-1)
        return jax.lax.dynamic_slice_in_dim(spread, jax.lax.axis_index(self.joins) * parts, parts, axis=-1)

    def row_scales(self, largest: jax.Array) -> jax.Array:
        """Returns the scales of global rows [..., blocks], from the largest magnitude [..., parts] of this device's parts."""
        if not self.joins:
            return largest
        row = jax.lax.all_gather(largest, self.joins, axis=largest.ndim - 1, tiled=True)
        each = BLOCK // self.part
        row = jnp.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, -row.shape[-1] % each)])
        return row.reshape(*row.shape[:-1], -1, each).max(axis=-1)
