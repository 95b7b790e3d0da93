"""Checks grouped matmuls that read MXFP4 against dequantized matrices. This module tests pallas_kernels.grouped_mxfp4."""

import functools
import re

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import ptx
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped, grouped_mxfp4
from zerojax.ops import expert_matrices, quantized

ROUNDED = 2.0**-8  # relative, of a result in bfloat16, with room for sums in another order
ROWS, GROUPS = 40, 5
SIZES = {
    "ragged": (0, 5, 20, 0, 15),
    "one row each": (1, 1, 1, 0, 0),
    "all in one": (0, 0, 40, 0, 0),
    "rows after the last group": (0, 3, 33, 2, 1),
    "no rows": (0, 0, 0, 0, 0),
}
TILES = {
    False: (grouped.TritonTile(16, 32, 64), grouped.TritonTile(32, 16, 128)),
    True: (grouped.TritonTile(16, 64, 32),),
}


@functools.cache
def stored(inputs, outputs):
    """Returns matrices in MXFP4, and the same as float32."""
    kernel = np.random.default_rng(0).normal(size=(GROUPS, inputs, outputs)).astype(np.float32)
    kernel[1] *= np.geomspace(1e-6, 1e6, inputs)[:, None]  # exponents of all sizes
    kernel[2, :32] = 0
    found = quantized.quantize(jnp.asarray(kernel), quantized.MXFP4)
    return quantized.values_of(found), np.asarray(quantized.dequantize(found, jnp.float32))


def rows_of(count, columns):
    return jnp.asarray(np.random.default_rng(1).normal(size=(count, columns)), jnp.bfloat16)


def by_einsum(lhs, matrices, sizes, transposed):
    """Returns each row times its matrix, 0 after the last group, and the sum of the terms' sizes."""
    own = np.repeat(np.arange(GROUPS + 1), (*sizes, len(lhs) - sum(sizes)))
    each = np.concatenate([matrices, np.zeros_like(matrices[:1])])[own]
    lhs, form = np.asarray(lhs, np.float32), "mn,mkn->mk" if transposed else "mk,mkn->mn"
    return np.einsum(form, lhs, each), np.einsum(form, np.abs(lhs), np.abs(each))


@pytest.mark.parametrize(
    ("transposed", "tile", "inputs", "outputs"),
    [(way, tile, 96, 72) for way, tiles in TILES.items() for tile in tiles]
    + [(False, grouped.TritonTile(16, 64, 256), 2880, 48), (True, grouped.TritonTile(64, 128, 64), 2880, 48)],
)
def test_rows_are_multiplied_by_the_matrices_that_codes_stand_for(transposed, tile, inputs, outputs):
    (codes, exponents), matrices = stored(inputs, outputs)
    lhs = rows_of(ROWS, outputs if transposed else inputs)
    assert grouped_mxfp4.takes(lhs, codes, transposed)
    for sizes in SIZES.values() if inputs < 1000 else [SIZES["ragged"]]:
        found = grouped_mxfp4.rows(
            lhs, codes, exponents, np.asarray(sizes, np.int32), transposed=transposed, tile=tile, interpret=True
        )
        wanted, terms = by_einsum(lhs, matrices, sizes, transposed)
        assert found.dtype == jnp.bfloat16
        assert np.all(np.abs(np.asarray(found, np.float32) - wanted) <= ROUNDED * np.abs(wanted) + 1e-6 * terms)


def test_one_row_of_one_group_is_multiplied():
    (codes, exponents), matrices = stored(96, 72)
    lhs, sizes = rows_of(1, 96), (0, 0, 0, 1, 0)
    found = grouped_mxfp4.rows(
        lhs, codes, exponents, jnp.asarray(sizes), transposed=False, tile=TILES[False][0], interpret=True
    )
    np.testing.assert_allclose(
        np.asarray(found, np.float32), by_einsum(lhs, matrices, sizes, False)[0], rtol=ROUNDED, atol=1e-4
    )


def test_floats_other_rows_no_rows_and_more_bytes_than_are_counted_are_not_taken():
    codes = jax.ShapeDtypeStruct((GROUPS, 72, 48), jnp.uint8)
    assert grouped_mxfp4.takes(rows_of(1, 96), codes, False) and grouped_mxfp4.takes(rows_of(1, 72), codes, True)
    assert not grouped_mxfp4.takes(rows_of(1, 96).astype(jnp.float32), codes, False)
    assert not grouped_mxfp4.takes(rows_of(0, 96), codes, False)
    assert not grouped_mxfp4.takes(rows_of(1, 96), codes.update(shape=(2**20, 72, 48)), False)


@pytest.mark.parametrize("is_odd", [False, True])
def test_ptx_makes_weights_of_codes(is_odd):
    """Of each byte, with exponents that files have; 0 stands for no weight at all."""
    threads, exponents = 256, np.asarray([0, 1, 66, 100, 127, 140, 192], np.int32)
    words = np.arange(threads, dtype=np.uint32) * 0x01010101 ^ np.uint32(0x00335A0F)  # four bytes
    for exponent in exponents:
        scale = np.asarray(grouped_mxfp4.scales_of(jnp.asarray([exponent]))).view(np.uint16).astype(np.uint32)[0]
        text = re.sub(r"\$(\d)", r"%\1!", grouped_mxfp4.decode_text(is_odd)).removeprefix("{").removesuffix("}")
        block = ptx.Block(ptx.Memory(0x400, {}), ptx.Memory(0x7F0000000000, {}), threads)
        found = block.run([text], [words.view(np.float32), *[int(scale | scale << 16)] * 2], 2)
        halves = np.stack([np.asarray(one).view(np.uint32) for one in found], axis=1).view(np.uint16)
        values = halves.view(jnp.bfloat16).astype(np.float64).reshape(threads, 4) * grouped_mxfp4.UNIT
        codes = (words.view(np.uint8).reshape(threads, 4) >> (4 if is_odd else 0)) & 15
        wanted = quantized.MXFP4_VALUES.astype(np.float64)[codes] * (2.0 ** (exponent - 127) if exponent else 0)
        if exponent >= 66:
            np.testing.assert_array_equal(values, wanted)
        else:
            np.testing.assert_allclose(values, wanted, atol=2.0**-60)


def both(x, dy, codes, exponents, sizes):
    stored = {quantized.MXFP4: codes, quantized.EXPONENTS: exponents}
    y, pull = jax.vjp(lambda x: expert_matrices.multiply(x, expert_matrices.StoredMatrices(stored), sizes), x)
    return y, *pull(dy)


def on_gpu(rows, groups, inputs, outputs, dtype=jnp.bfloat16):
    """Returns the program of both products on an absent GPU."""
    mesh = Mesh(np.asarray(compile_only.gpus()[:1]), ("data",))
    shapes = (
        ((rows, inputs), dtype),
        ((rows, outputs), dtype),
        ((groups, outputs, inputs // 2), jnp.uint8),
        ((groups, outputs, inputs // 32), jnp.uint8),
        ((groups,), jnp.int32),
    )
    args = [jax.ShapeDtypeStruct(*one, sharding=NamedSharding(mesh, P())) for one in shapes]
    return jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(*args)


@pytest.mark.parametrize("rows", [4, 512])
def test_experts_of_an_absent_gpu_are_read_as_they_are_stored(rows):
    groups, inputs, outputs = 16, 320, 192
    with compile_only.optimized():
        program = on_gpu(rows, groups, inputs, outputs).compile(compiler_options=compile_only.ASSEMBLED)
    text = program.as_text()
    assert len(re.findall(r"custom-call\(.*triton", text)) == 2 and not re.search(r"\bdot\(|__cublas|gemm", text)
    # Rows in another order, and no matrix as floats
    assert (
        program.memory_analysis().temp_size_in_bytes
        < 2**14 + 4 * rows * (inputs + outputs)
        < 2 * groups * inputs * outputs
    )


def test_float32_rows_multiply_floats():
    assert "grouped_rows_mxfp4" not in on_gpu(64, 4, 64, 64, jnp.float32).as_text()
