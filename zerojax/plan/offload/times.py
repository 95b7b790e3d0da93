"""Estimates the time of a step with offloaded state. This module lays its programs beside its copies, phase by phase.

block by block      forward passes; backward passes and the sums of gradients; the last backward pass, beside which groups of optimizer
                    state arrive, are updated and leave. Where updates wait for the norm they are a phase of their own
one program         the gradients; the updates

A phase takes as long as the device's programs, the copies over the host link or those of the disk, whichever is longest. `AT_PEAK` gives
the least time: the rates of data sheets, and arithmetic beside the traffic of memory. `AS_REACHED` gives an estimate: kernels run one after
the other, at the share of the rates that steps reached. It knows neither waits of the host nor copies that begin late.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from zerojax.hlo import buffers, linked, syntax, traffic
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import bound as bound_lib
from zerojax.plan import flops, targets
from zerojax.plan.offload import streams
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.offload import step_by_block, streamed_step
from zerojax.zero.step_programs import passes


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast kernels run."""

    matrix: float  # the share of the matrix rate that matmuls and attention reach
    blocks: float  # the share of the memory's bandwidth that the other kernels of the passes reach
    sweeps: float  # that of sums of gradients and updates
    launch: float  # seconds between two kernels
    is_serial: bool  # whether kernels run one after the other; else arithmetic runs beside the traffic of all kernels


AT_PEAK = Pace(1.0, 1.0, 1.0, 0.0, is_serial=False)
# Measured on an H200, 14B shapes block by block (docs/benchmarks/plan.md): matmuls and attention 509 ms a pass, where the rates give 355;
# other kernels of blocks 70 ms, where the bytes of the untuned program give 30; sums of gradients at 4.1e12 bytes/s of 4.8e12.
AS_REACHED = Pace(bound_lib.REACHED, 0.43, 0.85, 1.9e-6, is_serial=True)


@dataclasses.dataclass(frozen=True)
class Work:
    """What programs do on a device."""

    compute: float = 0.0  # seconds at the matrix rate
    collectives: float = 0.0  # seconds of the bytes that the device receives from others
    traffic: float = 0.0  # bytes that all kernels read and write
    others: float = 0.0  # those of the kernels of passes without matmuls and attention
    swept: float = 0.0  # those of sums of gradients and updates
    kernels: float = 0.0  # their number

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * count for count in dataclasses.astuple(self)))

    def seconds(self, bandwidth: float, pace: Pace) -> float:
        """Returns the time on a device whose memory has this bandwidth."""
        if not pace.is_serial:
            return max(self.compute / pace.matrix, self.collectives, self.traffic / bandwidth)
        moved = (self.others / pace.blocks + self.swept / pace.sweeps) / bandwidth
        return self.compute / pace.matrix + self.collectives + moved + self.kernels * pace.launch


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


def of(phases: Iterable[StepPhase], target: targets.Target, pace: Pace) -> Times | None:
    """Returns the time of a step's phases; None if the target's rates are unknown."""
    if target.memory_bandwidth is None or target.host_link is None:
        return None
    both = (target.host_duplex or target.host_link).value
    # A rate of both directions that is above that of one, as a user may give it, is that of one too.
    one, disk = max(target.host_link.value, both), target.disk.value
    found = []
    for phase in phases:
        device = phase.work.seconds(target.memory_bandwidth.value, pace)
        first = phase.first.seconds(target.memory_bandwidth.value, pace)
        shared, alone = sorted((phase.arriving, phase.leaving))
        link, of_disk = shared / both + (alone - shared) / one, (phase.read + phase.written) / disk
        seconds = max([device, *(first + copies for copies in (link, of_disk) if copies)])
        found.append(PhaseTime(phase.name, phase.runs, *(phase.runs * s for s in (device, link, of_disk, seconds))))
    return Times(tuple(found))


def bounded(bound: bound_lib.Bound, phases: Sequence[StepPhase], target: targets.Target) -> bound_lib.Bound:
    """Returns a bound with all the programs' traffic, the copies over the host link and those of a disk."""
    least = of(phases, target, AT_PEAK)
    if least is None or target.memory_bandwidth is None:
        return bound
    traffic = sum(phase.runs * phase.work.traffic for phase in phases)
    seconds = {**bound.seconds, bound_lib.MEMORY: traffic / target.memory_bandwidth.value, bound_lib.HOST: least.link}
    seconds |= {bound_lib.DISK: least.disk} if least.disk else {}
    return bound_lib.Bound(seconds, least.seconds)


def phases(
    step: streamed_step.StreamedStep,
    stream: streams.Stream,
    flow: hlo_flow.Flow,
    seconds: Mapping[str, float],
    state: State,
    batch: PyTree,
    activations: tuple[int, int] = (0, 0),
) -> list[StepPhase]:
    """Returns the phases of a step.

    Args:
      step: planned before, so that its programs are compiled.
      stream: its stream.
      flow: of its program of gradients, or of its programs, linked.
      seconds: the terms of its bound.
      state, batch: of the step, abstract.
      activations: bytes that its program of gradients sends to host memory, and fetches.
    """
    updates = _updates(step)
    if isinstance(step, step_by_block.BlockwiseStep):
        return _by_block(step, stream, flow, seconds, updates, step.one_pass(state, batch))
    ahead, read = stream.before, _read_ahead(step, stream)
    work = _work(flow.module, traffic.kernels(flow)).get("", Work())
    work += Work(seconds[bound_lib.COMPUTE], seconds[bound_lib.COLLECTIVES])
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
) -> list[StepPhase]:
    cut, count = one_pass.schedule.cut, step.passes.count
    row = _programs(one_pass, flow, seconds, count)
    turn = next((n for n, program in enumerate(cut.programs) if program.name == "backward"), len(row))
    forward, backward = sum(row[:turn], Work()), sum(row[turn:], Work())
    to_forward, to_backward = (
        sum(cut.nbytes(number) for index in indices for number in cut.arrivals.sent(index))
        for indices in (range(-1, turn), range(turn, len(cut.programs)))
    )
    sums, last_sums = _sums(one_pass, count, step.passes.in_16_bits)
    last_sums += _squares(step, one_pass)
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
    one_pass: passes.PassPrograms, flow: hlo_flow.Flow, seconds: Mapping[str, float], count: int
) -> list[Work]:
    """Returns the work of each program of a pass."""
    by_label = _work(flow.module, traffic.kernels(flow))
    operations = [
        sum(sum(flops.count(call.closed).values()) for call in program.part.calls)
        for program in one_pass.schedule.cut.programs
    ]
    whole = max(1.0, sum(operations))
    return [
        by_label.get(f"p{place}", Work()) * (1 / count)
        + Work(seconds[bound_lib.COMPUTE], seconds[bound_lib.COLLECTIVES]) * (own / whole / count)
        for place, own in enumerate(operations)
    ]


def _work(module: syntax.Module, kernels: Iterable[traffic.KernelBytes]) -> dict[str, Work]:
    """Returns the traffic of kernels by the label of their program (`linked`); "" without."""
    found: dict[str, Work] = {}
    for kernel in kernels:
        nbytes = kernel.nbytes * kernel.times
        is_bound = traffic.uses_matrix_units(module, kernel.where, kernel.instruction)
        own = Work(traffic=nbytes, others=0 if is_bound else nbytes, kernels=kernel.times)
        name = linked.label_of(kernel.instruction)
        found[name] = found.get(name, Work()) + own
    return found


def _sums(one_pass: passes.PassPrograms, count: int, in_16_bits: bool) -> tuple[Work, Work]:
    """Returns the work to add the gradients of a pass to the sums: the mean of the passes before the last, and that of the last.

    The first pass reads gradients and writes sums, the others read both. The last sum is float32, and is read and written again for the
    mean.
    """
    if count == 1:
        return Work(), Work()
    grads, elements = sum(map(one_pass.schedule.cut.nbytes, one_pass.grads)), sum(one_pass.elements.values())
    sums, number = (2 if in_16_bits else 4) * elements, len(one_pass.grads)
    nbytes = grads + sums + sums * (count - 2) / (count - 1)
    last = grads + sums + 3 * 4 * elements
    return Work(traffic=nbytes, swept=nbytes, kernels=number), Work(traffic=last, swept=last, kernels=2 * number)


def _squares(step: step_by_block.BlockwiseStep, one_pass: passes.PassPrograms) -> Work:
    """Returns the work to sum up the squares of the gradients of groups."""
    apart = [count for path, count in one_pass.elements.items() if path in step.updates.weights]
    nbytes = 4 * sum(apart)
    return Work(traffic=nbytes, swept=nbytes, kernels=len(apart))


def _updates(step: streamed_step.StreamedStep) -> Work:
    """Returns the work of the updates of groups."""
    by_program: dict[int, Work] = {}
    found = Work()
    for group in step.updates.groups:
        for item in group.items:
            program = step.updates.executable(item)
            if id(program) not in by_program:
                flow = hlo_flow.flow(syntax.parse(buffers.text_of(program)))
                own = _work(flow.module, traffic.kernels(flow)).get("", Work())
                by_program[id(program)] = Work(traffic=own.traffic, swept=own.traffic, kernels=own.kernels)
            found += by_program[id(program)]
    return found


def _read_ahead(step: streamed_step.StreamedStep, stream: streams.Stream) -> float:
    """Returns the bytes of optimizer state that a disk reads before the updates: those that arrive, and as many as its buffers hold."""
    if not stream.is_on_disk:
        return 0
    chosen = step.updates.rest.partition.offload
    return min(stream.nbytes, stream.before + chosen.buffers() * chosen.chunk_bytes)
