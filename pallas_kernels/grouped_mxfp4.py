"""Multiplies groups of rows by matrices in MXFP4, read as they are stored. This module holds both products of frozen experts, for Triton.

`grouped` says what groups, tiles of rows and the products are; here

    rhs[g][k, n] = value(code[g, n, k]) 2^(exponent[g, n, k / 32] - 127)      value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

(OCP Microscaling Formats v1.0), exact in bfloat16. Codes become numbers in registers, so a matrix passes the memory once, in 4.25 bits a
weight, and only those of groups with rows do. There is no gradient of the matrices.

Two codes are in a byte: of an even and of an odd k. So `lhs` is given, and `dlhs` returned by the kernel, with its even columns before the
odd ones, and a tile of bytes is two operands of matmuls.

Shapes: M rows, K and N the matrices' dims, G groups, H = K / 2 bytes, J = K / 32 exponents, T tiles of rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.grouped import TritonTile, dot

GROUP, BYTES = 32, 16  # weights of an exponent, and their bytes
# The fastest of six and of five on an H200 (docs/benchmarks/raw/stored_1xh200.txt).
FEW = TritonTile(16, 64, 128, 4, 4)  # of `out` of groups of few rows
ROWS = TritonTile(128, 128, 64, 8, 3)  # of `out`
TRANSPOSED = TritonTile(128, 128, 64, 8, 3)  # of `dlhs`


def takes(lhs: jax.Array, codes_GNH: jax.Array, transposed: bool) -> bool:
    """Returns whether the kernels compute a product: of some bfloat16 rows, and fewer than 2^31 bytes, by which they count."""
    columns = codes_GNH.shape[1] if transposed else 2 * codes_GNH.shape[2]
    is_known = lhs.dtype == jnp.bfloat16 and lhs.shape[0] > 0 and lhs.shape[1] == columns
    return is_known and codes_GNH.size < 2**31 and lhs.size < 2**31


def tile_of(rows: int, groups: int, transposed: bool) -> TritonTile:
    """Returns the tile of a product of so many rows in so many groups."""
    return TRANSPOSED if transposed else FEW if rows <= 16 * groups else ROWS


@functools.partial(jax.jit, static_argnames=("transposed", "tile", "interpret"))
def rows(
    lhs: jax.Array,
    codes_GNH: jax.Array,
    exponents_GNJ: jax.Array,
    sizes_G: jax.Array,
    *,
    transposed: bool,
    tile: TritonTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns `out` of the dtype of `lhs`, or `dlhs` of `dout` if `transposed`.

    Args:
      lhs: the rows, sorted by group: [M, K], or `dout` [M, N].
      codes_GNH: uint8, two codes a byte, that of the even k in the low half.
      exponents_GNJ: uint8.
      sizes_G: int32, the rows of each group; their sum is at most M.
      transposed: see above.
      tile: the sizes; None: those of `tile_of`.
      interpret: whether the kernel is interpreted.
    """
    height, (groups, outputs, half) = lhs.shape[0], codes_GNH.shape
    tile = tile or tile_of(height, groups, transposed)
    columns = half if transposed else outputs  # bytes of `dlhs`, columns of `out`
    tile = tile.fitted(tile.rows, 2 * half if transposed else outputs, 2**30)
    wide = tile.columns // 2 if transposed else tile.columns
    across = pl.cdiv(columns, wide)
    tiles = min(height, height // tile.rows + groups + 1)
    body = _transposed if transposed else _rows
    kernel = functools.partial(_kernel, body, tile, (height, groups, outputs, half), across, not interpret)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((height, 2 * columns if transposed else columns), lhs.dtype),
        grid=(tiles * across,),
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(4 * height * outputs * half, 0, lhs.nbytes + codes_GNH.nbytes),
        name="grouped_rows_t_mxfp4" if transposed else "grouped_rows_mxfp4",
    )
    given = lhs if transposed else lhs.reshape(height, half, 2).swapaxes(1, 2).reshape(height, -1)
    out = call(
        sizes_G.astype(jnp.int32), exponents_GNJ, given, codes_GNH
    )  # `plan` and `clock` read the work off the last two
    return out.reshape(height, 2, half).swapaxes(1, 2).reshape(height, -1) if transposed else out


def _kernel(body: Any, tile: TritonTile, sizes: tuple[int, ...], across: int, native: bool, *refs: Any) -> None:
    """One tile of the result."""
    sizes_ref, exponents_ref, lhs_ref, codes_ref, out_ref = refs
    (height, groups, *shape), column = sizes, pl.program_id(0) % across
    group, start, real, count = _place(pl.program_id(0) // across, tile.rows, height, groups, sizes_ref)

    @pl.when(count > 0)
    def _() -> None:
        def codes(at_N: jax.Array, at_J: jax.Array) -> jax.Array:
            """Returns the bytes [N, J, 16] of these columns and blocks; those beyond the matrix are 0."""
            mask = ((at_N < shape[0])[:, None] & (at_J < shape[1] // BYTES)[None, :])[:, :, None]
            where = at_N[:, None, None], at_J[None, :, None] * BYTES + jnp.arange(BYTES)[None, None, :]
            return pltriton.load(
                codes_ref.at[group, *where], mask=jnp.broadcast_to(mask, (*mask.shape[:2], BYTES)), other=0
            )

        def exponents(at_N: jax.Array, at_J: jax.Array) -> jax.Array:
            """Returns those of the same blocks: int32[N, J]."""
            mask = (at_N < shape[0])[:, None] & (at_J < shape[1] // BYTES)[None, :]
            found = pltriton.load(exponents_ref.at[group, at_N[:, None], at_J[None, :]], mask=mask, other=0)
            return found.astype(jnp.int32)

        body(tile, shape, column, native, (codes, exponents), lhs_ref, out_ref, (start, real, count))


def _place(number: jax.Array, most: int, height: int, groups: int, sizes_ref: Any) -> tuple[jax.Array, ...]:
    """Returns of a tile of rows its group, its first row, how many of its rows are the group's, and how many it writes.

    Each program finds them, since the kernels that would write a table take as long as few rows do. See `row_tiles.table`.
    """
    at = jnp.arange(pl.next_power_of_2(groups + 1))
    sizes = pltriton.load(sizes_ref.at[at], mask=at < groups, other=0)
    sizes = jnp.where(at == groups, height - jnp.sum(sizes), sizes)  # the rows after the last group
    tiles = (sizes + (most - 1)) // most
    own = jnp.sum((jnp.cumsum(tiles) <= number).astype(jnp.int32))
    start = jnp.sum(jnp.where(at < own, sizes - tiles * most, 0)) + number * most
    count = jnp.clip(jnp.sum(jnp.where(at <= own, sizes, 0)) - start, 0, most)
    return jnp.minimum(own, groups - 1), start, jnp.where(own < groups, count, 0), count


def _rows(
    tile: TritonTile, shape: list[int], column: jax.Array, native: bool, read: Any, lhs_ref: Any, out_ref: Any,
    extent: tuple[jax.Array, jax.Array, jax.Array],
) -> None:  # fmt: skip
    """Writes a tile of `out`. Exponents are read a step ahead, since copies of so few bytes are not asynchronous."""
    (outputs, half), (start, real, count), (codes, exponents) = shape, extent, read
    at_M, at_N = jnp.arange(tile.rows), column * tile.columns + jnp.arange(tile.columns)
    spots, is_row = (start + at_M)[:, None], (at_M < real)[:, None]
    wide, own = tile.depth // 2, jnp.arange(tile.depth // GROUP)

    def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        acc, now = carry
        later = exponents(at_N, (i + 1) * own.size + own)
        pair = _weights(codes(at_N, i * own.size + own), now, native)
        at_H = (i * wide + jnp.arange(wide))[None, :]
        for number, weights in enumerate(pair):
            mask = is_row & (at_H < half)
            lhs = pltriton.load(lhs_ref.at[spots, number * half + at_H], mask=mask, other=0.0)
            acc = acc + dot(lhs, weights.reshape(tile.columns, wide).T)
        return acc, later

    first = jnp.zeros((tile.rows, tile.columns), jnp.float32), exponents(at_N, own)
    acc = jax.lax.fori_loop(0, pl.cdiv(half, wide), step, first)[0] * _unit(native)
    mask = (at_M < count)[:, None] & (at_N < outputs)[None]
    pltriton.store(out_ref.at[spots, at_N[None, :]], acc.astype(out_ref.dtype), mask=mask)


def _transposed(
    tile: TritonTile, shape: list[int], column: jax.Array, native: bool, read: Any, lhs_ref: Any, out_ref: Any,
    extent: tuple[jax.Array, jax.Array, jax.Array],
) -> None:  # fmt: skip
    """Writes a tile of `dlhs`: of its even columns and of the odd ones beside them."""
    (outputs, half), (start, real, count), (codes, exponents) = shape, extent, read
    wide = tile.columns // 2
    at_M, at_H = jnp.arange(tile.rows), column * wide + jnp.arange(wide)
    spots, is_row = (start + at_M)[:, None], (at_M < real)[:, None]
    at_J = column * (wide // BYTES) + jnp.arange(wide // BYTES)

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        *accs, now = carry
        at_N = i * tile.depth + jnp.arange(tile.depth)
        later = exponents(at_N + tile.depth, at_J)
        pair = _weights(codes(at_N, at_J), now, native)
        dout = pltriton.load(lhs_ref.at[spots, at_N[None, :]], mask=is_row & (at_N < outputs)[None], other=0.0)
        added = (dot(dout, weights.reshape(tile.depth, wide)) for weights in pair)
        return *(acc + one for acc, one in zip(accs, added)), later

    zeros = jnp.zeros((tile.rows, wide), jnp.float32)
    first = zeros, zeros, exponents(jnp.arange(tile.depth), at_J)
    *accs, _ = jax.lax.fori_loop(0, pl.cdiv(outputs, tile.depth), step, first)
    mask = (at_M < count)[:, None] & (at_H < half)[None]
    for number, acc in enumerate(accs):
        place = out_ref.at[spots, number * half + at_H[None, :]]
        pltriton.store(place, (acc * _unit(native)).astype(out_ref.dtype), mask=mask)


# A code is a sign, two bits of exponent and one of mantissa. At these bits of a bfloat16 they are 2^-126 times its value (0.5 is a number
# without a leading 1), and 2^(exponent - 65) makes of that 2^-64 times the weight. It is finite up to an exponent of 192.
_BITS, _BELOW, _BIAS, UNIT = "0x01C001C0", 6, 62, 2.0**64


def decode_text(is_odd: bool) -> str:
    """PTX: makes the even or the odd codes of four bytes ($2) bfloat16 in $0 and $1, times those in $3 and $4."""
    lines = [".reg .b32 t, u, minus; mov.b32 minus, 0x80008000;"]
    for pair, places in enumerate(("0x1404", "0x3424")):  # each byte in the high half of a float
        lines.append(f"prmt.b32 t, $2, 0, {places}; shr.u32 u, t, {_BELOW if is_odd else _BELOW - 4};")
        lines.append(f"and.b32 u, u, {_BITS}; {'' if is_odd else 'shl.b32 t, t, 4;'}")
        lines.append(f"lop3.b32 u, t, minus, u, 0xEA; fma.rn.bf16x2 ${pair}, u, ${3 + pair}, minus;")
    return "{" + "\n".join(lines) + "}"


def _weights(codes: jax.Array, exponents: jax.Array, native: bool) -> list[jax.Array]:
    """Returns the weights of the even and of the odd codes of bytes [N, J, 16], bfloat16, over `_unit`."""
    if not native:
        scales = jax.lax.bitcast_convert_type(exponents << 23, jnp.float32)[:, :, None]
        halves = (codes.astype(jnp.int32) & 15, codes.astype(jnp.int32) >> 4)
        return [(_value(half) * scales).astype(jnp.bfloat16) for half in halves]
    scales = jnp.broadcast_to(scales_of(exponents)[:, :, None], codes.shape)
    how: dict[str, Any] = {"args": [codes, scales], "pack": 4}
    how |= {"constraints": "=r,=r,r,r,r", "result_shape_dtypes": [jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)]}
    return [pltriton.elementwise_inline_asm(decode_text(is_odd), **how)[0] for is_odd in (False, True)]


def scales_of(exponents: jax.Array) -> jax.Array:
    """Returns by what the text multiplies: 2^(exponent - 65), bfloat16; 0 of the exponent 0, and infinity where that is not finite."""
    bits = jnp.where(exponents == 0, 0, jnp.minimum(exponents + _BIAS, 255)) << 7
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _value(codes: jax.Array) -> jax.Array:
    """Returns the values of codes, float32."""
    power, tail = (codes >> 1) & 3, (codes & 1).astype(jnp.float32)
    size = jnp.where(power == 0, 0.5 * tail, (1 + 0.5 * tail) * (1 << power).astype(jnp.float32) / 2)
    return jnp.where(codes >= 8, -size, size)


def _unit(native: bool) -> float:
    return UNIT if native else 1.0
