"""Rows in 8 or 4 bits with a scale for each block, as they travel. This module cuts rows into the blocks of `pallas_kernels.wire`.

A row ends with zeros up to a whole block, so its codes are those of the row whatever lies beside it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import wire

BLOCK = wire.BLOCK


class Packed(NamedTuple):
    """Rows of n values: codes int8[..., M, 256], or uint8[..., M, 128] of 4 bits, and scales float32[..., M], M = ceil(n / 256)."""

    codes: jax.Array
    scales: jax.Array


def blocks(n: int) -> int:
    """Returns the number of blocks of a row of n values."""
    return -(-n // BLOCK)


def elements(n: int, bits: int) -> int:
    """Returns the elements of both arrays of a row of n values.

    >>> elements(512, 8), elements(512, 4)
    (514, 258)
    """
    return blocks(n) * (wire.WIDTH[bits] + 1)


def pack(rows: jax.Array, bits: int, platform: str) -> Packed:
    """Returns rows [..., n] in 8 or 4 bits. On GPUs a kernel reads each value once."""
    *outer, n = rows.shape
    x = jnp.pad(rows, [(0, 0)] * len(outer) + [(0, blocks(n) * BLOCK - n)]) if n % BLOCK else rows
    codes, scales = wire.pack(x.reshape(-1, BLOCK), bits, implementation=_implementation(platform))
    return Packed(codes.reshape(*outer, blocks(n), -1), scales.reshape(*outer, blocks(n)))


def unpack(packed: Packed, bits: int, n: int) -> jax.Array:
    """Returns the rows: float32[..., n]."""
    x = wire.unpack(packed.codes, packed.scales, bits)
    return x.reshape(*x.shape[:-2], -1)[..., :n]


def sum_of(packed: Packed, bits: int, n: int, platform: str) -> jax.Array:
    """Returns the sum over the first dim of rows [P, ..., n]: float32[..., n]."""
    parts, *outer, count, width = packed.codes.shape
    x = wire.unpack_sum(
        packed.codes.reshape(parts, -1, width),
        packed.scales.reshape(parts, -1),
        bits,
        implementation=_implementation(platform),
    )
    return x.reshape(*outer, count * BLOCK)[..., :n]


def _implementation(platform: str) -> str:
    return "pallas" if platform == "gpu" else "jnp"
