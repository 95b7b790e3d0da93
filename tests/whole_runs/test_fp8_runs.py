"""Checks that one huge activation does not end a run in fp8. This module runs each recipe for some steps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

import zerojax
from zerojax.ops import fp8

OUTLIER, STRUCK, STEPS = 1e4, 5, 16
SEEN = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


class Block(nn.Module):
    """A residual block. `struck` is added to one element of what its first matmul reads."""

    @nn.compact
    def __call__(self, x, struck):
        y = nn.RMSNorm()(x)
        y = y.at[0, 0].add(struck)
        return x + nn.Dense(16, name="narrow")(nn.gelu(nn.Dense(32, name="wide")(y)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, struck):
        for number in range(2):
            x = Block(name=f"block_{number}")(x, struck * (number == 0))
        return nn.Dense(4, name="head")(nn.RMSNorm()(x))


def losses(settings, struck):
    """Returns the losses of a run whose step STRUCK has the outlier, if there is one."""

    def init(key):
        params = Net().init(key, SEEN[:1], 0.0)["params"]
        fields = {"fp8": settings.init(params, r"block_\d")} if settings else {}
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
        return zerojax.TrainState.create(
            apply_fn=Net().apply, params=params, tx=tx, rng=jax.random.key_data(key), **fields
        )

    def loss_fn(params, batch, state):
        struck_now = jnp.where(state.step == STRUCK, struck, 0.0)
        found = state.apply_fn({"params": params}, batch["x"], struck_now)
        return jnp.mean(jnp.square(found - batch["x"][:, :4] ** 2))

    mesh = zerojax.make_mesh(data=2, devices=jax.devices()[:2])
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3, min_size=0)
    step = zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", fp8=settings, reduce_dtype=jnp.float32)
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, {"x": SEEN})
        found.append(float(metrics["loss"]))
    return np.asarray(found)


@pytest.mark.parametrize("recipe", runs.cases(fp8.RECIPES, long=("tensorwise", "rowwise")))
def test_a_run_goes_on_after_one_activation_of_10000(recipe):
    """Later steps learn on, also while a history of delayed scaling holds the outlier."""
    found = losses(zerojax.Fp8(recipe=recipe, history=4), OUTLIER)
    assert np.all(np.isfinite(found))
    assert np.all(np.diff(found) < 0)
