"""Takes steps with two loss scales, whose numbers are to be equal bit for bit. This module tests whole steps.

A scale multiplies the loss, and with it every gradient. It comes off again in one place of each executor, before the norm, before the
update and before what the state keeps of a gradient. A power of two costs float32 no bits, so a step has one result whatever the scale is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pipelines
import pytest
import runs

import zerojax
from zerojax.checkpoint import logical
from zerojax.optim import fused, master_weights

SCALES, STEPS = (1.0, 2.0**12), 2
SCALER = zerojax.DynamicLossScale(init_scale=SCALES[0], min_scale=1.0, window=10**6)
NET = pipelines.Net(layers=2)
BY_BLOCK = {"blocks": pipelines.BLOCKS, "heads": pipelines.HEADS, "reduce_dtype": jnp.float32}
PASSES = {"grad_accum": pipelines.PASSES}
WIRES = {"gradients": "int4", "weights": "int8", "host_devices": 1, "error_feedback": True}
HOST = {"optimizer": "host", "chunk_bytes": 2048}
ROUNDED = fused.fused_adamw(1e-2, moments="bf16", stochastic_rounding=True)
# What runs a step: (the mesh, arguments of `shard_train_state`, of `make_train_step`, of the state).
EXECUTORS = {
    "one program, by the compiler": ({"data": 4}, {}, {}, {}),
    "one program, 16-bit params": ({"data": 4}, {}, BY_BLOCK, {"is_narrow": True}),
    "one program, one pass over memory": ({"data": 4}, {"stage": 1}, BY_BLOCK, {"tx": ROUNDED}),
    "several passes, by the compiler": ({"data": 4}, {"stage": 1}, PASSES, {}),
    "several passes, 16-bit sums": ({"data": 4}, {}, {**BY_BLOCK, **PASSES, "accum_dtype": jnp.bfloat16}, {}),
    "packed wires": ({"data": 2}, {}, {**BY_BLOCK, **PASSES, "wires": zerojax.PackedWires(**WIRES)}, {}),
    "pipeline": ({"pipe": 2, "data": 2}, {"stage": 2}, {**BY_BLOCK, **PASSES}, {}),
    "pipeline, state on the host": ({"pipe": 2, "data": 2}, {"offload": HOST}, {**BY_BLOCK, **PASSES}, {}),
    "streamed updates": ({"data": 4}, {"offload": {**HOST, "fraction": 0.5}}, BY_BLOCK, {}),
    "block by block": (
        {"data": 4},
        {"offload": {**HOST, "by_block": "on", "fraction": 0.5}},  # some gradients wait for the update on the device
        {**BY_BLOCK, **PASSES},
        {},
    ),
    "block by block, all on the host": ({"data": 4}, {"offload": {**HOST, "params": "host"}}, BY_BLOCK, {}),
}
# The others have the same places.
ALSO = (
    "one program, one pass over memory",
    "several passes, by the compiler",
    "pipeline, state on the host",
    "block by block, all on the host",
)


def loss_fn(params, batch, state):
    scores = NET.apply({"params": params}, batch["tokens"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]))


def prepared(mesh, of_state, of_step, tx=None, is_narrow=False):
    """Returns the first state and the step."""
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    batch = pipelines.batch_of(0)

    def init(key):
        params = NET.init(key, jnp.zeros((1, 4), jnp.int32))["params"]
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16 if is_narrow else jnp.float32), params)
        own = master_weights.with_master_weights(optax.adamw(1e-2)) if is_narrow else tx or optax.adamw(1e-2)
        return zerojax.TrainState.create(apply_fn=None, params=params, tx=own, loss_scale=SCALER.init())

    pipeline = None
    if "pipe" in mesh:
        micro = {name: leaf[0] for name, leaf in batch.items()}
        how = {"heads": pipelines.HEADS, "schedule": "1f1b", "batch_specs": pipelines.SPECS}
        pipeline = zerojax.Pipeline(loss_fn, micro, pipelines.BLOCKS, **how)
    how = {"stage": 3, "min_size": 0, "pipeline": pipeline} | of_state
    state, partition = zerojax.shard_train_state(
        init, jax.random.key(0), mesh=zerojax.make_mesh(**mesh, devices=devices), **how
    )
    if "wires" in of_step:
        state, partition = zerojax.with_unsent(state, partition, of_step["wires"])
    how = {"clip_norm": 0.05, "donate": False, "loss_scale": SCALER, "batch_specs": pipelines.SPECS} | of_step
    return state, zerojax.make_train_step(loss_fn, partition, **how)


@pytest.mark.parametrize("name", runs.cases(EXECUTORS, long=ALSO))
def test_the_numbers_of_a_step_do_not_depend_on_the_loss_scale(name):
    mesh, of_state, of_step, how = EXECUTORS[name]
    first, step = prepared(mesh, of_state, of_step, **how)
    first_scale, found = first.loss_scale.scale, []
    for scale in SCALES:
        own = first_scale if scale == 1 else jax.device_put(np.float32(scale), first_scale.sharding)
        state, numbers = first.replace(loss_scale=first.loss_scale._replace(scale=own)), {}
        for number in range(STEPS):
            batch = pipelines.batch_of(number)
            batch = batch if "grad_accum" in of_step else {key: leaf[0] for key, leaf in batch.items()}
            state, metrics = step(state, batch)
            assert float(metrics.pop("loss_scale")) == scale
            numbers |= {f"{key} of step {number}": np.asarray(value) for key, value in metrics.items()}
        held = state.replace(loss_scale=state.loss_scale._replace(scale=()))
        found.append(numbers | {path: np.asarray(leaf) for path, leaf in logical.to_stored(held).items()})
    for path, value in found[0].items():
        np.testing.assert_array_equal(found[1][path], value, err_msg=f"{name}: {path}")
    assert found[0]["grad_norm of step 1"] > 0.05, "it clips"
    if "wires" in of_step:
        assert any(np.abs(value).max() > 0 for path, value in found[0].items() if path.startswith("unsent_grads/"))
