"""The products of `grouped` for Hopper GPUs. This module writes them for Mosaic: the copy engine, barriers and warpgroup matmuls.

A block of threads stays on its processor and computes one tile after another. Two of its warpgroups multiply, one half of the tile's rows
each. The third copies: it runs ahead by the buffers that there are, past the end of a tile, so that the next tile's operands arrive while
the results of the last are written.

The copy engine reads and writes shared memory in tiles of 8 rows (`ALIGNED`). From a row that is no multiple of 8 it copies the rest of its
tile alone, so a tile of this module begins at a multiple of 8 and may begin with rows of the group before, which are not written.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_tiles

MULTIPLIERS, COPIER = 2, 2  # the warpgroups that multiply, and the number of the one that copies
ALIGNED = 8  # rows of a tile of the copy engine
PART = 64  # columns that are written at a time: 128 bytes of 16-bit values, the widest swizzle


@dataclasses.dataclass(frozen=True)
class MosaicTile:
    """The sizes of one block's work.

    Attributes:
      rows, columns: of the result. Two warpgroups hold it in registers: at most 256 x 128 or 128 x 256.
      depth: contracted at a time; a multiple of 64.
      buffers: how many pairs of operands are in shared memory.
      parts: how many parts of a warpgroup's result are in shared memory.
      blocks: blocks of threads, one for each processor of an H100 or H200.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    buffers: int = 3
    parts: int = 2
    blocks: int = 132


TILE = MosaicTile()


def rows(
    lhs_MK: jax.Array,
    rhs_GKN: jax.Array,
    sizes_G: jax.Array,
    transposed: bool,
    *,
    tile: MosaicTile = TILE,
    **kwargs: Any,
) -> jax.Array:
    """Returns `out`, or `dlhs` if `transposed` (see `grouped`).

    Args:
      lhs_MK, rhs_GKN: 16-bit. Both dims of a matrix are multiples of the tile's, and M of 8.
      sizes_G: int32, the rows of each group.
      transposed: whether the matrices are.
      tile: the sizes.
      kwargs: of `plgpu.kernel`.
    """
    height, contracted = lhs_MK.shape
    table = row_tiles.table(sizes_G, height, tile.rows, ALIGNED)
    columns = rhs_GKN.shape[1 if transposed else 2]
    across, steps, half = columns // tile.columns, contracted // tile.depth, tile.rows // MULTIPLIERS
    used = jnp.sum(table.count_T > 0, dtype=jnp.int32) * across  # in the table used tiles come first

    def body(*refs: Any) -> None:
        used_ref, group_ref, start_ref, real_ref, count_ref, skip_ref, lhs_ref, rhs_ref, out_ref = refs

        def scope(
            lhs_smem: jax.Ref, rhs_smem: jax.Ref, part_smem: jax.Ref, rest_smem: jax.Ref, full: Any, free: Any
        ) -> None:
            group_of_threads = lax.axis_index("warpgroup")
            block = lax.axis_index("block")
            mine = _share(used_ref[0], block, tile.blocks)

            def find(i: jax.Array) -> tuple[jax.Array, jax.Array]:
                work = i * tile.blocks + block
                return lax.div(work, across), lax.rem(work, across) * tile.columns

            def copy(i: jax.Array, _: None) -> None:
                number, column = find(i)
                start, group = pl.multiple_of(start_ref[number], ALIGNED), group_ref[number]

                def step(k: jax.Array, _: None) -> None:
                    count = i * steps + k
                    slot = lax.rem(count, tile.buffers)
                    pl.when(count >= tile.buffers)(lambda: plgpu.barrier_wait(free.at[slot]))
                    deep, wide = pl.ds(k * tile.depth, tile.depth), pl.ds(column, tile.columns)
                    plgpu.copy_gmem_to_smem(lhs_ref.at[pl.ds(start, tile.rows), deep], lhs_smem.at[slot], full.at[slot])
                    spot = (group, wide, deep) if transposed else (group, deep, wide)
                    plgpu.copy_gmem_to_smem(rhs_ref.at[spot], rhs_smem.at[slot], full.at[slot])

                lax.fori_loop(0, steps, step, None)

            def multiply(i: jax.Array, _: None) -> None:
                number, column = find(i)
                count = jnp.clip(count_ref[number] - group_of_threads * half, 0, half)
                leading = jnp.where(group_of_threads == 0, skip_ref[number], 0)
                first = pl.multiple_of(start_ref[number] + group_of_threads * half, ALIGNED)
                is_real = real_ref[number] > 0

                def slot_of(k: jax.Array) -> jax.Array:
                    return lax.rem(i * steps + k, tile.buffers)

                # A warpgroup whose half is empty, or belongs to no group, lets the operands pass.
                def skip(k: jax.Array, _: None) -> None:
                    plgpu.barrier_wait(full.at[slot_of(k)])
                    plgpu.barrier_arrive(free.at[slot_of(k)])

                multiplied = jnp.where((count > 0) & is_real, steps, 0)
                lax.fori_loop(multiplied, steps, skip, None)

                @pl.when(count > 0)
                def _() -> None:
                    def product(acc: Any) -> jax.Array:
                        def step(k: jax.Array, _: None) -> None:
                            slot = slot_of(k)
                            plgpu.barrier_wait(full.at[slot])
                            rhs = _transposed(rhs_smem.at[slot]) if transposed else rhs_smem.at[slot]
                            plgpu.wgmma(acc, lhs_smem.at[slot, pl.ds(group_of_threads * half, half)], rhs)
                            plgpu.wgmma_wait(1)  # that of the step before is done
                            pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))

                        lax.fori_loop(0, multiplied, step, None)
                        plgpu.wgmma_wait(0)
                        pl.when(multiplied > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(multiplied - 1)]))
                        return acc[...]

                    acc = pl.run_scoped(product, plgpu.ACC((half, tile.columns), jnp.float32)).astype(out_ref.dtype)
                    own = (part_smem.at[group_of_threads], rest_smem.at[group_of_threads])
                    _write_rows(acc, leading, count, first, column, out_ref, *own)

            @pl.when(group_of_threads == COPIER)
            def _() -> None:
                plgpu.set_max_registers(40, action="decrease")
                lax.fori_loop(0, mine, copy, None)
                _drain(mine * steps, tile.buffers, free)

            @pl.when(group_of_threads < MULTIPLIERS)
            def _() -> None:
                plgpu.set_max_registers(232, action="increase")
                lax.fori_loop(0, mine, multiply, None)
                plgpu.wait_smem_to_gmem(0)

        operand = (tile.columns, tile.depth) if transposed else (tile.depth, tile.columns)
        pl.run_scoped(
            scope,
            _operands(tile.buffers, (tile.rows, tile.depth), lhs_MK.dtype),
            _operands(tile.buffers, operand, rhs_GKN.dtype),
            _operands((MULTIPLIERS, tile.parts), (half, PART), lhs_MK.dtype),
            plgpu.SMEM((MULTIPLIERS, half, PART), lhs_MK.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.buffers),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tile.buffers),
            collective_axes="warpgroup",
        )

    kernel = _kernel(body, jax.ShapeDtypeStruct((height, columns), lhs_MK.dtype), tile, "grouped_rows", kwargs)
    return kernel(used[None], *table, lhs_MK, rhs_GKN)


def _write_rows(
    acc: Any, skip: Any, count: Any, first: Any, column: Any, out_ref: jax.Ref, part_smem: jax.Ref, rest_smem: jax.Ref
) -> None:
    """Writes rows `skip` ... `count` - 1 of a warpgroup's half of a tile."""
    (half, columns), parts = acc.shape, part_smem.shape[0]
    written = count - skip

    @pl.when(written == half)
    def _() -> None:
        for n in range(columns // PART):
            plgpu.wait_smem_to_gmem(parts - 1, wait_read_only=True)
            part_smem[n % parts] = acc[:, n * PART : (n + 1) * PART]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                part_smem.at[n % parts], out_ref.at[pl.ds(first, half), pl.ds(column + n * PART, PART)]
            )

    @pl.when(written < half)
    def _() -> None:
        for n in range(columns // PART):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _store_in_rows(rest_smem, acc[:, n * PART : (n + 1) * PART])
            plgpu.commit_smem()
            # A copy has a fixed size: one of each power of 2 makes any number.
            size, done = half // 2, skip
            while size:
                is_part = (written & size) != 0
                source = rest_smem.at[pl.ds(done, size)]
                target = out_ref.at[pl.ds(first + done, size), pl.ds(column + n * PART, PART)]
                pl.when(is_part)(functools.partial(plgpu.copy_smem_to_gmem, source, target))
                done = done + (written & size)
                size //= 2


def matrices(
    lhs_MK: jax.Array, dout_MN: jax.Array, sizes_G: jax.Array, *, tile: MosaicTile = TILE, **kwargs: Any
) -> jax.Array:
    """Returns `drhs` (see `grouped`); the arguments are as in `rows`."""
    groups, shape = sizes_G.shape[0], (lhs_MK.shape[1], dout_MN.shape[1])
    down, across, half = shape[0] // tile.rows, shape[1] // tile.columns, tile.rows // MULTIPLIERS
    works = groups * down * across
    ends_G = jnp.cumsum(sizes_G.astype(jnp.int32))

    def body(start_ref: jax.Ref, end_ref: jax.Ref, lhs_ref: jax.Ref, dout_ref: jax.Ref, out_ref: jax.Ref) -> None:
        def scope(lhs_smem: jax.Ref, dout_smem: jax.Ref, part_smem: jax.Ref, full: Any, free: Any) -> None:
            group_of_threads = lax.axis_index("warpgroup")
            block = lax.axis_index("block")
            mine = _share(works, block, tile.blocks)
            own = pl.ds(group_of_threads * half, half)

            def find(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                work = i * tile.blocks + block
                inside = lax.rem(work, down * across)
                return (
                    lax.div(work, down * across),
                    lax.div(inside, across) * tile.rows,
                    lax.rem(inside, across) * tile.columns,
                )

            def extent(group: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
                """Returns the first row that is copied, how many of the first rows are skipped, the last row's end, and the steps."""
                start, end = start_ref[group], end_ref[group]
                first = pl.multiple_of(lax.div(start, ALIGNED) * ALIGNED, ALIGNED)
                steps = lax.div(end - first + (tile.depth - 1), tile.depth)
                return first, start - first, end, jnp.where(end > start, steps, 0)

            def copy(i: jax.Array, before: jax.Array) -> jax.Array:
                group, top, left = find(i)
                start, _, _, steps = extent(group)

                def step(k: jax.Array, _: None) -> None:
                    slot = lax.rem(before + k, tile.buffers)
                    pl.when(before + k >= tile.buffers)(lambda: plgpu.barrier_wait(free.at[slot]))
                    deep = pl.ds(start + k * tile.depth, tile.depth)
                    plgpu.copy_gmem_to_smem(lhs_ref.at[deep, pl.ds(top, tile.rows)], lhs_smem.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        dout_ref.at[deep, pl.ds(left, tile.columns)], dout_smem.at[slot], full.at[slot]
                    )

                lax.fori_loop(0, steps, step, None)
                return before + steps

            def multiply(i: jax.Array, before: jax.Array) -> jax.Array:
                group, top, left = find(i)
                start, skip, end, steps = extent(group)
                inside = end - start - (steps - 1) * tile.depth  # rows of the last step that are the group's

                def slot_of(k: jax.Array) -> jax.Array:
                    return lax.rem(before + k, tile.buffers)

                def product(acc: Any) -> jax.Array:
                    def step(k: jax.Array, _: None) -> None:
                        slot = slot_of(k)
                        plgpu.barrier_wait(full.at[slot])

                        low = jnp.where(k == 0, skip, 0)
                        high = jnp.where(k == steps - 1, inside, tile.depth)

                        @pl.when((low > 0) | (high < tile.depth))
                        def _() -> None:
                            lhs = lhs_smem[slot, :, own]
                            row = plgpu.broadcasted_iota(jnp.int32, lhs.shape, 0, layout=plgpu.Layout.WGMMA)
                            lhs_smem[slot, :, own] = jnp.where((row >= low) & (row < high), lhs, jnp.zeros_like(lhs))
                            plgpu.commit_smem()

                        plgpu.wgmma(acc, _transposed(lhs_smem.at[slot, :, own]), dout_smem.at[slot])
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(k - 1)]))

                    lax.fori_loop(0, steps, step, None)
                    plgpu.wgmma_wait(0)
                    pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(steps - 1)]))
                    return acc[...]

                acc = pl.run_scoped(product, plgpu.ACC((half, tile.columns), jnp.float32)).astype(out_ref.dtype)
                for n in range(tile.columns // PART):
                    plgpu.wait_smem_to_gmem(tile.parts - 1, wait_read_only=True)
                    part_smem[group_of_threads, n % tile.parts] = acc[:, n * PART : (n + 1) * PART]
                    plgpu.commit_smem()
                    target = (group, pl.ds(top + group_of_threads * half, half), pl.ds(left + n * PART, PART))
                    plgpu.copy_smem_to_gmem(part_smem.at[group_of_threads, n % tile.parts], out_ref.at[target])
                return before + steps

            @pl.when(group_of_threads == COPIER)
            def _() -> None:
                plgpu.set_max_registers(40, action="decrease")
                _drain(lax.fori_loop(0, mine, copy, jnp.int32(0)), tile.buffers, free)

            @pl.when(group_of_threads < MULTIPLIERS)
            def _() -> None:
                plgpu.set_max_registers(232, action="increase")
                lax.fori_loop(0, mine, multiply, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(
            scope,
            _operands(tile.buffers, (tile.depth, tile.rows), lhs_MK.dtype),
            _operands(tile.buffers, (tile.depth, tile.columns), lhs_MK.dtype),
            _operands((MULTIPLIERS, tile.parts), (half, PART), lhs_MK.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.buffers),
            plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=tile.buffers),
            collective_axes="warpgroup",
        )

    kernel = _kernel(body, jax.ShapeDtypeStruct((groups, *shape), lhs_MK.dtype), tile, "grouped_matrices", kwargs)
    return kernel(ends_G - sizes_G, ends_G, lhs_MK, dout_MN)


def _share(works: Any, block: jax.Array, blocks: int) -> jax.Array:
    """Returns how many of the works 0, 1, ... are of a block that takes every `blocks`-th."""
    return lax.div(works - block + (blocks - 1), blocks)


def _drain(copies: Any, buffers: int, free: Any) -> None:
    """Waits until all buffers are free after so many copies."""
    lax.fori_loop(
        jnp.maximum(copies - buffers, 0), copies, lambda n, _: plgpu.barrier_wait(free.at[lax.rem(n, buffers)]), None
    )


def _operands(buffers: Any, shape: tuple[int, int], dtype: Any) -> Any:
    """Returns buffers in shared memory of the layout that warpgroup matmuls and the copy engine share."""
    transforms = (plgpu.TilingTransform((8, PART)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((*((buffers,) if isinstance(buffers, int) else buffers), *shape), dtype, transforms=transforms)


def _store_in_rows(ref: jax.Ref, values: jax.Array) -> None:
    """Stores values row by row, although banks of memory conflict."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:  # JAX before 0.12
        ref[...] = values


def _transposed(ref: jax.Ref) -> Any:
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))  # JAX before 0.11


def _kernel(body: Any, out: jax.ShapeDtypeStruct, tile: MosaicTile, name: str, kwargs: dict[str, Any]) -> Any:
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(tile.blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        # Layouts are given here; newer versions of JAX would infer them.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **kwargs,
    )
