"""Divides the device time of a step by phase and by kernel. This module joins a trace with the compiled step.

The instruction of a kernel determines its work, its scope and, for a collective, its role. NCCL's kernels wait for their peers, so their
time includes the delay of the other devices.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zerojax import roles
from zerojax.hlo import collectives, linked, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import ledger
from zerojax.profile import phases, traces

LARGEST = 25  # kernels that are listed
_CONTAINERS = ("while", "conditional", "call")  # the trace has the kernels inside them too
_NANOSECONDS = 1e9


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """The kernels of one name in one phase: seconds and runs in a step on a device, and the instruction of the longest run."""

    name: str
    phase: str
    seconds: float
    runs: float
    instruction: str
    op_name: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of a step on one device in seconds: the mean over steps and devices.

    Attributes:
      first, last: the steps that were profiled.
      devices: the number of devices in the trace: those of one process.
      step_seconds: the time from the start of the first kernel to the end of the last one, divided by the number of steps.
      shares: by phase, and for `phases.IDLE`; see `phases.divide`.
      collectives: the shares of the collectives, by role (`roles.SENT`).
      kernels: the kernels that took longest.
      named: the share of kernel time for which the instruction of the step is known.
    """

    first: int
    last: int
    devices: int
    step_seconds: float
    shares: Mapping[str, phases.Share]
    collectives: Mapping[str, phases.Share]
    kernels: tuple[KernelTime, ...]
    named: float


@dataclasses.dataclass(frozen=True)
class _KernelRun:
    """One run of a kernel with its instruction, phase and role."""

    kernel: traces.Kernel
    instruction: syntax.Instruction | None
    phase: str
    role: str  # of a collective

    @property
    def interval(self) -> phases.Interval:
        return self.kernel.start, self.kernel.end

    @property
    def length(self) -> float:
        return self.kernel.end - self.kernel.start


def profile(
    kernels: Iterable[traces.Kernel], sent: ledger.Ledger, first: int, last: int, programs: Iterable[syntax.Module] = ()
) -> Profile:
    """Returns the time of the steps `first` to `last` by phase, role and kernel.

    Args:
      kernels: all kernels that ran in these steps, on any number of devices.
      sent: the ledger of the compiled step.
      first, last: the profiled steps.
      programs: others of the step, of which the ledger has no rows: those of other groups of a pipeline.
    """
    by_device: dict[str, list[_KernelRun]] = {}
    by_name: dict[tuple[str, str], list[_KernelRun]] = {}
    for run in _runs(kernels, sent, programs):
        by_device.setdefault(run.kernel.device, []).append(run)
        by_name.setdefault((run.phase, run.kernel.name), []).append(run)
    count = (last - first + 1) * max(1, len(by_device))
    shares = _mean([_by_phase(runs) for runs in by_device.values()], count)
    rows = [_kernel_time(runs, count) for runs in by_name.values()]
    every = [run for runs in by_device.values() for run in runs]
    total, named = sum(run.length for run in every), sum(run.length for run in every if run.instruction is not None)
    return Profile(
        first=first,
        last=last,
        devices=len(by_device),
        step_seconds=sum(share.owned for share in shares.values()),
        shares=shares,
        collectives=_mean([_by_role(runs) for runs in by_device.values()], count),
        kernels=tuple(sorted(rows, key=lambda row: -row.seconds)[:LARGEST]),
        named=named / total if total else 0.0,
    )


def _runs(
    kernels: Iterable[traces.Kernel], sent: ledger.Ledger, programs: Iterable[syntax.Module]
) -> Iterator[_KernelRun]:
    """Yields the runs of kernels. Omits loops and calls, because the trace has the kernels inside them too."""
    known = _instructions([sent.flow, *map(hlo_flow.flow, programs)])
    only = next(iter(known)) if len(known) == 1 else ""
    role_of = {row.name: row.role for row in sorted(sent.rows, key=lambda row: row.nbytes)}

    @functools.cache  # the same kernels run in every step and on every device
    def read(name: str, traced: str, module: str) -> tuple[syntax.Instruction | None, str, str]:
        of = known.get(module or only, {})
        flow, instruction = of.get(traced, (sent.flow, None))
        # For a kernel in a CUDA graph, the trace names only the graph or the loop. XLA names its own kernels after their instructions.
        if instruction is None or (instruction.opcode in _CONTAINERS and name != instruction.name):
            flow, instruction = of.get(name, (sent.flow, None))
        if instruction is None:
            return None, phases.phase(name), roles.OTHER
        phase = phases.phase(name, collectives.work_kind(flow.module, instruction), instruction.op_name)
        return instruction, phase, _role(flow, instruction, role_of if flow is sent.flow else {})

    for kernel in kernels:
        instruction, phase, role = read(kernel.name, kernel.instruction, kernel.module)
        if instruction is None or instruction.opcode not in _CONTAINERS:
            yield _KernelRun(kernel, instruction, phase, role)


def _by_phase(runs: Sequence[_KernelRun]) -> dict[str, phases.Share]:
    found: dict[str, list[phases.Interval]] = {}
    for run in runs:
        found.setdefault(run.phase, []).append(run.interval)
    return phases.divide(found)


def _by_role(runs: Sequence[_KernelRun]) -> dict[str, phases.Share]:
    """Returns the shares of a device's collectives by role. Time beside computing kernels is hidden."""
    computing = phases.union(run.interval for run in runs if run.phase in phases.COMPUTE)
    sending = [run for run in runs if run.phase == phases.COLLECTIVES]
    of_role = {role: [run.interval for run in sending if run.role == role] for role in roles.SENT}
    return {role: phases.beside(intervals, computing) for role, intervals in of_role.items() if intervals}


def _instructions(flows: Iterable[hlo_flow.Flow]) -> dict[str, dict[str, tuple[hlo_flow.Flow, syntax.Instruction]]]:
    """Returns by program the instructions that run, by their names and by their kernels' names, with what they are of."""
    found: dict[str, dict[str, tuple[hlo_flow.Flow, syntax.Instruction]]] = {}
    for flow in flows:
        for call in flow.calls.values():
            for instruction in call.computation.instructions:
                program, name = linked.program_of(flow.module, instruction)
                found.setdefault(program, {}).setdefault(name, (flow, instruction))
    for known in found.values():
        for name, own in list(known.items()):
            known.setdefault(re.sub(r"\W", "_", name), own)
    return found


def _role(flow: hlo_flow.Flow, instruction: syntax.Instruction, role_of: Mapping[str, str]) -> str:
    """Returns the role of a collective. The instruction may be its asynchronous wrapper."""
    inner = [i.name for name in hlo_flow.runs(instruction) for i in flow.module.computation(name).instructions]
    return next((role_of[name] for name in (instruction.name, *inner) if name in role_of), roles.OTHER)


def _mean(parts: Sequence[Mapping[str, phases.Share]], count: int) -> dict[str, phases.Share]:
    """Returns the mean of the shares of several devices, in seconds. `count` is the number of devices times the number of steps."""
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        shares = [part[name] for part in parts if name in part]
        owned, hidden = sum(share.owned for share in shares), sum(share.hidden for share in shares)
        kernels = sum(share.kernels for share in shares) / count
        found[name] = phases.Share(owned / count / _NANOSECONDS, hidden / count / _NANOSECONDS, kernels)
    return found


def _kernel_time(runs: Sequence[_KernelRun], count: int) -> KernelTime:
    """Adds up the runs of the kernels of one name."""
    longest = max(runs, key=lambda run: run.length)
    return KernelTime(
        name=longest.kernel.name,
        phase=longest.phase,
        seconds=sum(run.length for run in runs) / count / _NANOSECONDS,
        runs=len(runs) / count,
        instruction=longest.kernel.instruction,
        op_name=longest.instruction.op_name if longest.instruction is not None else "",
    )
