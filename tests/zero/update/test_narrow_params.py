"""Checks updates of 16-bit params: copies of master weights, and dtypes of the state.
This module tests zerojax.zero.update.narrow_params."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from small_states import GRADS, sharded

from zerojax import tree
from zerojax.optim import master_weights
from zerojax.zero.update import update


@pytest.mark.parametrize("finite", [None, True, False])
def test_params_are_exactly_the_master_weights_rounded(finite):
    """-1 + (1 + master) loses the last bit of the master, without which it is a tie."""
    master = jnp.float32(2.0**-9 + 2.0**-17 + 2.0**-32)
    state, part = sharded(master_weights.with_master_weights(optax.sgd(1.0)), jnp.bfloat16)
    state = state.replace(params=jax.tree.map(lambda p: -jnp.ones_like(p), state.params))
    own = state.opt_state._replace(master=jax.tree.map(lambda m: jnp.full_like(m, master), state.opt_state.master))
    state = state.replace(opt_state=own)
    grads = jax.tree.map(jnp.zeros_like, GRADS)
    new = jax.jit(functools.partial(update.make(part), factor=1.0))(
        state, state, grads, finite=None if finite is None else jnp.asarray(finite)
    )
    expected = -1.0 if finite is False else float(master.astype(jnp.bfloat16))
    assert {float(leaf) for leaf in new.params["w"].ravel()} == {expected}


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)], ids=["adam", "sgd"])
def test_a_state_keeps_its_dtypes_though_its_gradients_are_float32(tx):
    state, part = sharded(tx, jnp.bfloat16)
    new = jax.eval_shape(update.make(part), state, state, GRADS, 0.5, None)
    assert jax.tree.map(tree.dtype_of, new) == jax.tree.map(tree.dtype_of, state)
