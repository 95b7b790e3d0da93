"""Divides a device's time among the phases of a step. This module does arithmetic on intervals, and knows no trace and no program.

Kernels of several streams run at the same time. Each moment belongs to the first phase in PHASES that has a kernel running then, so the
times add up to the step's. Time in which a phase runs beside an earlier one is hidden. Collectives come after all computing phases: they
own only the time in which nothing is computed.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

ATTENTION, MATMULS, LOSS, OPTIMIZER, OTHER = "attention", "matmuls", "loss and head", "optimizer", "other"
COLLECTIVES, COPIES, IDLE = "collectives", "copies", "idle"
COMPUTE = (ATTENTION, MATMULS, LOSS, OPTIMIZER, OTHER)
PHASES = (*COMPUTE, COLLECTIVES, COPIES)  # the first that runs owns the moment

# Names of kernels from libraries and XLA, for kernels whose instruction does not determine the phase.
_KERNELS = {
    COLLECTIVES: re.compile(
        r"nccl|memcpyp2p|all[-_]?(gather|reduce|to[-_]?all)|reduce[-_]?scatter|collective[-_]?(permute|broadcast)", re.I
    ),
    COPIES: re.compile(
        r"^(mem(cpy|set)|((wrapped|loop|input)_)?((copy|transpose)_)*(copy|transpose)(_fusion)?([._]\d+)?$)", re.I
    ),
    ATTENTION: re.compile(r"fmha|flash|sdpa|dot_product_attention", re.I),
    MATMULS: re.compile(r"gemm|nvjet|cutlass|xmma|cublas|matmul|grouped_(rows|matrices)", re.I),
}
_WORK = {"attention": ATTENTION, "matmul": MATMULS, "copy": COPIES, "transpose": COPIES}
_SCOPES = {
    LOSS: re.compile(r"[/(]loss[/)]"),
    OPTIMIZER: re.compile(r"^jit\(\w+\)/\(?(update|clip)/"),
    ATTENTION: re.compile(r"[/(]attention/attention/"),  # the scope inside the module of that name
}

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Share:
    """A phase's share of an interval: the time that it owns, the time hidden beside earlier phases, and the number of its kernels."""

    owned: float
    hidden: float
    kernels: float


def phase(kernel: str, work: str = "", op_name: str = "") -> str:
    """Returns the phase that a kernel belongs to.

    Args:
      kernel: its name, or that of its instruction.
      work: the instruction's kind of work (`collectives.work_kind`); "" if it is unknown.
      op_name: the scopes that it was traced in; "" if they are unknown. If ";" joins several, the first counts.
    """
    if _KERNELS[COLLECTIVES].match(work):
        return COLLECTIVES
    kind = _WORK.get(work) or next((name for name, form in _KERNELS.items() if form.search(kernel)), OTHER)
    if kind in (COLLECTIVES, COPIES):
        return kind
    scopes = op_name.split(";")[0]
    return next((name for name, form in _SCOPES.items() if form.search(scopes)), kind)


def divide(kernels: Mapping[str, Sequence[Interval]]) -> dict[str, Share]:
    """Divides the time from the start of the first kernel to the end of the last.

    Args:
      kernels: by phase, the intervals in which its kernels run, in any order. They may overlap.

    Returns:
      The shares by phase, and for IDLE, in the unit of the intervals. The owned times add up to the time from the first start to the
      last end. {} if nothing runs.
    """
    everything = [interval for intervals in kernels.values() for interval in intervals]
    if not everything:
        return {}
    shares: dict[str, Share] = {}
    busy: list[Interval] = []
    for name in PHASES:
        shares[name] = beside(kernels.get(name, ()), busy)
        busy = union([*busy, *kernels.get(name, ())])
    total = max(end for _, end in everything) - min(start for start, _ in everything)
    shares[IDLE] = Share(total - length(busy), 0.0, 0)
    return shares


def beside(intervals: Sequence[Interval], others: Sequence[Interval]) -> Share:
    """Returns the share of kernels that run beside others. The others are disjoint and in order, and they own their moments."""
    busy = union(intervals)
    owned = length(subtract(busy, others))
    return Share(owned, length(busy) - owned, len(intervals))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same moments as disjoint intervals, in order.

    >>> union([(3, 5), (0, 1), (4, 6)])
    [(0, 1), (3, 6)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def subtract(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the moments of `intervals` that are not in `others`. Both are disjoint and in order.

    >>> subtract([(0, 10)], [(2, 3), (5, 12)])
    [(0, 2), (3, 5)]
    """
    found, first = [], 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        index = first
        while index < len(others) and others[index][0] < end:
            if others[index][0] > start:
                found.append((start, others[index][0]))
            start = max(start, others[index][1])
            index += 1
        if start < end:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of the lengths."""
    return sum(end - start for start, end in intervals)
