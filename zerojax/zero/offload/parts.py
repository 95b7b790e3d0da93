"""Cuts the trace of a step into parts. This module decides where a program ends; `programs` compiles them.

Each nested function of `blocks` is a part, and so are the operations between two of them. A few operations that recur before each of
several blocks run in the blocks' programs: to send a program costs the host more than they cost the device.

Equal layers differ in the integers that tell their random bits apart, such as hashes of their names. So a part is described without its
integers. Parts of one description share a program, which reads the integers that differ as an argument.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source
import jax.numpy as jnp
import numpy as np

from zerojax.zero.offload import blocks

FEW = 8  # operations before a block that may run in its program
_INTEGERS = ("int32", "uint32")
_INLINED = {  # no program is differentiated after the cut
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


@dataclasses.dataclass(frozen=True, eq=False)
class TraceCall:
    """A trace that is called.

    Attributes:
      arguments: what `closed` is called with: variables or literals.
      writes: the variables of its results.
      closed: the trace.
    """

    arguments: Sequence[Any]
    writes: Sequence[Any]
    closed: jex.ClosedJaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class StepPart:
    """The operations of one program.

    Attributes:
      name: "forward" or "backward" of a block, or "between".
      calls: one after the other.
      writes: the variables that it returns.
      same: variables that are returned as they came in, so that the program need not copy them.
    """

    name: str
    calls: Sequence[TraceCall]
    writes: Sequence[Any]
    same: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def reads(self) -> list[Any]:
        """Returns the variables that it takes, each once."""
        own = {var for call in self.calls for var in call.writes}
        return [var for var in _variables(a for call in self.calls for a in call.arguments) if var not in own]

    def described(self) -> tuple[Any, list[int]]:
        """Returns what is equal for parts that differ in integers alone, and their integers."""
        found = _Description()
        places = {var: found.name() for var in self.reads}
        values = _run(self, places, found)
        return (self.name, tuple(found.lines), tuple(values[var] for var in self.writes)), found.integers

    def run(self, values: Mapping[Any, Any], integers: Mapping[int, Any]) -> list[Any]:
        """Runs its operations.

        Args:
          values: of the variables that it reads.
          integers: uint32[] in place of some of `described`'s integers, by their place.
        """
        found = _run(self, values, _Execution(integers))
        return [found[var] for var in self.writes]


def cut(jaxpr: jex.Jaxpr, apart: Collection[Any]) -> list[StepPart]:
    """Returns the parts of a trace, without operations whose results nothing reads.

    Args:
      jaxpr: the trace.
      apart: variables; operations that read one are not moved to another part.
    """
    groups: list[Any] = []
    results = jaxpr.outvars
    for eqn in _live(jaxpr.eqns, results):
        if _is_block(eqn) or not groups or not isinstance(groups[-1], list):
            groups.append(eqn if _is_block(eqn) else [])
        if not _is_block(eqn):
            groups[-1].append(eqn)
    parts: list[StepPart] = []
    needed = set(_variables(results))
    later = set(needed)  # what is read after the part that comes next in time
    recurring = collections.Counter(_names(group) for group in groups if isinstance(group, list))
    for group in reversed(groups):
        part = _between(group, needed) if isinstance(group, list) else _block(group, needed, set(results))
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
        if part.writes or part.same or any(_acts(eqn) for call in part.calls for eqn in call.closed.jaxpr.eqns):
            parts.append(part)
    return _renamed(parts[::-1])


def _renamed(parts: Iterable[StepPart]) -> list[StepPart]:
    """Returns parts that read the original of each variable that a part returns as it came in."""
    original: dict[Any, Any] = {}

    def of(atom: Any) -> Any:
        return original.get(atom, atom) if _is_var(atom) else atom

    named = []
    for part in parts:
        calls = [dataclasses.replace(call, arguments=[of(atom) for atom in call.arguments]) for call in part.calls]
        named.append(dataclasses.replace(part, calls=calls))
        original |= {var: of(same) for var, same in part.same.items()}
    return named


def _between(eqns: list[jex.JaxprEqn], needed: set[Any]) -> StepPart:
    eqns = _live(eqns, needed)
    own = {var for eqn in eqns for var in eqn.outvars}
    reads = [var for var in _variables(atom for eqn in eqns for atom in eqn.invars) if var not in own]
    writes = [var for eqn in eqns for var in eqn.outvars if var in needed]
    closed = jex.ClosedJaxpr(jex.Jaxpr((), reads, writes, eqns), ())
    return StepPart("between", [TraceCall(reads, writes, closed)], writes)


def _names(eqns: Iterable[jex.JaxprEqn]) -> tuple[str, ...]:
    return tuple(eqn.primitive.name for eqn in eqns)


def _may_join(part: StepPart, following: Sequence[StepPart], apart: Collection[Any]) -> bool:
    """Returns whether operations between blocks may run in the program of the part that follows, the last of `following`."""
    return bool(following) and following[-1].name != "between" and not set(apart).intersection(part.reads)


def _block(eqn: jex.JaxprEqn, needed: set[Any], results: set[Any]) -> StepPart:
    """Returns one nested call, without what nothing reads."""
    closed, name = eqn.params["jaxpr"], eqn.params["name"].removeprefix(f"{blocks.NAME}_")
    outer_of = dict(zip(closed.jaxpr.invars, eqn.invars))
    same, out = {}, []
    for var, inner in zip(eqn.outvars, closed.jaxpr.outvars):
        if var in needed and _is_var(inner) and _is_var(outer_of.get(inner)) and var not in results:
            same[var] = outer_of[inner]
        elif var in needed:
            out.append((var, inner))
    own = trimmed(closed, [inner for _, inner in out])
    writes = [var for var, _ in out]
    return StepPart(name, [TraceCall([outer_of[var] for var in own.jaxpr.invars], writes, own)], writes, same)


def trimmed(closed: jex.ClosedJaxpr, results: Sequence[Any]) -> jex.ClosedJaxpr:
    """Returns a trace that makes some of its variables, or literals, without operations and arguments that they do not need."""
    jaxpr = closed.jaxpr
    eqns = _live(jaxpr.eqns, results)
    read = set(_variables([*results, *(atom for eqn in eqns for atom in eqn.invars)]))
    invars = [var for var in jaxpr.invars if var in read]
    return jex.ClosedJaxpr(jex.Jaxpr(jaxpr.constvars, invars, list(results), eqns), closed.consts)


def needs(jaxpr: jex.Jaxpr) -> list[set[int]]:
    """Returns for each result of a trace the numbers of the arguments that `trimmed` leaves."""
    found: dict[Any, set[int]] = {var: {number} for number, var in enumerate(jaxpr.invars)}
    acting: set[int] = set()
    for eqn in jaxpr.eqns:
        own = set().union(*(found.get(var, ()) for var in _variables(eqn.invars)))
        found.update(dict.fromkeys(eqn.outvars, own))
        acting |= own if _acts(eqn) else set()
    return [acting.union(*(found.get(var, ()) for var in _variables([atom]))) for atom in jaxpr.outvars]


class _Description:
    """Writes down the operations of a part: each with its params, the names of its inputs, and the types of its results."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.integers: list[int] = []
        self._names = 0

    def name(self) -> str:
        """Returns the name of a new value."""
        self._names += 1
        return f"v{self._names}"

    def integer(self, value: Any, aval: Any) -> str:
        """Returns the name of an integer of the trace."""
        self.integers.append(int(value))
        return f"i{len(self.integers)}:{aval.dtype}"

    def constant(self, value: Any) -> str:
        """Returns another constant of the trace as text; a large one stands for itself only."""
        shape, dtype, nbytes = np.shape(value), getattr(value, "dtype", type(value)), getattr(value, "nbytes", 0)
        is_short = nbytes <= 256 and not jnp.issubdtype(dtype, jax.dtypes.extended)
        return f"{shape} {dtype} {np.asarray(value).tobytes().hex() if is_short else id(value)}"

    @contextlib.contextmanager
    def inside(self, eqn: jex.JaxprEqn) -> Iterator[None]:
        """Enters an operation."""
        yield

    def apply(self, eqn: jex.JaxprEqn, inputs: Sequence[str]) -> list[str]:
        """Writes down one operation."""
        names = [self.name() for _ in eqn.outvars]
        types = [str(var.aval) for var in eqn.outvars]
        consts = [id(const) for const in consts_of(eqn.params.values())]
        self.lines.append(f"{eqn.primitive.name} {eqn.params} {consts} {inputs} {types}")
        return names


class _Execution:
    """Runs the operations of a part."""

    def __init__(self, integers: Mapping[int, Any]):
        self._integers, self._seen = integers, 0

    def integer(self, value: Any, aval: Any) -> Any:
        """Returns an integer of the trace, or what is in its place."""
        self._seen += 1
        if self._seen - 1 not in self._integers:
            return value
        return jax.lax.bitcast_convert_type(self._integers[self._seen - 1], aval.dtype)

    def constant(self, value: Any) -> Any:
        """Returns another constant of the trace."""
        return value

    @contextlib.contextmanager
    def inside(self, eqn: jex.JaxprEqn) -> Iterator[None]:
        """Enters an operation: names of its scopes are kept."""
        stack = source.current_name_stack() + eqn.source_info.name_stack
        with source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            yield

    def apply(self, eqn: jex.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one operation."""
        results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]


def _run(part: StepPart, values: Mapping[Any, Any], how: Any) -> dict[Any, Any]:
    """Returns the values of a part's variables. `how` decides what a value is. Integers are met in the same order each time."""
    values = dict(values)
    for call in part.calls:
        args = [_read(values, atom, how) for atom in call.arguments]
        values.update(zip(call.writes, _walk(call.closed.jaxpr, call.closed.consts, args, how)))
    return values


def _walk(jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], how: Any) -> list[Any]:
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args))
    for var, const in zip(jaxpr.constvars, consts):
        values[var] = how.integer(const, var.aval) if _is_integer(var.aval) else how.constant(const)
    for eqn in jaxpr.eqns:
        inputs = [_read(values, atom, how) for atom in eqn.invars]
        inner = _inlined(eqn)
        with how.inside(eqn):
            results = how.apply(eqn, inputs) if inner is None else _walk(*inner, inputs, how)
        values.update(zip(eqn.outvars, results))
    return [_read(values, atom, how) for atom in jaxpr.outvars]


def _read(values: Mapping[Any, Any], atom: Any, how: Any) -> Any:
    if _is_var(atom):
        return values[atom]
    return how.integer(atom.val, atom.aval) if _is_integer(atom.aval) else how.constant(atom.val)


def _inlined(eqn: jex.JaxprEqn) -> tuple[jex.Jaxpr, Sequence[Any]] | None:
    """Returns the trace and the constants of a nested function whose operations may run as if they stood in its place."""
    params = eqn.params
    inner = params.get(_INLINED.get(eqn.primitive.name, ""))
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_bound = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    if inner is None or is_bound or np.any(params.get("prevent_cse", False)) or params.get("compiler_options_kvs"):
        return None
    return (inner.jaxpr, inner.consts) if isinstance(inner, jex.ClosedJaxpr) else (inner, ())


def consts_of(params: Iterable[Any]) -> Iterator[Any]:
    """Returns the constants of traces among the params of an operation, which their text does not show."""
    for value in params:
        if isinstance(value, (list, tuple)):
            yield from consts_of(value)
        elif isinstance(value, (jex.ClosedJaxpr, jex.Jaxpr)):
            yield from getattr(value, "consts", ())
            for eqn in value.eqns:
                yield from consts_of(eqn.params.values())


def _live(eqns: Iterable[jex.JaxprEqn], needed: Iterable[Any]) -> list[jex.JaxprEqn]:
    """Returns the operations whose results are read, directly or by others."""
    needed, kept = set(_variables(needed)), []
    for eqn in reversed(list(eqns)):
        if _acts(eqn) or any(var in needed for var in eqn.outvars):
            kept.append(eqn)
            needed.update(_variables(eqn.invars))
    return kept[::-1]


def _acts(eqn: jex.JaxprEqn) -> bool:
    """Returns whether an operation does something beside its results, such as printing. Collectives have an effect in name only."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among variables and literals, each once."""
    return list(dict.fromkeys(atom for atom in atoms if _is_var(atom)))


def _is_var(atom: Any) -> bool:
    return isinstance(atom, jex.Var)


def _is_integer(aval: Any) -> bool:
    """Returns whether a constant of this type may be an argument instead."""
    return getattr(aval, "shape", None) == () and str(aval.dtype) in _INTEGERS


def _is_block(eqn: jex.JaxprEqn) -> bool:
    return str(eqn.params.get("name", "")).startswith(blocks.NAME)
