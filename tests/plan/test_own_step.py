"""Checks that a plan from an init function and a loss is that of the calls that train. This module tests zerojax.plan.own_step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zerojax
from zerojax.plan import own_step, step_plan

LAYERS, WIDTH = 4, 64
HOW = {"blocks": "layers", "reduce_dtype": jnp.float32, "grad_accum": 2}
BATCH = np.ones((2, 16, WIDTH), np.float32)


def init(key):
    params = {
        "layers": jax.vmap(lambda own: {"w": jax.random.normal(own, (WIDTH, WIDTH))})(jax.random.split(key, LAYERS)),
        "out": jnp.ones((WIDTH, WIDTH)),
    }
    return zerojax.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def loss_fn(params, batch, state):
    y = jax.lax.scan(lambda x, own: (jnp.tanh(x @ own["w"]), None), batch, params["layers"])[0]
    return jnp.mean((y @ params["out"]) ** 2)


def test_a_step_of_your_own_is_planned_as_it_runs_and_nothing_is_allocated():
    mesh, key, shard = zerojax.make_mesh(), jax.random.key(0), {"trainable": "out", "min_size": 8}
    before = len(jax.live_arrays())
    plan = own_step.plan_own_step(init, key, loss_fn=loss_fn, batch=BATCH, mesh=mesh, shard=shard, **HOW)
    assert len(jax.live_arrays()) == before
    state, partition = zerojax.shard_train_state(init, key, mesh=mesh, **shard)
    train_step = zerojax.make_train_step(loss_fn, partition, **HOW)
    batch = jax.device_put(BATCH, zerojax.batch_sharding(mesh, 1))
    expected = step_plan.plan_step(
        train_step, state, batch, mesh=mesh, placement=partition, passes=2, by_hand=True, target="cpu"
    )
    assert (plan.memory, plan.peak, plan.stage) == (expected.memory, expected.peak, 3)
    assert plan.buffers.hlo_text.count("all-gather(") == expected.buffers.hlo_text.count("all-gather(") > 0
