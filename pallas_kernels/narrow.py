"""Matmuls of a few rows with a weight that is read once, as it is stored. This module holds the kernel and its twin.

    y = x w,   w = unit * scale * code     scale: of 64 weights along a row of w, or of 128 x 128

A program multiplies 64 columns with a part of the rows of w. One row of x is multiplied without matrix units: each thread adds up its own
elements of the tile, and they are summed at the end. More rows use matrix units, on codes that were scaled to 16 bits. The parts of a
column are added up afterwards. The time is that in which w passes the memory.

Shapes: M rows of x, K contracted, N columns, R parts of K.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

COLUMNS = 64  # of a program: a block of scales
SIDE = 128  # rows and columns of a block of scales that is a square
TILE = 64  # rows of w that are read at a time
PROGRAMS = 1056  # eight on each multiprocessor of an H200
MOST_ROWS = 128  # of x; more are a matmul for others
LEAST_ROWS = 16  # of a matmul in a kernel


def takes(shape: tuple[int, int, int]) -> bool:
    """Returns whether the kernel takes a matmul [M, K] x [K, N]."""
    rows, inputs, outputs = shape
    return 0 < rows <= MOST_ROWS and inputs % TILE == 0 and outputs % COLUMNS == 0 and inputs * outputs < 2**31


def multiply(
    x_MK: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    *,
    unit: float = 1.0,
    book: jax.Array | None = None,
    implementation: str = "jnp",
) -> jax.Array:
    """Returns x w: float32[M, N].

    Args:
      x_MK: 16 or 32 bits.
      codes: [K, N] of any dtype, or uint8[K, N / 2], two codes of 4 bits in a byte, the first in the low half.
      scales: floating [K, N / 64], or [K / 128, N / 128], rounded up, of squares; None: all 1.
      unit: multiplies every weight.
      book: float32[16], the values of codes of 4 bits; None where a code is its own value.
      implementation: "pallas", "interpret" or "jnp".
    """
    columns = codes.shape[1] * (1 if book is None else 2)
    if implementation == "jnp":
        return multiply_ref(x_MK, codes, scales, unit=unit, book=book)
    parts = 1
    tiles = x_MK.shape[1] // TILE
    while parts * columns // COLUMNS < PROGRAMS and tiles % (2 * parts) == 0 and tiles // (2 * parts) >= 2:
        parts *= 2
    arrays = {"x": x_MK, "codes": codes, "scales": scales, "book": book}
    given = {name: array for name, array in arrays.items() if array is not None}
    return unit * _parts(given, parts=parts, interpret=implementation == "interpret")


def multiply_ref(
    x_MK: jax.Array, codes: jax.Array, scales: jax.Array | None, *, unit: float = 1.0, book: jax.Array | None = None
) -> jax.Array:
    """Returns the same in plain jnp: the kernel's twin."""
    if book is not None:
        codes = jnp.asarray(book)[jnp.stack([codes & 15, codes >> 4], axis=-1)].reshape(codes.shape[0], -1)
    w_KN = codes.astype(jnp.float32)
    if scales is not None:
        rows, columns = (1, COLUMNS) if scales.shape[0] == len(w_KN) else (SIDE, SIDE)
        whole = jnp.repeat(jnp.repeat(scales.astype(jnp.float32), rows, axis=0), columns, axis=1)
        w_KN = w_KN * whole[: w_KN.shape[0], : w_KN.shape[1]]
    return unit * (x_MK.astype(jnp.float32) @ w_KN)


@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
def _parts(arrays: Mapping[str, jax.Array], *, parts: int, interpret: bool) -> jax.Array:
    """Runs the kernel, and adds up the parts of each column."""
    x_MK, codes = arrays["x"], arrays["codes"]
    (rows, inputs), is_packed = x_MK.shape, "book" in arrays
    outputs = codes.shape[1] * (2 if is_packed else 1)
    names = tuple(arrays)
    padded = 1 if rows == 1 else max(LEAST_ROWS, pl.next_power_of_2(rows))
    body = _one_row if rows == 1 else _rows
    is_square = "scales" in arrays and arrays["scales"].shape[0] != inputs
    kernel = functools.partial(_kernel, names, body, (rows, padded, inputs, outputs), parts, is_square)
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts * rows * outputs,), jnp.float32),
        grid=(outputs // COLUMNS, parts),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2 if rows == 1 else 4),
        interpret=interpret,
        name="narrow_matmul",
    )(*(array.reshape(-1) for array in arrays.values()))
    return jnp.sum(y.reshape(parts, rows, outputs), axis=0)


def _kernel(
    names: tuple[str, ...],
    body: Callable[..., list],
    sizes: tuple[int, int, int, int],
    parts: int,
    is_square: bool,
    *refs: Any,
) -> None:
    """Each program multiplies its columns with its part of the rows of w, and writes the sums."""
    *given, y_ref = refs
    ref = dict(zip(names, given))
    rows, padded, inputs, outputs = sizes
    block, part = pl.program_id(0), pl.program_id(1)
    is_packed = "book" in ref
    width = COLUMNS // 2 if is_packed else COLUMNS  # codes of a program in a row of w
    at_C = block * width + jnp.arange(width)
    count = inputs // TILE // parts

    def tile(number: jax.Array) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
        """Returns the rows of w, their scales in these columns, and the values of the codes, for even and odd columns if packed."""
        at_T = (part * count + number) * TILE + jnp.arange(TILE)
        codes = pltriton.load(ref["codes"].at[at_T[:, None] * (outputs * width // COLUMNS) + at_C[None, :]])
        scales_T = None
        if "scales" in ref:
            at = at_T * (outputs // COLUMNS) + block
            if is_square:
                at = at_T // SIDE * pl.cdiv(outputs, SIDE) + block * COLUMNS // SIDE
            scales_T = pltriton.load(ref["scales"].at[at]).astype(jnp.float32)
        if not is_packed:
            return at_T, scales_T, [codes.astype(jnp.float32)]
        wide = codes.astype(jnp.int32)
        return at_T, scales_T, [pltriton.load(ref["book"].at[half]) for half in (wide & 15, wide >> 4)]

    sums = body(ref["x"], (rows, padded, inputs), tile, count, 2 if is_packed else 1, width)
    row_M = jnp.arange(padded)
    for number, sum_MC in enumerate(sums):
        at_N = block * COLUMNS + jnp.arange(width) * len(sums) + number
        if rows == 1:
            pltriton.store(y_ref.at[part * outputs + at_N], sum_MC)
        else:
            at = (part * rows + row_M)[:, None] * outputs + at_N[None, :]
            pltriton.store(y_ref.at[at], sum_MC, mask=(row_M < rows)[:, None] & (at_N >= 0)[None, :])


def _one_row(
    x_ref: jax.Ref, sizes: tuple[int, int, int], tile: Callable[..., tuple], count: int, halves: int, width: int
) -> list:
    """Returns the sums [columns] of each half."""

    def add(number: jax.Array, sums: tuple) -> tuple:
        at_T, scales_T, values = tile(number)
        x_T = pltriton.load(x_ref.at[at_T]).astype(jnp.float32)
        scaled_T = x_T if scales_T is None else x_T * scales_T
        return tuple(sum_TC + scaled_T[:, None] * value_TC for sum_TC, value_TC in zip(sums, values))

    zeros = jnp.zeros((TILE, width), jnp.float32)
    return [jnp.sum(sum_TC, axis=0) for sum_TC in jax.lax.fori_loop(0, count, add, (zeros,) * halves)]


def _rows(
    x_ref: jax.Ref, sizes: tuple[int, int, int], tile: Callable[..., tuple], count: int, halves: int, width: int
) -> list:
    """Returns the sums [rows, columns] of each half."""
    rows, padded, inputs = sizes
    row_M = jnp.arange(padded)
    dtype = x_ref.dtype

    def add(number: jax.Array, sums: tuple) -> tuple:
        at_T, scales_T, values = tile(number)
        mask = (row_M < rows)[:, None] & (at_T >= 0)[None, :]
        x_MT = pltriton.load(x_ref.at[row_M[:, None] * inputs + at_T[None, :]], mask=mask, other=0.0)
        if scales_T is not None:
            values = [value_TC * scales_T[:, None] for value_TC in values]
        return tuple(
            sum_MC + jnp.dot(x_MT, value_TC.astype(dtype), preferred_element_type=jnp.float32)
            for sum_MC, value_TC in zip(sums, values)
        )

    zeros = jnp.zeros((padded, width), jnp.float32)
    return list(jax.lax.fori_loop(0, count, add, (zeros,) * halves))
