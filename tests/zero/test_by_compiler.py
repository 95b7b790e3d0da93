"""Checks that a model keeps its meaning on the global batch. This module tests zerojax.zero.by_compiler."""

from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.zero import shard_state, step


def drawn(seed):
    return dict(zip("xy", arrays.normal(seed, (2, 16, 8))))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(32)(x))
        return nn.Dense(8)(nn.relu(x))


class StateWithStatistics(TrainState):
    batch_stats: Any


def classifier_loss(params, batch, state):
    variables = {"params": params, "batch_stats": state.batch_stats}
    y, changed = Classifier().apply(variables, batch["x"], mutable=["batch_stats"])
    loss = jnp.mean((y - batch["y"]) ** 2)
    return loss, {"state": changed, "metrics": {"largest": jnp.max(y), "step": state.step}}


@pytest.mark.parametrize(
    ("stage", "accum"), [pytest.param(0, 1, marks=runs.LONG), pytest.param(3, 1, marks=runs.LONG), (3, 2)]
)
def test_batch_statistics_are_those_of_the_global_batch_and_travel_with_the_state(stage, accum):
    variables = jax.jit(Classifier().init)(jax.random.key(0), jnp.zeros((2, 8)))
    state = StateWithStatistics.create(apply_fn=None, tx=optax.sgd(0.1), **variables)
    sharded, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=0)
    train_step = step.make_train_step(classifier_loss, part, grad_accum=accum)
    plain = jax.jit(jax.value_and_grad(classifier_loss, has_aux=True))
    for number in range(3):
        batch = drawn(number)
        halves = jax.tree.map(lambda leaf: leaf.reshape(accum, -1, 8), batch)
        grads, values = [], []
        for i in range(accum):
            (loss, aux), grad = plain(state.params, jax.tree.map(lambda leaf, i=i: leaf[i], halves), state)
            state = state.replace(**aux["state"])
            grads.append(grad)
            values.append((loss, aux["metrics"]["largest"]))
        state = state.apply_gradients(grads=jax.tree.map(lambda *g: sum(g) / accum, *grads))
        sharded, metrics = train_step(sharded, batch if accum == 1 else halves)
        np.testing.assert_allclose((metrics["loss"], metrics["largest"]), np.mean(values, 0), rtol=1e-5)
        assert metrics["step"] == number
    for found, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(state)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # divided by batch deviations thrice
