"""Checks matmuls in fp8 against float64 matmuls of operands that numpy casts. This module tests zerojax.ops.fp8."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import zerojax
from zerojax.errors import UserError
from zerojax.ops import fp8

E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)
SUMS = 1e-5  # of the largest result: float32 sums in another order
BF16 = 2.0**-8  # half a last place of bfloat16
NOW = (fp8.TENSORWISE, fp8.ROWWISE)  # recipes without a history
MATRICES = (((1,), (0,)), ((), ()))


def cast(array, kind, axis):
    """Returns an array in float64 after a cast to fp8 with power-of-two scales, along `axis` or for all of it (None)."""
    dtype, top = kind
    array = np.asarray(array, np.float64)
    amax = np.max(np.where(np.isfinite(array), np.abs(array), 0), axis=axis, keepdims=axis is not None)
    scale = np.exp2(np.floor(np.log2(top / np.where(amax == 0, top, amax))))
    return (array * scale).astype(dtype).astype(np.float64) / scale


def twin(x, w, dy, recipe):
    """Returns y, dx and dw of y = x w."""
    row, column = (1, 0) if recipe == "rowwise" else (None, None)
    y = cast(x, E4M3, row) @ cast(w, E4M3, column)
    dx = cast(dy, E5M2, row) @ cast(w, E4M3, row).T
    dw = cast(x, E4M3, column).T @ cast(dy, E5M2, column)
    return y, dx, dw


def drawn(seed, *shape, spread=3.0):
    """Returns normal numbers whose rows differ in size by powers of e."""
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) * np.exp(random.normal(scale=spread, size=(shape[0], 1)))).astype(np.float32)


def close(found, expected, tolerance=SUMS):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@functools.partial(jax.jit, static_argnums=3)
def product(x, w, dy, recipe):
    y, pull = jax.vjp(lambda x, w: fp8.dot_general(x, w, MATRICES, recipe=recipe), x, w)
    return y, *pull(dy)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), size=st.sampled_from([(5, 3, 7), (32, 48, 16)]), power=st.integers(-60, 60))
@pytest.mark.parametrize("recipe", NOW)
def test_a_matmul_and_its_gradients_are_those_of_operands_cast_with_their_own_scales(recipe, seed, size, power):
    rows, inner, columns = size
    x, w, dy = drawn(seed, rows, inner), drawn(seed + 1, inner, columns), drawn(seed + 2, rows, columns)
    dy = np.ldexp(dy, power // 2).astype(np.float32)
    for found, expected in zip(product(x, w, dy, recipe), twin(x, w, dy, recipe)):
        close(found, expected)


def test_16_bit_operands_give_16_bit_results():
    x, w, dy = (jnp.asarray(drawn(n, 32, 32, spread=0.5), jnp.bfloat16) for n in range(3))
    for found, expected in zip(product(x, w, dy, "tensorwise"), twin(x, w, dy, "tensorwise")):
        assert found.dtype == jnp.bfloat16
        close(found, expected, BF16)
    half = fp8.dot_general(x.astype(jnp.float16), w.astype(jnp.float16), MATRICES)
    assert half.dtype == jnp.float16
    close(half, twin(x, w, dy, "tensorwise")[0], BF16)
    assert fp8.dot_general(x, w, MATRICES, preferred_element_type=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize(
    "shapes, dims",
    [
        (((2, 3, 4, 5), (6, 5, 4)), (((2, 3), (2, 1)), ((), ()))),
        (((4, 3, 5), (5, 3, 2)), (((2,), (0,)), ((1,), (1,)))),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", NOW)
def test_any_dims_may_be_contracted_or_batched(shapes, dims, recipe):
    """Values that fp8 holds exactly give exactly the matmul, so only the order of dims is left to check."""
    random = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(random.integers(-2, 3, shape), jnp.float32) for shape in shapes)
    expected = jax.lax.dot_general(lhs, rhs, dims)
    weights = jnp.asarray(random.integers(-2, 3, expected.shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def results(dot, lhs, rhs):
        y, pull = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, dims), lhs, rhs)
        return y, *pull(weights)

    in_fp8 = functools.partial(fp8.dot_general, recipe=recipe)
    for ours, theirs in zip(results(in_fp8, lhs, rhs), results(jax.lax.dot_general, lhs, rhs)):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind, top", [(fp8.FORWARD, 448.0), (fp8.BACKWARD, 57344.0)])
def test_scales_are_the_largest_powers_of_two_that_fit(kind, top, dtype):
    amax = jnp.asarray([1.0, 447.0, 448.0, 450.0, 57344.0, 1e-12, 1e4, 3e38, 1e-30], dtype).astype(jnp.float32)
    scale = np.asarray(jax.vmap(lambda a: fp8.scale_of(a[None], kind))(amax), np.float64)
    scaled = np.asarray(amax, np.float64) * scale
    assert np.all(np.exp2(np.round(np.log2(scale))) == scale)
    assert np.all(scaled <= top) and np.all(scaled[:-1] > top / 2)  # the last is below the smallest scale
    assert fp8.scale_of(jnp.zeros((3,)), kind) == 1


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_an_array_that_was_cast_is_cast_again_without_a_change(axis):
    array = jnp.asarray(drawn(0, 16, 24), jnp.bfloat16)
    once = fp8.quantized(array, fp8.FORWARD, fp8.scale_of(array, fp8.FORWARD, axis))
    back = once.values.astype(jnp.bfloat16) / once.scale.astype(jnp.bfloat16)
    again = fp8.quantized(back, fp8.FORWARD, fp8.scale_of(back, fp8.FORWARD, axis))
    np.testing.assert_array_equal(again.values.astype(jnp.float32) / again.scale, back.astype(jnp.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("recipe", NOW)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_value_that_is_not_finite_reaches_the_results_that_it_reaches_in_16_bits_and_no_others(which, recipe, bad):
    arrays = [jnp.asarray(drawn(n, 8, 8, spread=0.5), jnp.bfloat16) for n in range(3)]
    clean = product(*arrays, recipe)
    arrays[which] = arrays[which].at[2, 3].set(bad)
    _, pull = jax.vjp(lambda x, w: x @ w, *arrays[:2])
    expected = arrays[0] @ arrays[1], *pull(arrays[2])
    for found, plain, before in zip(product(*arrays, recipe), expected, clean):
        is_finite = np.isfinite(np.asarray(plain, np.float32))
        np.testing.assert_array_equal(np.isfinite(np.asarray(found, np.float32)), is_finite)
        size = np.abs(np.asarray(before, np.float32)).max()  # the other values keep their precision
        np.testing.assert_allclose(
            np.where(is_finite, found, 0).astype(np.float32),
            np.where(is_finite, before, 0).astype(np.float32),
            atol=0.2 * size,
        )


def test_arrays_of_zeros_have_zero_products_and_gradients():
    zeros = jnp.zeros((4, 4))
    for array in product(zeros, zeros, zeros, "tensorwise"):
        np.testing.assert_array_equal(array, zeros)
    _, dx, dw = product(zeros, jnp.eye(4), jnp.eye(4), "rowwise")
    np.testing.assert_array_equal(dx, jnp.eye(4))
    np.testing.assert_array_equal(dw, zeros)


def test_an_outlier_leaves_the_product_finite_and_other_rows_exact_if_rows_have_scales():
    x, dy = np.ones((4, 16), np.float32), np.ones((4, 8), np.float32)
    x[0, 0] = 1e4
    y, *_ = product(x, jnp.ones((16, 8)), dy, "rowwise")
    np.testing.assert_array_equal(y[1:], 16.0)
    y, *_ = product(x, jnp.ones((16, 8)), dy, "tensorwise")
    np.testing.assert_allclose(y[1:], 16.0, rtol=0.07)  # 1 / 32 has no fewer than 3 bits below 1e4's scale


def test_layers_of_linen_and_nnx_take_it():
    x = jnp.asarray(drawn(0, 4, 32, spread=0.3))
    dense = nn.Dense(16, dot_general=zerojax.fp8.dot_general)
    params = dense.init(jax.random.key(0), x)
    expected = cast(x, E4M3, None) @ cast(params["params"]["kernel"], E4M3, None)
    close(dense.apply(params, x), expected)
    several = nn.DenseGeneral((2, 8), axis=-1, dot_general=zerojax.fp8.dot_general)
    kernel = {"params": {"kernel": params["params"]["kernel"].reshape(32, 2, 8), "bias": jnp.zeros((2, 8))}}
    close(several.apply(kernel, x).reshape(4, 16), expected)
    linear = nnx.Linear(32, 16, dot_general=zerojax.fp8.dot_general, rngs=nnx.Rngs(0))
    linear.kernel.set_value(params["params"]["kernel"])
    close(linear(x), expected)


def test_misuse_is_told():
    x = jnp.ones((4, 4))
    with pytest.raises(UserError, match=r"^recipe: must be one of tensorwise, delayed, rowwise, and is 'rows'"):
        fp8.dot_general(x, x, MATRICES, recipe="rows")
    with pytest.raises(UserError, match=r"^fp8.dot_general: rhs must be a floating array, and is int8"):
        fp8.dot_general(x, x.astype(jnp.int8), MATRICES)
    with pytest.raises(UserError, match=r"^fp8.dot_general: out_sharding"):
        fp8.dot_general(x, x, MATRICES, out_sharding="anything")
