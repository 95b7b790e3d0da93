"""Holds the 8-bit code to its definition. This module tests pallas_kernels.blockwise; its shards are tested with zerojax.shards."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import blockwise

BLOCK = blockwise.BLOCK


def values_of(dtype):
    """Returns the code's values, written out in float64."""
    if dtype == jnp.int8:
        code = np.arange(-127, 128, dtype=np.float64)
        return np.sign(code) * (np.abs(code) / 127) ** 2
    return (np.arange(256, dtype=np.float64) / 255) ** 4


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_every_code_is_decoded_to_its_value_and_encoded_again(dtype):
    codes = jnp.arange(-127, 128) if dtype == jnp.int8 else jnp.arange(256)
    block = jnp.pad(codes, (0, BLOCK - codes.size)).astype(dtype)
    scale = jnp.float32(3.0)
    decoded = blockwise.decode(block, scale)
    np.testing.assert_allclose(decoded[: codes.size], 3 * values_of(dtype), rtol=1e-6)
    np.testing.assert_array_equal(blockwise.encode(decoded, scale, dtype), block)


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(st.integers(0, 10**6), st.floats(-20, 10), st.floats(0.1, 6), st.sampled_from(["int8", "uint8"]))
def test_a_value_becomes_one_of_its_two_neighbours(seed, power, spread, dtype):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, BLOCK)) * np.exp(spread * rng.standard_normal((2, BLOCK))) * 10.0**power
    x = jnp.asarray(np.abs(x) if dtype == "uint8" else x, jnp.float32)
    scales = blockwise.scales_of(x)
    table = values_of(jnp.dtype(dtype))
    r = np.asarray(x, np.float64) / np.asarray(scales, np.float64)[:, None]
    above = np.clip(np.searchsorted(table, r), 1, len(table) - 1)
    slack = 1e-5 * np.abs(r) + 1e-12
    for bits in (None, jnp.asarray(rng.integers(0, 2**16, x.shape), jnp.uint32)):
        codes = blockwise.encode(x, scales, jnp.dtype(dtype), bits)
        found = np.asarray(blockwise.decode(codes, jnp.ones_like(scales)), np.float64)
        low, high = table[above - 1], table[above]
        is_raised = (r > 0) & (found == found[found > 0].min()) if dtype == "uint8" else np.zeros(r.shape, bool)
        assert np.all(((found >= low - slack) & (found <= high + slack)) | is_raised)
        if dtype == "uint8":
            assert np.all(found[r > 0] > 0)  # nu is divided by


def test_random_bits_make_the_mean_right():
    draws = 4096
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2**16, (draws, BLOCK)), jnp.uint32)
    for dtype, x in ((jnp.int8, np.linspace(-1, 1, BLOCK)), (jnp.uint8, np.linspace(0.001, 1, BLOCK))):
        rows = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (draws, BLOCK))
        codes = blockwise.encode(rows, jnp.ones(draws), dtype, bits)
        mean = np.mean(blockwise.decode(codes, jnp.ones(draws)), axis=0)
        gap = 0.016  # between neighbours, at most; the mean of n draws is off by less than gap / 2 / sqrt(n) * 5
        np.testing.assert_allclose(mean, x, atol=gap / 2 / np.sqrt(draws) * 5)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_a_block_of_zeros_stays_zero(dtype):
    zeros = jnp.zeros((3, BLOCK))
    codes = blockwise.encode(zeros, blockwise.scales_of(zeros), dtype)
    assert not np.any(codes) and not np.any(blockwise.decode(codes, blockwise.scales_of(zeros)))


@pytest.mark.parametrize("shape", [(1,), (3, 256), (2, 3, 257), (5, 700)])
def test_blocks_split_rows_and_join_them(shape):
    blocks = blockwise.BlockView(shape)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    parts = blocks.split(x)
    assert parts.shape == (*shape[:-1], -(-shape[-1] // BLOCK), BLOCK)
    np.testing.assert_array_equal(blocks.join(parts), x)
    np.testing.assert_array_equal(blocks.scales_of(parts), blockwise.scales_of(parts))
