"""Packs arrays into 8 or 4 bits for a wire. This module holds the kernels and their twins.

    8 bits    x ~ scale * code / 127                      scale = max |x| of the block
    4 bits    R x ~ scale * code / 7, two codes a byte    scale = max |R x|;  R: the rotation of 64 neighbours by Hadamard's matrix / 8

A block is 256 neighbours. The nearest code errs by at most scale / 254, or scale / 14. A rotation spreads a large value over its
neighbours, so that 15 codes are enough for gradients (SDP4Bit, arXiv:2410.15526); R is its own inverse, and keeps the sum of squares.
A block with a NaN or an infinity has the scale NaN, so all its values arrive as NaN.

Of a byte, the low half is the code of the block's first half. Shapes: M blocks, B = 256 values of a block, P arrays that are added up.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

BLOCK = 256
ROTATED = 64  # neighbours that a rotation mixes
TOP = {8: 127, 4: 7}  # the largest code, by bits
WIDTH = {8: BLOCK, 4: BLOCK // 2}  # bytes of a block's codes
DTYPE = {8: jnp.int8, 4: jnp.uint8}
_TILE = 32  # blocks of a program
_TINY = float(np.finfo(np.float32).tiny)


def pack(x_MB: jax.Array, bits: int, *, implementation: str = "jnp") -> tuple[jax.Array, jax.Array]:
    """Returns the codes, int8[M, 256] or uint8[M, 128], and the scales, float32[M], of blocks; each value is read once.

    Args:
      x_MB: floating; computed with in float32.
      bits: 8 or 4.
      implementation: "pallas", "interpret" or "jnp".
    """
    if implementation == "jnp":
        return pack_ref(x_MB, bits)
    blocks = x_MB.shape[0]
    rotation = (jnp.asarray(_hadamard()),) if bits == 4 else ()
    codes, scales = pl.pallas_call(
        functools.partial(_pack, bits, blocks),
        out_shape=(
            jax.ShapeDtypeStruct((blocks * WIDTH[bits],), DTYPE[bits]),
            jax.ShapeDtypeStruct((blocks,), jnp.float32),
        ),
        grid=(pl.cdiv(blocks, _TILE),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=implementation == "interpret",
        name=f"pack_{bits}_bits",
    )(x_MB.reshape(-1), *rotation)
    return codes.reshape(blocks, WIDTH[bits]), scales


def pack_ref(x_MB: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns the same in plain jnp: the kernel's twin."""
    x_MB = x_MB.astype(jnp.float32)
    if bits == 4:
        x_MB = rotated(x_MB)
    scale_M = _scale(x_MB)
    codes = _codes(x_MB, scale_M, bits)
    return (codes.astype(jnp.int8) if bits == 8 else _in_bytes(*jnp.split(codes, 2, axis=1))), scale_M


def unpack(codes: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """Returns float32[..., 256] of codes [..., 256 or 128] and scales [...]. With 8 bits XLA makes one pass of it and of what reads it."""
    if bits == 8:
        return codes.astype(jnp.float32) * (scales * (1 / TOP[8]))[..., None]
    values = jnp.concatenate(_halves(codes), axis=-1).astype(jnp.float32)
    return rotated(values * (scales * (1 / TOP[4]))[..., None])


def unpack_sum(codes_PM: jax.Array, scales_PM: jax.Array, bits: int, *, implementation: str = "jnp") -> jax.Array:
    """Returns the sum of P packed arrays, float32[M, 256]; each code is read once.

    Args:
      codes_PM: [P, M, 256 or 128].
      scales_PM: [P, M].
      bits, implementation: as of `pack`.
    """
    parts, blocks, _ = codes_PM.shape
    if bits == 8 or implementation == "jnp":  # of 8 bits the sum is a single fusion of XLA's
        values = codes_PM if bits == 8 else jnp.concatenate(_halves(codes_PM), axis=-1)
        total = jnp.sum(values.astype(jnp.float32) * (scales_PM * (1 / TOP[bits]))[..., None], axis=0)
        return total if bits == 8 else rotated(total)
    return pl.pallas_call(
        functools.partial(_unpack_sum, parts, blocks),
        out_shape=jax.ShapeDtypeStruct((blocks * BLOCK,), jnp.float32),
        grid=(pl.cdiv(blocks, _TILE),),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=implementation == "interpret",
        name="unpack_sum_4_bits",
    )(codes_PM.reshape(-1), scales_PM.reshape(-1), jnp.asarray(_hadamard())).reshape(blocks, BLOCK)


def rotated(x: jax.Array) -> jax.Array:
    """Returns float32[..., n] with each 64 neighbours rotated; twice is the array itself."""
    apart = x.reshape(*x.shape[:-1], -1, ROTATED)
    return jnp.matmul(apart, _hadamard(), precision=jax.lax.Precision.HIGHEST).reshape(x.shape)


@functools.cache
def _hadamard() -> np.ndarray:
    """Returns Hadamard's matrix of 64 over its root: symmetric, and its own inverse."""
    found = np.ones((1, 1))
    while len(found) < ROTATED:
        found = np.block([[found, found], [found, -found]])
    return (found / np.sqrt(ROTATED)).astype(np.float32)


def _scale(x: jax.Array) -> jax.Array:
    """Returns the scales of blocks. The sum of zeros is NaN if a value is not finite, on devices whose maximum drops NaN too."""
    return jnp.max(jnp.abs(x), axis=-1) + jnp.sum(x * 0.0, axis=-1)


def _codes(x: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the nearest codes, int32; 0 in a block whose scale is NaN or below the smallest normal number."""
    inverse = jnp.where(scale >= _TINY, TOP[bits] / jnp.maximum(scale, _TINY), 0.0)
    level = x * inverse[..., None]
    level = jnp.where(jnp.abs(level) <= TOP[bits] + 1, level, 0.0)  # no NaN becomes an integer
    return jnp.clip(jnp.floor(level + 0.5), -TOP[bits], TOP[bits]).astype(jnp.int32)


def _in_bytes(low: jax.Array, high: jax.Array) -> jax.Array:
    return ((low & 15) | ((high & 15) << 4)).astype(jnp.uint8)


def _halves(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the signed codes, int32, of the low and the high halves of bytes."""
    wide = codes.astype(jnp.int32)
    return ((wide & 15) ^ 8) - 8, ((wide >> 4) ^ 8) - 8


def _pack(bits: int, blocks: int, x_ref: jax.Ref, *refs: Any) -> None:
    """Each program packs a tile of blocks. With 4 bits it holds the halves of its blocks apart, since they share bytes."""
    codes_ref, scales_ref = refs[-2:]
    block_T, exists_T = _tile(blocks)
    width = WIDTH[bits]
    at = jnp.arange(width)[None, :]
    halves = []
    for start in range(0, BLOCK, width):
        half = pltriton.load(
            x_ref.at[block_T[:, None] * BLOCK + start + at], mask=exists_T[:, None] & (at >= 0), other=0.0
        ).astype(jnp.float32)
        halves.append(_rotated_tile(half, refs[0]) if bits == 4 else half)
    scale_T = _scale(halves[0])
    for half in halves[1:]:
        scale_T = jnp.maximum(scale_T, _scale(half)) + (scale_T + _scale(half)) * 0.0
    codes = [_codes(half, scale_T, bits) for half in halves]
    packed = codes[0].astype(jnp.int8) if bits == 8 else _in_bytes(*codes)
    pltriton.store(codes_ref.at[block_T[:, None] * width + at], packed, mask=exists_T[:, None] & (at >= 0))
    pltriton.store(scales_ref.at[block_T], scale_T, mask=exists_T)


def _unpack_sum(
    parts: int, blocks: int, codes_ref: jax.Ref, scales_ref: jax.Ref, rotation_ref: jax.Ref, out_ref: jax.Ref
) -> None:
    """Each program adds up a tile of blocks over all parts, and rotates the sum back."""
    block_T, exists_T = _tile(blocks)
    at = jnp.arange(WIDTH[4])[None, :]
    mask = exists_T[:, None] & (at >= 0)

    def add(part: jax.Array, sums: tuple) -> tuple:
        row_T = part * blocks + block_T
        codes = pltriton.load(codes_ref.at[row_T[:, None] * WIDTH[4] + at], mask=mask, other=0)
        unit_T = pltriton.load(scales_ref.at[row_T], mask=exists_T, other=0.0) * (1 / TOP[4])
        return tuple(total + half.astype(jnp.float32) * unit_T[:, None] for total, half in zip(sums, _halves(codes)))

    zeros = jnp.zeros((_TILE, WIDTH[4]), jnp.float32)
    for number, total in enumerate(jax.lax.fori_loop(0, parts, add, (zeros, zeros))):
        place = block_T[:, None] * BLOCK + number * WIDTH[4] + at
        pltriton.store(out_ref.at[place], _rotated_tile(total, rotation_ref), mask=mask)


def _tile(blocks: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of a program's blocks, and which of them exist."""
    block_T = pl.program_id(0) * _TILE + jnp.arange(_TILE)
    return block_T, block_T < blocks


def _rotated_tile(x: jax.Array, rotation_ref: jax.Ref) -> jax.Array:
    """Returns a tile rotated; on a GPU the matrix units round its values to TF32, to a 2,048th, where a code is a 14th."""
    at = jnp.arange(ROTATED)
    rotation = pltriton.load(rotation_ref.at[at[:, None], at[None, :]])
    apart = x.reshape(-1, ROTATED)
    return jnp.dot(apart, rotation, preferred_element_type=jnp.float32).reshape(x.shape)
