"""Checks a step with params in host memory against the same step on the device. This module tests zerojax.zero.offload.step_by_block."""

import functools
import itertools
from typing import Any

import arrays
import compile_only
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from block_nets import Net, X
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.optim import fused, master_weights
from zerojax.zero import shard_state, stages, step
from zerojax.zero.host import storage
from zerojax.zero.offload import state_stream, step_by_block

NET = Net(2)
SPECS = [("", P(("replica", "data")))]  # all leaves count examples, though the loss reads one factor
SCALE = np.linspace(0.5, 1.5, 16, dtype=np.float32)[:, None]
BOTH = {"optimizer": "host", "params": "host", "chunk_bytes": 600}
DISK = {"optimizer": "nvme", "params": "nvme", "chunk_bytes": 600, "nvme_buffers": 2}


STATES = {"optimizer": "host", "by_block": "on", "chunk_bytes": 600}  # params on the device
LATE = {"optimizer": "host", "late_norm": True, "chunk_bytes": 600, "in_flight": 3}


class State(TrainState):
    loss_scale: Any = ()
    last_norm: Any = ()


@functools.cache
def first_params() -> Any:
    shapes = jax.eval_shape(NET.init, jax.random.key(0), X, SCALE)["params"]
    seeds = itertools.count(2)
    return jax.tree.map(lambda leaf: arrays.normal(next(seeds), leaf.shape) / 3, shapes)


def loss_of(params: Any, batch: Any, state: Any) -> tuple[Any, dict]:
    """Returns a mean over a mask, so that passes and devices differ in weight."""
    losses = jax.vmap(lambda x, scale: NET.apply({"params": params}, x[None], scale[None]))(batch["x"], batch["scale"])
    total = batch["factor"][0] * jnp.sum(losses * batch["mask"])
    return zerojax.Mean(total, jnp.sum(batch["mask"])), {"metrics": {"count": jnp.sum(batch["mask"] > 0)}}


def plain_loss(params: Any, batch: Any, state: Any) -> Any:
    return NET.apply({"params": params}, batch["x"], batch["scale"]) * batch["factor"][0]


def run(
    offload: Any,
    loss_fn: Any = plain_loss,
    tx: Any = None,
    accum: int = 1,
    steps: int = 4,
    stage: int = 3,
    saved: int = 0,
    **how: Any,
) -> Any:
    """Returns the metrics of each step, the last state and its partition. The state after `saved` steps is saved and restored."""
    dtype, trainable, scaler = how.pop("dtype", jnp.float32), how.pop("trainable", ""), how.pop("scaler", None)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), first_params())
    scale = {} if scaler is None else {"loss_scale": scaler.init()}
    if (offload or {}).get("late_norm"):
        scale["last_norm"] = zerojax.first_norm()
    state = State.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-2), **scale)
    state, part = shard_state.shard_train_state(
        state, mesh=mesh_lib.make_mesh(2, 4), stage=stage, min_size=0, offload=offload, trainable=trainable
    )
    train_step = step.make_train_step(
        loss_fn,
        part,
        grad_accum=accum,
        blocks=r"block_\w+",
        heads="head",
        reduce_dtype=jnp.float32,
        batch_specs=SPECS,
        loss_scale=scaler,
        **how,
    )
    rows = []
    for number in range(steps):
        huge = 1e30 if scaler is not None and number == 1 else 1.0  # this step overflows
        mask = (jnp.arange(16) % (number + 2) == 0).astype(jnp.float32)
        batch = {"x": X, "scale": SCALE, "mask": mask, "factor": jnp.full((16,), huge)}
        if accum > 1:
            batch = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), batch)
        before = jax.tree.leaves((part.trainable_part(state.params), state.opt_state))
        structure = jax.tree.structure(state)
        state, metrics = train_step(state, batch)
        assert {leaf.is_deleted() for leaf in before} == {how.get("donate", True)}, "the old state's memory is reused"
        assert jax.tree.structure(state) == structure and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        rows.append({name: np.asarray(value) for name, value in metrics.items()})
        if number + 1 == saved:
            state = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), leaf.sharding), state)
    return rows, state, part


def agree(offloads: Any, how: dict[str, Any], programs: str = "one", **tolerance: float) -> list[Any]:
    """Asserts that steps with different offload, or programs, are the step without, and returns their last states."""
    rows, state, _ = run(None, **how)
    states = []
    for offload in offloads:
        own_rows, own_state, part = run(offload, programs=programs, **how)
        assert int(own_state.step) == int(state.step)
        for row, own in zip(rows, own_rows):
            assert row.keys() == own.keys()
            for name in row:
                np.testing.assert_allclose(own[name], row[name], err_msg=name, **tolerance)
        for (path, leaf), own in zip(tree.flatten(state.params), jax.tree.leaves(own_state.params)):
            np.testing.assert_allclose(
                np.asarray(own, np.float32), np.asarray(leaf, np.float32), err_msg=path, **tolerance
            )
        jax.tree.map(
            lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf)), own_state, part.shardings
        )
        states.append(own_state)
    return states


MASTER = master_weights.with_master_weights(optax.adamw(1e-2))
SCALER = zerojax.DynamicLossScale(init_scale=2.0**10, window=2)
CROSSED = {"loss_fn": loss_of, "accum": 2, "trainable": "narrow|head", "scaler": SCALER, "clip_norm": 0.5}


@pytest.mark.parametrize(
    ("how", "offloads"),
    [
        pytest.param({}, [BOTH], marks=runs.LONG),
        pytest.param({"clip_norm": 0.5, "accum": 2}, [DISK], marks=runs.LONG),
        (CROSSED, [BOTH]),
        pytest.param({"loss_fn": loss_of, "accum": 2}, [BOTH], marks=runs.LONG),
        pytest.param({"loss_fn": loss_of, "accum": 2, "clip_norm": 0.5}, [{**STATES, "in_flight": 2}], marks=runs.LONG),
        pytest.param({"trainable": "narrow|head", "clip_norm": 0.5}, [BOTH], marks=runs.LONG),
        pytest.param(
            {"dtype": jnp.bfloat16, "tx": MASTER}, [{**BOTH, "fraction": 0.5, "params_fraction": 0.5}], marks=runs.LONG
        ),
        pytest.param(
            {
                "dtype": jnp.bfloat16,
                "tx": fused.fused_adamw(1e-2, moments="bf16", stochastic_rounding=True),
                "donate": False,
            },
            [BOTH],
            marks=runs.LONG,
        ),
        pytest.param({"scaler": SCALER, "clip_norm": 0.5}, [BOTH], marks=runs.LONG),
        # The late norm below has params on the device, and tests/mission resumes at stage 1.
        pytest.param({"stage": 1, "dtype": jnp.bfloat16, "tx": MASTER, "steps": 2}, [STATES], marks=runs.LONG),
    ],
    ids=["early", "clip", "crossed", "mean", "states", "frozen", "master", "rounded", "scaled", "stage1"],
)
def test_a_step_by_blocks_is_the_step(how, offloads, tmp_path):
    offloads = [
        {**offload, **({"nvme_path": str(tmp_path)} if "nvme_buffers" in offload else {})} for offload in offloads
    ]
    states = agree(offloads, how, rtol=2e-4, atol=2e-5)
    for offload, state in zip(offloads, states):
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)}
        assert ("pinned_host" in kinds) == ("params" in offload)


@pytest.mark.parametrize(
    "how",
    [
        CROSSED,
        {"stage": 1, "remat": "full", "donate": False},
        pytest.param({}, marks=runs.LONG),
        pytest.param({"stage": 2, "clip_norm": 0.5, "accum": 2, "remat": "none"}, marks=runs.LONG),
        pytest.param({"dtype": jnp.bfloat16, "tx": MASTER, "loss_fn": loss_of}, marks=runs.LONG),
        pytest.param({"stage": 0, "recompute": r"block_\w+/wide"}, marks=runs.LONG),
    ],
)
@pytest.mark.filterwarnings("ignore:heads")
def test_a_program_for_each_kind_of_block_makes_the_step_of_one_program(how):
    agree([None], how, programs="kinds", rtol=2e-2 if "dtype" in how else 1e-5, atol=1e-6)


def kinds_of(layers):
    """Returns the programs of a step of so many layers for absent GPUs: (name, collectives of other blocks, its HLO), each kind once."""
    net, mesh = Net(layers), mesh_lib.make_mesh(data=8, devices=list(compile_only.devices(8)))
    params = jax.eval_shape(net.init, jax.random.key(0), X, SCALE)["params"]
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.sgd(0.1)), params)
    part = stages.partition_state(state, mesh=mesh, stage=3, min_size=0)

    def loss(params, batch, state):
        return net.apply({"params": params}, batch["x"], batch["scale"])

    how = {"blocks": r"block_\w+", "heads": "head", "reduce_dtype": jnp.float32, "programs": "kinds"}
    batch = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in (("x", X), ("scale", SCALE))}
    found = step.make_train_step(loss, part, **how).one_pass(part.abstract_state, batch, compile_only.FAST)
    each = {id(program.run): program for program in found.schedule.cut.programs}
    return [(program.part.name, program.part.also, program.run.as_text()) for program in each.values()]


def test_kinds_are_as_many_at_any_depth_and_a_gpu_runs_a_blocks_collectives_in_its_neighbours_programs():
    with compile_only.optimized():
        few, many = kinds_of(4), kinds_of(6)
    assert [row[:2] for row in few] == [row[:2] for row in many]
    assert ("backward", ("gather", "reduce")) in {(name, tuple(sorted(also))) for name, also, _ in few}
    for name, also, text in few:
        if name != "between":
            assert ("all-gather" in text) == ("gather" in also or name == "gather"), name
            assert ("reduce-scatter" in text) == ("reduce" in also or name == "reduce"), name


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"reduce_dtype": None}, "the compiler sums gradients; pass reduce_dtype"),
        ({"blocks": ""}, "programs: is 'kinds', which are those of `blocks`"),
        ({"offload": "block_0/wide"}, "keeps activations in host memory within one program"),
        ({"wires": zerojax.PackedWires(weights="int8")}, "wire packs within one program; omit wires, or omit programs"),
        ({"fp8": zerojax.Fp8()}, "is gathered in another form than as it is; omit programs"),
    ],
)
@pytest.mark.filterwarnings("ignore:wire")
def test_what_a_program_for_each_kind_cannot_do_is_refused_before_anything_compiles(how, line):
    params = {f"block_{n}": {"kernel": jax.ShapeDtypeStruct((128, 128), jnp.float32)} for n in range(2)}
    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.sgd(0.1)), params)
    part = stages.partition_state(state, mesh=mesh_lib.make_mesh(), min_size=0)
    plain = {"blocks": r"block_\d", "reduce_dtype": jnp.float32, "programs": "kinds"}
    with pytest.raises(UserError, match=line):
        step.make_train_step(plain_loss, part, **plain | how)


def clipped_late(limit: float) -> optax.GradientTransformation:
    """Returns a clip by the norm of the gradients of the update before; the first by its own."""

    def update(grads: Any, last: Any, params: Any = None) -> Any:
        norm = optax.global_norm(grads)
        factor = jnp.minimum(1.0, limit / jnp.where(last < 0, norm, last))
        return jax.tree.map(lambda grad: factor * grad, grads), norm

    return optax.GradientTransformation(lambda params: jnp.float32(-1), update)


def test_a_late_norm_clips_by_the_norm_of_the_step_before_and_the_first_by_its_own(monkeypatch):
    limit, sent, update = 0.05, [], state_stream.StepGroups.update

    def noted(groups: Any, index: int, handed: Any) -> None:
        if groups._waiting and groups._waiting[0][0] <= index:
            sent.append(index)
        update(groups, index, handed)

    monkeypatch.setattr(state_stream.StepGroups, "update", noted)
    rows, state, _ = run(None, tx=optax.chain(clipped_late(limit), optax.sgd(0.5, momentum=0.9)), accum=2)
    own_rows, own_state, _ = run(LATE, tx=optax.sgd(0.5, momentum=0.9), accum=2, clip_norm=limit, saved=2)
    norms = [float(row["grad_norm"]) for row in rows]
    assert max(norms) > 1.01 * min(norms) > limit, "another norm would show"
    for row, own, before in zip(rows, own_rows, [norms[0], *norms]):
        np.testing.assert_allclose(own["loss"], row["loss"], rtol=2e-5)
        np.testing.assert_allclose(own["grad_norm"], row["grad_norm"], rtol=2e-5)
        np.testing.assert_allclose(own["clipped_norm"], before, rtol=2e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), own_state.params, state.params)
    assert float(own_state.last_norm) == float(own_rows[-1]["grad_norm"])
    last = sent[0]  # the first step waits for its norm, and no other one does, also not the one that resumes
    assert sent.count(last) == 1 and max(sent[1:]) < last and len(sent) > 1 + 3 * 2


@pytest.mark.parametrize(
    ("devices", "by_block", "clip", "chosen"),
    [
        (1, "auto", 0.0, True),
        (1, "auto", 1.0, False),
        (8, "auto", 0.0, False),
        (1, "off", 0.0, False),
        (8, "on", 1.0, True),
    ],
)
def test_a_step_runs_block_by_block_where_it_is_asked_for_or_hides_more(devices, by_block, clip, chosen):
    state = TrainState.create(apply_fn=None, params=first_params(), tx=optax.adam(1e-2))
    mesh = mesh_lib.make_mesh(devices=jax.devices()[:devices])
    part = stages.partition_state(
        jax.eval_shape(lambda: state),
        mesh=mesh,
        stage=2,
        min_size=0,
        offload={"optimizer": "host", "by_block": by_block},
    )
    how = {"blocks": r"block_\w+", "heads": "head", "reduce_dtype": jnp.float32}
    made = step.make_train_step(plain_loss, part, clip_norm=clip, **how)
    assert isinstance(made, step_by_block.BlockwiseStep) == chosen


@runs.LONG
def test_a_disk_gives_the_bits_of_host_memory_and_a_checkpoint_restores_into_either(tmp_path):
    """Params are read twice in each pass, and written over while the reads of the next step wait."""
    rows, state, part = run(BOTH, accum=2, steps=3)
    own_rows, own_state, own_part = run({**DISK, "nvme_path": str(tmp_path / "disk")}, accum=2, steps=3)
    assert [row["loss"] for row in own_rows] == [row["loss"] for row in rows]
    on_disk = {path for path, leaf in tree.flatten(own_state) if storage.is_on_disk(leaf)}
    assert on_disk == own_part.on_host == part.on_host and any(path.startswith("params/") for path in on_disk)
    with zerojax.Checkpointer(tmp_path / "steps") as saver:
        saver.save(3, own_state, partition=own_part)
        restored = [saver.restore(3, wanted)[0] for wanted in (part, own_part)]
    for tested in (own_state, *restored):
        for (path, own), leaf in zip(tree.flatten(tested), jax.tree.leaves(state), strict=True):
            assert np.array_equal(np.asarray(own), np.asarray(leaf)), path
    assert [any(map(storage.is_on_disk, jax.tree.leaves(tested))) for tested in restored] == [False, True]


def test_a_step_sends_frozen_weights_for_the_next_which_takes_them_only_if_it_gets_the_same():
    first = TrainState.create(apply_fn=None, params=first_params(), tx=optax.adam(1e-2))
    first, part = shard_state.shard_train_state(
        first, mesh=mesh_lib.make_mesh(2, 4), stage=3, min_size=0, offload=BOTH, trainable="narrow|head"
    )
    how = {"blocks": r"block_\w+", "heads": "head", "reduce_dtype": jnp.float32, "batch_specs": SPECS}
    train_step = step.make_train_step(plain_loss, part, **how)
    batch, passes = {"x": X, "scale": SCALE, "factor": jnp.ones(16)}, train_step.passes
    source = passes.source

    def state(factor: float) -> Any:
        def put(path: str, leaf: Any, sharding: Any) -> Any:
            is_frozen = path.startswith("params/") and not part.placements[path].trainable
            return jax.device_put(np.asarray(leaf) * factor if is_frozen else np.asarray(leaf), sharding)

        return tree.map_with_path(put, kept_first, part.shardings)

    def steps(state: Any, forgets: bool = False) -> tuple[Any, list[float]]:
        losses = []
        for _ in range(3):
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
            sent = source.early[1]._copies
            assert sent and {passes.one_pass(state, batch).weights[n] for n in sent} <= frozen
            if forgets:
                source.early = None
        return state, losses

    kept_first = jax.tree.map(np.asarray, first)
    frozen = {path for path in part.on_host if path in part.placements and not part.placements[path].trainable}
    assert frozen
    one, expected = steps(state(1.0), forgets=True)
    two, others = steps(state(1.5), forgets=True)
    assert expected != others
    assert [steps(state(factor))[1] for factor in (1.0, 1.5, 1.0)] == [expected, others, expected]
    one, two = steps(one)[0], steps(two)[0]
    assert source.early[1]._copies
    del two  # the weights' copies on the device go with the state
    assert not source.early[1]._copies


@pytest.mark.parametrize("how", [{"blocks": r"block_\w+"}, {"reduce_dtype": jnp.float32}])
def test_params_on_the_host_need_blocks_and_explicit_sums(how):
    state = TrainState.create(apply_fn=None, params=first_params(), tx=optax.adam(1e-2))
    _, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0, offload=BOTH)
    lacking = "reduce_dtype" if "blocks" in how else "blocks"
    with pytest.raises(UserError, match=rf"^offload\.params: .* and {lacking} is not given"):
        step.make_train_step(plain_loss, part, **how)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(name="layer")(x, None)


def test_a_stack_of_nn_scan_is_one_program_with_the_losses_of_the_step_on_the_device():
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)

    def init(key):
        return TrainState.create(apply_fn=None, params=Stack().init(key, x)["params"], tx=optax.sgd(0.1, 0.9))

    def loss_fn(params, batch, state):
        return jnp.mean(Stack().apply({"params": params}, batch)[0] ** 2)

    losses = []
    for offload in (None, {"optimizer": "host", "params": "host"}):
        how = {"mesh": mesh_lib.make_mesh(devices=jax.devices()[:1]), "stage": 3, "min_size": 8, "offload": offload}
        state, part = shard_state.shard_train_state(init, jax.random.key(0), **how)
        train_step = step.make_train_step(loss_fn, part, blocks="layer", reduce_dtype=jnp.float32)
        assert isinstance(train_step, step_by_block.BlockwiseStep) == bool(offload)
        for _ in range(2):
            state, metrics = train_step(state, x)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-6)


@pytest.mark.parametrize("derivative", ["gradient", "forward mode", "both"])
def test_a_loss_that_reads_a_derivative_of_its_blocks_is_refused(derivative):
    def penalised(params, batch, state):
        def function(x):
            return NET.apply({"params": params}, x, batch["scale"])

        if derivative == "forward mode":
            return jax.jvp(function, (batch["x"],), (batch["x"],))[1]
        if derivative == "both":
            return jnp.sum(jax.jvp(jax.grad(function), (batch["x"],), (batch["x"],))[1] ** 2)
        return jnp.sum(jax.grad(function)(batch["x"]) ** 2)

    with pytest.raises(
        UserError,
        match=r"^blocks: the loss reads a derivative of its blocks, .*keep params on the device.*omit .*programs='kinds'",
    ):
        run(BOTH, penalised, steps=1)


class Counted(TrainState):
    fixed: Any = ()
    number: Any = ()


def test_a_field_that_the_loss_returns_as_it_was_is_kept():
    def loss_fn(params, batch, state):
        fields = {"fixed": state.fixed, "number": state.number + 1}
        return NET.apply({"params": params}, batch["x"], batch["scale"]) + 0 * state.fixed.sum(), {"state": fields}

    fixed = jnp.arange(8) % 3 == 0
    state = Counted.create(apply_fn=None, params=first_params(), tx=optax.adam(1e-2), fixed=fixed, number=jnp.int32(0))
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0, offload=BOTH)
    train_step = step.make_train_step(loss_fn, part, blocks=r"block_\w+", reduce_dtype=jnp.float32)
    for _ in range(2):
        state, _ = train_step(state, {"x": X, "scale": SCALE})
    np.testing.assert_array_equal(state.fixed, fixed)
    assert state.number == 2


class Odd(nn.Module):
    """On one device the gradients of `c` and `d` are one value; that of `w` is an argument, and those of the last two are constants."""

    @nn.compact
    def __call__(self, x, v):
        a, b, c, d, w, *_ = (self.param(name, nn.initializers.ones, shape) for name, shape in ODD.items())
        x = nn.Dense(8, name="block_0")(x) * (a + b) + (c + d)
        return jnp.mean(nn.Dense(1, name="out")(x) ** 2) + jnp.sum(w * v)


ODD = {"a": (), "b": (), "c": (8,), "d": (8,), "w": (3,), "unread": (), "unread_vector": (3,)}


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.filterwarnings("ignore:loss_fn. does not read")
def test_a_gradient_may_be_a_constant_an_argument_or_that_of_another_weight(devices, accum):
    x, v = arrays.normal(1, (accum, 8, 8)), 1.0 + jnp.arange(3.0)
    batch = {"x": x if accum > 1 else x[0], "v": v, "factor": 0.5}
    mesh, losses = mesh_lib.make_mesh(devices=jax.devices()[:devices]), []

    def init(key):
        params = Odd().init(key, x[0], v)["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    def loss_fn(params, batch, state):
        return batch["factor"] * Odd().apply({"params": params}, batch["x"], batch["v"])

    for programs in ("one", "kinds"):
        state, part = shard_state.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=3, min_size=0)
        how = {"batch_specs": [("v|factor", P())], "grad_accum": accum, "programs": programs}
        train_step = step.make_train_step(loss_fn, part, blocks=r"block_\d", reduce_dtype=jnp.float32, **how)
        for _ in range(3):
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
        losses.append(float(state.params["unread"]))
    with pytest.raises(UserError, match="has no values while jit, grad, vmap or scan traces a function"):
        jax.eval_shape(train_step, state, batch)
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[4:], losses[:4], rtol=1e-6)
