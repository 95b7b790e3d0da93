"""Checks blocks of 8 and 4 bits against their closed form. This module tests pallas_kernels.wire."""

import functools

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import wire

M = 70  # two full tiles of blocks, and a ragged one
BAD = {5: np.nan, 6: np.inf, 7: -np.inf}
ROUNDED = 1e-5  # of a scale: float32 sums of a rotation


def blocks(seed=0, dtype=np.float32):
    random = np.random.default_rng(seed)
    x = random.normal(size=(M, wire.BLOCK)) * 10.0 ** random.integers(-6, 6, size=(M, 1))
    x[3] = 0
    return jnp.asarray(x, dtype)


def of_scale(error, scales):
    return np.max(np.abs(np.asarray(error)) / np.maximum(np.asarray(scales), 1e-30)[:, None])


WAYS = [
    ("jnp", 4),
    ("interpret", 8),
    *(pytest.param(*way, marks=pytest.mark.long) for way in (("jnp", 8), ("interpret", 4))),
]


@pytest.mark.parametrize(("implementation", "bits"), WAYS)
def test_a_value_errs_by_at_most_half_a_code(implementation, bits):
    for dtype in (np.float32, jnp.bfloat16):
        x = blocks(dtype=dtype)
        codes, scales = wire.pack(x, bits, implementation=implementation)
        assert (codes.dtype, codes.shape) == (wire.DTYPE[bits], (M, wire.WIDTH[bits]))
        before, after = x.astype(jnp.float32), wire.unpack(codes, scales, bits)
        if bits == 4:
            before, after = wire.rotated(before), wire.rotated(after)
        np.testing.assert_allclose(scales, np.max(np.abs(before), axis=1), rtol=1e-6)
        assert of_scale(after - before, scales) <= 0.5 / wire.TOP[bits] + ROUNDED
        assert of_scale(after - before, scales) > 0.4 / wire.TOP[bits]  # the bound is reached
        np.testing.assert_array_equal(after[3], 0)


def test_a_rotation_keeps_the_sum_of_squares_and_is_its_own_inverse():
    x = np.zeros((1, wire.BLOCK), np.float32)
    x[0, 70] = 8.0
    once = np.asarray(wire.rotated(jnp.asarray(x)))
    np.testing.assert_allclose(np.abs(once[0, 64:128]), 1.0, rtol=1e-6)  # one large value becomes 64 equal ones
    assert np.count_nonzero(once) == wire.ROTATED
    np.testing.assert_allclose(wire.rotated(once), x, atol=1e-6)


@pytest.mark.parametrize(("implementation", "bits"), WAYS)
def test_a_block_that_is_not_finite_arrives_as_nan_and_no_other_does(implementation, bits):
    x = blocks()
    for row, value in BAD.items():
        x = x.at[row, 40 * (row - 4)].set(value)
    codes, scales = wire.pack(x, bits, implementation=implementation)
    total = wire.unpack_sum(codes[None], scales[None], bits, implementation=implementation)
    for found in (wire.unpack(codes, scales, bits), total):
        assert np.isnan(found).all(axis=1).nonzero()[0].tolist() == list(BAD)
        assert np.isnan(found).any(axis=1).sum() == len(BAD)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
def test_a_sum_is_that_of_the_unpacked_parts(implementation, bits):
    parts = [wire.pack(blocks(seed), bits) for seed in range(3)]
    codes, scales = (jnp.stack(arrays) for arrays in zip(*parts))
    found = wire.unpack_sum(codes, scales, bits, implementation=implementation)
    wanted = sum(np.asarray(wire.unpack(*part, bits), np.float64) for part in parts)
    assert of_scale(found - wanted, scales.max(axis=0)) < ROUNDED


@pytest.mark.parametrize("bits", [8, 4])
def test_one_kernel_packs_and_one_adds_up(bits):
    mesh = Mesh(np.asarray(compile_only.devices()[:1]), ("one",))
    held = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    pack = jax.jit(lambda x: wire.pack(x, bits, implementation="pallas"))
    add = jax.jit(lambda codes, scales: wire.unpack_sum(codes, scales, bits, implementation="pallas"))
    arrays = held((4, M, wire.WIDTH[bits]), wire.DTYPE[bits]), held((4, M), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # which tells JAX 0.11 and later the GPU of the kernels
        lowered = pack.lower(held((M, wire.BLOCK), jnp.float32)), add.lower(*arrays)
    packed, added = (compile_only.compile_gpu(program, compile_only.ASSEMBLED) for program in lowered)
    assert packed.count("__gpu$xla.gpu.triton") == 1
    entry = added[added.index("ENTRY") :]
    assert entry.count("__gpu$xla.gpu.triton") + entry.count(" fusion(") == 1
