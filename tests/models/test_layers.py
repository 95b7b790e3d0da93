"""Checks the shared modules against their equations. This module tests zerojax.models.layers."""

import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models import layers
from zerojax.ops import losses

ROUNDING = 1e-5  # float32 sums of some terms in another order
EPS = 1e-6


def applied(module, *arrays, **options):
    params = jax.jit(module.init)(jax.random.key(0), *arrays)
    return np.asarray(jax.jit(functools.partial(module.apply, **options))(params, *arrays)), jax.tree.map(
        np.asarray, params["params"]
    )


def normal(*shape):
    return arrays.normal(1, shape)


def test_the_norm_divides_by_the_root_mean_square():
    x = normal(2, 3, 8)
    found, _ = applied(layers.RMSNorm(1e-3), x)
    np.testing.assert_allclose(found, x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-3), rtol=ROUNDING)


def plain_norm(x, scale, eps):
    """The norm with JAX's own derivative."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + eps)).astype(x.dtype) * scale


@functools.partial(jax.jit, static_argnums=0)
def value_and_derivatives(norm, x, scale, dy, dx, dscale):
    y, pull = jax.vjp(lambda x, scale: norm(x, scale, EPS), x, scale)
    forward = jax.jvp(lambda x, scale: norm(x, scale, EPS), (x, scale), (dx, dscale))[1]
    return y, (*pull(dy), forward)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norms_derivative_is_as_exact_as_jaxs_own(dtype):
    """Beside the closed form in float64: the gradients of x and scale, and forward mode. Values are the same bits."""
    drawn = np.random.default_rng(0).normal(size=(3, 512, 96)).astype(np.float32)
    scales = 1 + np.random.default_rng(1).normal(size=(2, 96)) / 4
    for size, offset in ((1.0, 0.0), (300.0, 0.0), (1e-3, 0.0), (1.0, 8.0), (0.01, 1.0)):
        arrays = drawn[0] * size + offset, scales[0], drawn[1], drawn[2], scales[1]
        given = [jnp.asarray(array, dtype) for array in arrays]
        x, scale, dy, dx, dscale = (np.asarray(array, np.float64) for array in given)
        inverse = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS)
        n, g = x * inverse, dy * scale
        wanted = (
            (g - n * np.mean(n * g, -1, keepdims=True)) * inverse,
            np.sum(dy * n, 0),
            (dx - n * np.mean(n * dx, -1, keepdims=True)) * inverse * scale + n * dscale,
        )
        y, found = value_and_derivatives(layers.rms_norm, *given)
        plain_y, plain = value_and_derivatives(plain_norm, *given)
        np.testing.assert_array_equal(y, plain_y)
        rounding = float(jnp.finfo(dtype).eps)  # twice that of a result
        for value, *pair in zip(wanted, found, plain):
            assert pair[0].dtype == dtype
            error, plain_error = (
                np.linalg.norm(np.asarray(array, np.float64) - value) / np.linalg.norm(value) for array in pair
            )
            assert error <= max(plain_error, rounding) and error < 8 * rounding, (size, offset)


@pytest.mark.parametrize("contracted, equation", [(1, "bthn,nxy->bthxy"), (2, "bthn,hnxy->btxy")])
def test_a_linear_map_contracts_the_last_dims(contracted, equation):
    x = normal(2, 3, 4, 5)
    found, params = applied(layers.Linear((6, 7), contracted=contracted), x)
    np.testing.assert_allclose(found, np.einsum(equation, x, params["kernel"]), atol=ROUNDING)


def test_activations_are_those_of_their_names():
    x = np.linspace(-4, 8, 25, dtype=np.float32)
    relu, logistic = np.maximum(x, 0), 1 / (1 + np.exp(-x))
    wanted = {
        "relu2": relu**2,
        "relu6": np.minimum(relu, 6),
        "quick_gelu": x / (1 + np.exp(-1.702 * x)),
        "mish": x * np.tanh(np.log1p(np.exp(x))),
        "sigmoid": logistic,
        "silu": x * logistic,
        "tanh": np.tanh(x),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(layers.ACTIVATIONS[name](x), value, atol=1e-6, rtol=1e-5)


def test_an_embedding_looks_rows_up():
    tokens = jnp.array([[3, 1], [0, 3]])
    found, params = applied(layers.Embed(5, 4), tokens)
    np.testing.assert_array_equal(found, params["embedding"][np.asarray(tokens)])


def test_the_heads_loss_is_the_cross_entropy_of_its_logits():
    x, labels = normal(2, 3, 8), jnp.array([[1, 2, 0], [10, 5, 5]])
    head = layers.Head(8, 11)
    logits, params = applied(head, x)
    np.testing.assert_allclose(logits, x @ params["kernel"], atol=ROUNDING)
    loss = head.apply({"params": params}, x, labels, method="loss")
    np.testing.assert_allclose(loss, losses.cross_entropy(jnp.asarray(logits), labels), rtol=ROUNDING)


def test_a_head_with_a_bias_has_the_loss_of_its_biased_logits():
    x, labels, bias = normal(2, 3, 8), jnp.array([[1, 2, 0], [10, 5, 5]]), jnp.arange(11.0) / 4
    params = layers.Head(8, 11).init(jax.random.key(0), x)
    loss = layers.Head(8, 11).apply(params, x, labels, bias, method="loss")
    logits = layers.Head(8, 11).apply(params, x) + bias
    np.testing.assert_allclose(loss, losses.cross_entropy(logits, labels), rtol=ROUNDING)


def test_a_linear_map_adds_its_bias():
    x, module = normal(2, 3, 4), layers.Linear((6, 7), use_bias=True)
    params = module.init(jax.random.key(0), x)["params"]
    assert params["bias"].shape == (6, 7) and not params["bias"].any()
    biased = module.apply({"params": params | {"bias": jnp.ones((6, 7))}}, x)
    np.testing.assert_allclose(biased, module.apply({"params": params}, x) + 1, atol=ROUNDING)


def test_the_layer_norm_subtracts_the_mean_and_divides_by_the_deviation():
    x = normal(2, 3, 8) + 100  # a mean far from 0
    params = {"scale": jnp.arange(8.0), "bias": jnp.arange(8.0) / 8}
    found = layers.LayerNorm(1e-5).apply({"params": params}, x)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        found, expected * params["scale"] + params["bias"], atol=1e-4
    )  # x has 5 digits after its mean


def test_attention_to_a_memory_reuses_its_keys():
    x, memory, mask = normal(2, 3, 16), normal(2, 5, 16) + 1, jnp.arange(5)[None] < jnp.array([[5], [3]])
    module = layers.MultiHeadAttention(16, 4, 4, "xla", use_bias=True)
    params, apply = jax.jit(module.init)(jax.random.key(0), x, memory), jax.jit(module.apply)
    full, keys = apply(params, x, memory, mask_BS=mask)
    again, _ = apply(params, x[:, 1:2], mask_BS=mask, keys=keys)
    np.testing.assert_allclose(again, full[:, 1:2], atol=ROUNDING)
    scores = np.einsum("bthn,bshn->bhts", *(_projected(params, name, y) for name, y in (("q", x), ("k", memory)))) / 2
    weights = np.exp(np.where(mask[:, None, None], scores, -np.inf))
    mixed = np.einsum("bhts,bshn->bthn", weights / weights.sum(-1, keepdims=True), _projected(params, "v", memory))
    np.testing.assert_allclose(full, np.einsum("bthn,hnd->btd", mixed, params["params"]["o"]["kernel"]), atol=ROUNDING)


def _projected(params, name, x):
    return np.einsum("btd,dhn->bthn", x, params["params"][name]["kernel"])
