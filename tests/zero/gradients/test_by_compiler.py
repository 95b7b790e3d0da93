"""Checks that a model keeps its meaning on the global batch. This module tests zerojax.zero.gradients.by_compiler."""

import warnings
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


KERNELS = {
    "patch": {"kernel": (4, 4, 3, 32)},
    "conv_0": {"kernel": (3, 8, 8)},
    "layers": {"kernel": (48, 8, 2, 16)},
    "dense": {"kernel": (8, 64)},
}


@pytest.mark.parametrize("reduce_dtype, model", [(None, 2), (None, 1), (jnp.float32, 2)])
def test_convolutions_beside_tensor_parallel_matrices_are_warned_of_without_reduce_dtype(reduce_dtype, model):
    params = jax.tree.map(jnp.zeros, KERNELS, is_leaf=lambda node: isinstance(node, tuple))
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    overrides = [("dense/kernel", (None, "model"))]
    _, partition = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(model=model), overrides=overrides)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.make_train_step(lambda params, batch, state: (0.0, {}), partition, reduce_dtype=reduce_dtype)
    said = [str(one.message) for one in found]
    if reduce_dtype is not None or model == 1:
        assert not said
    else:
        assert "gradient of a convolution's kernel 2 times too large" in said[0]
        assert "patch/kernel" in said[0] and "conv_0/kernel" in said[0] and "layers" not in said[0]
