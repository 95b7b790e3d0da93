"""Follows values through a compiled program. This module counts how often computations run, and finds a value's origins and readers.

The body of a loop and an asynchronous wrapper each take one tuple. Values are followed into and out of both. They are not followed
through operations that mix elements (matmuls, reductions, scatters): a value that was only moved, cast or updated element by element
still belongs to its original array.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from zerojax import roles
from zerojax.hlo import syntax

# Operations that only move or cast their first operand.
_MOVES = frozenset(
    "bitcast bitcast-convert convert copy copy-start transpose reshape slice dynamic-slice pad optimization-barrier "
    "all-gather all-gather-start reduce-precision".split()
)
FUSIONS = ("fusion", "fusion-start")
_ELEMENTWISE = frozenset("add subtract multiply divide select maximum minimum negate sqrt rsqrt".split())
_MIXES = ("dot", "convolution", "scatter", "reduce", "custom-call", "gather", "sort")
_MAX_VISITED = 4000  # values visited for one query; real chains have tens


@dataclasses.dataclass(frozen=True)
class Call:
    """A computation that runs: how often in one run of the program, and the computation and instruction that call it."""

    computation: syntax.Computation
    times: int
    caller: syntax.Computation | None = None
    site: syntax.Instruction | None = None


@dataclasses.dataclass(frozen=True)
class Flow:
    """A program with the calls of its computations, by name."""

    module: syntax.Module
    calls: Mapping[str, Call]


def flow(module: syntax.Module) -> Flow:
    """Returns a program with the computations that run: entry, loop bodies, branches and asynchronous wrappers, but no fusions."""
    found = {module.entry_name: Call(module.entry, 1)}
    pending = [(module.entry, 1)]
    while pending:
        caller, times = pending.pop(0)
        for site in caller.instructions:
            for name in runs(site):
                computation = module.computation(name)
                repeats = times * (trip_count(module, caller, site) if site.opcode == "while" else 1)
                before = found[name].times if name in found else 0
                found[name] = Call(computation, before + repeats, caller, site)
                pending.append((computation, repeats))
    return Flow(module, found)


def runs(site: syntax.Instruction) -> tuple[str, ...]:
    """Returns the computations whose instructions run one by one when this instruction runs."""
    is_async = site.opcode.endswith("-start") and site.opcode not in FUSIONS and " calls=" in site.attributes
    return site.called if is_async or site.opcode in ("while", "conditional", "call") else ()


def takes_further_tokens(loop: syntax.Instruction) -> bool:
    """Returns whether a `while` runs the further rounds of tokens for which their experts' rooms are too small."""
    return re.search(rf"\b{roles.FURTHER_ROUNDS}\b", loop.op_name) is not None


def trip_count(module: syntax.Module, caller: syntax.Computation, loop: syntax.Instruction) -> int:
    """Returns how often a `while` runs its body: XLA's known trip count, else from its counter's bound, start and step, else 1.

    Further rounds of tokens to their experts (`roles.FURTHER_ROUNDS`) count as none: a router that sends as planned needs none.
    """
    if takes_further_tokens(loop):
        return 0
    known = loop.known_trip_count
    if known is not None:
        return known
    named = loop.computation_roles
    condition = module.computation(named["condition"])
    compare = next(
        (i for i in condition.instructions if i.opcode == "compare" and "direction=LT" in i.attributes), None
    )
    counters = [i for i in condition.instructions if i.opcode == "get-tuple-element"]
    bounds = {i.argument for i in condition.instructions if i.opcode == "constant" and i.argument.isdigit()}
    if compare is None or len(counters) != 1 or len(bounds) != 1:
        return 1
    index = counters[0].number("index") or 0
    body = module.computation(named["body"])
    step = _step(body, index)
    start = _constant(caller, caller.by_name[loop.operands[0]], index)
    return max(0, -(-(int(bounds.pop()) - start) // step)) if step > 0 else 1


def origins(flow: Flow, computation: syntax.Computation, name: str) -> tuple[syntax.Instruction, ...]:
    """Returns the entry's parameters of which a value is a moved, cast or elementwise updated copy."""
    found: dict[str, syntax.Instruction] = {}
    pending: list[tuple[syntax.Computation, str, int | None]] = [(computation, name, None)]
    seen: set[tuple[str, str, int | None]] = set()
    while pending and len(seen) < _MAX_VISITED:
        where, name, index = pending.pop()
        if (where.name, name, index) in seen or name not in where.by_name:
            continue
        seen.add((where.name, name, index))
        value = where.by_name[name]
        if value.opcode == "parameter" and where.name == flow.module.entry_name:
            found[value.name] = value
        else:
            pending.extend(_sources(flow, where, value, index))
    return tuple(found.values())


def _sources(
    flow: Flow, where: syntax.Computation, value: syntax.Instruction, index: int | None
) -> Iterator[tuple[syntax.Computation, str, int | None]]:
    """Yields the values of which this one is a copy. `index` is the element of a tuple to follow; None follows all."""
    operands = value.operands
    if value.opcode == "parameter":
        call = flow.calls.get(where.name)
        if call is not None and call.site is not None and call.caller is not None:
            number = 0 if call.site.opcode == "while" else int(value.argument)
            if number < len(call.site.operands):
                yield call.caller, call.site.operands[number], index
    elif value.opcode == "get-tuple-element":
        yield where, operands[0], value.number("index")
    elif value.opcode == "tuple":
        for operand in operands if index is None else operands[index : index + 1]:
            yield where, operand, None
    elif value.opcode == "while":
        yield where, operands[0], index
        body = flow.module.computation(value.computation_roles["body"])
        yield body, body.root.name, index
    elif stacks(flow, value) and not _mixes(flow, value):
        for operand in operands:
            yield where, operand, None
    elif value.opcode in ("all-gather-start", "all-gather") and len(operands) > 1:
        for operand in operands if index is None else operands[index : index + 1]:
            yield where, operand, None
    elif value.opcode in _MOVES or value.opcode.endswith("-done"):
        yield where, operands[0], index
    elif value.opcode in _ELEMENTWISE or (value.opcode in FUSIONS and not _mixes(flow, value)):
        operands = _read_by_output(flow, value, index)
        most = max((_elements(where, operand) for operand in operands), default=0)
        for operand in operands:
            if _elements(where, operand) == most:
                yield where, operand, None


def _read_by_output(flow: Flow, value: syntax.Instruction, index: int | None) -> tuple[str, ...]:
    """Returns the operands that one output of a fusion reads; all of them if it has one output."""
    if index is None or value.opcode not in FUSIONS or not value.called:
        return value.operands
    inside = flow.module.computation(value.called[-1])
    if inside.root.opcode != "tuple" or index >= len(inside.root.operands):
        return value.operands
    seen = inside.behind(inside.root.operands[index])
    read = {number for number, parameter in inside.parameters.items() if parameter.name in seen}
    return tuple(operand for number, operand in enumerate(value.operands) if number in read)


def readers(flow: Flow, computation: syntax.Computation, name: str) -> tuple[syntax.Instruction, ...]:
    """Returns the instructions that compute with a value, without the moves and casts on the way.

    A `dynamic-update-slice`, or a fusion with one, is a reader too: it keeps the value until after the loop.
    """
    found: dict[tuple[str, str], syntax.Instruction] = {}
    pending = [(computation, name)]
    seen: set[tuple[str, str]] = set()
    while pending and len(seen) < _MAX_VISITED:
        where, name = pending.pop()
        if (where.name, name) in seen:
            continue
        seen.add((where.name, name))
        size = _elements(where, name)
        for user in where.users.get(name, ()):
            if user.opcode == "tuple":
                pending.extend(_inside(flow, where, user, name))
            elif (
                user.opcode in _MOVES
                or user.opcode in ("get-tuple-element", "copy-done", "all-gather-done")
                or _only_moves(flow, user, size)
            ):
                pending.append((where, user.name))
            else:
                found[where.name, user.name] = user
    return tuple(found.values())


def stacks(flow: Flow, reader: syntax.Instruction) -> bool:
    """Returns whether an instruction writes its operand into a slice of a larger array, as a loop does to keep values."""
    kind = "dynamic-update-slice"
    return reader.opcode == kind or any(flow.module.mentions(called, kind) for called in reader.called)


def _inside(
    flow: Flow, where: syntax.Computation, packed: syntax.Instruction, name: str
) -> Iterator[tuple[syntax.Computation, str]]:
    """Yields the names of a tuple's element inside the loops that take the tuple."""
    for loop in where.users.get(packed.name, ()):
        if loop.opcode == "while":
            body = flow.module.computation(loop.computation_roles["body"])
            for index, operand in enumerate(packed.operands):
                if operand == name:
                    yield from ((body, inner) for inner in body.elements.get(index, ()))


def _only_moves(flow: Flow, user: syntax.Instruction, size: int) -> bool:
    """Returns whether a fusion only moves, casts or transposes a value of this size."""
    if user.opcode != "fusion" or user.elements != size or _mixes(flow, user):
        return False
    return len(user.operands) == 1 and not stacks(flow, user)


def _mixes(flow: Flow, fusion: syntax.Instruction) -> bool:
    return any(flow.module.mentions(called, *_MIXES) for called in fusion.called)


def _elements(where: syntax.Computation, name: str) -> int:
    return where.by_name[name].elements if name in where.by_name else 0


def _step(body: syntax.Computation, index: int) -> int:
    """Returns the number that a body adds to the counter at `index` of its tuple; 0 if it is unknown."""
    root = body.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return 0
    value, total = body.by_name.get(root.operands[index]), 0
    while value is not None and value.opcode in ("add", "copy", "bitcast"):
        constants = [
            body.by_name[o] for o in value.operands if o in body.by_name and body.by_name[o].opcode == "constant"
        ]
        others = [o for o in value.operands if o not in {c.name for c in constants}]
        total += sum(int(c.argument) for c in constants if c.argument.isdigit())
        value = body.by_name.get(others[0]) if others else None
    is_counter = value is not None and value.opcode == "get-tuple-element" and (value.number("index") or 0) == index
    return total if is_counter else 0


def _constant(where: syntax.Computation, packed: syntax.Instruction, index: int) -> int:
    """Returns the constant at `index` of a tuple; 0 if the element is not constant."""
    if packed.opcode != "tuple" or index >= len(packed.operands):
        return 0
    value = where.by_name.get(packed.operands[index])
    while value is not None and value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        value = where.by_name.get(value.operands[0])
    is_constant = value is not None and value.opcode == "constant" and value.argument.isdigit()
    return int(value.argument) if value is not None and is_constant else 0
