"""Tests the grouped matmul: its twin against a loop in numpy, its kernels against the twin, and their programs for absent GPUs."""

import functools
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped, grouped_mosaic, row_tiles

F32 = 1e-4  # float32 sums of some hundred terms, in another order
ROWS, DIM, WIDTH = 200, 72, 40
SIZES = {
    "ragged": (0, 5, 70, 0, 33, 92, 0),
    "whole tiles": (32, 64, 0, 32, 72, 0, 0),
    "all in one": (0, 0, 200, 0, 0, 0, 0),
    "rows after the last group": (1, 31, 33, 0, 64, 1, 2),
    "no rows": (0, 0, 0, 0, 0, 0, 0),
}
TILE = grouped.TritonTile(32, 32, 32, 4, 1)


def arrays(width=WIDTH):
    random = np.random.default_rng(0)
    shapes = ((ROWS, DIM), (7, DIM, width), (ROWS, width))
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def by_loop(lhs, rhs, dout, sizes):
    out, dlhs, drhs, start = np.zeros_like(dout), np.zeros_like(lhs), np.zeros_like(rhs), 0
    for group, size in enumerate(sizes):
        own = slice(start, start + size)
        out[own], dlhs[own], drhs[group] = lhs[own] @ rhs[group], dout[own] @ rhs[group].T, lhs[own].T @ dout[own]
        start += size
    return out, dlhs, drhs


@pytest.mark.parametrize("aligned", [1, 8])
def test_tiles_write_each_row_once_and_begin_where_copies_may(aligned):
    table = jax.jit(lambda sizes: row_tiles.table(sizes, ROWS, 32, aligned))
    for sizes in SIZES.values():
        tiles = table(np.asarray(sizes, np.int32))
        ends, written = np.cumsum(sizes), []
        for group, start, real, count, skip in np.transpose(tiles):
            rows = range(start + skip, start + count)
            written += rows
            if count:
                assert start % aligned == 0 and skip < aligned and real in (0, count)
            assert all(ends[group] - sizes[group] <= row < ends[group] for row in rows if real)
        assert written == list(range(ROWS))


NARROW = 9  # as an adapter's rank


@pytest.mark.parametrize("implementation, width", [("jnp", WIDTH), ("interpret", WIDTH), ("interpret", NARROW)])
def test_three_products_are_those_of_a_loop_over_groups(implementation, width, monkeypatch):
    small = {"tile": TILE, "interpret": True}
    products = (functools.partial(f, **small) for f in (grouped.rows_by_triton, grouped.matrices_by_triton))
    monkeypatch.setitem(grouped.IMPLEMENTATIONS, "interpret", grouped.Products(*products))

    @jax.jit
    def both(lhs, rhs, dout, sizes):
        out, pull = jax.vjp(lambda *inputs: grouped.grouped_matmul(*inputs, sizes, implementation), lhs, rhs)
        return out, *pull(dout)

    for sizes in SIZES.values():
        found = both(*arrays(width), np.asarray(sizes, np.int32))
        for ours, theirs in zip(found, by_loop(*arrays(width), sizes), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=F32)


def test_tiles_are_no_larger_than_a_product_needs():
    assert (
        grouped.ROWS.fitted(128, 768, 2048) == grouped.ROWS
        and grouped.MATRICES.fitted(2048, 768, 64) == grouped.MATRICES
    )
    tile = grouped.ROWS.fitted(128, NARROW, 24)
    assert (tile.rows, tile.columns, tile.depth) == (128, 16, 32)


@pytest.mark.long
def test_kernels_of_hopper_compile_for_absent_gpus_without_a_dense_product(monkeypatch):
    rows, dim, width, groups = 1024, 256, 512, 16
    products = grouped.Products(grouped_mosaic.rows, grouped_mosaic.matrices)
    monkeypatch.setitem(grouped.IMPLEMENTATIONS, "mosaic", products)
    mesh = compile_only.mesh(("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def both(lhs, rhs, dout, sizes):
        out, pull = jax.vjp(lambda *inputs: grouped.grouped_matmul(*inputs, sizes, "mosaic"), lhs, rhs)
        return out, *pull(dout)

    def abstract(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    shapes = ((rows, dim), (groups, dim, width), (rows, width))
    lowered = jax.jit(both).lower(*map(abstract, shapes), abstract((groups,), jnp.int32))
    with compile_only.optimized():
        program = lowered.compile(compiler_options=compile_only.FAST)
    text = program.as_text()
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == 3
    assert not re.search(r"\bdot\(|__cublas|triton_gemm", text)
    assert program.memory_analysis().temp_size_in_bytes < 2**16  # tables of tiles alone
