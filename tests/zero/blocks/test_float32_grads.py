"""Checks gradients in float32 against those of matmuls of float32 operands. This module tests zerojax.zero.blocks.float32_grads."""

import functools
from typing import Any

import arrays
import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax.zero.blocks import float32_grads

IN, HIDDEN, ROWS = 24, 40, 64


def weights() -> dict[str, jax.Array]:
    return {
        "up": arrays.normal(0, (IN, HIDDEN), jnp.bfloat16) / 5,
        "down": arrays.normal(1, (4, HIDDEN // 4, IN), jnp.bfloat16) / 5,
        "scale": jnp.ones((IN,), jnp.bfloat16),
        "cut": arrays.normal(2, (IN, 2 * IN), jnp.bfloat16) / 5,
    }


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """`down` is reshaped and its matmul scaled, `up` is used twice, once transposed, and a slice of `cut` is read."""
    hidden = jnp.tanh(x @ params["up"])
    y = x + jnp.einsum("rh,hi->ri", hidden, params["down"].reshape(HIDDEN, IN)) * params["scale"]
    return y + hidden @ params["up"].T + x @ params["cut"][:, :IN]


def inputs() -> jax.Array:
    return arrays.normal(1, (ROWS, IN), jnp.bfloat16)


WRAPS = {
    "plain": lambda body: body,
    "recomputed": functools.partial(jax.checkpoint, prevent_cse=False),
    "kept apart": jax.checkpoint,
    "in part": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.checkpoint_dots, prevent_cse=False),
}


@functools.cache
def pulled(wrap: str) -> tuple[Any, Any]:
    """Returns (gradients as JAX gives them, gradients in float32), each with the input's."""
    y, pull = jax.vjp(WRAPS[wrap](block), weights(), inputs())
    return pull(y), jax.jit(float32_grads.in_float32(pull, platform="cpu"))(y)


@pytest.mark.parametrize("wrap", runs.cases(WRAPS, long=["recomputed"]))  # which the next test takes
def test_rounded_they_are_the_gradients_of_jax(wrap):
    given, wide = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), grads) for grads in pulled(wrap))
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        other = functools.reduce(lambda node, key: node[key.key if hasattr(key, "key") else key.idx], path, wide)
        # What is computed between is rounded to bfloat16, or not, as XLA likes.
        np.testing.assert_allclose(leaf, other, rtol=2**-7, atol=2**-6 * np.sqrt(np.mean(leaf**2)), err_msg=str(path))


@pytest.mark.parametrize("wrap", WRAPS)
def test_only_matmuls_and_sums_are_float32(wrap):
    _, (wide, wide_x) = pulled(wrap)
    assert {name: str(grad.dtype) for name, grad in wide.items()} == {
        "up": "float32",
        "down": "float32",
        "scale": "float32",
        "cut": "bfloat16",  # padded after its matmul
    }
    assert wide_x.dtype == jnp.bfloat16


def test_they_are_as_close_as_float32_allows():
    """A matmul of one layer: nothing before it is rounded, so its float32 result is that of float32 operands."""

    def layer(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x @ w["up"]

    x, up = inputs(), {"up": weights()["up"]}
    y, pull = jax.vjp(layer, up, x)
    exact = x.astype(jnp.float32).T @ y.astype(jnp.float32)
    wide = float32_grads.in_float32(pull, platform="cpu")(y)[0]["up"]
    np.testing.assert_allclose(wide, exact, rtol=1e-6, atol=1e-5)
    assert np.abs(pull(y)[0]["up"].astype(jnp.float32) - exact).max() > 100 * np.abs(wide - exact).max()


def test_a_biass_gradient_is_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    y, pull = jax.vjp(lambda bias, x: x + bias, jnp.zeros((3,), jnp.bfloat16), jnp.zeros((10_001, 3), jnp.bfloat16))
    ones = jnp.ones_like(y)
    np.testing.assert_array_equal(float32_grads.in_float32(pull, platform="cpu")(ones)[0], 10_001.0)


def test_a_norms_gradients_leave_its_float32_arithmetic_unrounded():
    norm = nn.LayerNorm(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x = arrays.normal(2, (300, 8), jnp.bfloat16)
    params = norm.init(jax.random.key(0), x)
    y, pull = jax.vjp(norm.apply, params, x)
    given, wide = pull(y)[0]["params"], float32_grads.in_float32(pull, platform="cpu")(y)[0]["params"]
    for name in ("scale", "bias"):
        assert wide[name].dtype == jnp.float32
        np.testing.assert_array_equal(given[name], wide[name].astype(jnp.bfloat16))
        assert (given[name].astype(jnp.float32) != wide[name]).any()


def test_a_convolutions_gradient_stays_as_it_is():
    """XLA has no convolution of 16-bit operands for GPUs that ends in float32: it would cast both, and keep the copies."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, w, (1,), "SAME")

    x = arrays.normal(2, (3, 4, 16), jnp.bfloat16)
    w = arrays.normal(3, (5, 4, 3), jnp.bfloat16)
    y, pull = jax.vjp(layer, w, x)
    for given, same in zip(pull(y), float32_grads.in_float32(pull, platform="gpu")(y)):
        assert given.dtype == same.dtype == jnp.bfloat16
        np.testing.assert_array_equal(given, same)


def test_a_gradient_that_something_else_reads_too_stays_as_it_is():
    @jax.custom_vjp
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    def backward(kept: Any, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, x = kept
        grad = x.T @ y
        return grad, (y @ w.T) * jnp.max(jnp.abs(grad))

    layer.defvjp(lambda w, x: (x @ w, (w, x)), backward)
    y, pull = jax.vjp(layer, weights()["up"], inputs())
    for given, same in zip(pull(y), float32_grads.in_float32(pull, platform="cpu")(y)):
        assert given.dtype == same.dtype
        np.testing.assert_array_equal(given, same)


def test_float32_stays_as_it_is():
    params = {name: leaf.astype(jnp.float32) for name, leaf in weights().items()}
    y, pull = jax.vjp(block, params, inputs().astype(jnp.float32))
    chex.assert_trees_all_equal(pull(y), float32_grads.in_float32(pull, platform="cpu")(y))
