"""Trains with what packing loses added to the next gradients, and compares sums of what was sent with those of the gradients. This module
tests zerojax.zero.wires.unsent."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.zero.wires import packed
from zerojax.zero.wires import unsent as unsent_lib

WIDTH, DEVICES, STEPS = 64, 8, 4
WIRES = {"gradients": "int4", "host_devices": 4, "error_feedback": True}
X = np.random.default_rng(0).normal(size=(STEPS, 2, 16, WIDTH)).astype(np.float32)
# Sums of some 100 gradients of size 1, of which each was rounded to float32.
EXACT = {"rtol": 2e-5, "atol": 2e-5}


class Block(nn.Module):
    """Two matrices whose gradients do not depend on them."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(2 * WIDTH, use_bias=False, name="own")(x)
        return x, jnp.sum(y * jnp.arange(1, 2 * WIDTH + 1), -1)


class Net(nn.Module):
    is_shared: bool = False
    is_scanned: bool = False

    @nn.compact
    def __call__(self, x):
        total = jnp.sum(nn.Dense(WIDTH, use_bias=False, name="embed")(x), -1)
        if self.is_scanned:
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return jnp.mean(total + scan(name="block_0")(x)[1].sum(0))
        block = Block(name="block_0")
        for number in range(2):
            total += (block if self.is_shared else Block(name=f"block_{number + 1}"))(x)[1]
        return jnp.mean(total)


def trained(wires, net, *, passes=1, mesh=None, spec=(), steps=STEPS, scaler=None, spoils=None, **how):
    """Returns the params before, and the state and the metrics after each step of SGD, whose params are those less what was sent."""
    params, mesh = net.init(jax.random.key(0), X[0, 0])["params"], mesh or zerojax.make_mesh(devices=jax.devices()[:8])
    fields = {} if scaler is None else {"loss_scale": scaler.init()}
    state = zerojax.TrainState.create(
        apply_fn=None, params=params, tx=optax.sgd(1.0), rng=jax.random.key_data(jax.random.key(0)), **fields
    )
    state, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=0, overrides=spec)
    if wires is not None and wires.error_feedback:
        state, partition = zerojax.with_unsent(state, partition, wires)
    how = {"blocks": r"block_\d", "reduce_dtype": jnp.float32, "donate": False, "loss_scale": scaler} | how
    loss = lambda params, batch, state: net.apply({"params": params}, batch)  # noqa: E731
    step = zerojax.make_train_step(loss, partition, wires=wires, grad_accum=passes, **how)
    found = []
    for number, x in enumerate(X[:steps]):
        x = x * np.inf if number == spoils else x
        state, metrics = step(state, x if passes > 1 else x[0])
        found.append((state, metrics))
    return params, found


def unsent(state, params, places, *, copies=1):
    """Returns what no device has sent of each weight's gradient, in the shape of the weight, of a mesh without `model`."""

    def of(path, leaf):
        rows = np.asarray(state.unsent_grads[path])  # [devices, (layers,) hosts, n]
        rows = rows.reshape(copies, DEVICES // copies, *rows.shape[1:]).sum(0)
        ways, hosts = rows.shape[0], rows.shape[0] // places
        if rows.ndim == 4:
            rows = np.moveaxis(rows, 2, 1).reshape(ways, hosts, -1)
        own = rows.reshape(hosts, places, hosts, -1).sum(0)  # [place, host of the shard, n]
        shards = np.swapaxes(own, 0, 1).reshape(ways, -1)
        dim = next(dim for dim, size in enumerate(leaf.shape) if size % ways == 0 and (dim or leaf.ndim < 3))
        cut = (*leaf.shape[:dim], leaf.shape[dim] // ways, *leaf.shape[dim + 1 :])
        return np.concatenate(list(shards.reshape(ways, *cut)), dim)

    return tree.map_with_path(of, params)


def gradients(net, params, passes, steps=STEPS):
    """Returns the sum over steps of the gradients; those of several passes are means over these."""
    grad = jax.jit(jax.grad(lambda params, x: net.apply({"params": params}, x)))
    batches = [x[number] for x in X[:steps] for number in range(passes)]
    own = [grad(params, x) for x in batches]
    return jax.tree.map(lambda *leaves: np.sum(leaves, 0) / passes, *own)


CASES = {
    "passes": (Net(), {"passes": 2}, {"host_devices": 1}),
    "one pass": (Net(), {}, {"host_devices": 1}),
    "8 bits": (Net(), {}, {"host_devices": 1, "gradients": "int8"}),
    "shared": (Net(is_shared=True), {}, {"host_devices": 1}),
    "scanned": (Net(is_scanned=True), {"spec": [("block", P(None, "data"))]}, {"host_devices": 1}),
    "no blocks": (Net(), {"blocks": "", "passes": 2}, {"host_devices": 1}),
    "replicas": (Net(), {"mesh": {"replica": 2, "data": 4}}, {"host_devices": 1}),
    "loss scale": (Net(), {"scaler": zerojax.StaticLossScale(1024.0)}, {"host_devices": 1}),
}


@pytest.mark.parametrize("case", runs.cases(CASES, long={*CASES} - {"passes", "shared"}))
def test_what_was_sent_and_what_is_unsent_add_up_to_the_gradients(case):
    net, how, asked = CASES[case]
    copies = how.get("mesh", {}).get("replica", 1)
    how = how | ({"mesh": zerojax.make_mesh(**how["mesh"], devices=jax.devices()[:DEVICES])} if "mesh" in how else {})
    params, found = trained(zerojax.PackedWires(**{**WIRES, **asked}), net, **how)
    state, passes = found[-1][0], how.get("passes", 1)
    sent = jax.tree.map(lambda before, after: before - np.asarray(after), params, state.params)
    left = jax.tree.map(lambda own: own / passes, unsent(state, params, asked["host_devices"], copies=copies))
    wanted = gradients(net, params, passes)
    for own, rest, total in zip(*map(jax.tree.leaves, (sent, left, wanted))):
        size = np.max(np.abs(total))
        assert np.max(np.abs(rest)) > 1e-3 * size  # packing loses something
        np.testing.assert_allclose((own + rest) / size, total / size, **EXACT)


def test_a_row_is_kept_for_each_layer_of_a_stack_whose_dim_of_layers_is_not_sharded():
    """A scan hands each layer its slice of what is unsent."""
    mesh, matrix = zerojax.make_mesh(devices=jax.devices()[:DEVICES]), (WIDTH, 2 * WIDTH)
    leaves = {"own": matrix, "by_columns": matrix, "stack": (3, *matrix), "sharded": (8, *matrix)}
    state = {"params": {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}}
    how = {"stage": 3, "min_size": 0, "overrides": [("stack|columns", P(None, "data"))]}
    own = zerojax.partition_state(state, mesh=mesh, **how)
    marked = packed.marked(own, zerojax.PackedWires(**WIRES), "", jnp.float32)
    found = {path: row.shape for path, row in unsent_lib._wanted(marked).items()}
    size = WIDTH * 2 * WIDTH // DEVICES
    rows = {"own": (8, 2, size), "by_columns": (8, 2, size), "stack": (8, 3, 2, size), "sharded": (8, 2, 8 * size)}
    assert found == rows


def test_a_step_that_overflows_leaves_what_is_unsent():
    scaler = zerojax.DynamicLossScale()
    _, ((before, _), (after, metrics), *_) = trained(
        zerojax.PackedWires(**WIRES), Net(), scaler=scaler, steps=2, spoils=1
    )
    assert int(metrics["skipped_steps"]) == 1
    for path, own in before.unsent_grads.items():
        assert np.max(np.abs(own)) > 0
        np.testing.assert_array_equal(own, after.unsent_grads[path])


def distance(found, wanted):
    own = [np.asarray(a) - np.asarray(b) for a, b in zip(*map(jax.tree.leaves, (found, wanted)))]
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in own))


MESHES = {"hosts of 4": {}, "model": {"mesh": (1, 4, 2), "spec": [("kernel", P("data", "model"))]}}


@pytest.mark.parametrize("mesh", runs.cases(MESHES, long=["model"]))
def test_errors_do_not_add_up_with_feedback(mesh):
    net, how = Net(), dict(MESHES[mesh])
    if "mesh" in how:
        how["mesh"] = zerojax.make_mesh(*how["mesh"], devices=jax.devices()[:DEVICES])
    (_, plain), (_, without), (_, kept) = (
        trained(wires and zerojax.PackedWires(**wires), net, **how)
        for wires in (None, {**WIRES, "error_feedback": False}, WIRES)
    )
    wanted = plain[-1][0].params
    assert distance(kept[-1][0].params, wanted) < 0.7 * distance(without[-1][0].params, wanted)
