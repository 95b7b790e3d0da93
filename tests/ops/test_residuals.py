"""Checks which arrays a backward pass keeps in place of matmuls. This module tests zerojax.ops.residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import residuals
from zerojax.zero.blocks import remat

X, W = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)


@pytest.mark.parametrize("name, in_place, adds", [("dots", True, 1), ("dots", False, 2), ("full", True, 2)])
def test_dots_keeps_an_array_in_place_of_the_matmul_that_it_was_made_of_unless_told_otherwise(name, in_place, adds):
    """What is kept is as large, and an addition that follows the matmul does not run again."""

    def f(x, w):
        return jnp.sum(jnp.tanh(residuals.in_place(1 + x @ w)) ** 2)

    run = jax.checkpoint(f, policy=remat.policy(name, in_place=in_place))
    leaves = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(run, x, w)[1], X, W))
    kept = [leaf.shape for leaf in leaves if leaf.shape not in (X.shape, W.shape)]
    assert kept == ([(3, 5)] if name == "dots" else [])
    assert str(jax.make_jaxpr(jax.grad(run, 1))(X, W)).count(" add ") == adds
