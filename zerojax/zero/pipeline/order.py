"""The order in which the stages of a pipeline run the passes of micro-batches. This module knows neither arrays nor devices.

A pass of a micro-batch through a stage is an `Op`, forward or backward. A schedule may divide the backward pass: BACKWARD then makes what
the stage before needs, and WEIGHTS, some time after it, the gradients of weights. What runs stages is here a device; it may have several
of them (`chunks`, virtual stages): stage v is on device v % devices.

    gpipe         all forward passes, then all backward passes: each device keeps what all micro-batches need
    1f1b          a device begins a backward pass as soon as it can; device d of n keeps at most n - d micro-batches
                  (PipeDream-Flush, arXiv:2006.09503)
    interleaved   the same with several chunks of layers a device, which shortens the ends by that factor (Megatron, arXiv:2104.04473)
    zero_bubble   1f1b with divided backward passes; device d runs WEIGHTS d micro-batches later, in what would be its bubble
                  (ZB-H1, arXiv:2401.10241). Each device keeps what n micro-batches need
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerojax import errors
from zerojax.errors import UserError

PASSES = FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"
DIVIDED = ("zero_bubble",)  # schedules whose backward passes are divided


class Op(NamedTuple):
    """One pass of a micro-batch through a stage: one of `PASSES`."""

    kind: str
    stage: int
    micro: int


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """How long a pass through a stage takes, in any unit: one number for all stages, or one for each.

    Attributes:
      forward, backward: of the passes; of a divided backward pass all of it.
      weights: of WEIGHTS, a part of `backward`.
      hop: until what a stage sends arrives at the next.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    weights: float | Sequence[float] = 1.0
    hop: float = 0.0

    def of(self, op: Op, *, is_divided: bool) -> float:
        """Returns the time of a pass of a schedule whose backward passes are divided, or are not."""
        forward, backward, weights = (
            times[op.stage] if isinstance(times, Sequence) else times
            for times in (self.forward, self.backward, self.weights)
        )
        return {FORWARD: forward, BACKWARD: backward - (weights if is_divided else 0), WEIGHTS: weights}[op.kind]


@dataclasses.dataclass(frozen=True)
class PassOrder:
    """A schedule."""

    name: str  # of the schedule
    devices: int  # the number of groups of devices that run side by side (the size of the mesh axis)
    chunks: int  # stages of a device
    micros: int  # micro-batches of a step
    of_device: Sequence[Sequence[Op]]  # the passes that each device runs, in order

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return self.devices * self.chunks

    @property
    def passes(self) -> tuple[str, ...]:
        """Returns the kinds of passes, in the order in which a micro-batch has them."""
        return PASSES if self.name in DIVIDED else PASSES[:2]

    @property
    def text(self) -> str:
        """Returns a line about the schedule."""
        bubble = f"{run(self).bubble:.1%} of the time if all stages take equally long"
        micros = f"{self.micros} micro-batch{'es' if self.micros > 1 else ''}"
        return f"{self.name}, {self.stages} stages on {self.devices} groups of devices, {micros}: devices wait {bubble}"

    def alive(self, device: int) -> int:
        """Returns the most passes of which a device holds what the backward pass needs, or the gradients of weights."""
        most = now = 0
        for op in self.of_device[device]:
            now += {FORWARD: 1, self.passes[-1]: -1}.get(op.kind, 0)
            most = max(most, now)
        return most


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When passes run.

    Attributes:
      start, end: of each pass.
      total: until the last has ended.
      busy: of each device.
    """

    start: Mapping[Op, float]
    end: Mapping[Op, float]
    total: float
    busy: Sequence[float]

    @property
    def bubble(self) -> float:
        """Returns the share of devices' time in which they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.total)


def make(name: str, devices: int, micros: int, *, chunks: int = 1) -> PassOrder:
    """Returns a schedule.

    Args:
      name: of the schedule.
      devices: the size of the mesh axis.
      micros: micro-batches of a step.
      chunks: stages of a device; above 1 for "interleaved" alone.

    Raises:
      UserError: no such schedule, or it cannot be of these sizes.
    """
    errors.one_of("pipeline.schedule", name, _MAKERS)
    if chunks > 1 and name != "interleaved":
        raise UserError(
            f"pipeline.chunks: {name} has one stage a device, and chunks is {chunks}; set it to 1, or take the schedule interleaved"
        )
    if name == "interleaved" and (chunks < 2 or micros % devices):
        raise UserError(
            f"pipeline.schedule: interleaved needs 2 or more chunks of layers a device, and micro-batches that {devices} divides; "
            f"`chunks` is {chunks} and there are {micros} micro-batches (`grad_accum`)"
            + (f"; take {micros + -micros % devices}" if micros % devices else "")
        )
    return PassOrder(name, devices, chunks, micros, _MAKERS[name](devices, micros, chunks))


def run(order: PassOrder, times: PassTimes | None = None) -> Timeline:
    """Returns when each pass runs if each device runs its own in order, each as soon as what it needs has arrived."""
    times = times or PassTimes()
    start: dict[Op, float] = {}
    end: dict[Op, float] = {}
    at, free, busy = [0] * order.devices, [0.0] * order.devices, [0.0] * order.devices
    waiting = set(range(order.devices))
    while waiting:
        moved = False
        for device in sorted(waiting):
            ops = order.of_device[device]
            while at[device] < len(ops) and all(need in end for need in needs(ops[at[device]], order.stages)):
                op = ops[at[device]]
                arrivals = [end[need] + times.hop * (need.stage != op.stage) for need in needs(op, order.stages)]
                start[op] = max([free[device], *arrivals])
                free[device] = end[op] = start[op] + times.of(op, is_divided=WEIGHTS in order.passes)
                busy[device] += end[op] - start[op]
                at[device] += 1
                moved = True
            if at[device] == len(ops):
                waiting.discard(device)
        assert moved, "the schedule waits for itself"
    return Timeline(start, end, max(free), busy)


def sent(order: PassOrder) -> list[tuple[Op, bool]]:
    """Returns all passes in the order in which one sender sends them, each with whether it is the last of its micro-batch."""
    start = run(order).start
    ops = sorted(start, key=lambda op: (start[op], op.stage))
    last = {op.micro: op for op in ops}
    return [(op, last[op.micro] == op) for op in ops]


def due(order: PassOrder) -> list[list[Op]]:
    """Returns, before each pass of `sent`, the passes that have ended since the one before; what they made is then sent on."""
    line = run(order)
    ended = sorted(line.end, key=lambda op: (line.end[op], line.start[op], op.stage))
    found: list[list[Op]] = []
    for op, _ in sent(order):
        found.append([])
        while ended and line.end[ended[0]] <= line.start[op] and ended[0] != op:
            found[-1].append(ended.pop(0))
    return found


def needs(op: Op, stages: int) -> list[Op]:
    """Returns the passes that must have ended before one begins."""
    kind, stage, micro = op
    if kind == FORWARD:
        return [Op(FORWARD, stage - 1, micro)] if stage else []
    if kind == WEIGHTS:
        return [Op(BACKWARD, stage, micro)]
    return [Op(FORWARD, stage, micro)] + ([Op(BACKWARD, stage + 1, micro)] if stage + 1 < stages else [])


def _gpipe(devices: int, micros: int, _: int) -> list[list[Op]]:
    return [[Op(kind, d, m) for kind in (FORWARD, BACKWARD) for m in range(micros)] for d in range(devices)]


def _one_f_one_b(devices: int, micros: int, _: int) -> list[list[Op]]:
    return [
        _alternating(
            [Op(FORWARD, d, m) for m in range(micros)], [Op(BACKWARD, d, m) for m in range(micros)], devices - d - 1
        )
        for d in range(devices)
    ]


def _interleaved(devices: int, micros: int, chunks: int) -> list[list[Op]]:
    def passes(device: int, kind: str) -> list[Op]:
        """Returns a device's passes: `devices` micro-batches through one chunk, then the same through the next."""
        found = []
        for number in range(micros * chunks):
            group, inside = divmod(number, devices * chunks)
            chunk, micro = divmod(inside, devices)
            chunk = chunks - 1 - chunk if kind == BACKWARD else chunk
            found.append(Op(kind, chunk * devices + device, group * devices + micro))
        return found

    return [
        _alternating(
            passes(device, FORWARD), passes(device, BACKWARD), 2 * (devices - device - 1) + (chunks - 1) * devices
        )
        for device in range(devices)
    ]


def _alternating(forward: list[Op], backward: list[Op], ahead: int) -> list[Op]:
    """Returns `ahead` forward passes, then one of each in turn, then the backward passes that are left."""
    ahead = min(ahead, len(forward))
    steady = [op for pair in zip(forward[ahead:], backward) for op in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


def _zero_bubble(devices: int, micros: int, _: int) -> list[list[Op]]:
    found: list[list[Op]] = []
    for device, ops in enumerate(_one_f_one_b(devices, micros, 1)):
        late = [Op(WEIGHTS, device, micro) for micro in range(micros)]
        found.append([])
        for op in ops:
            found[-1].append(op)
            if op.kind == BACKWARD and op.micro >= device:
                found[-1].append(late.pop(0))
        found[-1] += late
    return found


_MAKERS = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved": _interleaved, "zero_bubble": _zero_bubble}
KINDS = tuple(_MAKERS)
