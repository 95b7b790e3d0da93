"""The order in which the stages of a pipeline run the passes of micro-batches. This module knows neither arrays nor devices.

A pass of a micro-batch through a stage is an `Op`, forward or backward. What runs stages is here a device; it may have several of them
(`chunks`, virtual stages): stage v is on device v % devices.

    gpipe         all forward passes, then all backward passes: each device keeps what all micro-batches need
    1f1b          a device begins a backward pass as soon as it can; device d of n keeps at most n - d micro-batches
                  (PipeDream-Flush, arXiv:2006.09503)
    interleaved   the same with several chunks of layers a device, which shortens the ends by that factor (Megatron, arXiv:2104.04473)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zerojax import errors
from zerojax.errors import UserError

PASSES = FORWARD, BACKWARD = "forward", "backward"


class Op(NamedTuple):
    """One pass of a micro-batch through a stage: FORWARD or BACKWARD."""

    kind: str
    stage: int
    micro: int


@dataclasses.dataclass(frozen=True)
class PassTimes:
    """How long a pass through a stage takes, in any unit: one number for all stages, or one for each.

    Attributes:
      forward, backward: of the passes.
      hop: until what a stage sends arrives at the next.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    hop: float = 0.0

    def of(self, op: Op) -> float:
        """Returns the time of a pass."""
        times = self.forward if op.kind == FORWARD else self.backward
        return times[op.stage] if isinstance(times, Sequence) else times


@dataclasses.dataclass(frozen=True)
class PassOrder:
    """A schedule.

    Attributes:
      name: of the schedule.
      devices: the number of groups of devices that run side by side (the size of the mesh axis).
      chunks: stages of a device.
      micros: micro-batches of a step.
      of_device: the passes that each device runs, in order.
    """

    name: str
    devices: int
    chunks: int
    micros: int
    of_device: Sequence[Sequence[Op]]

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return self.devices * self.chunks

    @property
    def text(self) -> str:
        """Returns a line about the schedule."""
        bubble = f"{run(self).bubble:.1%} of the time if all stages take equally long"
        micros = f"{self.micros} micro-batch{'es' if self.micros > 1 else ''}"
        return f"{self.name}, {self.stages} stages on {self.devices} groups of devices, {micros}: devices wait {bubble}"

    def alive(self, device: int) -> int:
        """Returns the most passes of which a device holds what the backward pass needs."""
        most = now = 0
        for op in self.of_device[device]:
            now += 1 if op.kind == FORWARD else -1
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
    if name not in _MAKERS:
        raise UserError(
            f"pipeline.schedule: {errors.shown(name)} is no schedule of a pipeline; {errors.choose(name, _MAKERS)}"
        )
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
                free[device] = end[op] = start[op] + times.of(op)
                busy[device] += end[op] - start[op]
                at[device] += 1
                moved = True
            if at[device] == len(ops):
                waiting.discard(device)
        assert moved, "the schedule waits for itself"
    return Timeline(start, end, max(free), busy)


def needs(op: Op, stages: int) -> list[Op]:
    """Returns the passes that must have ended before one begins."""
    kind, stage, micro = op
    if kind == FORWARD:
        return [Op(FORWARD, stage - 1, micro)] if stage else []
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


_MAKERS = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved": _interleaved}
KINDS = tuple(_MAKERS)
