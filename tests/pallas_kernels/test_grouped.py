"""Tests the grouped matmul: its twin against a loop in numpy, its kernels against the twin, and their programs for absent GPUs."""

import functools
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped, grouped_mosaic, row_tiles
from zerojax import traces
from zerojax.zero.blocks import float32_grads

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


@pytest.mark.parametrize("make", [row_tiles.table, lambda *args: row_tiles.largest_first(*args)[0]])
def test_tiles_write_each_row_of_their_group_once(make):
    table = jax.jit(lambda sizes: make(sizes, ROWS, 32))
    for sizes in SIZES.values():
        ends, written = np.cumsum(sizes), []
        for group, start, real, count in np.transpose(table(np.asarray(sizes, np.int32))):
            rows = range(start, start + count)
            written += rows
            assert real in (0, count) and count <= 32
            assert all(ends[group] - sizes[group] <= row < ends[group] for row in rows if real)
        assert sorted(written) == list(range(ROWS))


def test_the_largest_tiles_come_first_and_those_that_are_not_needed_last():
    table = jax.jit(lambda sizes: row_tiles.largest_first(sizes, ROWS, 32))
    for sizes in SIZES.values():
        tiles, used = table(np.asarray(sizes, np.int32))
        assert list(tiles.count_T) == sorted(tiles.count_T, reverse=True) and used == np.count_nonzero(tiles.count_T)
        rest = ROWS - sum(sizes)
        assert used == sum(-(-size // 32) for size in (*sizes, rest))  # as few as can be


def test_groups_by_size_are_the_largest_first_and_equal_ones_in_order():
    for sizes in SIZES.values():
        _, ends, order = jax.jit(row_tiles.by_size)(np.asarray(sizes, np.int32))
        assert list(ends) == list(np.cumsum(sizes))
        assert list(order) == sorted(range(len(sizes)), key=lambda group: -sizes[group])


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


E4M3, SCALE = jnp.float8_e4m3fn, 0.25


@pytest.mark.parametrize(
    "way", [grouped.rows_ref, functools.partial(grouped.rows_by_triton, tile=TILE, interpret=True)]
)
def test_products_in_8_bits_are_those_of_their_values_times_a_scale(way):
    lhs, rhs, _ = (jnp.asarray(array, E4M3) for array in arrays())
    run = jax.jit(functools.partial(way, transposed=True, scale=jnp.float32(SCALE), dtype=jnp.float32))
    values = [np.asarray(array, np.float32) for array in (lhs, rhs)]
    for sizes in SIZES.values():
        found = run(lhs, rhs.swapaxes(1, 2), np.asarray(sizes, np.int32))
        expected = by_loop(*values, arrays()[2], sizes)[0]
        np.testing.assert_allclose(found, SCALE * expected, atol=F32)


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
def test_gradients_of_matrices_that_are_summed_in_float32_are_not_rounded_before(implementation, monkeypatch):
    small = {"tile": TILE, "interpret": True}
    products = (functools.partial(f, **small) for f in (grouped.rows_by_triton, grouped.matrices_by_triton))
    monkeypatch.setitem(grouped.IMPLEMENTATIONS, "interpret", grouped.Products(*products))
    lhs, rhs, dout = (jnp.asarray(array, jnp.bfloat16) for array in arrays())
    sizes = jnp.asarray(SIZES["ragged"], jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def grads(widen, rhs):
        _, pull = jax.vjp(lambda rhs: grouped.grouped_matmul(lhs, rhs, sizes, implementation), rhs)
        return (float32_grads.in_float32(pull, platform="cuda") if widen else pull)(dout)[0]

    exact = by_loop(*(np.asarray(array, np.float32) for array in (lhs, rhs, dout)), SIZES["ragged"])[2]
    summed, rounded = grads(True, rhs), grads(False, rhs)
    assert (summed.dtype, rounded.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(summed, exact, atol=F32)
    np.testing.assert_array_equal(rounded, summed.astype(jnp.bfloat16))


def test_tiles_are_no_larger_than_a_product_needs():
    assert (
        grouped.ROWS.fitted(128, 768, 2048) == grouped.ROWS
        and grouped.MATRICES.fitted(2048, 768, 64) == grouped.MATRICES
    )
    tile = grouped.ROWS.fitted(128, NARROW, 24)
    assert (tile.rows, tile.columns, tile.depth) == (128, 16, 32)


def on(target, run, rows, dim, width, groups=4, dtype=jnp.bfloat16):
    """Returns a function in a `shard_map` on absent GPUs, and its abstract arguments."""
    mesh = Mesh(np.asarray(compile_only.gpus(target)[:1]), ("data",))

    def abstract(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    shapes = ((rows, dim), (groups, dim, width), (rows, width))
    inside = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return inside, (*map(abstract, shapes), abstract((groups,), jnp.int32))


def both(lhs, rhs, dout, sizes):
    out, pull = jax.vjp(lambda *inputs: grouped.grouped_matmul(*inputs, sizes, grouped.BY_PLATFORM), lhs, rhs)
    return out, *pull(dout)


def kernels(program):
    """Returns the numbers of Hopper's kernels of rows and of matrices, and of Triton's kernels."""
    found = list(traces.equations(program))
    names = [eqn.params["name"] for eqn in found if eqn.primitive.name in ("jit", "pjit")]
    triton = sum(eqn.primitive.name == "pallas_call" for eqn in found)
    return [names.count("grouped_rows"), names.count("grouped_matrices"), triton]


@pytest.mark.parametrize(
    "target, width, dtype, expected",
    [
        ("h100", 128, jnp.bfloat16, [2, 1, 0]),
        ("h100", 128, jnp.float32, [0, 0, 3]),
        ("h100", 16, jnp.bfloat16, [0, 0, 3]),  # an adapter's
        ("a100", 128, jnp.bfloat16, [0, 0, 3]),
    ],
)
def test_hopper_gpus_run_their_own_kernels_of_wide_16_bit_products(target, width, dtype, expected):
    inside, args = on(target, both, 64, 128, width, dtype=dtype)
    assert kernels(jax.make_jaxpr(inside)(*args)) == expected


def in_8_bits(lhs, rhs, dout, sizes, dtype=jnp.bfloat16):
    products = grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM]
    return products.rows(dout.astype(E4M3), rhs.astype(E4M3), sizes, True, scale=jnp.float32(SCALE), dtype=dtype)


@pytest.mark.parametrize(
    "target, width, dtype, expected",
    [
        ("h100", 128, jnp.bfloat16, [1, 0, 0]),
        ("h100", 64, jnp.bfloat16, [0, 0, 1]),  # 128 values of 8 bits are contracted at a time
        ("h100", 128, jnp.float32, [0, 0, 1]),
        ("b200", 128, jnp.bfloat16, [0, 0, 1]),
    ],
)
def test_hopper_gpus_run_their_own_kernel_of_wide_8_bit_products(target, width, dtype, expected):
    inside, args = on(target, functools.partial(in_8_bits, dtype=dtype), 64, 128, width)
    assert kernels(jax.make_jaxpr(inside)(*args)) == expected


@pytest.mark.parametrize("works", [1, 131, 678, 1808, 3072])
def test_blocks_share_the_works_and_begin_one_after_the_other_where_each_has_several(works):
    processors, waves = 132, 4
    blocks = grouped_mosaic._blocks(processors, waves, works)
    assert blocks % processors == 0 and blocks <= waves * processors
    assert blocks == processors or works // blocks >= grouped_mosaic.FEWEST
    assert blocks == waves * processors or works < (blocks + processors) * grouped_mosaic.FEWEST
    shares = [range((works - block + blocks - 1) // blocks) for block in range(blocks)]
    all_of = [(i, block) for block, own in enumerate(shares) for i in own]
    turns = jax.vmap(lambda i, block: grouped_mosaic._in_turns(i, works, blocks, block))(*np.asarray(all_of).T)
    assert sorted(np.asarray(turns)) == list(range(works))


def compiled(inside, args):
    with compile_only.optimized():
        program = jax.jit(inside).lower(*args).compile(compiler_options=compile_only.ASSEMBLED)
    return program, program.as_text()


@pytest.mark.long
def test_the_kernel_of_8_bit_products_compiles_for_an_absent_gpu_without_a_dense_product():
    text = compiled(*on("h200", in_8_bits, 1024, 256, 384, groups=16))[1]
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == 1 and not re.search(
        r"\bdot\(|__cublas|triton_gemm", text
    )


@pytest.mark.long
def test_kernels_of_hopper_compile_for_absent_gpus_without_a_dense_product():
    groups, dim, width = 16, 256, 384
    inside, args = on("h200", both, 1024, dim, width, groups=groups)
    program, text = compiled(inside, args)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) == 3
    assert not re.search(r"\bdot\(|__cublas|triton_gemm", text)
    # Tables of tiles, and `drhs` in float32 before its cast, alone.
    assert program.memory_analysis().temp_size_in_bytes < 2**16 + 4 * groups * dim * width
