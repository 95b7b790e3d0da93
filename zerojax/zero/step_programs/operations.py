"""Walks over the operations of a part: to describe them, and to run them. This module decides which parts share a program.

Equal layers differ in the integers that tell their random bits apart, such as hashes of their names. So a part is described without its
integers. Parts of one description share a program, which reads the integers that differ as an argument.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from zerojax import traces
from zerojax.zero.step_programs import cut

_INTEGERS = ("int32", "uint32")


def described(part: cut.StepPart, known: "Known | None" = None) -> tuple[Any, list[int]]:
    """Returns what is equal for parts that differ in integers alone, and their integers. `known` are traces that parts have in common."""
    known = {} if known is None else known
    names = {var: f"v{number}" for number, var in enumerate(part.reads)}
    calls, integers = [], list[int]()
    for number, call in enumerate(part.calls):
        own = _Description(f"a{number}.")
        arguments = [
            names[atom] if traces.is_var(atom) else _constant(own, atom.val, atom.aval) for atom in call.arguments
        ]
        if id(call.closed) not in known:
            known[id(call.closed)] = call.closed, *_of_trace(call.closed)
        _, text, inside = known[id(call.closed)]
        calls.append((tuple(arguments), text))
        integers += own.integers + inside
        names.update({var: f"c{number}.{place}" for place, var in enumerate(call.writes)})
    return (part.name, tuple(calls), tuple(names[var] for var in part.writes)), integers


Known = dict[int, tuple[jex.ClosedJaxpr, str, list[int]]]  # traces by their ids, with their text and integers


def _of_trace(closed: jex.ClosedJaxpr) -> tuple[str, list[int]]:
    """Returns the text of a trace without its integers, and these."""
    found = _Description()
    results = _walked(closed, [found.name() for _ in closed.jaxpr.invars], found)
    return "\n".join((*found.lines, *results)), found.integers


def run(
    part: cut.StepPart, values: Mapping[Any, Any], integers: Mapping[int, Any], *, in_turn: bool = False
) -> list[Any]:
    """Runs the operations of a part.

    Args:
      part: the part.
      values: of the variables that it reads.
      integers: uint32[] in place of some of the integers of `described`, by their place.
      in_turn: whether each call waits for the one before it: independent collectives of emulated devices may wait for each other for ever.
    """
    found, how, before = dict(values), _Execution(integers), list[Any]()
    for call in part.calls:
        args = [found[atom] if traces.is_var(atom) else _constant(how, atom.val, atom.aval) for atom in call.arguments]
        if in_turn and before:
            args = jax.lax.optimization_barrier((args, before))[0]
        before = _walked(call.closed, args, how)
        found.update(zip(call.writes, before))
    return [found[var] for var in part.writes]


class _Description:
    """Writes down operations: each with its params, the names of its inputs, and the types of its results."""

    def __init__(self, before: str = "") -> None:
        self._before = before  # the beginning of the names of integers
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
        return f"{self._before}i{len(self.integers)}:{aval.dtype}"

    def constant(self, value: Any) -> str:
        """Returns another constant of the trace as text; a large one stands for itself only."""
        shape, dtype, nbytes = np.shape(value), getattr(value, "dtype", type(value)), getattr(value, "nbytes", 0)
        is_short = nbytes <= 256 and not jnp.issubdtype(dtype, jax.dtypes.extended)
        return f"{shape} {dtype} {np.asarray(value).tobytes().hex() if is_short else id(value)}"

    def inside(self, eqn: jex.JaxprEqn) -> contextlib.AbstractContextManager[None]:
        """Enters an operation."""
        return contextlib.nullcontext()

    def apply(self, eqn: jex.JaxprEqn, inputs: Sequence[str]) -> list[str]:
        """Writes down one operation."""
        names = [self.name() for _ in eqn.outvars]
        types = [str(var.aval) for var in eqn.outvars]
        consts = [id(const) for inner in traces.programs(eqn) for const in traces.constants(inner)]
        self.lines.append(f"{eqn.primitive.name} {eqn.params} {consts} {inputs} {types}")
        return names


class _Execution:
    """Runs operations."""

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

    def inside(self, eqn: jex.JaxprEqn) -> contextlib.AbstractContextManager[None]:
        """Enters an operation: names of its scopes are kept."""
        return traces.scopes(eqn)

    def apply(self, eqn: jex.JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        """Runs one operation."""
        return traces.bind(eqn, inputs)


def _walked(program: traces.Program, values: Sequence[Any], how: Any) -> list[Any]:
    """Returns the results of a program. `how` decides what a value is. Integers are met in the same order each time."""

    def apply(eqn: jex.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        inner = inlined(eqn)
        with how.inside(eqn):
            return how.apply(eqn, inputs) if inner is None else traces.run(inner, inputs, apply, constant)

    constant = functools.partial(_constant, how)
    return traces.run(program, values, apply, constant)


def _constant(how: Any, value: Any, aval: Any) -> Any:
    """Returns what stands for a constant or a literal."""
    may_be_argument = getattr(aval, "shape", None) == () and str(aval.dtype) in _INTEGERS
    return how.integer(value, aval) if may_be_argument else how.constant(value)


def inlined(eqn: jex.JaxprEqn) -> Any:
    """Returns the trace of a nested function whose operations may run as if they stood in its place. Nothing is differentiated any more."""
    params = eqn.params
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_bound = any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)
    if is_bound or np.any(params.get("prevent_cse", False)) or params.get("compiler_options_kvs"):
        return None
    return traces.called(eqn)
