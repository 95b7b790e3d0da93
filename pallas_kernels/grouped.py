"""Multiplies groups of rows by a matrix each. This module holds the three products of a mixture's experts, and their twin.

Rows are sorted by group, so that a group is a run of rows. With start(g) the rows before group g,

    out[m] = lhs[m] @ rhs[g]                               for m in start(g) ... start(g) + sizes[g] - 1
    dlhs[m] = dout[m] @ rhs[g]^T                           for the same m
    drhs[g] = sum over these m of lhs[m]^T dout[m]

accumulated in float32. `out` and `dlhs` are rounded once. So is `drhs`, by a cast which a sum over devices in float32 leaves out
(`zerojax.zero.blocks.float32_grads`). Rows after the last group are 0 in `out` and `dlhs` and count nowhere.

Tiles of rows begin where a group begins, so a group of 256 rows is two tiles of 128 wherever it lies. A tile that ends after its group is
masked. A table tells each tile its group and its rows (`row_tiles`).

Here are the kernels of any GPU, for Triton; `grouped_mosaic` has those of Hopper GPUs.

Shapes: M rows, K and N the matrices' dims, G groups, T tiles of rows.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import row_tiles


@dataclasses.dataclass(frozen=True)
class TritonTile:
    """The sizes of one program's work.

    Attributes:
      rows, columns: of the result.
      depth: contracted at a time.
      num_warps, num_stages: Triton's.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int = 8
    num_stages: int = 4

    def fitted(self, rows: int, columns: int, depth: int) -> "TritonTile":
        """Returns the tile of a smaller product, such as by an adapter of rank 16, so that little of it is beyond the product."""
        sizes = (self.rows, rows), (self.columns, columns), (self.depth, depth)
        return dataclasses.replace(self, **dict(zip(("rows", "columns", "depth"), (_least(*size) for size in sizes))))


def _least(most: int, size: int) -> int:
    """Returns the least power of 2 that holds a size: at least 16, which matmuls of Triton need, and at most `most`."""
    return min(most, max(16, pl.next_power_of_2(size)))


TWIN = "grouped_twin"  # the scope of the twins' matmuls, which are dense
# The fastest of five on an H200 (docs/benchmarks/raw/experts_1xh200.txt).
ROWS = TritonTile(128, 256, 64, 8, 3)  # of `out` and `dlhs`
MATRICES = TritonTile(128, 128, 64, 8, 3)  # of `drhs`


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(lhs_MK: jax.Array, rhs_GKN: jax.Array, sizes_G: jax.Array, implementation: str = "jnp") -> jax.Array:
    """Returns each row times the matrix of its group: [M, N] of the dtype of `lhs_MK`.

    Args:
      lhs_MK: the rows, sorted by group.
      rhs_GKN: the matrices, of the same dtype.
      sizes_G: int32, the rows of each group; their sum is at most M.
      implementation: a key of IMPLEMENTATIONS.
    """
    return IMPLEMENTATIONS[implementation].rows(lhs_MK, rhs_GKN, sizes_G, False)


def _forward(lhs_MK: jax.Array, rhs_GKN: jax.Array, sizes_G: jax.Array, implementation: str) -> tuple[jax.Array, Any]:
    return grouped_matmul(lhs_MK, rhs_GKN, sizes_G, implementation), (lhs_MK, rhs_GKN, sizes_G)


def _backward(implementation: str, saved: Any, dout_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs_MK, rhs_GKN, sizes_G = saved
    products = IMPLEMENTATIONS[implementation]
    drhs_GKN = products.matrices(lhs_MK, dout_MN, sizes_G).astype(rhs_GKN.dtype)
    return products.rows(dout_MN, rhs_GKN, sizes_G, True), drhs_GKN, None


grouped_matmul.defvjp(_forward, _backward)


def rows_ref(
    lhs_MK: jax.Array,
    rhs_GKN: jax.Array,
    sizes_G: jax.Array,
    transposed: bool,
    *,
    scale: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Returns `out`, or `dlhs` of `dout` if `transposed`: a loop over groups, each over all rows with those of others set to 0."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def add(out_MN: jax.Array, each: Any) -> tuple[jax.Array, None]:
        rhs_KN, is_own_M = each
        own_MK = jnp.where(is_own_M[:, None], lhs_MK, jnp.zeros_like(lhs_MK))
        return out_MN + jax.lax.dot_general(own_MK, rhs_KN, dims, preferred_element_type=jnp.float32), None

    empty_MN = jnp.zeros((lhs_MK.shape[0], rhs_GKN.shape[1 if transposed else 2]), jnp.float32)
    with jax.named_scope(TWIN):
        out_MN = jax.lax.scan(add, empty_MN, (rhs_GKN, _members(sizes_G, lhs_MK.shape[0])))[0]
        return (out_MN if scale is None else out_MN * scale).astype(dtype or lhs_MK.dtype)


def matrices_ref(lhs_MK: jax.Array, dout_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns `drhs` in float32: a loop over groups, as in `rows_ref`."""

    def one(is_own_M: jax.Array) -> jax.Array:
        own_MK = jnp.where(is_own_M[:, None], lhs_MK, 0)
        dims = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(own_MK, dout_MN, dims, preferred_element_type=jnp.float32)

    with jax.named_scope(TWIN):
        return jax.lax.map(one, _members(sizes_G, lhs_MK.shape[0]))


def _members(sizes_G: jax.Array, rows: int) -> jax.Array:
    """Returns bool[G, M]: which rows each group has."""
    ends_G1 = jnp.cumsum(sizes_G)[:, None]
    return (jnp.arange(rows) >= ends_G1 - sizes_G[:, None]) & (jnp.arange(rows) < ends_G1)


def rows_by_triton(
    lhs_MK: jax.Array,
    rhs_GKN: jax.Array,
    sizes_G: jax.Array,
    transposed: bool,
    *,
    scale: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    tile: TritonTile = ROWS,
    interpret: bool = False,
) -> jax.Array:
    """Returns `out`, or `dlhs` if `transposed`, by a kernel of Triton."""
    rows, contracted = lhs_MK.shape
    columns = rhs_GKN.shape[1 if transposed else 2]
    tile = tile.fitted(tile.rows, columns, contracted)
    across = pl.cdiv(columns, tile.columns)
    tiles = row_tiles.table(sizes_G, rows, tile.rows)
    call = pl.pallas_call(
        functools.partial(_rows_kernel, tile, transposed, contracted, columns, across),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype or lhs_MK.dtype),
        grid=(tiles.group_T.shape[0] * across,),
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        cost_estimate=_cost(lhs_MK, rhs_GKN, rows, contracted, columns),
        name="grouped_rows_t" if transposed else "grouped_rows",
    )
    return call(*([] if scale is None else [scale.reshape(1)]), *tiles, lhs_MK, rhs_GKN)


def _rows_kernel(tile: TritonTile, transposed: bool, contracted: int, columns: int, across: int, *refs: Any) -> None:
    """One tile of `out`."""
    *scale_ref, group_ref, start_ref, real_ref, count_ref, lhs_ref, rhs_ref, out_ref = refs
    number, column = pl.program_id(0) // across, pl.program_id(0) % across
    count = count_ref[number]

    @pl.when(count > 0)
    def _() -> None:
        group, start = group_ref[number], start_ref[number]
        rows, columns_ = jnp.arange(tile.rows), column * tile.columns + jnp.arange(tile.columns)
        is_row, is_column = rows[:, None] < real_ref[number], columns_ < columns
        spots = (start + rows)[:, None]

        def step(i: jax.Array, acc: jax.Array) -> jax.Array:
            depth = i * tile.depth + jnp.arange(tile.depth)
            is_depth = depth < contracted
            exact = contracted % tile.depth == 0
            lhs = pltriton.load(
                lhs_ref.at[spots, depth[None, :]], mask=is_row if exact else is_row & is_depth[None], other=0.0
            )
            where = (columns_[:, None], depth[None, :]) if transposed else (depth[:, None], columns_[None, :])
            masks = (is_column[:, None], is_depth[None]) if transposed else (is_column[None], is_depth[:, None])
            mask: jax.Array | None = None
            if not exact or columns % tile.columns:
                own = masks[0] & (True if exact else masks[1])
                mask = jnp.broadcast_to(own, jnp.broadcast_shapes(*(w.shape for w in where)))
            rhs = pltriton.load(rhs_ref.at[group, *where], mask=mask, other=None if mask is None else 0.0)
            return acc + dot(lhs, rhs.T if transposed else rhs)

        acc = jax.lax.fori_loop(
            0, pl.cdiv(contracted, tile.depth), step, jnp.zeros((tile.rows, tile.columns), jnp.float32)
        )
        acc = acc * scale_ref[0][0] if scale_ref else acc
        mask = (rows[:, None] < count) & is_column[None]
        pltriton.store(out_ref.at[spots, columns_[None, :]], acc.astype(out_ref.dtype), mask=mask)


def _cost(first: jax.Array, second: jax.Array, rows: int, contracted: int, columns: int) -> pl.CostEstimate:
    """Returns the work of a product whose groups have all rows."""
    return pl.CostEstimate(2 * rows * contracted * columns, 0, first.nbytes + second.nbytes)


def matrices_by_triton(
    lhs_MK: jax.Array, dout_MN: jax.Array, sizes_G: jax.Array, *, tile: TritonTile = MATRICES, interpret: bool = False
) -> jax.Array:
    """Returns `drhs` in float32 by a kernel of Triton."""
    shape = lhs_MK.shape[1], dout_MN.shape[1]
    tile = tile.fitted(*shape, tile.depth)
    down, across = pl.cdiv(shape[0], tile.rows), pl.cdiv(shape[1], tile.columns)
    ends_G = jnp.cumsum(sizes_G.astype(jnp.int32))
    call = pl.pallas_call(
        functools.partial(_matrices_kernel, tile, shape, across),
        out_shape=jax.ShapeDtypeStruct((sizes_G.shape[0], *shape), jnp.float32),
        grid=(down * across, sizes_G.shape[0]),
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        cost_estimate=_cost(lhs_MK, dout_MN, lhs_MK.shape[0], *shape),
        name="grouped_matrices",
    )
    return call(ends_G - sizes_G, ends_G, lhs_MK, dout_MN)


def _matrices_kernel(tile: TritonTile, shape: tuple[int, int], across: int, *refs: Any) -> None:
    """One tile of one matrix of `drhs`."""
    start_ref, end_ref, lhs_ref, dout_ref, out_ref = refs
    group = pl.program_id(1)
    start, end = start_ref[group], end_ref[group]
    down = pl.program_id(0) // across * tile.rows + jnp.arange(tile.rows)
    right = pl.program_id(0) % across * tile.columns + jnp.arange(tile.columns)
    is_down, is_right = down < shape[0], right < shape[1]

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        row = (start + i * tile.depth + jnp.arange(tile.depth))[:, None]
        is_row = row < end
        lhs = pltriton.load(lhs_ref.at[row, down[None, :]], mask=is_row & is_down[None], other=0.0)
        dout = pltriton.load(dout_ref.at[row, right[None, :]], mask=is_row & is_right[None], other=0.0)
        return acc + dot(lhs.T, dout)

    steps = pl.cdiv(end - start, tile.depth)
    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    pltriton.store(out_ref.at[group, down[:, None], right[None, :]], acc, mask=is_down[:, None] & is_right[None])


def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the product of two tiles, summed in float32."""
    return jax.lax.dot_general(lhs, rhs, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


class Products(NamedTuple):
    """Functions of (rows, matrices, sizes, whether the matrices are transposed) for `out` and `dlhs`, of (rows, rows, sizes) for `drhs`
    in float32. The former take `scale`, float32[], by which results are multiplied before they are rounded to `dtype`, that of the rows
    if it is None. Rows and matrices in e4m3 have both."""

    rows: Callable[..., jax.Array]
    matrices: Callable[..., jax.Array]


HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")


def rows_on_gpu(lhs_MK: jax.Array, rhs_GKN: jax.Array, sizes_G: jax.Array, transposed: bool, **how: Any) -> jax.Array:
    """Returns `out`, or `dlhs` if `transposed`, by the kernel of the GPUs that the surrounding `jax.shard_map` runs on."""
    if processors := hopper_processors():
        from pallas_kernels import grouped_mosaic  # takes long to import, and only these GPUs need it

        if grouped_mosaic.takes_rows(lhs_MK, rhs_GKN, transposed, how.get("dtype")):
            how |= {"transposed": transposed, "processors": processors}
            return grouped_mosaic.grouped_rows(lhs_MK, rhs_GKN, sizes_G, **how)
    return rows_by_triton(lhs_MK, rhs_GKN, sizes_G, transposed, **how)


def matrices_on_gpu(lhs_MK: jax.Array, dout_MN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns `drhs`, as `rows_on_gpu` does."""
    if processors := hopper_processors():
        from pallas_kernels import grouped_mosaic

        if grouped_mosaic.takes_matrices(lhs_MK, dout_MN):
            return grouped_mosaic.grouped_matrices(lhs_MK, dout_MN, sizes_G, processors=processors)
    return matrices_by_triton(lhs_MK, dout_MN, sizes_G)


def hopper_processors() -> int:
    """Returns the processors of the Hopper GPUs that the surrounding `jax.shard_map` runs on; 0 on others, or without one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.num_cores if device is not None and HOPPER.search(device.device_kind) else 0


def _by_platform(of_gpu: Callable[..., jax.Array], of_others: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(
        first: jax.Array,
        second: jax.Array,
        sizes_G: jax.Array,
        *static: bool,
        scale: jax.Array | None = None,
        **how: Any,
    ) -> jax.Array:
        def given(way: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            if scale is None:
                return lambda *arrays: way(*arrays, *static, **how)
            return lambda *arrays: way(*arrays[:-1], *static, scale=arrays[-1], **how)

        arrays = (first, second, sizes_G, *([] if scale is None else [scale]))
        return jax.lax.platform_dependent(*arrays, cuda=given(of_gpu), default=given(of_others))

    return run


BY_PLATFORM = "by platform"  # the kernels where the program is compiled for CUDA, else the twins
IMPLEMENTATIONS: dict[str, Products] = {
    BY_PLATFORM: Products(_by_platform(rows_on_gpu, rows_ref), _by_platform(matrices_on_gpu, matrices_ref)),
    "gpu": Products(rows_on_gpu, matrices_on_gpu),
    "jnp": Products(rows_ref, matrices_ref),
    "triton": Products(rows_by_triton, matrices_by_triton),
    "interpret": Products(
        functools.partial(rows_by_triton, interpret=True), functools.partial(matrices_by_triton, interpret=True)
    ),
}
