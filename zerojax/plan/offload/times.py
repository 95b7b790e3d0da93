"""Estimates the time of a step with offloaded state. This module lays its programs beside its copies, phase by phase.

block by block      forward passes; backward passes and the sums of gradients; the last backward pass, beside which groups of optimizer
                    state arrive, are updated and leave. Where updates wait for the norm they are a phase of their own
one program         the gradients; the updates

A phase takes as long as the device's programs, the copies over the host link or those of the disk, whichever is longest. Two answers: the
least time, with the rates of data sheets and arithmetic beside the traffic of memory, and an estimate, in which programs take the time that
the clock foretells, and are slowed by copies beside them. It knows neither waits of the host nor copies that begin late.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zerojax.clock import rates as rates_lib
from zerojax.clock import walk
from zerojax.hlo import buffers, linked, syntax, traffic
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import bound as bound_lib
from zerojax.plan import flops, targets
from zerojax.plan.offload import streams
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.offload import step_by_block
from zerojax.zero.step_programs import passes

# How many times as long kernels take while copies run: matmuls of 364 ms took 379 beside 220 ms of copies (raw/offload_1xh200.txt, 5).
SLOWED = 1.068


@dataclasses.dataclass(frozen=True)
class Work:
    """What programs do on a device."""

    compute: float = 0.0  # seconds at the matrix rate
    collectives: float = 0.0  # seconds of the bytes that the device receives from others
    traffic: float = 0.0  # bytes that all kernels read and write
    foretold: float = 0.0  # seconds by the clock, without waits for what the phase copies

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def least(self, bandwidth: float) -> float:
        """Returns the least seconds on a device whose memory has this bandwidth."""
        return max(self.compute, self.collectives, self.traffic / bandwidth)


@dataclasses.dataclass(frozen=True)
class Clock:
    """Foretells programs on the devices of a mesh."""

    rates: rates_lib.GpuRates
    devices: int
    per_host: int

    def walk(self, module: syntax.Module) -> walk.StepTime:
        """Returns the time of a program."""
        return walk.walk(hlo_flow.flow(module), self.rates, self.devices, self.per_host)


@dataclasses.dataclass(frozen=True)
class StepPhase:
    """A part of a step, and what is copied beside it.

    Attributes:
      name: what the device does.
      runs: how often in a step.
      work: of one run, as the following.
      arriving, leaving: bytes over the host link.
      read, written: bytes of a disk.
      first: the part of `work` before which no copy can begin.
    """

    name: str
    runs: int
    work: Work
    arriving: float = 0.0
    leaving: float = 0.0
    read: float = 0.0
    written: float = 0.0
    first: Work = Work()


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """The time of a phase in seconds, of all its runs: of the device's programs, the host link, the disk, and the phase itself."""

    name: str
    runs: int
    device: float
    link: float
    disk: float
    seconds: float

    @property
    def exposed(self) -> float:
        """Returns the seconds in which the device waits for copies."""
        return self.seconds - self.device


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of a step."""

    phases: tuple[PhaseTime, ...]  # one after the other

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def exposed(self) -> float:
        """Returns the seconds in which the device waits for copies."""
        return sum(phase.exposed for phase in self.phases)

    @property
    def link(self) -> float:
        """Returns the seconds of copies over the host link."""
        return sum(phase.link for phase in self.phases)

    @property
    def disk(self) -> float:
        """Returns the seconds in which the disk reads and writes."""
        return sum(phase.disk for phase in self.phases)


def of(phases: Iterable[StepPhase], target: targets.Target, *, is_least: bool = False) -> Times | None:
    """Returns the estimated time of a step's phases, or the least; None if the target's rates are unknown."""
    if target.memory_bandwidth is None or target.host_link is None:
        return None
    bandwidth = target.memory_bandwidth.value
    both = (target.host_duplex or target.host_link).value
    # A rate of both directions that is above that of one, as a user may give it, is that of one too.
    one, disk = max(target.host_link.value, both), target.disk.value
    found = []
    for phase in phases:
        device, first = (own.least(bandwidth) if is_least else own.foretold for own in (phase.work, phase.first))
        shared, alone = sorted((phase.arriving, phase.leaving))
        link, of_disk = shared / both + (alone - shared) / one, (phase.read + phase.written) / disk
        device += 0.0 if is_least else min(device, link) * (1 - 1 / SLOWED)
        seconds = max([device, *(first + copies for copies in (link, of_disk) if copies)])
        found.append(PhaseTime(phase.name, phase.runs, *(phase.runs * s for s in (device, link, of_disk, seconds))))
    return Times(tuple(found))


def bounded(bound: bound_lib.Bound, phases: Sequence[StepPhase], target: targets.Target) -> bound_lib.Bound:
    """Returns a bound with all the programs' traffic, the copies over the host link and those of a disk."""
    least = of(phases, target, is_least=True)
    if least is None or target.memory_bandwidth is None:
        return bound
    traffic = sum(phase.runs * phase.work.traffic for phase in phases)
    seconds = {**bound.seconds, bound_lib.MEMORY: traffic / target.memory_bandwidth.value, bound_lib.HOST: least.link}
    seconds |= {bound_lib.DISK: least.disk} if least.disk else {}
    return bound_lib.Bound(seconds, least.seconds)


def phases(
    step: streams.Step,
    stream: streams.Stream,
    flow: hlo_flow.Flow,
    seconds: Mapping[str, float],
    state: State,
    batch: PyTree,
    activations: tuple[int, int] = (0, 0),
    clock: Clock | None = None,
) -> list[StepPhase]:
    """Returns the phases of a step.

    Args:
      step: planned before, so that its programs are compiled.
      stream: its stream.
      flow: of its program of gradients, or of its programs, linked.
      seconds: the terms of its bound.
      state, batch: of the step, abstract.
      activations: bytes that its program of gradients sends to host memory, and fetches.
      clock: foretells its programs; without it nothing is foretold.
    """
    updates = _updates(step, clock)
    if isinstance(step, step_by_block.BlockwiseStep):
        return _by_block(step, stream, flow, seconds, updates, step.one_pass(state, batch), clock)
    ahead, read = stream.before, _read_ahead(step, stream)
    foretold = clock.walk(flow.module).seconds if clock else 0.0
    work = Work(seconds[bound_lib.COMPUTE], seconds[bound_lib.COLLECTIVES], traffic.memory_traffic(flow), foretold)
    sent, fetched = activations
    on_disk = stream.nbytes if stream.is_on_disk else 0
    return [
        StepPhase("gradients", 1, work, ahead + fetched, ahead + sent, read),
        StepPhase("updates", 1, updates, stream.nbytes - ahead, stream.nbytes - ahead, on_disk - read, on_disk),
    ]


def _by_block(
    step: step_by_block.BlockwiseStep,
    stream: streams.Stream,
    flow: hlo_flow.Flow,
    seconds: Mapping[str, float],
    updates: Work,
    one_pass: passes.PassPrograms,
    clock: Clock | None,
) -> list[StepPhase]:
    cut, count = one_pass.schedule.cut, step.passes.count
    row = _programs(one_pass, flow, seconds, count, clock)
    turn = next((n for n, program in enumerate(cut.programs) if program.name == "backward"), len(row))
    forward, backward = sum(row[:turn], Work()), sum(row[turn:], Work())
    to_forward, to_backward = (
        sum(cut.nbytes(number) for index in indices for number in cut.arrivals.sent(index))
        for indices in (range(-1, turn), range(turn, len(cut.programs)))
    )
    sums, last_sums = _sums(one_pass, count, step.passes.in_16_bits, clock)
    last_sums += _squares(step, one_pass, clock)
    # The first groups may arrive, and those of the step before leave, beside any pass.
    ahead, read = stream.before / count, _read_ahead(step, stream) / count
    leaving = stream.nbytes + step.updates.param_bytes(step.updates.groups)
    behind = min(leaving, stream.in_flight)
    of_params = 1 if stream.params_on_disk else 0
    found = [
        StepPhase("forward passes", count, forward, to_forward + ahead, behind / count, of_params * to_forward + read),
        StepPhase("backward passes", count - 1, backward + sums, to_backward, read=of_params * to_backward),
    ]
    arriving, reading = stream.nbytes - stream.before, (stream.nbytes if stream.is_on_disk else 0) - read * count
    leaving -= behind
    if stream.is_early:
        arriving, reading = arriving + to_backward, reading + of_params * to_backward
        head = row[turn] if turn < len(row) else Work()  # no gradient is final before its end
        work = backward + last_sums + updates
        found.append(StepPhase("last backward pass, updates", 1, work, arriving, leaving, reading, stream.disk, head))
    else:
        again = step.updates.param_bytes(step.updates.groups)  # params are brought again
        arriving, reading = arriving + again, reading + of_params * again
        found += [
            StepPhase("last backward pass", 1, backward + last_sums, to_backward, read=of_params * to_backward),
            StepPhase("updates", 1, updates, arriving, leaving, reading, stream.disk),
        ]
    return [phase for phase in found if phase.runs]


def _programs(
    one_pass: passes.PassPrograms, flow: hlo_flow.Flow, seconds: Mapping[str, float], count: int, clock: Clock | None
) -> list[Work]:
    """Returns the work of each program of a pass. What it waits for weights is none: they arrive beside the programs before it."""
    traffic_of: dict[str, float] = {}
    for kernel in traffic.kernels(flow):
        label = linked.label_of(kernel.instruction)
        traffic_of[label] = traffic_of.get(label, 0.0) + kernel.nbytes * kernel.times / count
    walked: dict[int, float] = {}  # equal programs share a module
    modules = linked.modules(flow.module)
    if clock is not None:
        for module in {id(own): own for own in modules.values()}.values():
            found = clock.walk(module)
            walked[id(module)] = found.seconds - found.parts[walk.WAITS]
    calls = [program.part.calls for program in one_pass.schedule.cut.programs]
    traces = {id(call.closed): call.closed for own in calls for call in own}  # equal blocks have one
    counted = {key: sum(flops.count(closed).values()) for key, closed in traces.items()}
    operations = [sum(counted[id(call.closed)] for call in own) for own in calls]
    whole = max(1.0, sum(operations))
    shares = (own / whole / count for own in operations)
    return [
        Work(
            share * seconds[bound_lib.COMPUTE],
            share * seconds[bound_lib.COLLECTIVES],
            traffic_of.get(label, 0.0),
            walked.get(id(module), 0.0),
        )
        for share, (label, module) in zip(shares, modules.items())
    ]


def _sums(one_pass: passes.PassPrograms, count: int, in_16_bits: bool, clock: Clock | None = None) -> tuple[Work, Work]:
    """Returns the work to add the gradients of a pass to the sums: the mean of the passes before the last, and that of the last.

    The first pass reads gradients and writes sums, the others read both. The last sum is float32, and is read and written again for the
    mean.
    """
    if count == 1:
        return Work(), Work()
    grads = sum(one_pass.schedule.cut.nbytes(own) for own in one_pass.grads.values() if isinstance(own, int))
    elements = sum(one_pass.elements.values())
    sums, number = (2 if in_16_bits else 4) * elements, len(one_pass.grads)
    nbytes = grads + sums + sums * (count - 2) / (count - 1)
    last = grads + sums + 3 * 4 * elements
    return _swept(nbytes, number, clock), _swept(last, 2 * number, clock)


def _swept(nbytes: float, kernels: int, clock: Clock | None) -> Work:
    """Returns the work of kernels that read and write so many bytes, one after the other."""
    rates = clock and clock.rates
    return Work(traffic=nbytes, foretold=nbytes / rates.figures["bandwidth"] + kernels * rates.gap if rates else 0.0)


def _squares(step: step_by_block.BlockwiseStep, one_pass: passes.PassPrograms, clock: Clock | None) -> Work:
    """Returns the work to sum up the squares of the gradients of groups."""
    apart = [count for path, count in one_pass.elements.items() if path in step.updates.weights]
    return _swept(4 * sum(apart), len(apart), clock)


def _updates(step: streams.Step, clock: Clock | None) -> Work:
    """Returns the work of the updates of groups."""
    by_program: dict[int, Work] = {}
    found = Work()
    for group in step.updates.groups:
        for items in step.updates.together(group):
            program = step.updates.executable(items)
            if id(program) not in by_program:
                flow = hlo_flow.flow(syntax.parse(buffers.text_of(program)))
                foretold = clock.walk(flow.module).seconds if clock else 0.0
                by_program[id(program)] = Work(traffic=traffic.memory_traffic(flow), foretold=foretold)
            found += by_program[id(program)]
    return found


def _read_ahead(step: streams.Step, stream: streams.Stream) -> float:
    """Returns the bytes of optimizer state that a disk reads before the updates: those that arrive, and as many as its buffers hold."""
    if not stream.is_on_disk:
        return 0
    chosen = step.updates.rest.partition.offload
    return min(stream.nbytes, stream.before + chosen.buffers() * chosen.chunk_bytes)
