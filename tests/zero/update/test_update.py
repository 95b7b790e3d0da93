"""Checks the dtypes and the shardings of updates through optax. This module tests zerojax.zero.update.update."""

import jax
import jax.numpy as jnp
import optax
from small_states import GRADS, sharded

from zerojax import precision
from zerojax.zero.update import update


def test_gradients_keep_their_dtype_where_nothing_is_scaled_and_are_float32_where_it_is():
    seen = []

    def spy(grads, state, params=None):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(grads)})
        return jax.tree.map(jnp.zeros_like, params), state

    state, part = sharded(optax.GradientTransformation(lambda params: (), spy))
    half = precision.cast_floating(GRADS, jnp.float16)
    for finite in (None, jnp.asarray(True)):
        update.make(part)(state, state, half, 1.0, finite)
    assert seen == [{"float16"}, {"float32"}]


def test_weights_that_are_trained_are_constrained_to_their_update_and_other_leaves_are_as_they_were():
    state, part = sharded(optax.sgd(1.0), trainable="^w$")
    given = {**state.params, "count": jnp.ones(8)}
    found = update.constrain(part, given)
    assert found["b"] is given["b"] and found["count"] is given["count"]
    assert given["w"].sharding.is_fully_replicated and not found["w"].sharding.is_fully_replicated
