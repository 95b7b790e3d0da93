"""Divides the backward passes of stages (zero-bubble, arXiv:2401.10241). This module decides what waits for the gradients of weights.

BACKWARD has what other stages read, and all that is cheap. WEIGHTS has the matmuls that no other stage waits for, and what follows from
them: the sums over devices. It reads what BACKWARD made, as a matmul's input and the gradient of its result, which are kept until then.
What follows from weights and the batch alone, such as a gathered weight, WEIGHTS makes again.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from zerojax import traces
from zerojax.zero.pipeline import segments
from zerojax.zero.pipeline.order import BACKWARD, WEIGHTS
from zerojax.zero.step_programs import cut, operations


def of(found: segments.Segments, jaxpr: jex.Jaxpr) -> segments.Segments:
    """Returns the segments of a pass with each backward pass in two; `jaxpr` is what they were cut from."""
    arguments = {*jaxpr.invars, *jaxpr.constvars}
    made, numbers = dict(found.segments), dict(found.number_of)
    for key, own in found.segments.items():
        if key[0] != BACKWARD:
            continue
        read = {var for other, seg in found.segments.items() if other != key for var in seg.reads}
        written = _WrittenOut(own)
        early, late = _divided(written, {var for var in own.writes if var in read}, arguments)
        made[key], made[WEIGHTS, key[1]] = written.part(BACKWARD, *early), written.part(WEIGHTS, *late)
        for eqn in written.eqns:
            for var in eqn.outvars:
                numbers.setdefault(var, len(numbers))
    return dataclasses.replace(found, segments=made, number_of=numbers)


Half = tuple[list[jex.JaxprEqn], list[Any]]  # operations, and the variables that they make for others


def _divided(written: "_WrittenOut", early: set[Any], arguments: set[Any]) -> tuple[Half, Half]:
    """Returns the two halves of a backward pass; `early` are its variables that other stages read."""
    eqns, given = written.eqns, {*arguments, *written.consts}
    awaited = set(map(id, traces.live(eqns, [written.known.get(var, var) for var in early])))
    waits: dict[Any, bool] = {}
    free = set(given)  # follow from arguments alone
    for eqn in eqns:
        inputs = traces.variables(eqn.invars)
        is_late = id(eqn) not in awaited and (any(waits.get(var) for var in inputs) or _is_heavy(eqn))
        waits |= dict.fromkeys(eqn.outvars, is_late)
        if free.issuperset(inputs) and not traces.acts(eqn):
            free.update(eqn.outvars)
    late = {id(eqn) for eqn in eqns if waits[eqn.outvars[0]]} if eqns else set()
    wanted = {written.known.get(var, var) for var in written.writes}
    readers: dict[Any, set[int]] = collections.defaultdict(set)
    for eqn in reversed(eqns):  # what only rearranges for one of them
        own = set().union(*(readers[var] for var in eqn.outvars))
        if own and own <= late and id(eqn) not in awaited and wanted.isdisjoint(eqn.outvars) and _grows(eqn):
            late.add(id(eqn))
        for var in traces.variables(eqn.invars):
            readers[var].add(id(eqn))
    needed = {var for eqn in eqns if id(eqn) in late for var in traces.variables(eqn.invars)}
    again = set(map(id, traces.live([eqn for eqn in eqns if free.issuperset(eqn.outvars)], needed)))
    first = [eqn for eqn in eqns if id(eqn) not in late]
    second = [eqn for eqn in eqns if id(eqn) in late or id(eqn) in again]
    by_late = {var for eqn in second for var in eqn.outvars}
    made_late = {var for eqn in eqns if id(eqn) in late for var in eqn.outvars}
    of_late = [var for var in written.writes if written.known.get(var, var) in made_late]
    of_first = [var for var in written.writes if written.known.get(var, var) not in made_late]
    early_made = {var for eqn in first for var in eqn.outvars}
    kept = traces.variables(atom for eqn in second for atom in eqn.invars)
    results = [*of_first, *(var for var in kept if var in early_made - by_late and var not in of_first)]
    return (traces.live(first, [written.known.get(var, var) for var in results]), results), (second, of_late)


def _is_heavy(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an operation is, or has, a matmul."""
    inner = (own for program in traces.programs(eqn) for own in traces.equations(program))
    return any(own.primitive.name in traces.MATMULS for own in (eqn, *inner))


def _grows(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an operation rearranges, repeats or casts its operand, and its result takes as many bytes or more."""
    if eqn.primitive.name not in traces.MOVES | {traces.CAST}:
        return False
    (made,), taken = eqn.outvars, traces.variables(eqn.invars)
    return _nbytes([made]) >= _nbytes(taken)


def _nbytes(variables: Iterable[Any]) -> int:
    return sum(var.aval.size * var.aval.dtype.itemsize for var in variables)


class _WrittenOut:
    """The operations of a part, those of nested functions in their places.

    Attributes:
      eqns: the operations.
      writes: of the part.
      known: what stands for the variables of the part that no operation makes under their own name.
      consts: arrays of nested functions, by variable.
    """

    def __init__(self, part: cut.StepPart):
        (call,) = part.calls
        self.writes = part.writes
        self.known: dict[Any, Any] = {}
        self.consts: dict[Any, Any] = {}
        self.eqns: list[jex.JaxprEqn] = self._flat(call.closed.jaxpr.eqns)

    def part(self, name: str, eqns: Sequence[jex.JaxprEqn], writes: Sequence[Any]) -> cut.StepPart:
        """Returns a part of some of the operations."""
        results = [self.known.get(var, var) for var in writes]
        own = {var for eqn in eqns for var in eqn.outvars}
        read = traces.variables([*(atom for eqn in eqns for atom in eqn.invars), *results])
        consts = {var: self.consts[var] for var in read if var in self.consts}
        reads = [var for var in read if var not in own and var not in self.consts]
        closed = traces.part(reads, results, eqns, consts)
        return cut.StepPart(name, [cut.TraceCall(reads, list(writes), closed)], list(writes))

    def _flat(self, eqns: Iterable[jex.JaxprEqn]) -> list[jex.JaxprEqn]:
        found: list[jex.JaxprEqn] = []
        for eqn in eqns:
            eqn = eqn.replace(invars=[self._of(atom) for atom in eqn.invars])
            inner = operations.inlined(eqn)
            found += [eqn] if inner is None else self._opened(eqn, inner)
        return found

    def _opened(self, eqn: jex.JaxprEqn, program: Any) -> list[jex.JaxprEqn]:
        """Returns the operations of a call, with variables of their own: a program may be called twice."""
        jaxpr, consts = traces.opened(program)
        names = dict(zip(jaxpr.invars, eqn.invars))
        for var, value in zip(jaxpr.constvars, consts):
            names[var] = jex.Var(var.aval)
            self.consts[names[var]] = value
        inside = {var for own in jaxpr.eqns for var in own.outvars}
        for outer, var in zip(eqn.outvars, jaxpr.outvars):
            if traces.is_var(var) and var in inside and not isinstance(outer, jex.DropVar):
                names.setdefault(var, outer)

        def of(atom: traces.Atom) -> traces.Atom:
            return names.setdefault(atom, jex.Var(atom.aval)) if traces.is_var(atom) else atom

        stack = eqn.source_info.name_stack
        found = self._flat(
            own.replace(
                invars=[of(atom) for atom in own.invars],
                outvars=[of(var) for var in own.outvars],
                source_info=own.source_info.replace(name_stack=stack + own.source_info.name_stack),
            )
            for own in jaxpr.eqns
        )
        for outer, var in zip(eqn.outvars, jaxpr.outvars):
            atom = self._of(of(var))
            if atom is not outer:
                self.known[outer] = atom
        return found

    def _of(self, atom: traces.Atom) -> traces.Atom:
        return self.known.get(atom, atom) if traces.is_var(atom) else atom
