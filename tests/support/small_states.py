"""A small sharded state to update. This module draws it, and its gradients."""

import jax.numpy as jnp
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.zero import shard_state

GRADS = {"w": jnp.linspace(2, -2, 64).reshape(8, 8), "b": jnp.arange(8.0)}


def sharded(tx, dtype=jnp.float32, state_class=TrainState, **how):
    """Returns the state at stage 2 on all devices, and its partition."""
    params = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8).astype(dtype), "b": jnp.ones((8,), dtype)}
    state = state_class.create(apply_fn=None, params=params, tx=tx)
    return shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=2, min_size=0, **how)
