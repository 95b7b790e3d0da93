"""Cuts a traced step into programs that run one after the other. This module makes them; `schedule` runs them.

A step that is one compiled program holds what it reads from start to end, and XLA's scheduler decides when copies from the host begin.
Programs that are sent to the device one by one are ordered by the sender. A copy that is sent before a program runs beside it, and a
weight is on the device only from its copy to the program that reads it.

The cut follows the trace. Each nested function of `blocks` is a program of its own, and so are the operations between two of them. A value
that passes from one program to the next may differ between devices, whatever its spec would be. It is stored stacked over devices: with a
leading dim that is sharded over the mesh. Programs of equal text are compiled once, so a model of equal layers compiles one layer.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.zero import explicit
from zerojax.zero.offload import blocks


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """One program of a step.

    Attributes:
      name: "forward", "backward" or "loss" of a block, or "between".
      reads: the numbers of the values that it takes.
      writes: the numbers of the values that it returns.
      run: f(*values) -> list of values, compiled.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    run: jax.stages.Compiled


@dataclasses.dataclass(frozen=True, eq=False)
class CutStep:
    """A step as programs. Values have numbers: first the leaves of the arguments, then what the programs write.

    Attributes:
      programs: in the order of execution.
      values: the abstract values, with shardings, by number.
      arguments: the number of leaves of the arguments.
      results: for each leaf of the step's result the number of its value, or an array if it is a constant.
      structure: the tree of the result.
    """

    programs: tuple[StepProgram, ...]
    values: tuple[jax.ShapeDtypeStruct, ...]
    arguments: int
    results: tuple[Any, ...]
    structure: Any

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a value on one device."""
        value = self.values[number]
        return tree.nbytes(value, value.sharding.shard_shape(value.shape) if value.sharding else value.shape)


def cut(run: Callable[..., Any], *args: Any, compiler_options: Mapping[str, Any] | None = None) -> CutStep:
    """Cuts `run(*args)` into programs and compiles them.

    Args:
      run: a function that is one `jax.shard_map` of its arguments, as `explicit.value_and_grad` returns.
      *args: trees of `jax.ShapeDtypeStruct`, with the shardings that the programs read.
      compiler_options: XLA's, for each program.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    (call,) = traced.jaxpr.eqns
    assert call.primitive.name == "shard_map" and not traced.consts, call.primitive.name
    mapped, inner = _Mapped(call), call.params["jaxpr"]
    parts = _parts(inner.eqns, inner.outvars)
    number_of = {var: number for number, var in enumerate(traced.jaxpr.invars)}
    number_of |= {var: number_of[outer] for var, outer in zip(inner.invars, call.invars)}
    values: list[Any] = jax.tree.leaves(args)
    compiled: dict[str, jax.stages.Compiled] = {}
    by_trace: dict[Any, tuple[jax.stages.Compiled, list[jax.ShapeDtypeStruct]]] = {}
    programs = []
    for part in parts:
        taken = [values[number_of[var]] for var in part.reads]
        key = mapped.traced(part, taken)
        if key not in by_trace:  # to lower a program takes several times as long as to print its trace
            lowered = jax.jit(mapped.program(part)).lower(*taken)
            text = lowered.as_text()
            if text not in compiled:
                compiled[text] = lowered.compile(compiler_options=dict(compiler_options or {}))
            out = zip(lowered.out_info, compiled[text].output_shardings)
            by_trace[key] = (
                compiled[text],
                [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding) for like, sharding in out],
            )
        program, given = by_trace[key]
        for var, like in zip(part.writes, given):
            number_of[var] = len(values)
            values.append(like)
        reads, writes = ([number_of[var] for var in group] for group in (part.reads, part.writes))
        programs.append(StepProgram(part.name, tuple(reads), tuple(writes), program))
    number_of |= {outer: number_of[var] for outer, var in zip(call.outvars, inner.outvars) if _is_var(var)}
    constants = {outer: var.val for outer, var in zip(call.outvars, inner.outvars) if not _is_var(var)}
    results = tuple(
        number_of[var] if var in number_of else jnp.asarray(constants[var], var.aval.dtype)
        for var in traced.jaxpr.outvars
    )
    return CutStep(tuple(programs), tuple(values), len(traced.jaxpr.invars), results, jax.tree.structure(shapes))


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """The operations of one program, as a trace.

    Attributes:
      name: see `StepProgram`.
      arguments: what `closed` is called with: variables or literals.
      writes: the variables that it returns.
      closed: the trace.
      same: variables that are returned as they came in, so that the program need not copy them.
    """

    name: str
    arguments: Sequence[Any]
    writes: Sequence[Any]
    closed: jex.ClosedJaxpr
    same: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def reads(self) -> list[Any]:
        """Returns the variables that it takes, each once."""
        return _variables(self.arguments)


class _Mapped:
    """Maps parts of a step in the same way as the `jax.shard_map` that the step is."""

    def __init__(self, call: jex.JaxprEqn):
        self._mesh, inner = call.params["mesh"], call.params["jaxpr"]
        self._axes = explicit.manual_axes(self._mesh)
        self._in_specs = dict(zip(inner.invars, call.params["in_specs"]))
        self._out_specs = {var: spec for var, spec in zip(inner.outvars, call.params["out_specs"]) if _is_var(var)}
        self._stacked = P(tuple(axis for axis in self._mesh.axis_names if axis in self._axes))

    def traced(self, part: _Part, taken: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """Returns what is equal for parts of equal programs. `taken` are the abstract values that they read."""
        reads = part.reads
        arguments = [
            reads.index(a) if _is_var(a) else (str(a.aval), np.asarray(a.val).tobytes()) for a in part.arguments
        ]
        avals = [
            (value.shape, value.dtype, value.sharding, self._in_specs.get(var)) for var, value in zip(reads, taken)
        ]
        specs = [self._out_specs.get(var) for var in part.writes]
        consts = [id(const) for const in part.closed.consts]
        return part.name, str(part.closed.jaxpr), tuple(arguments), tuple(avals), tuple(specs), tuple(consts)

    def program(self, part: _Part) -> Callable[..., Any]:
        """Returns f(*global values) -> list of global values."""
        run, reads, literals = jex.jaxpr_as_fun(part.closed), part.reads, {}
        literals = {i: jnp.asarray(a.val, a.aval.dtype) for i, a in enumerate(part.arguments) if not _is_var(a)}
        place = {var: index for index, var in enumerate(reads)}

        def on_device(*values: Any) -> list[Any]:
            own = [value if var in self._in_specs else value[0] for var, value in zip(reads, values)]
            filled = [literals[i] if i in literals else own[place[a]] for i, a in enumerate(part.arguments)]
            return [value if var in self._out_specs else value[None] for var, value in zip(part.writes, run(*filled))]

        on_device.__name__ = on_device.__qualname__ = f"{blocks.NAME}_{part.name}"
        return jax.shard_map(
            on_device,
            mesh=self._mesh,
            in_specs=tuple(self._in_specs.get(var, self._stacked) for var in reads),
            out_specs=[self._out_specs.get(var, self._stacked) for var in part.writes],
            axis_names=self._axes,
            check_vma=False,
        )


def _parts(eqns: Iterable[jex.JaxprEqn], results: Sequence[Any]) -> list[_Part]:
    """Returns the operations whose results are read, part by part."""
    groups: list[Any] = []
    for eqn in _live(eqns, _variables(results)):
        if _is_block(eqn) or not groups or not isinstance(groups[-1], list):
            groups.append(eqn if _is_block(eqn) else [])
        if not _is_block(eqn):
            groups[-1].append(eqn)
    parts: list[_Part] = []
    needed = set(_variables(results))
    for group in reversed(groups):
        part = _between(group, needed) if isinstance(group, list) else _block(group, needed, set(results))
        needed |= set(part.reads) | set(part.same.values())
        if part.writes or part.same or any(map(_acts, part.closed.jaxpr.eqns)):
            parts.append(part)
    original: dict[Any, Any] = {}
    named = []
    for part in reversed(parts):
        named.append(dataclasses.replace(part, arguments=[_of(original, atom) for atom in part.arguments]))
        original |= {var: _of(original, same) for var, same in part.same.items()}
    return named


def _of(original: Mapping[Any, Any], atom: Any) -> Any:
    """Returns the variable that one returned unchanged by a program came from, or the atom itself."""
    return original.get(atom, atom) if _is_var(atom) else atom


def _between(eqns: list[jex.JaxprEqn], needed: set[Any]) -> _Part:
    eqns = _live(eqns, needed)
    own = {var for eqn in eqns for var in eqn.outvars}
    reads = [var for var in _variables(atom for eqn in eqns for atom in eqn.invars) if var not in own]
    writes = [var for eqn in eqns for var in eqn.outvars if var in needed]
    return _Part("between", reads, writes, jex.ClosedJaxpr(jex.Jaxpr((), reads, writes, eqns), ()))


def _block(eqn: jex.JaxprEqn, needed: set[Any], results: set[Any]) -> _Part:
    """Returns one nested call, without what nothing reads."""
    closed, name = eqn.params["jaxpr"], eqn.params["name"].removeprefix(f"{blocks.NAME}_")
    outer_of = dict(zip(closed.jaxpr.invars, eqn.invars))
    same, out = {}, []
    for var, inner in zip(eqn.outvars, closed.jaxpr.outvars):
        if var in needed and _is_var(inner) and _is_var(outer_of.get(inner)) and var not in results:
            same[var] = outer_of[inner]
        elif var in needed:
            out.append((var, inner))
    outvars = [inner for _, inner in out]
    eqns = _live(closed.jaxpr.eqns, _variables(outvars))
    read = set(_variables([*outvars, *(atom for eqn in eqns for atom in eqn.invars)]))
    invars = [var for var in closed.jaxpr.invars if var in read]
    trimmed = jex.ClosedJaxpr(jex.Jaxpr(closed.jaxpr.constvars, invars, outvars, eqns), closed.consts)
    return _Part(name, [outer_of[var] for var in invars], [var for var, _ in out], trimmed, same)


def _live(eqns: Iterable[jex.JaxprEqn], needed: Iterable[Any]) -> list[jex.JaxprEqn]:
    """Returns the operations whose results are read."""
    needed, kept = set(needed), []
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


def _is_block(eqn: jex.JaxprEqn) -> bool:
    return str(eqn.params.get("name", "")).startswith(blocks.NAME)
