"""Walks over the operations of a part: to describe them, and to run them. This module decides which parts share a program.

Equal layers differ in the integers that tell their random bits apart, such as hashes of their names. So a part is described without its
integers. Parts of one description share a program, which reads the integers that differ as an argument.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.extend.source_info_util as source
import jax.numpy as jnp
import numpy as np

from zerojax.zero.step_parts import cut

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


def described(part: cut.StepPart) -> tuple[Any, list[int]]:
    """Returns what is equal for parts that differ in integers alone, and their integers."""
    found = _Description()
    values = _walked(part, {var: found.name() for var in part.reads}, found)
    return (part.name, tuple(found.lines), tuple(values[var] for var in part.writes)), found.integers


def run(part: cut.StepPart, values: Mapping[Any, Any], integers: Mapping[int, Any]) -> list[Any]:
    """Runs the operations of a part.

    Args:
      part: the part.
      values: of the variables that it reads.
      integers: uint32[] in place of some of the integers of `described`, by their place.
    """
    found = _walked(part, values, _Execution(integers))
    return [found[var] for var in part.writes]


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


def _walked(part: cut.StepPart, values: Mapping[Any, Any], how: Any) -> dict[Any, Any]:
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
    if cut.is_var(atom):
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


def _is_integer(aval: Any) -> bool:
    """Returns whether a constant of this type may be an argument instead."""
    return getattr(aval, "shape", None) == () and str(aval.dtype) in _INTEGERS
