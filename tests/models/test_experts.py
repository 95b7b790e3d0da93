"""Tests the module of experts in a Flax model of one's own, at every stage and on any mesh, against one device at stage 0."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import zerojax
from zerojax.models import experts
from zerojax.ops import experts as experts_op

F32 = 1e-5  # float32 sums over devices, in another order


class Net(nn.Module):
    """A user's model: a residual mixture."""

    @nn.compact
    def __call__(self, x_BTD):
        return x_BTD + experts.Experts(4, 2, 24, stddevs=(1.0, 0.2, 0.2), name="experts")(x_BTD)


def trained(stage, mesh, **how):
    """Returns the losses of three steps, and the largest share of a leaf that a device has."""
    net, random = Net(), np.random.default_rng(0)
    batch = {name: random.normal(size=(16, 5, 16)).astype(np.float32) for name in ("x", "y")}

    def init(key):
        params = net.init(key, batch["x"])["params"]
        return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))

    def loss_fn(params, batch, state):
        y_BTD, seen = net.apply({"params": params}, batch["x"], mutable=["intermediates"])
        routings = jax.tree.leaves(seen, is_leaf=lambda leaf: isinstance(leaf, experts_op.Routing))
        balance = sum(map(experts_op.balance_loss, routings))
        return jnp.mean((y_BTD - batch["y"]) ** 2) + 0.1 * balance, {"metrics": experts_op.metrics(routings[0])}

    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, min_size=0)
    step = zerojax.make_train_step(loss_fn, partition, **how)
    found = []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    assert 1 <= metrics["load"] <= 4 and metrics["dropped"] == 0 and 0 < metrics["entropy"] < np.log(4)
    return found, max(leaf.addressable_shards[0].data.size / leaf.size for leaf in jax.tree.leaves(state.params))


def test_experts_with_a_balance_loss_train_as_on_one_device():
    expected, _ = trained(0, zerojax.make_mesh(devices=jax.devices()[:1]))
    assert expected[2] < expected[0]
    # Each device's loss is of its own tokens, and its balance loss of all.
    found, held = trained(3, zerojax.make_mesh(devices=jax.devices()[:4]), reduce_dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=F32)
    assert held == 1 / 4  # stacked experts are weights as any other


def test_a_bias_and_a_capacity_belong_to_the_module():
    module = experts.Experts(4, 2, 24, router=(("score", "sigmoid"),), capacity_factor=0.5, has_bias=True)
    x = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)
    variables = module.init(jax.random.key(0), x)
    assert variables["router"]["bias"].shape == (4,)
    far = {"params": variables["params"], "router": {"bias": jnp.asarray([9.0, 8.0, 0.0, 0.0])}}
    y, seen = module.apply(far, x, mutable=["intermediates"])
    (routing,) = seen["intermediates"][experts.ROUTING]
    np.testing.assert_array_equal(routing.experts_TK, [[0, 1]] * 12)
    y = np.asarray(y).reshape(12, 16)
    assert np.abs(y[:3]).min() > 0 and not y[3:].any()  # room for 0.5 x 12 x 2 / 4
