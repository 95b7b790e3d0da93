"""Weights in 4 or 8 bits with a scale for each block. This module quantizes kernels and dequantizes them.

    w ~ scale * codebook[code]     scale = max |w| of the block, 64 weights

- "int8": the code book is -127/127 ... 127/127.
- "fp8": the values of e4m3, divided by 448.
- "nf4": 16 values, the quantiles of a normal distribution, with an exact 0 (QLoRA, arXiv:2305.14314, section 3 and appendix E).

- "mxfp4": 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, with a power of two as the scale of 32 inputs (OCP Microscaling Formats v1.0),
  as files of gpt-oss hold its experts: kernels float[experts, inputs, outputs...] alone, with codes uint8[experts, outputs..., inputs / 2]
  and exponents uint8[experts, outputs..., inputs / 32], biased by 127. 4.25 bits a weight.
- "fp8_block": the values of e4m3, with a float32 scale for each block of 128 x 128 of a matrix, as DeepSeek-V3's files hold theirs
  (arXiv:2412.19437, section 3.3): the bits of values uint8[*stack, inputs..., outputs...] and of scales uint32[*stack, inputs / 128,
  outputs / 128], rounded up. As integers, so that no precision casts them. 8.002 bits a weight.

Two nf4 codes share a byte. Scales are bfloat16, rounded up before the codes are chosen, so no weight exceeds its block's scale: 4.25 bits a
weight, and 8.25 with int8 and fp8. A block lies within one row of the kernel's first dim, so a kernel sharded on that dim is quantized
locally.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

NONE, INT8, FP8, NF4, MXFP4 = "none", "int8", "fp8", "nf4", "mxfp4"
FP8_BLOCK = "fp8_block"
KINDS = (NONE, INT8, NF4, MXFP4, FP8_BLOCK)  # of frozen weights in training
TOP = {INT8: 127, FP8: 448}  # the largest code of 8 bits: the weight that is its block's scale
SCALES, EXPONENTS, BLOCK_SCALES = "scales", "exponents", "block_scales"
TRANSPOSED = (
    "transposed"  # the scales of a matrix [K, N / 64] as [N / 64, K], beside them, for kernels that read them so
)
BLOCK, GROUP, SIDE = 64, 32, 128  # weights of a scale; inputs of one of mxfp4; rows and columns of one of fp8_block
# The values of QLoRA's appendix E.
CODE_BOOK = np.array(
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    np.float32,
)  # fmt: skip
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # 1 bit of mantissa, 2 of exponent
MXFP4_VALUES = np.concatenate([_HALF, -_HALF])
_HALVES = (_HALF[1:] + _HALF[:-1]) / 2
_BETWEEN = (CODE_BOOK[1:] + CODE_BOOK[:-1]) / 2  # codes change here


def takes(shape: tuple[int, ...], kind: str = NF4) -> bool:
    """Returns whether a kernel of this shape is quantized: its rows, over all dims but the first, divide into blocks. Those of "fp8_block"
    may be parts."""
    return kind == FP8_BLOCK or (len(shape) > 1 and shape[-1] % 2 == 0 and math.prod(shape[1:]) % BLOCK == 0)


def quantize(kernel: jax.Array, kind: str, inputs: int = 1) -> dict[str, jax.Array]:
    """Returns a kernel float[rows, ...] as {kind: codes, "scales": bfloat16[rows, weights of a row / 64]}.

    Codes are int8 or float8_e4m3fn of the kernel's shape, or uint8 with half of its last dim. For the others see the module's docstring.
    "fp8_block" alone reads `inputs`, the number of the kernel's first dims that are inputs.
    """
    if kind == FP8_BLOCK:
        return _to_blocks(kernel.astype(jnp.float32), inputs)
    if kind == MXFP4:
        return _to_mxfp4(kernel.astype(jnp.float32))
    rows = kernel.astype(jnp.float32).reshape(kernel.shape[0], -1, BLOCK)
    scales = _rounded_up(jnp.max(jnp.abs(rows), axis=-1))
    normed = rows / jnp.where(scales == 0, 1, scales).astype(jnp.float32)[..., None]
    if kind == INT8:
        return {kind: jnp.round(normed * TOP[INT8]).astype(jnp.int8).reshape(kernel.shape), SCALES: scales}
    if kind == FP8:
        return {kind: (normed * TOP[FP8]).astype(jnp.float8_e4m3fn).reshape(kernel.shape), SCALES: scales}
    codes = jnp.sum(normed[..., None] > _BETWEEN, axis=-1, dtype=jnp.uint8).reshape(-1, 2)
    packed = codes[:, 0] | (codes[:, 1] << 4)
    return {kind: packed.reshape(*kernel.shape[:-1], kernel.shape[-1] // 2), SCALES: scales}


def dequantize(stored: Mapping[str, jax.Array], dtype: DTypeLike) -> jax.Array:
    """Returns the kernel that `quantize` stored, in `dtype`. It has no gradient, and `jax.checkpoint` computes it again under any policy
    that refuses `custom_vjp_call`."""
    return _dequantize(dict(stored), jnp.dtype(dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dequantize(stored: dict[str, jax.Array], dtype: DTypeLike) -> jax.Array:
    shape, kind = shape_of(stored), kind_of(stored)
    if kind == MXFP4:
        return _of_mxfp4(stored[MXFP4], stored[EXPONENTS]).astype(dtype)
    if kind == FP8_BLOCK:
        return _of_blocks(stored).astype(dtype)
    scales = stored[SCALES].astype(jnp.float32)
    # Scales get the kernel's shape, and not the kernel that of blocks: devices that share a kernel may cut it within a block. And the
    # compiler knows of fewer ways to shard the dims if they are one in between.
    if shape[-1] % BLOCK == 0:
        scales = scales.reshape(*shape[:-1], -1)
    scales = jnp.repeat(scales, BLOCK, axis=-1).reshape(shape)
    if kind in TOP:
        values = stored[kind].astype(jnp.float32) / TOP[kind]
    else:
        packed = stored[NF4]
        codes = jnp.stack([packed & 15, packed >> 4], axis=-1)
        values = jnp.asarray(CODE_BOOK).at[codes.reshape(shape)].get(mode="promise_in_bounds")
    return (values * scales).astype(dtype)


def _to_mxfp4(kernel: jax.Array) -> dict[str, jax.Array]:
    """Rounds each weight to the nearest value. The largest of a group has the largest exponent of a value, 2, so 7 of 4 becomes 6."""
    moved = jnp.moveaxis(kernel, 1, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, GROUP)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1), jnp.uint32)
    exponents = jnp.maximum(bits >> 23, 3) - 2
    values = groups / _power(exponents)[..., None]
    codes = jnp.sum(jnp.abs(values)[..., None] > _HALVES, axis=-1, dtype=jnp.uint8) | jnp.where(values < 0, 8, 0)
    pairs = codes.reshape(*moved.shape[:-1], -1, 2).astype(jnp.uint8)
    return {MXFP4: pairs[..., 0] | (pairs[..., 1] << 4), EXPONENTS: exponents.astype(jnp.uint8)}


def _of_mxfp4(packed: jax.Array, exponents: jax.Array) -> jax.Array:
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = jnp.asarray(MXFP4_VALUES).at[codes].get(mode="promise_in_bounds")
    return jnp.moveaxis(values * jnp.repeat(_power(exponents.astype(jnp.uint32)), GROUP, axis=-1), -1, 1)


def _to_blocks(kernel: jax.Array, inputs: int) -> dict[str, jax.Array]:
    rows, columns = blocks_of(kernel.shape, inputs)
    matrix = kernel.reshape(math.prod(kernel.shape[:inputs]), -1)
    padded = jnp.pad(matrix, [(0, SIDE * count - size) for count, size in zip((rows, columns), matrix.shape)])
    scales = jnp.max(jnp.abs(padded.reshape(rows, SIDE, columns, SIDE)), axis=(1, 3)) / TOP[FP8]
    codes = (kernel / _over_blocks(jnp.where(scales == 0, 1, scales), kernel.shape)).astype(jnp.float8_e4m3fn)
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    return {FP8_BLOCK: jax.lax.bitcast_convert_type(codes, jnp.uint8), BLOCK_SCALES: bits}


def _of_blocks(stored: Mapping[str, jax.Array]) -> jax.Array:
    values, scales = values_of(stored)
    return values.astype(jnp.float32) * _over_blocks(scales, values.shape)


def _over_blocks(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the scales of blocks [*stack, rows, columns], each at all weights of its block: float32 of the kernel's shape."""
    own = shape[scales.ndim - 2 :]
    # Where the inputs end is not stored. If two answers fit, the matrix is one block: a dim that moves between rows and columns at least
    # doubles one and halves the other, so more blocks than one change their number.
    inputs = next(n for n in range(1, len(own)) if blocks_of(own, n) == scales.shape[-2:])
    rows, columns = math.prod(own[:inputs]), math.prod(own[inputs:])
    whole = jnp.repeat(jnp.repeat(scales, SIDE, axis=-2)[..., :rows, :], SIDE, axis=-1)[..., :columns]
    return whole.reshape(shape)


def blocks_of(shape: tuple[int, ...], inputs: int) -> tuple[int, int]:
    """Returns the numbers of blocks over the rows and the columns of a kernel [inputs..., outputs...]."""
    return -(-math.prod(shape[:inputs]) // SIDE), -(-math.prod(shape[inputs:]) // SIDE)


def _power(exponents: jax.Array) -> jax.Array:
    """Returns 2^(exponent - 127), float32, exactly; 0 of the exponent 0."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.uint32) << 23, jnp.float32)


def _forward(stored: dict[str, jax.Array], dtype: DTypeLike) -> tuple[jax.Array, dict[str, None]]:
    return _dequantize(stored, dtype), dict.fromkeys(stored)


def _backward(dtype: DTypeLike, names: dict[str, None], _: jax.Array) -> tuple[dict[str, None]]:
    return (names,)


_dequantize.defvjp(_forward, _backward)


def is_quantized(node: Any) -> bool:
    """Returns whether a node of a weight tree is a quantized kernel."""
    is_node = isinstance(node, Mapping)
    return is_node and (
        EXPONENTS in node or BLOCK_SCALES in node or (SCALES in node and not {INT8, FP8, NF4}.isdisjoint(node))
    )


def parts_of(kind: str) -> tuple[str, str]:
    """Returns the names of what `quantize` returns: of the codes, and of the scales."""
    return kind, {MXFP4: EXPONENTS, FP8_BLOCK: BLOCK_SCALES}.get(kind, SCALES)


def kind_of(stored: Mapping[str, Any]) -> str:
    """Returns the kind of a kernel that is stored."""
    return next(kind for kind in (INT8, FP8, NF4, MXFP4, FP8_BLOCK) if kind in stored)


def values_of(stored: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and the scales of a kernel that is stored, floating where their bits are stored as integers ("fp8_block")."""
    codes, scales = (stored[part] for part in parts_of(kind_of(stored)))
    if BLOCK_SCALES not in stored:
        return codes, scales
    bitcast = jax.lax.bitcast_convert_type
    return bitcast(codes, jnp.float8_e4m3fn), bitcast(scales, jnp.float32)


def shape_of(stored: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the shape of the kernel that is stored."""
    if kind_of(stored) in (*TOP, FP8_BLOCK):
        return tuple(stored[kind_of(stored)].shape)
    if kind_of(stored) == MXFP4:
        count, *outputs, half = stored[MXFP4].shape
        return (count, 2 * half, *outputs)
    *rows, last = stored[NF4].shape
    return (*rows, 2 * last)


@functools.lru_cache(maxsize=512)
def abstract(shape: tuple[int, ...], kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what `quantize` returns for a kernel of this shape. Layers share it: do not change it."""
    return jax.eval_shape(lambda kernel: quantize(kernel, kind), jax.ShapeDtypeStruct(shape, jnp.float32))


def _rounded_up(values: jax.Array) -> jax.Array:
    """Returns non-negative float32 values as bfloat16, never smaller."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    up = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(up, jnp.float32).astype(jnp.bfloat16)
