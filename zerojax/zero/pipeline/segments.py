"""Cuts the trace of one pass into the passes through the stages of a pipeline. This module decides on which stage each operation runs.

A stage has consecutive calls of the model's blocks. Every other operation follows its data:

    forward    it runs on the last stage that makes one of its inputs
    backward   on the first stage whose backward pass makes one of its inputs. What follows the last block, such as the loss, begins the
               backward pass on the last stage
    free       what reads arguments alone (positions, masks, a gather of an embedding) runs wherever it is read

So what a stage reads comes from stages before it, in the backward pass from those after it, and from its own forward pass. A weight lives
where its gradient is complete: on the first stage that it has one from. Other stages that read it (a tied embedding) get a copy once a
step.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax import traces
from zerojax.errors import UserError
from zerojax.zero.pipeline.order import BACKWARD, FORWARD
from zerojax.zero.step_programs import blocks, cut


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A pass, cut."""

    segments: Mapping[tuple[str, int], cut.StepPart]  # by (one of `order.PASSES`, stage)
    results: Sequence[Any]  # for each result of the trace its variable or literal
    number_of: Mapping[Any, int]  # the number of each variable; those of equal traces are equal
    stage_of_call: Sequence[int]  # of each call of a block

    @functools.cached_property
    def reads(self) -> dict[tuple[str, int], list[int]]:
        """Returns the numbers of what each segment reads."""
        return {key: [self.number_of[var] for var in own.reads] for key, own in self.segments.items()}

    @functools.cached_property
    def writes(self) -> dict[tuple[str, int], list[int]]:
        """Returns the numbers of what each segment makes."""
        return {key: [self.number_of[var] for var in own.writes] for key, own in self.segments.items()}

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return 1 + max(stage for _, stage in self.segments)

    def writer(self, number: int) -> int | None:
        """Returns the stage that makes a variable, or None."""
        return next((stage for (_, stage), numbers in self.writes.items() if number in numbers), None)

    def readers(self, number: int) -> list[int]:
        """Returns the stages that read a variable."""
        return sorted({stage for (_, stage), numbers in self.reads.items() if number in numbers})


def balanced(
    costs: Sequence[float], parts: int, before: float = 0.0, after: float = 0.0, *, chunks: int = 1
) -> list[int]:
    """Returns the part of each of some things that stay in order, so that the costliest part costs as little as it can.

    With several chunks it is the costliest group of devices that costs as little as single moves reach, and then the costliest part: a step
    takes as long as all that one group does.

    Args:
      costs: of each.
      parts: how many there are; each has at least one thing.
      before, after: what the first and the last part cost beside.
      chunks: parts of a group. Part v is of group v % (parts / chunks).

    >>> balanced([1, 1, 1, 1, 1, 1], 2, after=2)
    [0, 0, 0, 0, 1, 1]
    >>> balanced([1] * 16, 4, after=2, chunks=2)  # 4 + 5, and 4 + 3 + 2
    [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def of(first: int, last: int) -> float:
        return sums[last] - sums[first] + (before if first == 0 else 0) + (after if last == len(costs) else 0)

    best: list[list[tuple[float, int]]] = [[(math.inf, 0)] * (len(costs) + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for last in range(part, len(costs) - (parts - part) + 1):
            best[part][last] = min(
                (max(best[part - 1][first][0], of(first, last)), first) for first in range(part - 1, last)
            )
    found, last = [0] * len(costs), len(costs)
    for part in range(parts, 0, -1):
        first = best[part][last][1]
        found[first:last] = [part - 1] * (last - first)
        last = first
    if chunks == 1:
        return found
    groups, total = parts // chunks, sums[-1] + before + after

    def most(counts: Sequence[int]) -> tuple[float, float]:
        """Returns the costs of the costliest group and of the costliest part, as shares."""
        ends = [0, *itertools.accumulate(counts)]
        of_part = [of(first, last) for first, last in itertools.pairwise(ends)]
        found = max(sum(of_part[group::groups]) for group in range(groups)), max(of_part)
        return round(found[0] / total, 6), round(found[1] / total, 6)  # sums of one cost in other orders are equal

    counts = [found.count(part) for part in range(parts)]
    least = most(counts)
    while True:
        moves = [
            [count - (part == source) + (part == target) for part, count in enumerate(counts)]
            for source, target in itertools.permutations(range(parts), 2)
            if counts[source] > 1
        ]
        following = min(moves, key=most, default=counts)
        if most(following) >= least:
            return [part for part, count in enumerate(counts) for _ in range(count)]
        counts, least = following, most(following)


def of_trace(
    jaxpr: jex.Jaxpr,
    stages: int,
    *,
    costs: Sequence[float] | Callable[[jex.JaxprEqn], float] | None = None,
    chunks: int = 1,
    stage_of_call: Sequence[int] | None = None,
) -> Segments:
    """Cuts the trace of a pass.

    Args:
      jaxpr: the body of the `jax.shard_map` that the pass is, with `blocks.NestedBlocks`.
      stages: how many there are.
      costs: of each call of a block, or f(operation) -> its own; None: FLOPs. What comes after the last block is the last stage's, unless
        the costs of calls are given.
      chunks: stages of a group of devices.
      stage_of_call: the stage of each call; None: as costs are balanced.

    Raises:
      UserError: there are fewer calls of blocks than stages.
    """
    eqns = traces.live(jaxpr.eqns, jaxpr.outvars)
    forward = [eqn for eqn in eqns if blocks.pass_of(eqn) == FORWARD]
    if len(forward) < stages:
        fewer = "`pipe`" if chunks == 1 else "`pipe` or `chunks`"
        raise UserError(
            f"pipe: the loss calls {len(forward)} blocks that read only their own weights and inputs and change none, and there are "
            f"{stages} stages; take a smaller {fewer}, more layers, or "
            "`make_train_step(blocks=)` that matches more modules"
        )
    if stage_of_call is not None and len(stage_of_call) != len(forward):
        raise UserError(
            f"pipe: the loss calls {len(forward)} blocks, and {len(stage_of_call)} when the state was divided; give Pipeline the loss, the "
            "blocks and the heads of make_train_step"
        )
    last = max(number for number, eqn in enumerate(eqns) if blocks.pass_of(eqn) == FORWARD)
    if stage_of_call is None:
        after = 0.0
        if costs is not None and not callable(costs):
            own = list(costs)
        else:
            of = costs or _flops
            backward = {id(call): eqn for eqn, call in _backward_of(eqns, forward)}
            own = [of(call) + (of(backward[id(call)]) if id(call) in backward else 0.0) for call in forward]
            after = sum(of(eqn) for eqn in eqns[last + 1 :] if not blocks.pass_of(eqn))
        stage_of_call = balanced(own, stages, after=after, chunks=chunks)
    stage_of = dict(zip(map(id, forward), stage_of_call))
    stage_of |= {id(eqn): stage_of[id(of)] for eqn, of in _backward_of(eqns, forward)}
    return dataclasses.replace(_Places(jaxpr, eqns, stage_of, last, stages).segments(), stage_of_call=stage_of_call)


class _Places:
    """Operations, each with its place: (kind, stage), or None if it is free."""

    def __init__(
        self, jaxpr: jex.Jaxpr, eqns: Sequence[jex.JaxprEqn], stage_of: Mapping[int, int], last: int, stages: int
    ):
        self._jaxpr, self._stages = jaxpr, stages
        self._alias: dict[Any, Any] = {}
        self._eqns: list[jex.JaxprEqn] = []
        self._place: dict[Any, tuple[str, int] | None] = {}  # of variables
        self._places: list[tuple[str, int] | None] = []  # of operations
        self._maker: dict[Any, int] = {}
        for number, eqn in enumerate(eqns):
            eqn = eqn.replace(invars=[self._original(atom) for atom in eqn.invars])
            place = self._placed(eqn, blocks.pass_of(eqn), stage_of.get(id(eqns[number])), is_late=number > last)
            if blocks.pass_of(eqn):
                self._alias |= _passed_through(eqn)
            self._eqns.append(eqn)
            self._places.append(place)
            for var in eqn.outvars:
                self._place[var], self._maker[var] = place, len(self._eqns) - 1

    def segments(self) -> Segments:
        """Returns the pass, cut."""
        results = [self._original(atom) for atom in self._jaxpr.outvars]
        at_end = (BACKWARD, self._stages - 1)
        kept = {var: self._place[var] or at_end for var in traces.variables(results) if var in self._place}
        wanted: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
        for var, place in kept.items():
            wanted[place].append(var)
        keys = [(kind, stage) for kind in (FORWARD, BACKWARD) for stage in range(self._stages)]
        inside = {key: self._inside(key, wanted[key]) for key in keys}
        eqns = {key: [self._eqns[number] for number in numbers] for key, numbers in inside.items()}
        read = {key: set(cut.part_of("", own, ()).reads) for key, own in eqns.items()}
        found = {}
        for key, own in eqns.items():
            needed = set().union(*(read[other] for other in keys if other != key))
            writes = {var for var in needed if self._place.get(var) == key}.union(wanted[key])
            found[key] = cut.part_of(key[0], own, writes)
        order = [*self._jaxpr.invars, *self._jaxpr.constvars, *(var for eqn in self._eqns for var in eqn.outvars)]
        return Segments(found, results, {var: number for number, var in enumerate(order)}, ())

    def _original(self, atom: traces.Atom) -> traces.Atom:
        return self._alias.get(atom, atom) if traces.is_var(atom) else atom

    def _placed(self, eqn: jex.JaxprEqn, kind: str, stage: int | None, *, is_late: bool) -> tuple[str, int] | None:
        if stage is not None:
            return kind, stage
        places = [place for var in traces.variables(eqn.invars) if (place := self._place.get(var)) is not None]
        if not places:
            return None
        if not is_late:
            return FORWARD, max(stage for _, stage in places)
        behind = [stage for kind, stage in places if kind == BACKWARD]
        return BACKWARD, min(behind, default=self._stages - 1)

    def _inside(self, key: tuple[str, int], wanted: Iterable[Any]) -> list[int]:
        """Returns the numbers of the operations of a segment, with the free ones that they need."""
        numbers = {number for number, place in enumerate(self._places) if place == key}
        waiting = [var for number in numbers for var in traces.variables(self._eqns[number].invars)]
        waiting += [var for var in wanted if self._place[var] is None]
        while waiting:
            number = self._maker.get(waiting.pop())
            if number is not None and self._places[number] is None and number not in numbers:
                numbers.add(number)
                waiting += traces.variables(self._eqns[number].invars)
        return sorted(numbers)


def _backward_of(
    eqns: Sequence[jex.JaxprEqn], forward: Sequence[jex.JaxprEqn]
) -> Iterable[tuple[jex.JaxprEqn, jex.JaxprEqn]]:
    """Yields the backward pass of each block with its forward pass: the last one that reads the same weights and has none yet."""
    arguments = {var for eqn in eqns for var in traces.variables(eqn.invars)} - {v for eqn in eqns for v in eqn.outvars}

    def weights(eqn: jex.JaxprEqn) -> frozenset[Any]:
        return frozenset(var for var in traces.variables(eqn.invars) if var in arguments)

    left = list(forward)
    for eqn in eqns:
        if blocks.pass_of(eqn) == BACKWARD:
            own = weights(eqn)
            of = max(reversed(left), key=lambda call: len(own & weights(call)))
            left.remove(of)
            yield eqn, of


def _passed_through(eqn: jex.JaxprEqn) -> dict[Any, Any]:
    """Returns what a block returns as it came in, by the variable that it returns it as."""
    inner, _ = traces.opened(traces.called(eqn))
    given = dict(zip(inner.invars, eqn.invars))
    return {var: given[own] for var, own in zip(eqn.outvars, inner.outvars) if traces.is_var(own) and own in given}


def _flops(eqn: jex.JaxprEqn) -> float:
    """Returns the FLOPs of the matmuls of an operation."""
    found = 0.0
    for own in [eqn, *(inner for program in traces.programs(eqn) for inner in traces.equations(program))]:
        if own.primitive.name == "dot_general":
            (contracted, _), _ = own.params["dimension_numbers"]
            left, made = (var.aval.shape for var in (own.invars[0], own.outvars[0]))  # type: ignore[attr-defined]
            found += 2.0 * math.prod(made) * math.prod(left[dim] for dim in contracted)
    return found
