"""Gives each instruction of a scheduled program its time. This module walks the program as a GPU runs it, on several streams.

    compute         kernels, one after the other, in the program's order
    collectives     one after the other over each link, each from its -start on; while one runs, kernels take longer, and without kernels
                    it is faster. Links are those inside a host and those between hosts: XLA sends over several streams
    copies          to and from the host, one after the other in each direction

A -done waits on the compute stream. The step ends with its last instruction.
"""

import bisect
import dataclasses
import heapq
import types
from collections.abc import Mapping

from zerojax.clock import kernels as kernels_lib
from zerojax.clock import rates as rates_lib
from zerojax.hlo import flow as hlo_flow
from zerojax.hlo import syntax

GAPS, SLOWED, SLOWEST = "gaps", "slowed by collectives", "slowest device"
EXPOSED, WAITS = "exposed collectives", "exposed host copies"
KERNELS, NEAR, FAR = "kernels", "links inside hosts", "links between hosts"
PARTS = (kernels_lib.MATMUL, kernels_lib.ATTENTION, kernels_lib.ELEMENTWISE, SLOWED, EXPOSED, WAITS, GAPS, SLOWEST)
Known = dict[tuple[str, str], tuple[kernels_lib.KernelWork, ...]]
_SIMULATED = 4  # runs of a loop's body that are walked; further ones take as long as the last


@dataclasses.dataclass(frozen=True)
class Span:
    """What one instruction did: its kind, when it began and ended in seconds from the step's start, what it was traced from, and the links
    over which it sent."""

    kind: str
    begin: float
    end: float
    op_name: str = ""
    times: float = 1
    links: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The foretold time of a program."""

    seconds: float  # from its first kernel to its last
    parts: Mapping[str, float]  # by a name of PARTS, seconds of the compute stream; they add up to `seconds`
    busy: Mapping[str, float]  # seconds of collectives, and of copies by direction; most of them run beside kernels
    spans: tuple[Span, ...] = ()  # kernels, collectives and copies, in the order in which they were started


def walk(
    flow: hlo_flow.Flow,
    rates: rates_lib.GpuRates,
    devices: int = 1,
    per_host: int = 0,
    *,
    known: Known | None = None,
    sent: Mapping[tuple[str, str], float] = types.MappingProxyType({}),
    further: int = 0,
) -> StepTime:
    """Returns the time of one run of a program.

    Args:
      flow: the compiled program.
      rates: of the kind of GPU.
      devices: those that the program runs on.
      per_host: the devices of one host; 0: all.
      known: kernels by computation and instruction, which a walk of the same program fills for the next.
      sent: by computation and instruction of collectives, the share of their bytes that they send; 0: they are not there.
      further: rounds in which each mixture and pass takes tokens that their experts' rooms had no place for.
    """
    per_host = per_host or devices
    run = _Run(
        flow, rates.beside(min(per_host, devices)), devices, per_host, {} if known is None else known, sent, further
    )
    run.computation(flow.module.entry)
    waits = run.now * rates.spread(devices)
    parts = {name: run.parts.get(name, 0.0) for name in PARTS} | {SLOWEST: waits}
    return StepTime(run.now + waits, parts, run.busy, tuple(run.spans))


class _Run:
    """The state of the streams while a program is walked."""

    def __init__(
        self,
        flow: hlo_flow.Flow,
        rates: rates_lib.GpuRates,
        devices: int,
        per_host: int,
        known: Known,
        sent: Mapping[tuple[str, str], float],
        further: int,
    ):
        self.flow, self.rates, self.devices, self.per_host, self.sent = flow, rates, devices, per_host, sent
        self.now = 0.0  # the compute stream
        self.free = dict.fromkeys((NEAR, FAR, *kernels_lib.COPIES), 0.0)
        self.ends: dict[tuple[str, str], tuple[float, kernels_lib.KernelWork]] = {}  # of what was started: when it ends
        # by link, intervals in which collectives run, in order
        self.sending: dict[str, list[tuple[float, float]]] = {NEAR: [], FAR: []}
        self.parts: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.spans: list[Span] = []
        self.known, self.further = known, further

    def computation(self, where: syntax.Computation) -> None:
        for instruction in where.instructions:
            self.instruction(where, instruction)

    def instruction(self, where: syntax.Computation, instruction: syntax.Instruction) -> None:
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            self._wait(where, instruction)
        elif opcode == "while":
            self._loop(where, instruction)
        elif opcode == "conditional":
            self._longest(instruction)
        elif opcode == "call":
            self.computation(self.flow.module.computation(instruction.called[-1]))
        elif opcode.endswith("-start") and opcode not in hlo_flow.FUSIONS and hlo_flow.runs(instruction):
            for name in hlo_flow.runs(instruction):
                inner = self.flow.module.computation(name)
                for part in inner.instructions:
                    self._launch(inner, part, where, instruction)
        else:
            self._launch(where, instruction, where, instruction)

    def _launch(
        self,
        where: syntax.Computation,
        instruction: syntax.Instruction,
        outer: syntax.Computation,
        start: syntax.Instruction,
    ) -> None:
        """Runs an instruction's kernels. What `start` begins runs beside the following instructions."""
        for kernel in self._kernels(where, instruction):
            if kernel.kind not in (kernels_lib.COLLECTIVE, *kernels_lib.COPIES):
                self._compute(kernel)
                continue
            if (share := self.sent.get((where.name, instruction.name), 1.0)) < 1:
                if not share:
                    continue
                kernel = dataclasses.replace(kernel, nbytes=share * kernel.nbytes)
            is_async = start.opcode.endswith("-start") and '"is_sync":true' not in start.attributes
            end = self._send(kernel)
            key = outer.name, start.name
            self.ends[key] = (end, kernel)
            if not is_async:
                self._until(key)

    def _kernels(
        self, where: syntax.Computation, instruction: syntax.Instruction
    ) -> tuple[kernels_lib.KernelWork, ...]:
        key = where.name, instruction.name
        if key not in self.known:
            self.known[key] = kernels_lib.of(self.flow.module, where, instruction, self.devices)
        return self.known[key]

    def _compute(self, kernel: kernels_lib.KernelWork) -> None:
        alone = self.rates.seconds(kernel)
        self._add(GAPS, self.rates.gap)
        self._add(kernel.kind, alone)
        self.now += self.rates.gap
        end = self._stretched(self.now, alone, self.rates.slowdown(kernel))
        self._add(SLOWED, end - self.now - alone)
        self.spans.append(Span(kernel.kind, self.now, end, kernel.op_name))
        self.now = end

    def _stretched(self, begin: float, work: float, factor: float) -> float:
        """Returns the end of a kernel that takes `factor` times as long while a collective runs."""
        at = begin
        later = (
            own[max(bisect.bisect_right(own, (begin, float("inf"))) - 1, 0) :] for own in self.sending.values() if own
        )
        for start, end in heapq.merge(*later):
            if end <= at:
                continue
            if start > at:
                if work <= start - at:
                    break
                work, at = work - (start - at), start
            if work * factor <= end - at:
                return at + work * factor
            work, at = work - (end - at) / factor, end
        return at + work

    def _send(self, kernel: kernels_lib.KernelWork) -> float:
        links = self._links(kernel)
        begin = max(self.now, *(self.free[link] for link in links))
        seconds = self.rates.seconds(kernel, self._hosts(kernel), self._is_duplex(kernel, begin))
        end = begin + seconds
        self.free |= dict.fromkeys(links, end)
        self.busy[kernel.kind] = self.busy.get(kernel.kind, 0.0) + seconds
        for own in (self.sending[link] for link in links if link in self.sending):
            own.append((begin, end))
        self.spans.append(Span(kernel.kind, begin, end, kernel.op_name, links=links))
        return end

    def _links(self, kernel: kernels_lib.KernelWork) -> tuple[str, ...]:
        """Returns the links over which a collective or a copy goes."""
        if kernel.kind != kernels_lib.COLLECTIVE:
            return (kernel.kind,)
        per_host = self._hosts(kernel)
        return (NEAR,) if not per_host else (FAR,) if per_host == 1 else (NEAR, FAR)

    def _hosts(self, kernel: kernels_lib.KernelWork) -> int:
        """Returns how many devices of each host are in a collective's group, or 0 if it stays on one host."""
        hosts = [device // self.per_host for device in kernel.group]
        return 0 if len(set(hosts)) < 2 else min(hosts.count(host) for host in set(hosts))

    def _is_duplex(self, kernel: kernels_lib.KernelWork, begin: float) -> bool:
        others = [kind for kind in kernels_lib.COPIES if kind != kernel.kind]
        return kernel.kind in kernels_lib.COPIES and any(self.free[kind] > begin for kind in others)

    def _wait(self, where: syntax.Computation, done: syntax.Instruction) -> None:
        started = where.by_name.get(done.operands[0])
        while started is not None and started.opcode.endswith("-update"):
            started = where.by_name.get(started.operands[0])
        if started is not None and (where.name, started.name) in self.ends:
            self._until((where.name, started.name))

    def _until(self, key: tuple[str, str]) -> None:
        """Waits for what was started."""
        end, kernel = self.ends.pop(key)
        if end <= self.now:
            return
        if kernel.kind == kernels_lib.COLLECTIVE:
            end = self._hasten(end, self.rates.hastened(kernel, self._hosts(kernel)), self._links(kernel))
        self._add(EXPOSED if kernel.kind == kernels_lib.COLLECTIVE else WAITS, end - self.now)
        self.now = end

    def _hasten(self, end: float, share: float, links: tuple[str, ...]) -> float:
        """Lets collectives over these links take a share of their time from now to `end`, since no kernel runs. Returns their new end."""
        saved = (end - self.now) * (1 - share)

        def moved(at: float) -> float:
            return at - saved if at >= end else self.now + (at - self.now) * share if at > self.now else at

        if saved:
            for own in map(self.sending.__getitem__, links):
                first = max(0, bisect.bisect_right(own, (self.now, self.now)) - 1)
                own[first:] = [(moved(begin), moved(until)) for begin, until in own[first:]]
            self.ends = {
                key: (moved(until) if links == self._links(kernel) else until, kernel)
                for key, (until, kernel) in self.ends.items()
            }
            self.free |= {link: moved(self.free[link]) for link in links}
            for number in range(len(self.spans) - 1, -1, -1):
                span = self.spans[number]
                if span.links == links:
                    if span.end <= self.now:
                        break
                    self.spans[number] = dataclasses.replace(span, begin=moved(span.begin), end=moved(span.end))
        return end - saved

    def _loop(self, where: syntax.Computation, loop: syntax.Instruction) -> None:
        is_further = hlo_flow.takes_further_tokens(loop)
        count = self.further if is_further else hlo_flow.trip_count(self.flow.module, where, loop)
        body = self.flow.module.computation(loop.computation_roles["body"])
        for _ in range(min(count, _SIMULATED)):
            before, parts, busy, spans = self.now, dict(self.parts), dict(self.busy), len(self.spans)
            self.computation(body)
        rest = count - _SIMULATED
        if rest > 0:
            own = self.now - before
            for total, earlier in ((self.parts, parts), (self.busy, busy)):
                for name in total:
                    total[name] += rest * (total[name] - earlier.get(name, 0.0))
            for index in range(spans, len(self.spans)):
                self.spans[index] = dataclasses.replace(self.spans[index], times=self.spans[index].times + rest)
            self.now += rest * own
            self.free = {kind: max(end, self.now) if end > before + own else end for kind, end in self.free.items()}

    def _longest(self, instruction: syntax.Instruction) -> None:
        """Walks the branch that takes longest."""
        branches = [self.flow.module.computation(name) for name in instruction.called]
        before = self.now, dict(self.parts), dict(self.busy), dict(self.free), len(self.spans)
        sent = {link: len(own) for link, own in self.sending.items()}
        found: list[float] = []
        for number in [*range(len(branches)), -1]:
            if number < 0:
                number = max(range(len(branches)), key=found.__getitem__)
            self.now, self.parts, self.busy, self.free = before[0], dict(before[1]), dict(before[2]), dict(before[3])
            del self.spans[before[4] :]
            for link, count in sent.items():
                del self.sending[link][count:]
            self.computation(branches[number])
            found.append(self.now)

    def _add(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds
