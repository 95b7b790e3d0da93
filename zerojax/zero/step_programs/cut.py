"""Cuts the trace of a step into parts. This module decides where a program ends; `programs` compiles them.

Each nested function of `blocks` is a part, and so are the operations between two of them. A few operations that recur before each of
several blocks run in the blocks' programs: to send a program takes the sender longer than they take the device.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax import traces
from zerojax.zero.step_programs import blocks

FEW = 8  # operations before a block that may run in its program


@dataclasses.dataclass(frozen=True, eq=False)
class TraceCall:
    """A trace that is called."""

    arguments: Sequence[Any]  # what `closed` is called with: variables or literals
    writes: Sequence[Any]  # the variables of its results
    closed: jex.ClosedJaxpr  # the trace


@dataclasses.dataclass(frozen=True, eq=False)
class StepPart:
    """The operations of one program."""

    name: str  # "forward" or "backward" of a block, or "between"
    calls: Sequence[TraceCall]  # one after the other
    writes: Sequence[Any]  # the variables that it returns
    # variables that are returned as they came in, so that the program need not copy them
    same: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    also: tuple[str, ...] = ()  # the names of the collectives of other blocks that it runs

    @property
    def reads(self) -> list[Any]:
        """Returns the variables that it takes, each once."""
        own = {var for call in self.calls for var in call.writes}
        return [var for var in traces.variables(a for call in self.calls for a in call.arguments) if var not in own]


def cut(jaxpr: jex.Jaxpr, apart: Collection[Any]) -> list[StepPart]:
    """Returns the parts of a trace, without operations whose results nothing reads.

    Args:
      jaxpr: the trace.
      apart: variables; operations that read one are not moved to another part.
    """
    groups: list[Any] = []
    results = jaxpr.outvars
    for eqn in traces.live(jaxpr.eqns, results):
        if blocks.pass_of(eqn) or not groups or not isinstance(groups[-1], list):
            groups.append(eqn if blocks.pass_of(eqn) else [])
        if not blocks.pass_of(eqn):
            groups[-1].append(eqn)
    parts: list[StepPart] = []
    final = set(traces.variables(results))
    needed = set(final)
    later = set(needed)  # what is read after the part that comes next in time
    recurring = collections.Counter(_names(group) for group in groups if isinstance(group, list))
    trimmed: dict[Any, jex.ClosedJaxpr] = {}
    for group in reversed(groups):
        is_between = isinstance(group, list)
        part = (
            part_of("between", traces.live(group, needed), needed)
            if is_between
            else _block(group, needed, final, trimmed)
        )
        if (
            isinstance(group, list)
            and len(group) <= FEW
            and recurring[_names(group)] > 1
            and _may_join(part, parts, apart)
        ):
            block = parts[-1]
            own = [var for var in part.writes if var in later]
            parts[-1] = dataclasses.replace(block, calls=[*part.calls, *block.calls], writes=[*own, *block.writes])
            needed |= set(part.reads)
            continue
        later = needed | set(part.same.values())
        needed |= set(part.reads) | set(part.same.values())
        if part.writes or part.same or any(traces.acts(eqn) for call in part.calls for eqn in call.closed.jaxpr.eqns):
            parts.append(part)
    return _renamed(parts[::-1])


def part_of(name: str, eqns: Sequence[jex.JaxprEqn], wanted: Collection[Any]) -> StepPart:
    """Returns operations as a part, which writes those of the variables that are `wanted`."""
    made = {var for eqn in eqns for var in eqn.outvars}
    reads = [var for var in traces.variables(atom for eqn in eqns for atom in eqn.invars) if var not in made]
    writes = [var for eqn in eqns for var in eqn.outvars if var in wanted]
    return StepPart(name, [TraceCall(reads, writes, traces.part(reads, writes, eqns))], writes)


def ahead(parts: Sequence[StepPart]) -> list[StepPart]:
    """Returns parts whose collectives run beside the arithmetic of other blocks.

        forward    gather(i + 1) beside block i
        backward   gather(i - 1) and reduce(i + 1) beside block i

    A gather reads shards alone, which are there from the start, so it may run earlier; what a reduction makes is read at the end. A gather
    of what the gather before it has brought is left out.

    Args:
      parts: of a trace with `blocks.AheadBlocks`.
    """
    found: list[StepPart] = []
    waiting: list[StepPart] = []  # reductions
    last: StepPart | None = None  # the last gather
    renamed: dict[Any, Any] = {}
    for part in parts:
        part = _with_names(part, renamed)
        if {var for one in waiting for var in one.writes}.intersection(part.reads):
            found, waiting = found + waiting, []
        if part.name == blocks.REDUCE:
            waiting.append(part)
        elif part.name == blocks.GATHER:
            if last is not None and _are_equal(last, part):
                renamed.update(zip(part.writes, last.writes))
                continue
            last = part
            at = next((n for n, one in reversed([*enumerate(found)]) if one.name != "between"), None)
            if at is None:
                found.append(part)
            else:
                found[at] = _beside(found[at], [part])
        elif part.name == "backward" and waiting:
            found.append(_beside(part, waiting))
            waiting = []
        else:
            found.append(part)
    return found + waiting


def _are_equal(part: StepPart, other: StepPart) -> bool:
    """Returns whether two parts read the same variables and do the same."""
    texts = lambda own: [str(call.closed.jaxpr) for call in own.calls]  # noqa: E731
    return part.reads == other.reads and texts(part) == texts(other)


def _beside(part: StepPart, others: Sequence[StepPart]) -> StepPart:
    """Returns a part that runs others too."""
    calls = [call for other in others for call in other.calls]
    writes = [var for other in others for var in other.writes]
    also = (*part.also, *(other.name for other in others))
    return dataclasses.replace(part, calls=[*calls, *part.calls], writes=[*writes, *part.writes], also=also)


def _with_names(part: StepPart, names: Mapping[Any, Any]) -> StepPart:
    """Returns a part that reads other variables in the place of some."""
    of = lambda atom: names.get(atom, atom) if traces.is_var(atom) else atom  # noqa: E731
    return dataclasses.replace(
        part, calls=[dataclasses.replace(call, arguments=[*map(of, call.arguments)]) for call in part.calls]
    )


def _renamed(parts: Iterable[StepPart]) -> list[StepPart]:
    """Returns parts that read the original of each variable that a part returns as it came in."""
    original, named = dict[Any, Any](), []
    for part in parts:
        named.append(_with_names(part, original))
        original |= {var: original.get(same, same) for var, same in part.same.items()}
    return named


def _names(eqns: Iterable[jex.JaxprEqn]) -> tuple[str, ...]:
    return tuple(eqn.primitive.name for eqn in eqns)


def _may_join(part: StepPart, following: Sequence[StepPart], apart: Collection[Any]) -> bool:
    """Returns whether operations between blocks may run in the program of the part that follows, the last of `following`."""
    return bool(following) and following[-1].name in ("forward", "backward") and not set(apart).intersection(part.reads)


def _block(eqn: jex.JaxprEqn, needed: set[Any], results: set[Any], trimmed: dict[Any, jex.ClosedJaxpr]) -> StepPart:
    """Returns one nested call, without what nothing reads. Calls of one trace have one in `trimmed`, where they return the same of it."""
    closed, name = eqn.params["jaxpr"], blocks.pass_of(eqn)
    outer_of = dict(zip(closed.jaxpr.invars, eqn.invars))
    same, out = {}, []
    for var, inner in zip(eqn.outvars, closed.jaxpr.outvars):
        if var in needed and traces.is_var(inner) and traces.is_var(outer_of.get(inner)) and var not in results:
            same[var] = outer_of[inner]
        elif var in needed:
            out.append((var, inner))
    returned = [inner for _, inner in out]
    key = (id(closed), *map(id, returned))
    if key not in trimmed:
        trimmed[key] = traces.trimmed(closed, returned)
    own = trimmed[key]
    writes = [var for var, _ in out]
    return StepPart(name, [TraceCall([outer_of[var] for var in own.jaxpr.invars], writes, own)], writes, same)
