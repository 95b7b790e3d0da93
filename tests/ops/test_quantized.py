"""Bounds the errors of 4 and 8 bits. This module tests zerojax.ops.quantized."""

import math
import statistics

import arrays
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import runs

from zerojax.ops import quantized

# The NF4 values as QLoRA's appendix E and bitsandbytes print them, from below, by how they are derived there: quantiles of a normal
# distribution, 8 of one half and 9 of the other with a common 0, divided by the largest.
OFFSET = 0.9677083  # (1 - 1 / 30 + 1 - 1 / 32) / 2


def test_the_code_book_is_that_of_normal_quantiles():
    quantile = np.vectorize(statistics.NormalDist().inv_cdf)
    upper, lower = quantile(np.linspace(OFFSET, 0.5, 9)[:-1]), -quantile(np.linspace(OFFSET, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([upper, [0.0], lower]))
    np.testing.assert_allclose(quantized.CODE_BOOK, values / values.max(), atol=2e-6)  # the paper rounds the offset


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", runs.cases([(8, 64), (3, 2, 32), (5, 4, 4, 8)], long=[(8, 64), (3, 2, 32)]))
def test_each_weight_is_the_nearest_code_times_a_scale_that_is_hardly_larger_than_the_block(kind, shape):
    kernel = arrays.normal(0, shape) * jnp.logspace(-6, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    stored = quantized.quantize(kernel, kind)
    assert quantized.shape_of(stored) == shape and stored["scales"].dtype == jnp.bfloat16
    blocks = np.asarray(kernel).reshape(shape[0], -1, quantized.BLOCK)
    largest, scales = np.abs(blocks).max(-1), np.asarray(stored["scales"], np.float32)
    assert (scales >= largest).all() and (scales <= largest * (1 + 2**-7)).all()
    book = quantized.CODE_BOOK if kind == "nf4" else np.arange(-127, 128) / 127
    nearest = np.abs(blocks[..., None] / scales[..., None, None] - book).min(-1) * scales[..., None]
    error = np.abs(np.asarray(quantized.dequantize(stored, jnp.float32)).reshape(blocks.shape) - blocks)
    np.testing.assert_allclose(error, nearest, rtol=1e-4, atol=1e-6 * largest.max())
    half_gap = np.diff(book).max() / 2
    assert (error <= half_gap * scales[..., None] * (1 + 1e-5)).all()


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_zeros_stay_zeros_and_bits_are_as_told(kind):
    stored = quantized.quantize(jnp.zeros((4, 128)), kind)
    assert not quantized.dequantize(stored, jnp.bfloat16).any()
    bits = 8 * sum(part.nbytes for part in stored.values()) / (4 * 128)
    assert bits == {"int8": 8.25, "nf4": 4.25}[kind]
    assert jax.tree.map(lambda leaf: leaf.shape, quantized.abstract((4, 128), kind)) == jax.tree.map(jnp.shape, stored)


def test_values_of_mxfp4_are_kept_and_others_rounded_to_the_nearest():
    values = np.concatenate([quantized.MXFP4_VALUES, quantized.MXFP4_VALUES[::-1]])
    kernel = np.moveaxis(np.stack([2.0**-40 * values, 8 * values, 0 * values]).reshape(1, 3, 32), 1, 2)
    stored = quantized.quantize(jnp.asarray(kernel, jnp.float32), "mxfp4")
    assert {name: leaf.shape for name, leaf in stored.items()} == {"mxfp4": (1, 3, 16), "exponents": (1, 3, 1)}
    assert quantized.shape_of(stored) == kernel.shape == (1, 32, 3)
    np.testing.assert_array_equal(quantized.dequantize(stored, jnp.float32), kernel)
    rounded = quantized.quantize(
        jnp.asarray([4.0, 5.1, 4.9, 0.2, -0.3, 2.6, 7.9, *[0] * 25]).reshape(1, 32, 1), "mxfp4"
    )
    found = quantized.dequantize(rounded, jnp.bfloat16)[0, :7, 0]
    np.testing.assert_array_equal(np.asarray(found, np.float32), [4, 6, 4, 0, -0.5, 3, 6])


@pytest.mark.parametrize("shape, inputs", [((200, 300), 1), ((24, 4, 40), 1), ((4, 40, 200), 2), ((5, 64), 1)])
def test_blocks_of_a_matrix_share_a_scale_whatever_its_dims(shape, inputs):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = quantized.quantize(jnp.asarray(kernel), "fp8_block", inputs)
    assert quantized.shape_of(stored) == shape and quantized.takes(shape, "fp8_block")
    scales = np.asarray(stored["block_scales"]).view(np.float32)
    found = quantized.dequantize(stored, jnp.float32)
    matrix, found = (np.asarray(a).reshape(math.prod(shape[:inputs]), -1) for a in (kernel, found))
    codes = np.asarray(stored["fp8_block"]).view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(matrix.shape)
    for row, column in np.ndindex(scales.shape):
        block = np.s_[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
        np.testing.assert_allclose(scales[row, column], np.abs(matrix[block]).max() / 448, rtol=1e-6)
        np.testing.assert_array_equal(found[block], codes[block] * scales[row, column])
        # 3 bits of mantissa, and below 2^-6 steps of 2^-9
        error = np.maximum(np.abs(matrix[block]) / 16, scales[row, column] * 2.0**-10)
        assert (np.abs(found[block] - matrix[block]) <= error * (1 + 1e-6)).all()


def test_a_kernel_whose_rows_are_no_whole_blocks_is_not_taken():
    assert not quantized.takes((64,)) and not quantized.takes((64, 96)) and quantized.takes((3, 4, 16))


def test_nothing_dequantized_is_kept_for_the_backward_pass():
    """Also under a policy that keeps all but weights."""
    from zerojax.zero.blocks import remat

    stored = quantized.quantize(arrays.normal(0, (64, 128)), "nf4")

    def loss(x, stored):
        return jnp.sum(jnp.tanh(x @ quantized.dequantize(stored, x.dtype)))

    for name in remat.REMAT:
        run = jax.checkpoint(loss, policy=remat.REMAT[name])
        residuals = jax.eval_shape(lambda x, run=run: jax.vjp(lambda y: run(y, stored), x)[1], jnp.ones((2, 64)))
        assert (64, 128) not in [leaf.shape for leaf in jax.tree.leaves(residuals)]
