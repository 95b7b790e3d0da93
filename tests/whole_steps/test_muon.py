"""Compares steps with Muon on 8 devices with optax's on one, at every stage and beside other settings. This module tests whole steps."""

import collections
import functools

import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import muon_by_optax
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import roles, tree
from zerojax.models import families, family
from zerojax.optim import muon
from zerojax.plan import ledger
from zerojax.zero.update import one_pass_update

WIDTH, ROWS, STEPS = 32, 16, 3
TOLERANCE = 1e-5
TOKENS = np.random.default_rng(1).integers(0, 64, (ROWS, 8)).astype(np.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        heads = nn.DenseGeneral((4, 8), use_bias=False, name="q")(nn.LayerNorm(use_bias=False)(x))
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(jnp.tanh(heads))
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(x)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, WIDTH, name="embed")(tokens)
        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        return nn.Dense(10, use_bias=False, name="odd")(
            nn.Dense(12, name="narrow")(x)
        )  # of 12 x 10 no dim divides by 8


def loss_fn(params, batch, state):
    return jnp.mean(jnp.tanh(Net().apply({"params": params}, batch)) ** 2)


def create(tx):
    return TrainState.create(apply_fn=None, params=Net().init(jax.random.key(0), TOKENS)["params"], tx=tx)


@functools.cache
def expected(clip_norm=0.0):
    """Returns losses and params of optax's Muon on one device."""
    tx = muon_by_optax.reference()
    state = create(optax.chain(optax.clip_by_global_norm(clip_norm), tx) if clip_norm else tx)

    @jax.jit
    def step(state):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, TOKENS, None)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(STEPS):
        state, loss = step(state)
        losses.append(float(loss))
    return losses, state.params


MODEL = (("up/kernel", P(None, "model")), ("down/kernel", P("model", None)), ("q/kernel", P(None, "model")))
MESHES = {"data": {}, "replica": {"replica": 2}, "context": {"data": 2, "context": 4}, "model": {"data": 4, "model": 2}}
# What a step has beside Muon: (stage, mesh, arguments of `shard_train_state`, of `make_train_step`).
CASES = {
    "stage 3": (3, "data", {}, {"reduce_dtype": jnp.float32, "blocks": r"block_\d"}),
    "stage 0": (0, "data", {}, {"reduce_dtype": jnp.float32}),
    "stage 1, replicas, clipping": (1, "replica", {}, {"clip_norm": 0.01}),
    "stage 2, accumulation": (
        2,
        "data",
        {},
        {"grad_accum": 2, "reduce_dtype": jnp.float32, "accum_dtype": jnp.float32},
    ),
    "stage 3, model": (3, "model", {"overrides": MODEL}, {"reduce_dtype": jnp.float32, "blocks": r"block_\d"}),
    "stage 3, by the compiler, small leaves replicated": (3, "replica", {"min_size": 1025}, {}),
    "stage 3, padding": (
        3,
        "data",
        {"min_size": 8, "indivisible": "pad"},
        {},
    ),
    "stage 3, host": (3, "data", {"min_size": 8, "offload": zerojax.Offload(optimizer="host", chunk_bytes=1024)}, {}),
    "stage 3, params on the host": (
        3,
        "data",
        {"min_size": 8, "offload": zerojax.Offload(optimizer="host", params="host")},
        {"blocks": r"block_\d", "reduce_dtype": jnp.float32, "clip_norm": 0.01},
    ),
}
BRIEF = ("stage 3, host",)


@pytest.mark.parametrize("case", runs.cases(CASES, long={*CASES} - {*BRIEF}))
def test_steps_with_muon_are_those_of_optax_on_one_device(case):
    stage, on, of_state, of_step = CASES[case]
    mesh = zerojax.make_mesh(**MESHES[on])
    plain = create(zerojax.muon(**muon_by_optax.settings()))
    state, partition = zerojax.shard_train_state(plain, mesh=mesh, stage=stage, **({"min_size": 32} | of_state))
    step = zerojax.make_train_step(loss_fn, partition, **of_step)
    batch = TOKENS.reshape(of_step.get("grad_accum", 1), -1, 8) if "grad_accum" in of_step else TOKENS
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    want, params = expected(of_step.get("clip_norm", 0.0))
    np.testing.assert_allclose(losses, want, atol=TOLERANCE)
    found = dict(tree.flatten(zerojax.unpad(state, partition).params))
    for path, value in tree.flatten(params):
        np.testing.assert_allclose(found[path], value, atol=TOLERANCE, err_msg=path)


@pytest.mark.parametrize("stage", runs.cases([3, 1], long=[1]))
def test_a_compiled_update_moves_matrices_by_asynchronous_all_to_alls_alone(stage):
    """Of 8 H200s: no weight is gathered for the update, and bytes are those that `planned` foretells."""
    mesh = zerojax.make_mesh(devices=compile_only.devices(8))
    tx = zerojax.muon(1e-2) if stage == 3 else zerojax.with_master_weights(zerojax.muon(1e-2))
    dtype = jnp.float32 if stage == 3 else jnp.bfloat16
    init = functools.partial(compile_only.create, tx=tx, dtype=dtype, depth=8)
    partition = zerojax.partition_state(jax.eval_shape(init, jax.random.key(0)), mesh=mesh, stage=stage)

    def loss_fn(params, batch, state):
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch).astype(jnp.float32) ** 2)

    step = zerojax.make_train_step(
        loss_fn, partition, compute_dtype=jnp.bfloat16, blocks=r"block_\d", reduce_dtype=jnp.float32, clip_norm=1.0
    )
    batch = jax.ShapeDtypeStruct((128, compile_only.WIDTH), jnp.bfloat16)
    text = compile_only.compile_gpu(step.lower(partition.abstract_state, batch))
    found = ledger.ledger(text, mesh, partition.placements)
    of_update = [row for row in found.rows if row.role == roles.MATRICES]
    # 16 matrices of two shapes are two rounds for 8 devices: each is two all-to-alls of bfloat16, and a device receives 7/8 of 8 tiles.
    assert [(row.kind, row.dtype) for row in of_update] == [("all-to-all", "bf16")] * 4
    assert all(row.is_async for row in of_update[:3])  # the last has nothing beside it
    tiles = compile_only.WIDTH * compile_only.HIDDEN // 8
    assert [row.nbytes for row in of_update] == [2 * 7 * tiles] * 4
    assert sum(row.elements for row in of_update) == one_pass_update.received(partition)
    beside = [row.overlaps.get("loop", 0) for row in of_update]
    assert sum(beside) >= 2  # the second round arrives, and the first goes back, beside iterations
    others = collections.Counter(row.kind for row in found.rows if "update" in row.op_name and row not in of_update)
    assert not others["all-gather"] or stage == 1  # there the 16-bit weights are gathered, as by any optimizer
    gathers = [row for row in found.rows if row.kind == "all-gather"]
    assert len(gathers) == (32 if stage == 3 else 16)


def test_owners_of_a_model_compute_equally_long():
    """Of 8B's 224 matrices on 8 devices: as many of each shape for each."""
    found = families.PRESETS["llama3_8b"]
    params = family.abstract_params(found.parts, found.presets["llama3_8b"])
    mesh = zerojax.make_mesh()
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None, params=jax.tree.map(lambda p: jnp.zeros(p.shape), params), tx=muon.muon(1e-3)
        )
    )
    partition = zerojax.partition_state(state, mesh=mesh, stage=3)
    shardings = tree.map_with_path(lambda path, _: partition.placements[f"params/{path}"].update, state.params)
    rounds = muon.planned(state.params, shardings)
    assert len(rounds) == 28 and all(len(one.units) == 8 and len({u.kind for u in one.units}) == 1 for one in rounds)
    matrices = sum(leaf.size for path, leaf in tree.flatten(params) if muon.form(path, leaf.shape))
    assert sum(one.received for one in rounds) == matrices // 8 * 7 // 8 * 2


@runs.LONG
def test_a_checkpoint_restores_on_another_number_of_devices(tmp_path):
    def made(count, stage):
        mesh = zerojax.make_mesh(devices=jax.devices()[:count])
        return zerojax.shard_train_state(
            create(zerojax.muon(**muon_by_optax.settings())), mesh=mesh, stage=stage, min_size=32
        )

    state, partition = made(8, 3)
    state, _ = zerojax.make_train_step(loss_fn, partition, **CASES["stage 3"][-1])(state, TOKENS)
    with zerojax.Checkpointer(tmp_path) as saver:
        saver.save(1, state, partition=partition)
    fewer, partition = made(4, 1)
    with zerojax.Checkpointer(tmp_path) as saver:
        fewer, _ = saver.restore(1, partition.abstract_state)
    step, losses = zerojax.make_train_step(loss_fn, partition), []
    for _ in range(STEPS - 1):
        fewer, metrics = step(fewer, TOKENS)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected()[0][1:], atol=TOLERANCE)
