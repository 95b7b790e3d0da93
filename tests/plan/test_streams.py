"""Tests of zerojax.plan.streams: each offloaded leaf stays on the host, and a bounded part of it is on the device, on compiled GPUs."""

import dataclasses
import math

import block_nets
import compile_only
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo import parameters
from zerojax.plan import report, step_plan, streams, targets

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


@pytest.fixture(scope="module", params=[(2, optax.adam(1e-3)), (3, zerojax.fused_adamw(1e-3, implementation="jnp"))])
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
    assert f"{rate / 1e9:.0f} GB/s each way" in text
    assert plan.stream.seconds == plan.stream.nbytes / rate
    assert 0 < plan.stream.exposed < plan.stream.seconds
    assert plan.bound.step_seconds == max(plan.bound.seconds.values()) + plan.stream.exposed
    row = next(row for row in plan.memory if row.role == "host memory")
    assert row.arithmetic == row.assigned == plan.stream.nbytes


def test_what_neither_arrives_before_nor_beside_the_last_backward_pass_is_exposed(planned):
    stream = planned[0].stream
    early, compute = dataclasses.replace(stream, is_early=True), 1.2 * stream.exposed
    assert stream.beside(compute, 2) == stream, "updates that wait for the norm run beside nothing"
    assert math.isclose(early.beside(compute, 2).exposed, stream.exposed - compute / 3)
    assert early.beside(compute, 1).exposed > 0 == early.beside(2 * compute, 1).exposed


def test_the_time_of_a_disk_is_that_of_the_rate_that_the_user_gives(planned):
    stream = dataclasses.replace(planned[0].stream, is_on_disk=True)
    line = report._stream_line(dataclasses.replace(stream, rate=None))
    assert "are read from a disk and written back" in line and "zerojax disk measures" in line
    line = report._stream_line(dataclasses.replace(stream, rate=stream.nbytes / 2.0))
    assert "2000 ms" in line


def test_the_rate_of_host_memory_is_not_taken_for_that_of_a_disk(planned, monkeypatch):
    plan, _, step = planned
    monkeypatch.setattr(type(step.updates), "is_on_disk", True)
    target = targets.TARGETS["h200"]
    assert streams.plan(step, plan.buffers, target, None, None).rate is None
    given = dataclasses.replace(target, host_duplex=targets.Figure(2e9, targets.GIVEN))
    found = streams.plan(step, plan.buffers, given, None, None)
    assert found.rate == 2e9 and found.is_on_disk


@pytest.fixture(scope="module")
def by_block():
    """Returns (plan, partition) of a step block by block on eight H200s, and the plan of one program with nothing offloaded."""
    net, mesh = block_nets.Net(4, dropout=True), zerojax.make_mesh(devices=compile_only.devices())
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
    how = {"blocks": r"block_\w+", "heads": "head", "reduce_dtype": jnp.float32}
    plans = [
        planned_on_h200s(zerojax.make_train_step(loss_fn, part, **how), part, batch)
        for part in (partition, partition.on_device)
    ]
    return plans[0], partition, plans[1]


def test_a_step_block_by_block_has_the_collectives_and_the_work_of_one_program(by_block):
    plan, _, whole = by_block

    def sent(plan):
        rows = [(r.kind, r.role, r.weights, r.dtype, r.elements, r.axes, r.times) for r in plan.ledger.rows]
        return sorted(
            row for row in rows if row[4] > 2
        )  # without scalars: the norm's and the metrics' are not in the passes

    assert len(sent(plan)) > 40 and sent(plan) == sent(whole)
    assert plan.findings == whole.findings and plan.bound.seconds["compute"] == whole.bound.seconds["compute"]
    assert 0.8 < plan.bound.seconds["memory"] / whole.bound.seconds["memory"] < 1  # without the update of small weights
    assert any("gather.py" in row.source for row in plan.ledger.rows)


def test_params_on_the_host_arrive_in_each_pass_and_are_no_part_of_the_devices_memory(by_block):
    plan, partition, _ = by_block
    on_host = [path for path in partition.on_host if path.startswith("params/")]
    nbytes = sum(4 * math.prod(partition.placements[path].shape) for path in on_host) // 8
    assert len(on_host) == 2 * 5 + 1  # the kernels of the blocks, and that of the embedding
    assert plan.stream.by_block.params == nbytes
    assert 2 * nbytes <= plan.stream.by_block.fetched <= 3 * nbytes  # one block is read twice
    assert plan.stream.is_early and plan.stream.exposed == 0 and plan.stream.by_block.waiting == 0
    row = {row.role: row for row in plan.memory}
    assert row["host memory"].assigned == row["host memory"].arithmetic == plan.stream.nbytes + nbytes
    assert row["params"].assigned == row["params"].arithmetic
    assert sum(row.assigned for row in plan.memory if row.role != "host memory") == plan.peak == plan.stream.peak
    assert "of params arrive block by block" in report.text(plan)
    by_block = plan.stream.by_block
    disk = dataclasses.replace(plan.stream, params_on_disk=True, rate=by_block.fetched / 2.0)
    assert (disk.disk, disk.read, disk.seconds) == (
        nbytes,
        by_block.fetched,
        2.0,
    )  # moments in host memory take other time
    assert "of params arrive block by block from a disk; the disk reads" in report._stream_line(disk)
