"""Multiplies groups of rows by matrices in MXFP4, read as they are stored. This module holds both products of frozen experts, for Triton.

`grouped` says what groups, tiles of rows and the products are; here

    rhs[g][k, n] = value(code[g, n, k]) 2^(exponent[g, n, k / 32] - 127)      value: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives

(OCP Microscaling Formats v1.0), exact in bfloat16. Codes become numbers in registers, so a matrix passes the memory once, in 4.25 bits a
weight, and only those of groups with rows do. There is no gradient of the matrices.

Two codes are in a byte: of an even and of an odd k. So `lhs` is given, and `dlhs` returned by the kernel, with its even columns before the
odd ones, and a tile of bytes is two operands of matmuls. Of a few rows in each group (`few_rows`) threads add up their own terms in float32:
matrix units need at least 16 rows.

Shapes: M rows, K and N the matrices' dims, G groups, H = K / 2 bytes, J = K / 32 exponents, T tiles of rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import row_tiles
from pallas_kernels.grouped import TritonTile

GROUP, BYTES = 32, 16  # weights of an exponent, and their bytes
FEW = {1: TritonTile(1, 32, 1024, 4, 1), 2: TritonTile(2, 32, 1024, 4, 1)}  # by the most rows of a tile
SOME = TritonTile(16, 64, 256, 4, 3)
ROWS = TritonTile(128, 128, 64, 8, 3)  # of `out`
TRANSPOSED = TritonTile(128, 128, 64, 8, 3)  # of `dlhs`


def takes(lhs: jax.Array, codes_GNH: jax.Array, transposed: bool) -> bool:
    """Returns whether the kernels compute a product: of bfloat16 rows, and fewer than 2^31 bytes, by which they count."""
    columns = codes_GNH.shape[1] if transposed else 2 * codes_GNH.shape[2]
    is_known = lhs.dtype == jnp.bfloat16 and lhs.shape[1] == columns and columns % 16 == 0
    return is_known and codes_GNH.size < 2**31 and lhs.size < 2**31


def tile_of(rows: int, groups: int, transposed: bool) -> TritonTile:
    """Returns the tile of a product of so many rows in so many groups."""
    if transposed:
        return TRANSPOSED
    if rows <= 2 * groups:
        return FEW[1 if 2 * rows <= groups else 2]
    return SOME if rows <= 16 * groups else ROWS


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
    is_few = tile.rows < 16
    tile = tile if is_few else tile.fitted(tile.rows, 2 * half if transposed else outputs, 2**30)
    wide = tile.columns // 2 if transposed else tile.columns
    across = pl.cdiv(columns, wide)
    table = row_tiles.table(sizes_G, height, tile.rows)
    body = _few_rows if is_few else _transposed if transposed else _rows
    kernel = functools.partial(_kernel, body, tile, (outputs, half), across, not interpret)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((height, 2 * columns if transposed else columns), lhs.dtype),
        grid=(table.group_T.shape[0] * across,),
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(4 * height * outputs * half, 0, lhs.nbytes + codes_GNH.nbytes),
        name="grouped_rows_t_mxfp4" if transposed else "grouped_rows_mxfp4",
    )
    given = lhs if transposed else lhs.reshape(height, half, 2).swapaxes(1, 2).reshape(height, -1)
    out = call(*table, exponents_GNJ, given, codes_GNH)  # `plan` and `clock` read the work off the last two
    return out.reshape(height, 2, half).swapaxes(1, 2).reshape(height, -1) if transposed else out


def _kernel(body: Any, tile: TritonTile, shape: tuple[int, int], across: int, native: bool, *refs: Any) -> None:
    """One tile of the result."""
    group_ref, start_ref, real_ref, count_ref, exponents_ref, lhs_ref, codes_ref, out_ref = refs
    number, column = pl.program_id(0) // across, pl.program_id(0) % across
    count = count_ref[number]

    @pl.when(count > 0)
    def _() -> None:
        group, start, real = group_ref[number], start_ref[number], real_ref[number]

        def read(at_N: jax.Array, at_J: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns the bytes [N, J, 16] and the exponents [N, J] of these columns and blocks; those beyond the matrix are 0."""
            mask = (at_N < shape[0])[:, None] & (at_J < shape[1] // BYTES)[None, :]
            at_16 = jnp.arange(BYTES)[None, None, :]
            where = at_N[:, None, None], at_J[None, :, None] * BYTES + at_16
            wide = jnp.broadcast_to(mask[:, :, None], (*mask.shape, BYTES))
            codes = pltriton.load(codes_ref.at[group, *where], mask=wide, other=0)
            return codes, pltriton.load(exponents_ref.at[group, at_N[:, None], at_J[None, :]], mask=mask, other=0)

        body(tile, shape, column, native, read, lhs_ref, out_ref, (start, real, count))


def _rows(
    tile: TritonTile, shape: tuple[int, int], column: jax.Array, native: bool, read: Any, lhs_ref: Any, out_ref: Any,
    extent: tuple[jax.Array, jax.Array, jax.Array],
) -> None:  # fmt: skip
    """Writes a tile of `out`."""
    (outputs, half), (start, real, count) = shape, extent
    at_M, at_N = jnp.arange(tile.rows), column * tile.columns + jnp.arange(tile.columns)
    spots, is_row = (start + at_M)[:, None], (at_M < real)[:, None]
    blocks, wide = tile.depth // GROUP, tile.depth // 2

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        pair = _weights(*read(at_N, i * blocks + jnp.arange(blocks)), native)
        at_H = (i * wide + jnp.arange(wide))[None, :]
        mask = is_row & (at_H < half)
        for number, weights in enumerate(pair):
            lhs = pltriton.load(lhs_ref.at[spots, number * half + at_H], mask=mask, other=0.0)
            acc = acc + _dot(lhs, weights.reshape(tile.columns, wide).T)
        return acc

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    acc = jax.lax.fori_loop(0, pl.cdiv(half, wide), step, zeros) * _unit(native)
    mask = (at_M < count)[:, None] & (at_N < outputs)[None]
    pltriton.store(out_ref.at[spots, at_N[None, :]], acc.astype(out_ref.dtype), mask=mask)


def _transposed(
    tile: TritonTile, shape: tuple[int, int], column: jax.Array, native: bool, read: Any, lhs_ref: Any, out_ref: Any,
    extent: tuple[jax.Array, jax.Array, jax.Array],
) -> None:  # fmt: skip
    """Writes a tile of `dlhs`: of its even columns and of the odd ones beside them."""
    (outputs, half), (start, real, count) = shape, extent
    wide = tile.columns // 2
    blocks = wide // BYTES
    at_M, at_H = jnp.arange(tile.rows), column * wide + jnp.arange(wide)
    spots, is_row = (start + at_M)[:, None], (at_M < real)[:, None]

    def step(i: jax.Array, accs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        at_N = i * tile.depth + jnp.arange(tile.depth)
        pair = _weights(*read(at_N, column * blocks + jnp.arange(blocks)), native)
        dout = pltriton.load(lhs_ref.at[spots, at_N[None, :]], mask=is_row & (at_N < outputs)[None], other=0.0)
        return tuple(acc + _dot(dout, weights.reshape(tile.depth, wide)) for acc, weights in zip(accs, pair))

    zeros = jnp.zeros((tile.rows, wide), jnp.float32)
    accs = jax.lax.fori_loop(0, pl.cdiv(outputs, tile.depth), step, (zeros, zeros))
    mask = (at_M < count)[:, None] & (at_H < half)[None]
    for number, acc in enumerate(accs):
        place = out_ref.at[spots, number * half + at_H[None, :]]
        pltriton.store(place, (acc * _unit(native)).astype(out_ref.dtype), mask=mask)


def _few_rows(
    tile: TritonTile, shape: tuple[int, int], column: jax.Array, native: bool, read: Any, lhs_ref: Any, out_ref: Any,
    extent: tuple[jax.Array, jax.Array, jax.Array],
) -> None:  # fmt: skip
    """Writes a tile of `out` of few rows, each by sums of its own."""
    (outputs, half), (start, real, count) = shape, extent
    at_N, blocks = column * tile.columns + jnp.arange(tile.columns), tile.depth // GROUP

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at_J = i * blocks + jnp.arange(blocks)
        codes, exponents = read(at_N, at_J)
        pair = [half_.astype(jnp.float32) for half_ in _units(codes, native, "f16")]
        scales = _power(exponents)
        at_H = at_J[:, None] * BYTES + jnp.arange(BYTES)[None, :]
        added = []
        for number, own in enumerate(sums):
            terms = jnp.zeros((), jnp.float32)
            for odd, values in enumerate(pair):
                mask = (at_H < half) & (number < real)
                lhs = pltriton.load(lhs_ref.at[start + number, odd * half + at_H], mask=mask, other=0.0)
                terms = terms + values * lhs.astype(jnp.float32)[None]
            added.append(own + jnp.sum(terms, axis=2) * scales)
        return tuple(added)

    zeros = jnp.zeros((tile.columns, blocks), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(2 * half, tile.depth), step, (zeros,) * tile.rows)
    for number, own in enumerate(sums):
        out = jnp.sum(own, axis=1) * 2.0**14
        pltriton.store(
            out_ref.at[start + number, at_N], out.astype(out_ref.dtype), mask=(at_N < outputs) & (number < count)
        )


def _power(exponents: jax.Array) -> jax.Array:
    """Returns 2^(exponent - 127), float32; 0 of the exponent 0."""
    return jax.lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)


def _dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.lax.dot_general(lhs, rhs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


# A code is a sign, two bits of exponent and one of mantissa. Put at these bits of a float they are its value times a power of two, with 0.5 as a
# number without a leading 1.
_AT = {"f16": (0x0E000E00, 3), "bf16": (0x01C001C0, 6)}  # in two floats: these bits, and how far below the sign's next bit


def decode_text(kind: str) -> str:
    """PTX: makes eight codes of four bytes %4 floats: the even ones in %0 and %1, the odd ones in %2 and %3; of "bf16" times those in %5 and
    %6."""
    mask, far = _AT[kind]
    lines = [".reg .b32 t, u;"]
    for pair in range(2):
        low, high = f"${pair}", f"${2 + pair}"
        lines.append(f"prmt.b32 t, $4, 0, 0x{3 if pair else 1}4{2 if pair else 0}4;")  # a byte in the high half of each float
        lines.append(f"shr.b32 u, t, {far}; and.b32 u, u, {mask:#x}; lop3.b32 {high}, t, 0x80008000, u, 0xEA;")
        moved = f"shl.b32 u, t, {4 - far};" if far < 4 else f"shr.b32 u, t, {far - 4};"
        lines.append(f"{moved} and.b32 u, u, {mask:#x}; shl.b32 t, t, 4; lop3.b32 {low}, t, 0x80008000, u, 0xEA;")
        if kind == "bf16":
            lines += [f"fma.rn.bf16x2 {half}, {half}, ${5 + pair}, 0x80008000;" for half in (low, high)]
    return "{" + "\n".join(lines) + "}"


def _units(codes: jax.Array, native: bool, kind: str) -> list[jax.Array]:
    """Returns the values of the even and of the odd codes of bytes, float16, over 2^14."""
    if native:
        return _run_ptx(kind, codes)
    wide = codes.astype(jnp.int32)
    return [
        jax.lax.bitcast_convert_type((((code & 8) << 12) | ((code & 7) << 9)).astype(jnp.uint16), jnp.float16)
        for code in (wide & 15, wide >> 4)
    ]


def _run_ptx(kind: str, codes: jax.Array, *scales: jax.Array) -> list[jax.Array]:
    dtype = {"f16": jnp.float16, "bf16": jnp.bfloat16}[kind]
    results = [jax.ShapeDtypeStruct(codes.shape, dtype)] * 2
    constraints = "=r,=r,=r,=r,r" + ",r,r" * len(scales)
    return pltriton.elementwise_inline_asm(
        decode_text(kind), args=[codes, *scales], constraints=constraints, pack=4, result_shape_dtypes=results
    )


# The values of codes in bfloat16 are 2^-126 times themselves, and 2^(exponent - 65) is finite, up to an exponent of 192.
_MOST = 192


def _weights(codes: jax.Array, exponents: jax.Array, native: bool) -> list[jax.Array]:
    """Returns the weights of the even and of the odd codes [N, J, 16], bfloat16, over `_unit`."""
    if not native:
        scales = (_power(exponents) * 2.0**14)[:, :, None]
        return [(half.astype(jnp.float32) * scales).astype(jnp.bfloat16) for half in _units(codes, native, "f16")]
    wide = exponents.astype(jnp.int32)
    bits = jnp.where(wide == 0, 0, jnp.minimum(wide + 62, 255)) << 7
    scales = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
    return _run_ptx("bf16", codes, jnp.broadcast_to(scales[:, :, None], codes.shape))


def _unit(native: bool) -> float:
    return 2.0**64 if native else 1.0
