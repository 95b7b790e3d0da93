"""Runs models with sharding constraints and axes of their own on each device's examples.
This module tests zerojax.zero.sharded_batch.constraints."""

from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

X = arrays.normal(1, (8, 16))


class Keyed(TrainState):
    raw: Any = ()


class Constrained(nn.Module):
    """Constrains its activations in every way that Flax and JAX have."""

    mesh: Any
    model: Any = None

    @nn.compact
    def __call__(self, x):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", self.model))
        x = nn.Dense(16, kernel_init=boxed, name="layers_0")(x)
        x = jax.lax.with_sharding_constraint(x, P("data", self.model))
        x = jax.lax.with_sharding_constraint((x, 1.0), (NamedSharding(self.mesh, P(("replica", "data"))), P()))[0]
        x = jax.lax.with_sharding_constraint({"x": x}, P("data"))["x"]
        rules = [("batch", "data"), ("features", self.model)]
        return nn.with_logical_constraint(x, ("batch", "features"), rules=rules, mesh=self.mesh)


@pytest.mark.filterwarnings("ignore:mesh. model is 2, and no weight is sharded over")  # the model's constraints use it
@pytest.mark.parametrize("model", [1, 2])
def test_a_models_own_constraints_over_the_batch_are_dropped_with_a_warning(model):
    mesh = zerojax.make_mesh(model=model, devices=jax.devices()[:4])
    net = Constrained(mesh, "model" if model > 1 else None)
    plain = nn.Sequential([nn.Dense(16)])
    params = plain.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state, part = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=8)
    step = zerojax.make_train_step(
        lambda params, batch, _: jnp.mean(net.apply({"params": params}, batch) ** 2), part, reduce_dtype=jnp.float32
    )
    with (
        jax.set_mesh(mesh),
        pytest.warns(UserWarning, match=r"^with_sharding_constraint: P\(.* has no effect over data") as told,
    ):
        after, metrics = step(state, X)
    assert told[0].filename == __file__
    loss, grads = jax.value_and_grad(lambda params: jnp.mean(plain.apply({"params": params}, X) ** 2))(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    jax.tree.map(lambda w, new, g: np.testing.assert_allclose(w - new, g, atol=1e-6), params, after.params, grads)


def with_axes(params, batch, state):
    """A loss with in-batch negatives: examples of all devices are compared with this device's."""
    axes, count = ("replica", "data"), batch.shape[0]
    emitted = batch @ params["w"]
    everyone = jax.lax.all_gather(emitted, axes, tiled=True)
    labels = jax.lax.axis_index(axes) * count + jnp.arange(count)
    loss = optax.softmax_cross_entropy_with_integer_labels(emitted @ everyone.T, labels).mean()
    noise = jax.random.uniform(state.raw, ())
    positive = jax.lax.psum(jnp.sum(batch > 0), axes)
    return loss, {"metrics": {"noise": noise, "positive": positive}}


def test_a_loss_may_use_the_axes_of_devices_if_it_runs_on_each():
    state = Keyed.create(apply_fn=None, params={"w": jnp.eye(16)}, tx=optax.sgd(1.0), raw=jax.random.PRNGKey(0))
    on, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(devices=jax.devices()[:2]), stage=3, min_size=8)
    by_device = {"reduce_dtype": jnp.float32, "donate": False}
    after, metrics = zerojax.make_train_step(with_axes, part, **by_device)(on, X)

    def whole(w):
        return optax.softmax_cross_entropy_with_integer_labels((X @ w) @ (X @ w).T, jnp.arange(8)).mean()

    loss, grad = jax.value_and_grad(whole)(jnp.eye(16))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(np.eye(16) - after.params["w"], grad, atol=1e-6)
    assert metrics["positive"] == jnp.sum(X > 0)
    with pytest.raises(
        zerojax.UserError, match=r"^loss_fn: returned metrics/positive, .* differs between devices or passes"
    ):
        zerojax.make_train_step(with_axes, part, grad_accum=2, **by_device)(on, X.reshape(2, 4, 16))
    with pytest.raises(zerojax.UserError, match=r"^loss_fn: .*unbound axis name: replica; .* pass reduce_dtype"):
        zerojax.make_train_step(with_axes, part)(on, X)
