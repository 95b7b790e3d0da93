"""Plans a train step by compiling it ahead of time. This module allocates nothing and needs no accelerator.

A plan joins four analyses of one compiled program: its buffers, its collectives, its defects, and the least time that it can take.
"""

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from zerojax import errors, roles, specs, tree
from zerojax import mesh as mesh_lib
from zerojax.clock import rates as rates_lib
from zerojax.clock import start as start_lib
from zerojax.clock import walk
from zerojax.hlo import buffer_roles, traffic
from zerojax.hlo import buffers as buffers_lib
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import bound as bound_lib
from zerojax.plan import departures, findings, ledger, pipelines, targets
from zerojax.plan.offload import streams, times
from zerojax.train_state import State
from zerojax.zero import stages, state_bytes
from zerojax.zero.host import storage
from zerojax.zero.pipeline import step as pipeline_step
from zerojax.zero.update import one_pass_update
from zerojax.zero.weights import partition as partition_lib

LARGEST = 10  # leaves and temporaries that are listed


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one role on one device, computed in three ways; None if a way does not cover the role.

    Attributes:
      theory: the role's bytes, divided by the size of `data` if the stage shards the role (ZeRO, arXiv:1910.02054, figure 1).
      arithmetic: from the shardings, including replicated leaves, padding and copies.
      assigned: from XLA's buffer assignment. For gradients and temporaries, those alive at the peak.
    """

    role: str
    theory: int | None
    arithmetic: int | None
    assigned: int | None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What each device receives of tokens that travel to their experts and back, in a step in which no room overflows.

    Attributes:
      load: the rows that there is room for, over those of a balanced router.
      theory: bytes of the rooms (`ops.expert_parallel.cost`). A balanced router fills the `load`-th part of them.
      received, beside: bytes of the program's all-to-alls, and of those with a matmul or attention beside them.
      further: seconds that a step takes more, by the clock, if one further exchange follows in each mixture and pass; None if unknown.
      parts: of the tokens, which travel one after the other.
    """

    load: float
    theory: int
    received: int = 0
    beside: int = 0
    further: float | None = None
    parts: int = 1


class RolloutDevices(NamedTuple):
    """What each of the devices holds that draw answers, beside what their programs compute.

    Attributes:
      devices: those that draw while the others train; 0: all devices draw and then train.
      answers: of a step.
      weights, caches: the bytes of the copies of the weights, and of the answers' keys and values.
      state: the bytes of the state beside them.
      refused: why a run would end; "" if its engine has room.
    """

    devices: int
    answers: int
    weights: int
    caches: int
    state: int = 0
    refused: str = ""

    @property
    def nbytes(self) -> int:
        """Returns the sum."""
        return self.weights + self.caches + self.state


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory, the collectives and the least time of a train step on each device.

    Attributes:
      target: the kind of device.
      devices, mesh_shape: the number of devices, and the size of each mesh axis.
      stage: the ZeRO stage; None for a step without a Partition.
      tokens: tokens (or examples) in one step, over all devices; 0 if unknown.
      memory: rows by role.
      buffers, ledger, findings, departures, bound: the analyses.
      theory: the amount that the stage should send, by role, in units of the parameters.
      compile_seconds: the time to trace, lower and compile.
      compiled: the compiled step. It runs if the devices are real.
      stream: the stream of offloaded state; None if there is none. `buffers` and what is read from the program are then those of the
        program of the gradients. A step block by block has no such program, and its own are read in their order (`streams`).
      expected: the estimated time of a step with offloaded state; None if there is none, or the target's rates are unknown.
      foretold: the time of a step that is one program; None if the state is offloaded, or `clock` has no rates of the target.
      rates: those of `foretold`.
      pipeline: of a step over a pipeline, whose peak is its own; `buffers` and what is read from the program are then those of the group
        of devices that needs the most. None without one.
      exchange: of a step whose experts live on different devices; None of others.
      beside: the bytes of models that the run reads and does not train.
      rollouts: of the devices that draw answers; None if none are drawn by an engine.
      model_seconds: of the model's operations alone, without those computed again, at the matrix rate; None if unknown.
    """

    target: targets.Target
    devices: int
    mesh_shape: Mapping[str, int]
    stage: int | None
    tokens: int
    memory: tuple[MemoryRow, ...]
    buffers: buffers_lib.Buffers
    ledger: ledger.Ledger
    findings: tuple[findings.Finding, ...]
    departures: tuple[departures.Departure, ...]
    theory: Mapping[str, float]
    bound: bound_lib.Bound | None
    compile_seconds: float
    compiled: Any = dataclasses.field(repr=False)
    stream: streams.Stream | None = None
    expected: times.Times | None = None
    foretold: walk.StepTime | None = None
    rates: rates_lib.GpuRates | None = None
    model_seconds: float | None = None
    pipeline: pipelines.Pipelined | None = None
    exchange: Exchange | None = None
    beside: int = 0
    rollouts: RolloutDevices | None = None

    @property
    def peak(self) -> int:
        """Returns the peak of bytes that a step's programs use on a device."""
        return _peak(self.buffers, self.stream, self.pipeline)

    @property
    def in_step(self) -> int:
        """Returns the peak of bytes in use on a device in a step: those of `peak`, of models beside it, and of an engine's caches."""
        return self.peak + self.beside + self._drawing.caches

    @property
    def most(self) -> int:
        """Returns the most bytes in use on a device: in a step, or while answers are drawn."""
        return max(self.in_step, self.beside + self._drawing.nbytes)

    @property
    def _drawing(self) -> RolloutDevices:
        """Returns what the devices that train hold while they draw answers: nothing where others draw."""
        return self.rollouts if self.rollouts and not self.rollouts.devices else RolloutDevices(0, 0, 0, 0)

    @property
    def start(self) -> start_lib.StartTimes | None:
        """Returns how long a run takes to its first step; None of steps of several programs, and off GPUs."""
        if self.target.kind != "gpu" or self.stream is not None or self.pipeline is not None:
            return None
        lines = self.buffers.hlo_text.count("\n")
        return start_lib.foretold(lines, bound_lib.per_host(self.ledger.mesh), self.buffers.host)

    @property
    def usable(self) -> int | None:
        """Returns the bytes that XLA may use on a device, or None if its memory is unknown."""
        return self.target.usable

    @property
    def largest_leaves(self) -> list[buffers_lib.Argument]:
        """Returns the largest leaves of the step's arguments, the largest first."""
        return sorted(self.buffers.arguments, key=lambda leaf: -leaf.nbytes)[:LARGEST]

    @property
    def largest_temporaries(self) -> list[buffers_lib.Temporary]:
        """Returns the largest temporaries at the peak, the largest first."""
        return list(self.buffers.at_peak[:LARGEST])

    @property
    def seconds(self) -> float | None:
        """Returns the seconds that a step should take, or None if they are unknown."""
        known = self.foretold or self.expected
        return known.seconds if known else None

    def mfu(self, seconds: float | None) -> float | None:
        """Returns the share of the matrix rate that the model's operations take in so long a step, or None if it is unknown."""
        return self.model_seconds / seconds if self.model_seconds and seconds else None

    @property
    def fits(self) -> bool | None:
        """Returns whether the step fits, and what draws its answers, or None if the device's memory is unknown."""
        is_refused = self.rollouts is not None and bool(self.rollouts.refused)
        return None if self.usable is None else self.most <= self.usable and not is_refused


def shortage(error: BaseException) -> str | None:
    """Returns how much memory a compiler lacked, in one line, or None if an error means something else.

    XLA's compiler for TPUs plans no program that exceeds the memory: it ends with an error. Those for GPUs and CPUs return the program.
    """
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    found = re.search(r"Used (\S+) of (\S+) (\w+)", str(error))
    return f"the compiler needs {found[1]} of {found[2]} of {found[3]}" if found else errors.one_line(error, 160)


def plan_step(
    train_step: Any,
    state: State,
    *args: Any,
    mesh: Mesh,
    target: str = "here",
    placement: partition_lib.Partition | None = None,
    tokens: int = 0,
    compute_dtype: DTypeLike | None = None,
    passes: int = 1,
    by_hand: bool = False,
    from_cache: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    host_rate: float | None = None,
    disk_rate: float | None = None,
    flops_per_token: float = 0.0,
    exchange: Exchange | None = None,
    rates: rates_lib.GpuRates | None = None,
) -> Plan:
    """Plans any jitted train step.

    Args:
      train_step: a `jax.jit` function of (state, *args), or a `streamed_step.StreamedStep`.
      state: the abstract train state: ShapeDtypeStructs with shardings on `mesh`. Its weights are under `params`.
      *args: the other arguments, abstract.
      mesh: the mesh that the step is lowered for, of compile-only devices (`targets.devices`) or real ones.
      target: the device whose memory and rates to compare with.
      placement: the state's partition. Without it, the stage is unknown and theory follows the state's shardings.
      tokens: tokens in one step, for the time bound.
      compute_dtype: dtype of the forward pass; None for that of most matmuls.
      passes: forward and backward passes in a step.
      by_hand: whether explicit collectives sum the gradients, in float32 (`make_train_step`'s reduce_dtype).
      from_cache: see `buffers.compile_with_buffers`.
      compiler_options: XLA options, in addition to the step's own; programs of blocks that are compiled before do not have them.
      host_rate: bytes/s to host memory, and as many from it at the same time; None for the target's.
      flops_per_token: operations of the model in training, for its MFU; 0 if unknown.
      exchange: the theory of tokens that travel to their experts; None if none do.
      rates: the clock's; None for the target's, of links as its own.
      disk_rate: bytes/s that each host's disk reads and writes at the same time, both together; None assumes `targets.Target.disk`.

    >>> plan = plan_step(train_step, partition.abstract_state, batch, mesh=mesh, target="h200", placement=partition)
    """
    known = _target(target, mesh, host_rate, disk_rate)
    rates = rates or rates_lib.of(known.name)
    began = time.perf_counter()
    pipeline, whole = None, mesh
    if isinstance(train_step, pipeline_step.PipelineStep):
        read, pipeline = pipelines.read(
            train_step, state, args[0], mesh, known, compiler_options, rates, is_absent=not targets.are_here(target)
        )
        assert placement is not None
        mesh = mesh_lib.groups(mesh)[pipeline.largest]
        placement = pipelines.own(placement, pipeline.largest)
    else:
        read = streams.read(train_step, state, args, from_cache=from_cache, compiler_options=compiler_options)
    held = read.buffers
    stream = streams.of(train_step, held, state, args)
    seconds = time.perf_counter() - began
    weights = placement.placements if placement else _weights(state)
    sent = ledger.ledger(read.module, mesh, weights)
    # Programs of blocks copy weights alone.
    activations = (0, 0) if stream and stream.by_block else bound_lib.host_traffic(sent.flow)
    of_group = pipeline.memory[pipeline.largest].host if pipeline else 0
    bound, expected = _bound(known, mesh, read.operations, sent, max(activations) + of_group), None
    if stream is not None and bound is not None:
        clock = None if rates is None else times.Clock(rates, mesh.size, bound_lib.per_host(mesh))
        phases = times.phases(train_step, stream, sent.flow, bound.seconds, state, args[0], activations, clock)
        bound, expected = times.bounded(bound, phases, known), times.of(phases, known) if clock else None
    # Programs of blocks of which nothing arrives from elsewhere are read as one; beside them run updates, and the host sends them.
    is_alone = pipeline is None and (stream is None or not (stream.nbytes or stream.fetched))
    walked = _foretold(rates, mesh, sent.flow) if is_alone and (stream is None or sent.exchanged) else None
    foretold = walked if stream is None else None
    peak = _peak(held, stream, pipeline)
    return Plan(
        target=known,
        devices=whole.size,
        mesh_shape=mesh_lib.sizes(whole),
        stage=placement.stage if placement else None,
        tokens=tokens,
        memory=_memory(held, placement, passes, by_hand, stream, pipeline),
        buffers=held,
        ledger=sent,
        findings=findings.findings(
            sent,
            planned=placement.abstract_state if placement else state,
            compute_dtype=compute_dtype,
            passes=passes,
            copies=bound_lib.copies(known, bound, activations[0]),
            at_peak=held.at_peak,
            peak=held.peak,
            free=None if known.usable is None else known.usable - peak,
            waits=pipeline.theory if pipeline else 0.0,
            foretold=walked,
            rates=rates,
        ),
        departures=departures.departures(sent, passes=passes),
        theory=sent.theory(passes) | _of_update(placement, sent),
        bound=bound,
        compile_seconds=seconds,
        compiled=read.executable,
        stream=stream,
        expected=expected,
        foretold=pipeline.time if pipeline else foretold,
        pipeline=pipeline,
        exchange=None if exchange is None else _exchange(exchange, sent, walked, rates),
        rates=rates,
        model_seconds=_model_seconds(known, flops_per_token * tokens / whole.size, compute_dtype),
    )


def _peak(held: buffers_lib.Buffers, stream: streams.Stream | None, pipeline: pipelines.Pipelined | None) -> int:
    """Returns the peak of bytes in use on a device; see `Plan`."""
    if pipeline is not None:
        return pipeline.peak
    if stream is None:
        return held.peak
    return stream.peak if stream.by_block else max(held.peak + stream.before, stream.peak)


def _target(name: str, mesh: Mesh, host_rate: float | None, disk_rate: float | None) -> targets.Target:
    """Returns the target with the given rates, of which the devices of a host have a share."""
    known = targets.get(name)
    if host_rate is not None:
        known = dataclasses.replace(known, host_duplex=targets.Figure(host_rate, targets.GIVEN))
    if disk_rate is not None:
        known = dataclasses.replace(known, disk=targets.Figure(disk_rate, targets.GIVEN))
    return known.beside(bound_lib.per_host(mesh))


def _weights(state: State) -> dict[str, Any]:
    """Returns the leaves of a state that are weights, by path."""
    role_of = stages.leaf_roles(state)
    return {path: leaf for path, leaf in tree.flatten(state) if role_of[path] == roles.PARAMS}


def _bound(
    target: targets.Target, mesh: Mesh, operations: Mapping[str, float], sent: ledger.Ledger, host: int
) -> bound_lib.Bound | None:
    """Returns the least time of the step's programs; `host` are the bytes to host memory, or from there, that `times` does not count."""
    return bound_lib.least_step(
        target, mesh, flops=operations, traffic=traffic.memory_traffic(sent.flow), received=_received(sent), host=host
    )


def _exchange(
    theory: Exchange, sent: ledger.Ledger, foretold: walk.StepTime | None, rates: rates_lib.GpuRates | None
) -> Exchange:
    """Returns the theory with what a program does."""
    again = None if foretold is None else _foretold(rates, sent.mesh, sent.flow, further=theory.parts)
    beside = [row for row in sent.exchanged if row.is_async and findings.has_arithmetic(row)]
    return dataclasses.replace(
        theory,
        received=sum(row.nbytes for row in sent.exchanged),
        beside=sum(row.nbytes for row in beside),
        further=None if foretold is None or again is None else again.seconds - foretold.seconds,
    )


def _model_seconds(target: targets.Target, flops: float, compute_dtype: DTypeLike | None) -> float | None:
    """Returns the least seconds of so many operations of a device, in fp8 at the rate of 16 bits; None if they or the rate are unknown."""
    is_wide = compute_dtype is not None and np.dtype(compute_dtype).itemsize > 2
    rate = target.matrix_rates.get("fp32" if is_wide else "bf16", target.matrix_rates.get("bf16"))
    return flops / rate.value if rate is not None and flops else None


def _foretold(
    rates: rates_lib.GpuRates | None, mesh: Mesh, flow: hlo_flow.Flow, further: int = 0
) -> walk.StepTime | None:
    """Returns the time of a program, or None if there are no rates. `further`: as of `walk.walk`."""
    if rates is None:
        return None
    return walk.walk(flow, rates, mesh.size, bound_lib.per_host(mesh), further=further)


def _received(sent: ledger.Ledger) -> dict[tuple[str, ...] | tuple[int, ...], float]:
    """Returns the bytes that a device receives, by the mesh axes that they travel over, or the devices of a group."""
    found: dict[tuple[str, ...] | tuple[int, ...], float] = {}
    for row in sent.rows:
        found[row.over] = found.get(row.over, 0.0) + row.nbytes
    return found


def _of_update(placement: Any, sent: ledger.Ledger) -> dict[str, float]:
    """Returns the parameters that a device receives in an update that needs whole matrices."""
    elements = one_pass_update.received(placement) if placement is not None and placement.offload is None else 0
    return {roles.MATRICES: elements / max(1, sent.params)} if elements else {}


def _memory(
    held: buffers_lib.Buffers,
    placement: partition_lib.Partition | None,
    passes: int,
    by_hand: bool,
    stream: streams.Stream | None,
    pipeline: pipelines.Pipelined | None,
) -> tuple[MemoryRow, ...]:
    """Returns the memory by role, computed in three ways."""
    assigned = {**held.arguments_by_role, roles.HOST: held.host}
    if stream is not None:
        where = roles.DISK if stream.is_on_disk else roles.HOST
        assigned[where] = assigned.get(where, 0) + stream.nbytes
    temporaries = held.temporaries_by_role if held.at_peak else {}
    for role in (roles.GRADIENTS, roles.GATHERED, roles.COLLECTIVE_BUFFERS):
        assigned[role] = temporaries.get(role, 0)
    if pipeline is not None:  # known by role but for what programs take
        assigned[roles.GRADIENTS] = pipeline.memory[pipeline.largest].sums
        group = pipeline.memory[pipeline.largest]
        assigned[roles.HOST] = group.kept_on_host
        where = roles.DISK if placement is not None and storage.on_disk(placement) else roles.HOST
        assigned[where] = assigned.get(where, 0) + group.host
        resident = sum(held.arguments_by_role.values()) + assigned[roles.GRADIENTS]
        return _rows(assigned | {roles.TEMPORARIES: pipeline.peak - resident}, placement, passes, by_hand)
    if stream is not None and stream.by_block is not None:
        return _memory_by_block(assigned, stream, placement, passes, by_hand)
    rest = held.temporaries - sum(temporaries.get(role, 0) for role in assigned)
    assigned[roles.TEMPORARIES] = rest + held.outputs + held.constants
    return _rows(assigned, placement, passes, by_hand)


def _memory_by_block(
    assigned: dict[str, int],
    stream: streams.Stream,
    placement: partition_lib.Partition | None,
    passes: int,
    by_hand: bool,
) -> tuple[MemoryRow, ...]:
    """Returns the memory of a step block by block: what waits is known by role, and the rest of the peak is temporaries."""
    assert stream.by_block is not None
    where = roles.DISK if stream.params_on_disk else roles.HOST
    assigned = assigned | {
        where: assigned.get(where, 0) + stream.by_block.params,
        roles.GRADIENTS: stream.by_block.waiting,
        roles.GATHERED: 0,
        roles.COLLECTIVE_BUFFERS: 0,
    }
    elsewhere = (roles.HOST, roles.DISK, roles.TEMPORARIES)
    resident = sum(count for role, count in assigned.items() if role not in elsewhere)
    return _rows(assigned | {roles.TEMPORARIES: stream.peak - resident}, placement, passes, by_hand)


def _rows(
    assigned: Mapping[str, int], placement: partition_lib.Partition | None, passes: int, by_hand: bool
) -> tuple[MemoryRow, ...]:
    theory, arithmetic = _theory(placement, passes, by_hand) if placement else ({}, {})
    shown = (
        roles.PARAMS,
        roles.MASTER,
        roles.MOMENTS,
        roles.GRADIENTS,
        roles.GATHERED,
        roles.COLLECTIVE_BUFFERS,
        roles.TEMPORARIES,
        roles.REST,
        roles.HOST,
        *([roles.DISK] if roles.DISK in assigned else []),
    )
    return tuple(MemoryRow(role, theory.get(role), arithmetic.get(role), assigned.get(role, 0)) for role in shown)


def _theory(placement: partition_lib.Partition, passes: int, by_hand: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes by role according to the stage's table, and according to the shardings."""
    stage, ways = stages.STAGES[placement.stage], mesh_lib.size(placement.mesh, mesh_lib.STATE)
    is_sharded = {
        roles.PARAMS: stage.params,
        roles.MASTER: stage.opt_state,
        roles.MOMENTS: stage.opt_state,
        roles.GRADIENTS: stage.grads,
    }
    theory, arithmetic = dict.fromkeys(is_sharded, 0.0), dict.fromkeys(is_sharded, 0)
    on_disk = storage.on_disk(placement)
    for path, leaf in tree.flatten(placement.abstract_state):
        role = buffer_roles.argument_role(f"state/{path}")
        if role not in is_sharded:
            continue
        # The shard of the leaf if no stage sharded it. The compiler's axes still do.
        shape = NamedSharding(placement.mesh, specs.without(leaf.sharding.spec, mesh_lib.STATE)).shard_shape(leaf.shape)
        elsewhere = roles.DISK if path in on_disk else roles.HOST
        where = elsewhere if path in placement.on_host else role
        theory[where] = theory.get(where, 0.0) + tree.nbytes(leaf, shape) / (ways if is_sharded[role] else 1)
        arithmetic[where] = arithmetic.get(where, 0) + tree.shard_bytes(leaf)
        if role == roles.PARAMS and placement.placements[path].trainable:
            item = 4 / leaf.dtype.itemsize if passes > 1 or by_hand else 1
            theory[roles.GRADIENTS] += item * tree.nbytes(leaf, shape) / (ways if stage.grads else 1)
    counted = state_bytes.bytes_per_device(placement, accumulates=passes > 1, by_hand=by_hand)
    arithmetic[roles.GRADIENTS] = counted[roles.GRADIENTS]
    return {role: round(count) for role, count in theory.items()}, arithmetic
