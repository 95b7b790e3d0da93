"""Checks the trainer's state. This module tests zerojax.train_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import train_state


def test_a_state_starts_at_step_0_with_its_key_as_raw_words():
    params = {"w": jnp.ones((2, 3))}
    state = train_state.create(params, optax.adam(1e-3), jax.random.key(5))
    assert state.step == 0
    assert jnp.issubdtype(state.rng.dtype, jnp.uint32)
    assert jnp.array_equal(state.rng, jax.random.key_data(jax.random.key(5)))
    assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(params)


def test_a_key_given_as_raw_words_is_kept():
    words = jax.random.key_data(jax.random.key(7))
    assert jnp.array_equal(train_state.create({"w": jnp.ones(2)}, optax.sgd(1.0), words).rng, words)


def test_the_key_is_a_leaf_and_an_update_leaves_it_alone():
    state = train_state.create({"w": jnp.ones(2)}, optax.sgd(1.0), jax.random.key(1))
    updated = state.apply_gradients(grads={"w": jnp.ones(2)})
    np.testing.assert_array_equal(updated.params["w"], np.zeros(2))
    assert jnp.array_equal(updated.rng, state.rng) and updated.step == 1
    assert any(leaf is state.rng for leaf in jax.tree.leaves(state))


def test_a_state_whose_model_draws_nothing_needs_no_key():
    state = train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(1.0))
    assert state.rng == () and state.apply_gradients(grads={"w": jnp.ones(2)}).step == 1
