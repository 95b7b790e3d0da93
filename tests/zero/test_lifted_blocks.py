"""Runs blocks by Linen's transformations. This module tests zerojax.zero.lifted_blocks."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.zero import lifted_blocks, remat


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x, word):
        y = x * self.param("w", nn.initializers.ones, (2,))
        self.sow("seen", "y", y)
        return {"y": y, word: word}


@pytest.mark.parametrize("policy", [None, remat.REMAT["full"]])
def test_a_block_gathers_its_known_weights_and_keeps_what_is_no_array(policy):
    stored, x = jnp.array([[2.0, 3.0]]), jnp.ones(2)

    def run(module, x):
        known = {"w": ("scaled/w", stored)}
        gather = lambda path, leaf: leaf[0] if path == "scaled/w" else leaf  # noqa: E731
        same = lambda values: values  # noqa: E731
        how = {"is_leaf": None, "is_made": True}
        return lifted_blocks.run(module, "__call__", (x, "word"), {}, known, gather, same, policy, **how)

    found, seen = nn.apply(run, Scaled(), mutable="seen")({"params": {"w": jnp.zeros(2)}}, x)
    np.testing.assert_array_equal(found.pop("y"), [2, 3])
    assert found == {"word": "word"} and "y" in seen["seen"]


def test_a_layer_lacks_the_first_dim_of_each_weight_of_its_stack():
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}
    is_layer = [
        lifted_blocks.is_layer(params, stacks, is_leaf=None)
        for stacks in ([(5, 3, 4), (5, 4)], [(5, 3, 4), (4,)], [None] * 2)
    ]
    assert is_layer == [True, False, False]
