"""Checks that what a hook reads of the state reaches its modules, and comes back as what they saw.
This module tests zerojax.zero.blocks.hooks."""

import contextlib

import block_nets
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.zero import shard_state
from zerojax.zero.blocks import block_settings, hooks
from zerojax.zero.gradients import explicit
from zerojax.zero.sharded_batch import inputs

X = block_nets.X


@jax.custom_vjp
def noted(x, seen):
    return x


noted.defvjp(lambda x, seen: (x, jnp.max(jnp.abs(x))), lambda largest, grad: (grad, largest))


class Largest(hooks.Hook):
    """Keeps the largest magnitude of a block's input."""

    values = None

    def inputs(self, state):
        return {OVERWRITE_WITH_GRADIENT: state.largest}

    @contextlib.contextmanager
    def known(self, inputs):
        before, self.values = self.values, inputs[OVERWRITE_WITH_GRADIENT]
        yield
        self.values = before

    def of_block(self, weights):
        blocks = {path.split("/")[0] for path in weights}
        return {OVERWRITE_WITH_GRADIENT: {path: self.values[path] for path in self.values if path in blocks}}

    def renewed(self, state, seen):
        return {"largest": seen[OVERWRITE_WITH_GRADIENT]}


class State(TrainState):
    largest: dict


@pytest.mark.parametrize("passes", [1, 2])
def test_a_hook_gets_its_values_inside_blocks_and_the_largest_of_what_all_devices_saw(passes):
    hook = Largest()

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            (own,) = [hook.values[name] for name in self.path if name in hook.values]
            return x + nn.Dense(8)(noted(x, own))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.mean(jnp.square(Block(name="block_1")(Block(name="block_0")(x))))

    zeros = {"block_0": jnp.zeros(()), "block_1": jnp.zeros(())}
    with hook.known({OVERWRITE_WITH_GRADIENT: zeros}):
        params = Net().init(jax.random.key(0), X)["params"]
    state = State.create(apply_fn=None, params=params, tx=optax.sgd(0.1), largest=zeros)
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(2, 4), stage=3, min_size=0)
    gradients = explicit.value_and_grad(
        lambda params, batch, state: (Net().apply({"params": params}, batch), {"metrics": {}}),
        part,
        block_settings.Blocks(r"block_\d", hooks=(hook,)),
        passes=passes,
        layout=inputs.Layout(part.mesh, passes, by_device=True),
        reduce_dtype=jnp.float32,
        compute_dtype=None,
    )
    (_, aux), _ = jax.jit(gradients)(state.params, X if passes == 1 else X.reshape(passes, -1, 8), state)
    dense = params["block_0"]["Dense_0"]
    second = X + X @ dense["kernel"] + dense["bias"]
    found = aux["state"]["largest"]
    np.testing.assert_allclose(
        [found["block_0"], found["block_1"]], [jnp.abs(X).max(), jnp.abs(second).max()], rtol=1e-6
    )
