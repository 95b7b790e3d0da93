"""Checks the shared modules against their equations. This module tests zerojax.models.layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models import layers
from zerojax.ops import losses

ROUNDING = 1e-5  # float32 sums of some terms in another order


def applied(module, *arrays, **options):
    params = module.init(jax.random.key(0), *arrays)
    return np.asarray(module.apply(params, *arrays, **options)), jax.tree.map(np.asarray, params["params"])


def normal(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def test_the_norm_divides_by_the_root_mean_square():
    x = normal(2, 3, 8)
    found, _ = applied(layers.RMSNorm(1e-3), x)
    np.testing.assert_allclose(found, x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-3), rtol=ROUNDING)


@pytest.mark.parametrize("contracted, equation", [(1, "bthn,nxy->bthxy"), (2, "bthn,hnxy->btxy")])
def test_a_linear_map_contracts_the_last_dims(contracted, equation):
    x = normal(2, 3, 4, 5)
    found, params = applied(layers.Linear((6, 7), contracted=contracted), x)
    np.testing.assert_allclose(found, np.einsum(equation, x, params["kernel"]), atol=ROUNDING)


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
