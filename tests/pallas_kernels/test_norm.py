"""Compares sums of squares with float64 numpy. This module tests pallas_kernels.norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import norm, tiles

ROUNDING = 3e-6  # sums of up to 5e6 float32 squares, added in trees
GROUPED = tiles.Launch(elements=1024, joins=True, step=256, group=3, group_elements=512, small=2000)


def grads_of(sizes, dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(size, np.float32)).astype(dtype) for size in sizes]


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_are_those_of_float64(implementation, dtype):
    grads = grads_of([1, 7, 512, 1000, 0, 3, 2048, 5000, 4096], dtype)
    found = norm.sums_of_squares(grads, 0.25, implementation=implementation, launch=GROUPED)
    expected = [np.sum((np.asarray(grad, np.float64) * 0.25) ** 2) for grad in grads]
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize("size", [255, 8193, 5_000_003])
def test_any_number_of_elements_in_any_shape(size):
    (grad,) = grads_of([size], "float32")
    for shape in {(size,), (1, size), (size, 1)}:
        (found,) = norm.sums_of_squares([grad.reshape(shape)], 2.0, implementation="interpret")
        np.testing.assert_allclose(found, 4 * np.sum(np.asarray(grad, np.float64) ** 2), rtol=ROUNDING)


@pytest.mark.parametrize("implementation", ["jnp", "interpret"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 511, 2999])
def test_one_element_that_is_not_finite_makes_its_sum_so_and_no_other(implementation, bad, place):
    grads = grads_of([3000, 10], "bfloat16")
    grads[0] = grads[0].at[place].set(bad)
    found = norm.sums_of_squares(grads, 1.0, implementation=implementation, launch=GROUPED)
    assert [bool(jnp.isfinite(square)) for square in found] == [False, True]


def test_small_arrays_share_launches():
    grads = [jax.ShapeDtypeStruct((100,), jnp.float32)] * 7
    text = str(jax.make_jaxpr(lambda g: norm.sums_of_squares(g, 1.0, implementation="pallas", launch=GROUPED))(grads))
    assert text.count("pallas_call[") <= 3
