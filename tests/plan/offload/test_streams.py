"""Tests of zerojax.plan.offload.streams: each offloaded leaf stays on the host, and a bounded part is on the device, on compiled GPUs."""

import collections
import dataclasses
import functools
import math

import block_nets
import compile_only
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.clock import rates, walk
from zerojax.hlo import parameters
from zerojax.plan import report, step_plan, targets
from zerojax.plan.offload import streams, times

CHUNK, IN_FLIGHT = 20_000, 4


def planned_on_h200s(step, partition, batch):
    with compile_only.optimized():
        return step_plan.plan_step(
            step,
            partition.abstract_state,
            batch,
            mesh=partition.mesh,
            target="h200",
            placement=partition,
            compiler_options=compile_only.FAST,
        )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, optax.adam(1e-3)), marks=pytest.mark.long),
        (3, zerojax.fused_adamw(1e-3, implementation="jnp")),
    ],
)
def planned(request):
    """Returns (plan, partition, step) on eight H200s."""
    stage, tx = request.param
    mesh = zerojax.make_mesh(devices=compile_only.devices())
    state = jax.eval_shape(lambda key: compile_only.create(key, tx), jax.random.key(0))
    offload = {"optimizer": "host", "chunk_bytes": CHUNK, "in_flight": IN_FLIGHT}
    partition = zerojax.partition_state(state, mesh=mesh, stage=stage, offload=offload)
    apply = state.apply_fn

    def loss_fn(params, batch, state):
        return jnp.mean((apply({"params": params}, batch) - batch).astype(jnp.float32) ** 2)

    step = zerojax.make_train_step(loss_fn, partition, clip_norm=1.0)
    batch = jax.ShapeDtypeStruct(
        (compile_only.EXAMPLES, compile_only.WIDTH), jnp.bfloat16, sharding=partition.batch_sharding
    )
    return planned_on_h200s(step, partition, batch), partition, step


def test_the_program_of_the_gradients_takes_no_offloaded_leaf(planned):
    plan, partition, _ = planned
    taken = {parameters.path_of(p.op_name) for p in plan.ledger.flow.module.entry.parameters.values()}
    moments = {path for path in partition.on_host if "mu" in path.split("/")}
    assert moments
    assert not [path for path in partition.on_host for name in taken if name.endswith(path.rpartition("/")[0])]
    assert not [finding for finding in plan.findings if "offloaded" in finding.rule]


def test_the_device_holds_the_chunks_in_flight_and_little_more(planned):
    plan, partition, step = planned
    groups = step.updates.groups
    assert plan.stream.nbytes == sum(group.nbytes for group in groups) > 5 * IN_FLIGHT * CHUNK // 2
    chunks = IN_FLIGHT * max(group.nbytes for group in groups)
    assert chunks <= IN_FLIGHT * CHUNK * 5 // 4  # a row of a kernel more than a chunk
    # At stage 2 the params are replicated, and the new slice of a weight is gathered before it is written.
    ways = 1 if partition.placements[groups[0].items[0].weight].stored.spec else partition.mesh.size
    slices = (ways + 1) * max(item.nbytes for group in groups for item in group.items) // 2
    assert chunks <= plan.stream.at_once <= chunks + slices + 4096
    resident = sum(argument.nbytes for argument in plan.buffers.arguments)
    assert plan.stream.peak == resident + plan.buffers.outputs + plan.stream.at_once <= plan.peak


def test_updates_overwrite_their_weight_and_their_state(planned):
    """No update allocates a second weight: it donates the weight, and a piece updates its slice of it."""
    _, _, step = planned
    for compiled in step.updates.compile():
        stats = compiled.memory_analysis()
        assert stats.output_size_in_bytes - stats.alias_size_in_bytes < 1024


def test_the_report_states_bytes_rate_and_what_hides(planned):
    plan, _, _ = planned
    text = report.text(plan)
    rate = targets.get("h200").beside(8).host_duplex.value  # eight devices share their host's memory
    assert f"{rate / 1e9:.3g} GB/s each way at once (measured" in text and " are exposed" in text
    assert [phase.name for phase in plan.expected.phases] == ["gradients", "updates"]
    by_clock = walk.walk(plan.ledger.flow, rates.of("h200"), 8).seconds
    assert by_clock <= plan.expected.phases[0].device <= by_clock * times.SLOWED and plan.expected.phases[1].device
    assert math.isclose(plan.expected.link, plan.stream.nbytes / rate)  # both directions at once
    assert 0 <= plan.expected.exposed < plan.expected.link and plan.expected.disk == 0
    assert plan.bound.seconds["host link"] == plan.expected.link
    assert max(plan.bound.seconds.values()) <= plan.bound.step_seconds <= plan.expected.seconds
    row = next(row for row in plan.memory if row.role == "host memory")
    assert row.arithmetic == row.assigned == plan.stream.nbytes


def test_the_time_of_a_disk_counts_at_its_own_rate_and_an_assumed_rate_says_so(planned, monkeypatch):
    plan, _, step = planned
    monkeypatch.setattr(type(step.updates), "is_on_disk", True)
    stream = streams.plan(step, plan.buffers, None, None)
    assert stream.is_on_disk and stream.disk == stream.read == stream.nbytes
    phases = times.phases(step, stream, plan.ledger.flow, plan.bound.seconds, None, None)
    target = dataclasses.replace(targets.get("h200"), disk=targets.Figure(2e3, targets.GIVEN))
    least = times.bounded(plan.bound, phases, target)
    assert math.isclose(least.seconds["disk"], 2 * stream.nbytes / 2e3) and least.binds == "disk"
    assert math.isclose(least.step_seconds, least.seconds["disk"], rel_tol=0.01)  # it takes far longer than all else
    expected = times.of(phases, target)
    on_disk = report.text(dataclasses.replace(plan, stream=stream, expected=expected, target=target))
    assert "disk: a step reads" in on_disk and "ASSUMED" not in on_disk
    assert "ASSUMED: zerojax disk" in report.text(dataclasses.replace(plan, stream=stream, expected=expected))


@functools.cache
def by_block(is_offloaded, **further):
    """Returns (plan, partition) of a step block by block on eight H200s, or with nothing offloaded; `further` are fields of the step."""
    net, mesh = block_nets.Net(1, dropout=True), zerojax.make_mesh(devices=compile_only.devices())
    x, scale = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((16, 1), jnp.float32)

    def init(key):
        keys = {"params": key, "dropout": key}
        params = net.init(keys, jnp.zeros(x.shape), jnp.zeros(scale.shape))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def loss_fn(params, batch, state):
        return block_nets.loss_of(net, params, batch, state)[0]

    partition = zerojax.partition_state(
        jax.eval_shape(init, jax.random.key(0)),
        mesh=mesh,
        stage=3,
        min_size=64,
        offload={"optimizer": "host", "params": "host"},
    )
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=partition.batch_sharding)
        for name, leaf in (("x", x), ("scale", scale))
    }
    how = {"blocks": r"block_\w+", "heads": "head", "reduce_dtype": jnp.float32, **further}
    part = partition if is_offloaded else partition.on_device
    return planned_on_h200s(zerojax.make_train_step(loss_fn, part, **how), part, batch), partition


@pytest.mark.long
def test_a_step_block_by_block_has_the_collectives_and_the_work_of_one_program():
    (plan, _), (whole, _) = by_block(True), by_block(False)

    def sent(plan):
        rows = ((r.kind, r.role, r.weights, r.dtype, r.elements, r.axes, r.times) for r in plan.ledger.rows)
        # without scalars: the norm's and the metrics' are not in the passes
        return collections.Counter(row for row in rows if row[4] > 2)

    # Of a replicated weight that two calls read, XLA adds the two gradients of one program before it sums them over devices.
    twice = [(path, 2 * size * 7 // 8) for path, size in (("narrow", 8), ("wide", 16))]
    again = [("all-reduce", "gradients", (f"params/block_shared/{p}/bias",), "f32", n, ("data",), 1) for p, n in twice]
    assert sent(plan).total() > 25 and sent(plan) == sent(whole) + collections.Counter(again)
    assert plan.findings == whole.findings and plan.bound.seconds["compute"] == whole.bound.seconds["compute"]
    assert 0.95 < plan.bound.seconds["memory"] / whole.bound.seconds["memory"] < 1.05  # with the updates
    assert any("gather.py" in row.source for row in plan.ledger.rows)


def test_the_moments_of_a_program_for_each_kind_of_block_have_their_role():
    plan, _ = by_block(False, programs="kinds")
    rows = {row.role: row for row in plan.memory}
    for role in ("params", "moments"):
        assert rows[role].assigned == rows[role].arithmetic > 0
    assert sum(row.assigned for row in plan.memory) == plan.peak


def test_params_on_the_host_arrive_in_each_pass_and_are_no_part_of_the_devices_memory():
    plan, partition = by_block(True)
    on_host = [path for path in partition.on_host if path.startswith("params/")]
    nbytes = sum(4 * math.prod(partition.placements[path].shape) for path in on_host) // 8
    assert len(on_host) == 2 * 2 + 1  # the kernels of the blocks, and that of the embedding
    assert plan.stream.by_block.params == nbytes
    assert 2 * nbytes <= plan.stream.by_block.fetched <= 3 * nbytes  # one block is read twice
    assert plan.stream.is_early and plan.stream.before == 0
    small = [math.prod(own.shape) for path, own in partition.placements.items() if path not in on_host]
    assert plan.stream.by_block.waiting == 4 * sum(small)  # replicated, and updated at the end
    first, last = plan.expected.phases
    assert (first.name, last.name) == ("forward passes", "last backward pass, updates")
    target = targets.get("h200").beside(8)
    last_in = plan.stream.nbytes + plan.stream.by_block.fetched - first.link * target.host_link.value
    assert math.isclose(first.device + last.device, plan.expected.seconds - plan.expected.exposed)
    by_clock = walk.walk(plan.ledger.flow, rates.of("h200"), 8)  # all programs of a pass, linked
    of_passes = by_clock.seconds - by_clock.parts[walk.WAITS]
    assert of_passes * 0.9 < first.device + last.device < of_passes * 2  # with the updates
    assert last.link >= last_in / target.host_link.value / 2
    row = {row.role: row for row in plan.memory}
    assert row["host memory"].assigned == row["host memory"].arithmetic == plan.stream.nbytes + nbytes
    assert row["params"].assigned == row["params"].arithmetic
    assert sum(row.assigned for row in plan.memory if row.role != "host memory") == plan.peak == plan.stream.peak
    assert "of params arrive block by block" in report.text(plan)
    disk = dataclasses.replace(plan.stream, params_on_disk=True)
    assert (disk.disk, disk.read) == (nbytes, plan.stream.by_block.fetched)
    assert "from a disk; " in report.text(dataclasses.replace(plan, stream=disk))


def test_a_matmul_without_a_kernel_of_xlas_own_is_planned_by_cublas():
    on = jax.sharding.SingleDeviceSharding(compile_only.gpus(topology="1x1")[0])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on) for shape in ((16, 4, 16, 1, 24), (64, 64)))
    step = jax.jit(lambda x, w: x.transpose(3, 0, 4, 1, 2).reshape(384, 64) @ w)
    assert streams.read(step, x, [w]).operations
