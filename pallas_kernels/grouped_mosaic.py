"""The products of `grouped` for Hopper GPUs. This module writes them for Mosaic: the copy engine, barriers and warpgroup matmuls.

A block of threads computes one tile after another (`_blocks`). Two of its warpgroups multiply, one half of the tile each.
The third copies: it runs ahead by the buffers that there are, past the end of a tile, so that the next tile's operands arrive while the
results of the last are written.

A warpgroup's matmul has 64 rows of its left operand and 8, 16, ... 256 columns of its right one. In `grouped_rows` the left one is a part
of the group's matrix and the right one the group's rows, so that a tile has about as many rows as its group needs, and most groups are one
tile. The copy engine takes rows of 128 bytes, so a tile begins where its group begins. 8-bit floats are the same kernel, of twice as many
elements a step: their operands must have the contracted dim last, so the matrices are transposed.

In `grouped_matrices` the rows are contracted, in steps that begin at a multiple of 8, as the layout of these operands requires. Rows of
other groups at both ends are set to 0 in shared memory. The rows of a group are few, so those of 128 columns of `dout` stay there while
those of `lhs` pass, and the two warpgroups take turns: one multiplies while the other writes. Of a group with more rows than stay, both
pass, step by step.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels import row_tiles

MULTIPLIERS, COPIER = 2, 2  # the warpgroups that multiply, and the number of the one that copies
EIGHT = 8  # rows of a tile of shared memory
# Contracted at a time, and columns that are written at a time: 128 bytes of 16-bit values, the widest swizzle.
DEPTH = 64
WIDEST = 256  # columns of a warpgroup's matmul
FEWEST = 4  # works of a block, so that most operands arrive while a work before is multiplied


@dataclasses.dataclass(frozen=True)
class RowsTile:
    """The sizes of one block's work in `grouped_rows`.

    Attributes:
      rows: at most; two warpgroups hold 288 x 128 in registers.
      unit: a tile has a multiple of this many rows, at least 16; each multiple is a loop of its own.
      columns: of the result.
      buffers: how many pairs of operands are in shared memory.
      chunk: rows that a warpgroup writes at a time.
      chunks: how many of these are in shared memory.
      waves: see `_blocks`.
    """

    rows: int = 288
    unit: int = 32
    columns: int = 128
    buffers: int = 4
    chunk: int = 32
    chunks: int = 2
    waves: int = 4


@dataclasses.dataclass(frozen=True)
class MatricesTile:
    """The sizes of one block's work in `grouped_matrices`.

    Attributes:
      rows, columns: of the result that a warpgroup computes at a time.
      kept: steps of 64 rows of `dout` that stay in shared memory while results are computed from them.
      buffers: steps of `lhs` in shared memory.
      pairs: of results in one work, at most.
      long_pairs: the same where the mean group has more rows than stay. Then results share no operands, and small works of the largest
        groups end together with those of the others.
      waves: see `_blocks`.
    """

    rows: int = 128
    columns: int = 128
    kept: int = 7
    buffers: int = 7
    pairs: int = 8
    long_pairs: int = 2
    waves: int = 4


def takes_rows(lhs_MK: jax.Array, rhs_GKN: jax.Array, transposed: bool, dtype: DTypeLike | None = None) -> bool:
    """Returns whether `grouped_rows` computes a product of these shapes."""
    columns, is_8_bit = rhs_GKN.shape[1 if transposed else 2], lhs_MK.dtype == rhs_GKN.dtype == jnp.float8_e4m3fn
    known = jnp.dtype(dtype or lhs_MK.dtype) in _IN_16_BITS and (
        transposed if is_8_bit else _is_16_bit(lhs_MK, rhs_GKN)
    )
    return known and lhs_MK.shape[1] % _depth(lhs_MK.dtype) == 0 and columns % RowsTile.columns == 0


def takes_matrices(lhs_MK: jax.Array, dout_MN: jax.Array) -> bool:
    """Returns whether `grouped_matrices` computes a product of these shapes."""
    return _is_16_bit(lhs_MK, dout_MN) and lhs_MK.shape[1] % 128 == 0 and dout_MN.shape[1] % 128 == 0


_IN_16_BITS = (jnp.bfloat16, jnp.float16)


def _is_16_bit(*arrays: jax.Array) -> bool:
    return all(array.dtype in _IN_16_BITS for array in arrays) and arrays[0].dtype == arrays[1].dtype


def _depth(dtype: DTypeLike) -> int:
    """Returns the elements of the 128 bytes that are contracted at a time."""
    return 2 * DEPTH // jnp.dtype(dtype).itemsize


# As programs of their own both are traced and compiled once for each shape, however many layers call them.
@functools.partial(jax.jit, static_argnames=("transposed", "processors", "tile", "dtype"))
def grouped_rows(
    lhs_MK: jax.Array,
    rhs_GKN: jax.Array,
    sizes_G: jax.Array,
    *,
    transposed: bool,
    processors: int,
    tile: RowsTile = RowsTile(),
    scale: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Returns `out`, or `dlhs` if `transposed` (see `grouped`).

    Args:
      lhs_MK, rhs_GKN: arrays that `takes_rows`.
      sizes_G: int32, the rows of each group.
      transposed: whether the matrices are.
      processors: of the GPU.
      tile: the sizes.
      scale, dtype: see `grouped.Products`.
    """
    height, contracted = lhs_MK.shape
    out, depth = jnp.dtype(dtype or lhs_MK.dtype), _depth(lhs_MK.dtype)
    scales = [] if scale is None else [scale.reshape(1)]
    columns = rhs_GKN.shape[1 if transposed else 2]
    table, used = row_tiles.largest_first(sizes_G, height, tile.rows)
    across, steps, half = columns // tile.columns, contracted // depth, tile.columns // MULTIPLIERS
    blocks = _blocks(processors, tile.waves, height // tile.rows * across)

    def body(*refs: Any) -> None:
        *scale_ref, used_ref, group_ref, start_ref, real_ref, count_ref, lhs_ref, rhs_ref, out_ref = refs

        def scope(lhs_smem: jax.Ref, rhs_smem: jax.Ref, out_smem: jax.Ref, full: Any, free: Any) -> None:
            warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
            works = used_ref[0] * across
            mine = lax.div(works - block + (blocks - 1), blocks)

            def find(i: jax.Array) -> tuple[jax.Array, jax.Array]:
                """Returns the tile and the first column of the i-th work."""
                work = _in_turns(i, works, blocks, block)
                return lax.div(work, across), lax.rem(work, across) * tile.columns

            def copy(i: jax.Array, _: None) -> None:
                number, column = find(i)
                start, group = start_ref[number], group_ref[number]

                def of(rows: int) -> None:
                    def step(k: jax.Array, _: None) -> None:
                        slot = _slot(i * steps + k, tile.buffers, free)
                        deep, wide = pl.ds(k * depth, depth), pl.ds(column, tile.columns)
                        spot = (group, wide, deep) if transposed else (group, deep, wide)
                        plgpu.copy_gmem_to_smem(rhs_ref.at[spot], rhs_smem.at[slot], full.at[slot])
                        for first in (0, rows // 2):  # a copy has at most 256 rows
                            source = lhs_ref.at[pl.ds(start + first, rows // 2), deep]
                            target = _in_rows(lhs_smem).at[slot, pl.ds(first, rows // 2)]
                            plgpu.copy_gmem_to_smem(source, target, full.at[slot])

                    lax.fori_loop(0, steps, step, None)

                _by_count(count_ref[number], tile, of)

            def multiply(i: jax.Array, _: None) -> None:
                number, column = find(i)
                start, count = start_ref[number], count_ref[number]
                own = pl.ds(warpgroup * half, half)
                multiplied = jnp.where(real_ref[number] > 0, steps, 0)

                def skip(k: jax.Array, _: None) -> None:
                    slot = lax.rem(i * steps + k, tile.buffers)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.barrier_arrive(free.at[slot])

                lax.fori_loop(multiplied, steps, skip, None)

                def of(rows: int) -> None:
                    widths = [rows] if rows <= WIDEST else [rows - rows // 64 * 32, rows // 64 * 32]

                    def product(*accs: Any) -> list[jax.Array]:
                        def step(slot: jax.Array, _: jax.Array) -> None:
                            left = rhs_smem.at[slot, own] if transposed else _transposed(rhs_smem.at[slot, :, own])
                            for n, acc in enumerate(accs):
                                right = _in_tiles(lhs_smem).at[slot, pl.ds(n * widths[0], widths[n])]
                                plgpu.wgmma(acc, left, _transposed(right))

                        _multiply(i * steps, multiplied, tile.buffers, full, free, step, len(accs))
                        return [acc[...] * scale_ref[0][0] if scale_ref else acc[...] for acc in accs]

                    accs = pl.run_scoped(product, *(plgpu.ACC((half, width), jnp.float32) for width in widths))
                    target = out_ref.at[:, pl.ds(column + warpgroup * half, half)]
                    _write_rows(accs, target, start, count, rows - tile.unit + 1, out_smem.at[warpgroup])

                _by_count(count, tile, of)

            _specialised(mine, copy, multiply, lambda _: _drain(mine * steps, tile.buffers, free))

        operand = (tile.columns, depth) if transposed else (depth, tile.columns)
        pl.run_scoped(
            scope,
            _rows_in_tiles((tile.buffers,), tile.rows, lhs_MK.dtype),
            _operands((tile.buffers,), operand, lhs_MK.dtype),
            _rows_in_tiles((MULTIPLIERS, tile.chunks), tile.chunk, out),
            plgpu.Barrier(num_arrivals=3, num_barriers=tile.buffers),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tile.buffers),
            collective_axes="warpgroup",
        )

    kernel = _kernel(body, jax.ShapeDtypeStruct((height, columns), out), blocks, "grouped_rows", True)
    return kernel(*scales, used[None], *table, lhs_MK, rhs_GKN)


def _write_rows(accs: Any, out_ref: Any, start: Any, count: Any, least: int, smem: Any) -> None:
    """Writes the first `count` rows of a warpgroup's result, which it has transposed.

    Args:
      accs: float32[columns, rows] each: the result's rows one after the other.
      out_ref: [M, columns].
      start: the first row in `out_ref`.
      count: of rows; at least `least`, by which copies of full chunks are known.
      smem: [chunks, ...], the warpgroup's memory for rows on their way.
    """
    chunks, chunk = smem.shape[0], _in_rows(smem).shape[1]
    pieces = [(acc, at, min(chunk, acc.shape[1] - at)) for acc in accs for at in range(0, acc.shape[1], chunk)]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    above = 0
    for n, (acc, at, size) in enumerate(pieces):
        if n >= chunks:
            plgpu.wait_smem_to_gmem(chunks - 1, wait_read_only=True)
        # Turned in registers, a thread has neighbouring columns of a row.
        turned = plgpu.layout_cast(acc[:, at : at + size].astype(smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        _transposed(_in_tiles(smem).at[n % chunks, pl.ds(0, size)])[...] = turned
        plgpu.commit_smem()

        def send(size: int, done: Any, n: int = n, above: int = above) -> None:
            source = _in_rows(smem).at[n % chunks, pl.ds(done, size)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[pl.ds(start + above + done, size)])

        if above + size <= least:
            send(size, 0)
        else:
            _in_powers_of_2(jnp.clip(count - above, 0, size), size, send)
        above += size


def _in_powers_of_2(count: Any, most: int, send: Callable[[int, Any], None]) -> None:
    """Calls `send(size, done)` with static sizes whose sum is `count`."""
    pl.when(count == most)(functools.partial(send, most, 0))

    @pl.when(count < most)
    def _() -> None:
        size, done = 1 << (most - 1).bit_length() - 1, 0
        while size:
            pl.when((count & size) != 0)(functools.partial(send, size, done))
            done = done + (count & size)
            size //= 2


@functools.partial(jax.jit, static_argnames=("processors", "tile"))
def grouped_matrices(
    lhs_MK: jax.Array, dout_MN: jax.Array, sizes_G: jax.Array, *, processors: int, tile: MatricesTile = MatricesTile()
) -> jax.Array:
    """Returns `drhs` (see `grouped`), float32, of arrays that `takes_matrices`; the other arguments are as in `grouped_rows`.

    Threads write the results themselves: 32 bytes of a row by four of them.
    """
    groups, shape = sizes_G.shape[0], (lhs_MK.shape[1], dout_MN.shape[1])
    if shape[0] % (2 * tile.rows):
        tile = dataclasses.replace(tile, rows=64)
    most = tile.pairs if lhs_MK.shape[0] <= groups * tile.kept * DEPTH else tile.long_pairs
    pairs = max(n for n in range(1, most + 1) if shape[0] // (2 * tile.rows) % n == 0)
    down, across = shape[0] // (2 * tile.rows * pairs), shape[1] // tile.columns
    works = groups * down * across
    blocks = _blocks(processors, tile.waves, works)
    table = row_tiles.by_size(sizes_G)

    def body(
        size_ref: jax.Ref, end_ref: jax.Ref, order_ref: jax.Ref, lhs_ref: Any, dout_ref: Any, out_ref: Any
    ) -> None:
        def scope(lhs_smem: Any, dout_smem: Any, full: Any, free: Any, came: Any, went: Any, turn: Any) -> None:
            warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
            mine = lax.div(works - block + (blocks - 1), blocks)

            def find(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                # Half of a wave's blocks begin with their smallest works, which wait for memory while large ones multiply.
                is_first = lax.rem(block, processors) < processors // 2
                work = _in_turns(jnp.where(is_first, i, mine - 1 - i), works, blocks, block)
                inside = lax.rem(work, down * across)
                top, left = lax.rem(inside, down) * (2 * tile.rows * pairs), lax.div(inside, down) * tile.columns
                return order_ref[lax.div(work, down * across)], top, left

            def extent(group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
                """Returns the first row that is copied, which of the copied rows are the group's, and the steps."""
                size, end = size_ref[group], end_ref[group]
                first = pl.multiple_of(lax.div(end - size, EIGHT) * EIGHT, EIGHT)
                steps = lax.div(end - first + (DEPTH - 1), DEPTH)
                return first, end - size - first, end - first, jnp.where(size > 0, steps, 0)

            def copy(i: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                group, top, left = find(i)
                start, _, _, steps = extent(group)
                is_long = steps > tile.kept

                def pair(j: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    """Copies the operands of two results; of a long group step by step, otherwise one after the other."""
                    passed, kept = before
                    fresh = (j == 0) | is_long

                    def one(t: jax.Array, n: jax.Array, k: jax.Array) -> None:
                        deep = pl.ds(start + k * DEPTH, DEPTH)

                        @pl.when(fresh & (n == 0))
                        def _() -> None:
                            slot = _slot(kept + k, tile.kept, went)
                            source = dout_ref.at[deep, pl.ds(left, tile.columns)]
                            plgpu.copy_gmem_to_smem(source, _swizzled(dout_smem.at[slot]), came.at[slot])

                        own = _slot(passed + t, tile.buffers, free)
                        source = lhs_ref.at[deep, pl.ds(top + (2 * j + n) * tile.rows, tile.rows)]
                        plgpu.copy_gmem_to_smem(source, lhs_smem.at[own], full.at[n * tile.buffers + own])

                    def step(t: jax.Array, _: None) -> None:
                        second = jnp.where(is_long, lax.rem(t, 2), (t >= steps).astype(jnp.int32))
                        one(t, second, jnp.where(is_long, lax.div(t, 2), t - second * steps))

                    lax.fori_loop(0, 2 * steps, step, None)
                    return passed + 2 * steps, kept + jnp.where(fresh, steps, 0)

                return lax.fori_loop(0, pairs, pair, before)

            def multiply(i: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                group, top, left = find(i)
                _, low, high, steps = extent(group)
                is_long = steps > tile.kept

                def pair(j: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    passed, kept = before
                    fresh, last = (j == 0) | is_long, (j == pairs - 1) | is_long
                    base = kept - jnp.where(fresh, 0, steps)

                    def product(acc: Any) -> jax.Array:
                        def slots(k: jax.Array) -> tuple[jax.Array, jax.Array]:
                            t = jnp.where(is_long, 2 * k + warpgroup, warpgroup * steps + k)
                            return lax.rem(passed + t, tile.buffers), lax.rem(base + k, tile.kept)

                        def leave(k: jax.Array) -> None:
                            own, common = slots(k)
                            plgpu.barrier_arrive(free.at[own])
                            pl.when(last)(lambda: plgpu.barrier_arrive(went.at[common]))

                        def step(k: jax.Array, _: None) -> None:
                            own, common = slots(k)
                            pl.when((k == 0) | is_long)(lambda: plgpu.barrier_wait(turn.at[warpgroup]))

                            @pl.when(fresh)
                            def enter() -> None:
                                plgpu.barrier_wait(came.at[common])
                                # The other warpgroup has its turn after this one.
                                bounds = jnp.where(k == 0, low, 0), jnp.minimum(high - k * DEPTH, DEPTH)
                                pl.when(warpgroup == 0)(lambda: mask(common, *bounds))

                            plgpu.barrier_wait(full.at[warpgroup * tile.buffers + own])
                            plgpu.wgmma(acc, _transposed(lhs_smem.at[own]), _swizzled(dout_smem.at[common]))
                            pl.when((k == steps - 1) | is_long)(lambda: plgpu.barrier_arrive(turn.at[1 - warpgroup]))
                            plgpu.wgmma_wait(1)
                            pl.when(k > 0)(lambda: leave(k - 1))

                        lax.fori_loop(0, steps, step, None)
                        plgpu.wgmma_wait(0)
                        pl.when(steps > 0)(lambda: leave(steps - 1))
                        return acc[...]

                    acc = pl.run_scoped(product, plgpu.ACC((tile.rows, tile.columns), jnp.float32))
                    above = top + (2 * j + warpgroup) * tile.rows
                    out_ref[group, pl.ds(above, tile.rows), pl.ds(left, tile.columns)] = acc
                    return passed + 2 * steps, kept + jnp.where(fresh, steps, 0)

                return lax.fori_loop(0, pairs, pair, before)

            def mask(slot: jax.Array, low: jax.Array, high: jax.Array) -> None:
                """Sets rows before `low` and from `high` on to 0."""

                def keep(eight: Any, low: Any, high: Any) -> None:
                    layout = plgpu.Layout.WG_STRIDED((EIGHT, DEPTH), vec_size=4)
                    row = plgpu.broadcasted_iota(jnp.int32, (EIGHT, DEPTH), 0, layout=layout)
                    for part in range(tile.columns // DEPTH):
                        ref = dout_smem.at[slot, eight, part]
                        values = plgpu.load(ref, *_WHOLE, layout=layout)
                        ref[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))

                @pl.when((low > 0) | (high < DEPTH))
                def _() -> None:
                    pl.when(low > 0)(lambda: keep(0, low, EIGHT))

                    @pl.when(high < DEPTH)
                    def _() -> None:
                        last = lax.div(high, EIGHT)
                        keep(last, jnp.where(last == 0, low, 0), high - last * EIGHT)
                        lax.fori_loop(last + 1, DEPTH // EIGHT, lambda n, _: keep(n, 0, 0), None)

                    plgpu.commit_smem()

            def drain(before: tuple[jax.Array, jax.Array]) -> None:
                passed, kept = before
                _drain(kept, tile.kept, went)
                _drain(passed, tile.buffers, free)

            pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
            _specialised(mine, copy, multiply, drain, (jnp.int32(0), jnp.int32(0)))
            pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

        pl.run_scoped(
            scope,
            _operands((tile.buffers,), (DEPTH, tile.rows), lhs_MK.dtype),
            # Without its layout, which `_swizzled` adds: a mask takes rows as they are.
            plgpu.SMEM((tile.kept, DEPTH // EIGHT, tile.columns // DEPTH, EIGHT, DEPTH), lhs_MK.dtype),
            plgpu.Barrier(
                num_arrivals=1, num_barriers=MULTIPLIERS * tile.buffers
            ),  # a warpgroup waits for its own copies
            plgpu.Barrier(num_arrivals=1, num_barriers=tile.buffers),
            plgpu.Barrier(num_arrivals=1, num_barriers=tile.kept),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tile.kept),
            plgpu.Barrier(num_arrivals=1, num_barriers=MULTIPLIERS),
            collective_axes="warpgroup",
        )

    kernel = _kernel(body, jax.ShapeDtypeStruct((groups, *shape), jnp.float32), blocks, "grouped_matrices", False)
    return kernel(*table, lhs_MK, dout_MN)


def _blocks(processors: int, waves: int, works: int) -> int:
    """Returns how many blocks share the works: `waves` for each processor, where each block then has several works.

    A block takes a processor's memory, so of more blocks than processors some begin when others have ended. Where a collective occupies
    processors, blocks of one wave would begin when all others have ended, and the product would take twice as long.
    """
    return processors * max(1, min(waves, works // (FEWEST * processors)))


def _specialised(works: Any, copy: Any, multiply: Any, drain: Any, first: Any = None) -> None:
    """Runs `copy` on one warpgroup and `multiply` on the others, for each work, with a value that goes from one to the next."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == COPIER)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        drain(lax.fori_loop(0, works, copy, first))

    @pl.when(warpgroup < MULTIPLIERS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        lax.fori_loop(0, works, multiply, first)
        plgpu.wait_smem_to_gmem(0)


def _in_turns(i: Any, works: Any, blocks: int, block: Any) -> jax.Array:
    """Returns the i-th of a block's works, which are in order of their size. Every second round of blocks is in reverse order."""
    turned = i * blocks + (blocks - 1 - block)
    return jnp.where((lax.rem(i, 2) == 1) & (turned < works), turned, i * blocks + block)


def _slot(count: jax.Array, buffers: int, free: Any) -> jax.Array:
    """Returns the buffer of a copy, once it is free."""
    slot = lax.rem(count, buffers)
    pl.when(count >= buffers)(lambda: plgpu.barrier_wait(free.at[slot]))
    return slot


def _drain(copies: Any, buffers: int, free: Any) -> None:
    """Waits until all buffers are free after so many copies."""
    lax.fori_loop(
        jnp.maximum(copies - buffers, 0), copies, lambda n, _: plgpu.barrier_wait(free.at[lax.rem(n, buffers)]), None
    )


def _multiply(
    before: Any, steps: Any, buffers: int, full: Any, free: Any, step: Callable[..., None], matmuls: int
) -> None:
    """Multiplies operands as they arrive. One step's matmuls begin before those of the last have ended, whose buffer is then free.

    Args:
      before: the operands that arrived before.
      steps: how many there are.
      buffers, full, free: of the operands.
      step: begins the matmuls of (buffer, number of the step).
      matmuls: how many it begins.
    """

    def one(k: jax.Array, _: None) -> None:
        slot = lax.rem(before + k, buffers)
        plgpu.barrier_wait(full.at[slot])
        step(slot, k)
        plgpu.wgmma_wait(matmuls)
        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(before + k - 1, buffers)]))

    lax.fori_loop(0, steps, one, None)
    plgpu.wgmma_wait(0)
    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[lax.rem(before + steps - 1, buffers)]))


def _by_count(count: Any, tile: RowsTile, of: Callable[[int], None]) -> None:
    """Calls `of` with the least multiple of `tile.unit` that holds a count above 0."""
    units = lax.div(count + (tile.unit - 1), tile.unit)
    for n in range(1, tile.rows // tile.unit + 1):
        pl.when(units == n)(functools.partial(of, n * tile.unit))


_SWIZZLE = plgpu.SwizzleTransform(128)
_NO_TYPE: Any = None  # neither reads it
_WHOLE: Any = () if jax.__version_info__ >= (0, 12) else ((),)  # the indices of a load, which JAX 0.12 takes no more
_UNSWIZZLING = _SWIZZLE.undo(_NO_TYPE)


def _operands(leading: tuple[int, ...], shape: tuple[int, int], dtype: Any) -> Any:
    """Returns buffers in shared memory of the layout that warpgroup matmuls and the copy engine share."""
    return plgpu.SMEM((*leading, *shape), dtype, transforms=(plgpu.TilingTransform((EIGHT, _depth(dtype))), _SWIZZLE))


def _rows_in_tiles(leading: tuple[int, ...], rows: int, dtype: Any) -> Any:
    """Returns such buffers of 128 bytes a row, for which tiles of 8 rows, and rows, are in the same order."""
    return plgpu.SMEM((*leading, rows // EIGHT, 1, EIGHT, _depth(dtype)), dtype, transforms=(_SWIZZLE,))


def _in_tiles(ref: Any) -> Any:
    untiling = plgpu.TilingTransform((EIGHT, ref.shape[-1])).undo(_NO_TYPE)
    return dataclasses.replace(ref, transforms=(*ref.transforms, untiling))


def _in_rows(ref: Any) -> Any:
    *leading, tiles, _, eight, columns = ref.shape
    return ref.reshape(*leading, tiles * eight, columns)


def _swizzled(ref: Any) -> Any:
    return _in_tiles(dataclasses.replace(ref, transforms=(*ref.transforms, _UNSWIZZLING)))


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))  # JAX before 0.11


def _kernel(body: Any, out: jax.ShapeDtypeStruct, blocks: int, name: str, barriers: bool) -> Any:
    """Returns the kernel; with `barriers` JAX puts one around each access to shared memory."""
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            # Layouts are given here; newer versions of JAX would infer them.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=not barriers,
        ),
    )
