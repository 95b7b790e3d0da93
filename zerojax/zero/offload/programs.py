"""Cuts a traced step into programs that run one after the other. This module compiles them; `schedule` runs them.

A step that is one compiled program holds what it reads from start to end, and XLA's scheduler decides when copies from the host begin.
Programs that are sent to the device one by one are ordered by the sender, and a weight is on the device only from its copy to the program
that reads it. A copy is sent some programs before the one that reads it, in one of two ways. Large arrays are sent one by one beside the
programs. That costs the host some 70 us an array, as long as the link takes for 3 MiB. So smaller ones are results of a program some
programs before, which copies them beside its arithmetic and costs the host a tenth of that.

The cut follows the trace (`parts`). A value that passes from one program to the next may differ between devices, whatever its spec would
be. It is stored stacked over devices: with a leading dim that is sharded over the mesh. Equal parts are compiled once, so a model of equal
layers compiles one layer.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.zero.offload import blocks, layout
from zerojax.zero.offload import parts as parts_lib

AHEAD = 2  # programs between the sending of a copy and its use; with 1 a copy has the time of one program
SMALL = 32 * 2**20  # bytes on each device; smaller arrays are copied by programs


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """One program of a step.

    Attributes:
      part: its operations in the trace.
      reads: the numbers of the values that it takes.
      writes: the numbers of the values that it returns.
      brings: the numbers of the arguments in host memory that it takes too, and returns on the device.
      after: the numbers of the arguments in host memory whose copies are sent just before it.
      run: f(*values, *arguments in host memory) -> list of values, compiled.
    """

    part: parts_lib.StepPart
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    brings: tuple[int, ...]
    after: tuple[int, ...]
    run: jax.stages.Compiled

    @property
    def name(self) -> str:
        """Returns "forward" or "backward" of a block, or "between"."""
        return self.part.name


@dataclasses.dataclass(frozen=True, eq=False)
class CutStep:
    """A step as programs. Values have numbers: first the leaves of the arguments, then constants and what the programs write.

    Attributes:
      programs: in the order of execution.
      values: the abstract values on the device, with shardings, by number.
      arguments: the number of leaves of the arguments.
      on_host: the numbers of the arguments' leaves that are stored on the host or a disk.
      ahead: programs between the sending of a copy and its use.
      first: the numbers of those whose copies are sent before the first program, for each of the first `ahead` programs.
      constants: values that programs read and no program writes, by number: arrays that the loss closes over, and integers.
      results: for each leaf of the step's result the number of its value, or an array if it is a constant.
      structure: the tree of the result.
      trace: of the whole.
    """

    programs: tuple[StepProgram, ...]
    values: tuple[jax.ShapeDtypeStruct, ...]
    arguments: int
    on_host: frozenset[int]
    ahead: int
    first: tuple[tuple[int, ...], ...]
    constants: Mapping[int, np.ndarray]
    results: tuple[Any, ...]
    structure: Any
    trace: jex.ClosedJaxpr

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a value on one device."""
        return _nbytes(self.values[number])


def cut(
    run: Callable[..., Any],
    *args: Any,
    on_host: Collection[int] = (),
    on_disk: bool = False,
    ahead: int = AHEAD,
    compiler_options: Mapping[str, Any] | None = None,
) -> CutStep:
    """Cuts `run(*args)` into programs and compiles them.

    Args:
      run: a function that is one `jax.shard_map` of its arguments, as `explicit.value_and_grad` returns.
      *args: trees of `jax.ShapeDtypeStruct`, with the shardings that the programs read.
      on_host: the numbers of the arguments' leaves that are stored on the host or a disk.
      on_disk: whether they are on a disk, so that no program can copy them.
      ahead: programs between the sending of a copy and its use.
      compiler_options: XLA's, for each program.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
    (call,) = traced.jaxpr.eqns
    assert call.primitive.name == "shard_map", call.primitive.name
    mapped, inner = _Mapped(call), call.params["jaxpr"]
    values: list[Any] = jax.tree.leaves(args)
    given = {len(values) + number: np.asarray(array) for number, array in enumerate(traced.consts)}
    values += [jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=mapped.replicated) for own in given.values()]
    number_of = {var: number for number, var in enumerate([*traced.jaxpr.invars, *traced.jaxpr.constvars])}
    number_of |= {var: number_of[outer] for var, outer in zip(inner.invars, call.invars)}
    parts = parts_lib.cut(inner, {var for var, number in number_of.items() if number in on_host})
    integers = _differing([part.described() for part in parts])
    on_host_read = [[number_of[var] for var in part.reads if number_of.get(var) in on_host] for part in parts]
    small = set() if on_disk else {n for n in on_host if _nbytes(values[n]) < SMALL}
    first, copies = _copies(on_host_read, small, ahead)
    compiled: dict[Any, jax.stages.Compiled] = {}
    programs = []
    for part, (key, places, own), (after, brings) in zip(parts, integers, copies):
        reads = [number_of[var] for var in part.reads]
        if places:
            given[len(values)] = own
            reads.append(len(values))
            values.append(jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=mapped.replicated))
        taken = [values[n] for n in reads] + [_as_on_host(values[n]) for n in brings]
        same = (key, places, mapped.specs(part), *((like.shape, like.dtype, like.sharding) for like in taken))
        if same not in compiled:
            program = mapped.program(part, places, [values[n].sharding for n in brings])
            compiled[same] = jax.jit(program).lower(*taken).compile(compiler_options=dict(compiler_options or {}))
        run_part = compiled[same]
        number_of |= {var: len(values) + number for number, var in enumerate(part.writes)}
        writes = range(len(values), len(values) + len(part.writes))
        likes = zip(jax.tree.leaves(run_part.out_info), run_part.output_shardings)
        shaped = [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding) for like, sharding in likes]
        values += shaped[: len(part.writes)]
        programs.append(StepProgram(part, tuple(reads), tuple(writes), brings, after, run_part))
    number_of |= {outer: number_of[var] for outer, var in zip(call.outvars, inner.outvars) if _is_var(var)}
    literals = {outer: var.val for outer, var in zip(call.outvars, inner.outvars) if not _is_var(var)}
    results = tuple(
        number_of[var] if var in number_of else jnp.asarray(literals[var], var.aval.dtype)
        for var in traced.jaxpr.outvars
    )
    return CutStep(
        programs=tuple(programs),
        values=tuple(values),
        arguments=len(traced.jaxpr.invars),
        on_host=frozenset(on_host),
        ahead=ahead,
        first=first,
        constants=given,
        results=results,
        structure=jax.tree.structure(shapes),
        trace=traced,
    )


def _differing(described: Sequence[tuple[Any, list[int]]]) -> list[tuple[Any, tuple[int, ...], np.ndarray]]:
    """Returns for each part its description, the places of the integers in which parts of this description differ, and its own there."""
    of_kind: dict[Any, list[list[int]]] = {}
    for key, integers in described:
        of_kind.setdefault(key, []).append(integers)
    places = {
        key: tuple(place for place, found in enumerate(zip(*all_of)) if len(set(found)) > 1)
        for key, all_of in of_kind.items()
    }
    return [
        (key, places[key], np.array([integers[place] & 0xFFFFFFFF for place in places[key]], np.uint32))
        for key, integers in described
    ]


def _copies(
    reads: Sequence[Sequence[int]], small: Collection[int], ahead: int
) -> tuple[tuple[tuple[int, ...], ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Returns which copies are sent before all programs, and for each program those sent before it and those that it makes.

    Args:
      reads: the numbers of the arguments in host memory that each program reads.
      small: the numbers of those that programs copy.
      ahead: see `cut`.
    """
    held: set[int] = set()
    first, copies = [], []
    for numbers in reads[:ahead]:
        first.append(tuple(n for n in numbers if n not in held))
        held.update(numbers)
    for index, numbers in enumerate(reads):
        missing = [n for n in (reads[index + ahead] if index + ahead < len(reads) else ()) if n not in held]
        held.update(missing)
        held -= set(numbers) - {n for soon in reads[index + 1 : index + 1 + ahead] for n in soon}
        copies.append((tuple(n for n in missing if n not in small), tuple(n for n in missing if n in small)))
    return tuple(first), copies


def _as_on_host(like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=layout.on_host(like.sharding))


def _nbytes(like: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an abstract value on one device."""
    return tree.nbytes(like, like.sharding.shard_shape(like.shape) if like.sharding else like.shape)


class _Mapped:
    """Maps parts of a step in the same way as the `jax.shard_map` that the step is."""

    def __init__(self, call: jex.JaxprEqn):
        self._mesh, inner = call.params["mesh"], call.params["jaxpr"]
        self._axes = mesh_lib.manual(self._mesh)
        self._in_specs = dict(zip(inner.invars, call.params["in_specs"]))
        self._out_specs = {var: spec for var, spec in zip(inner.outvars, call.params["out_specs"]) if _is_var(var)}
        self._stacked = P(tuple(axis for axis in self._mesh.axis_names if axis in self._axes))
        self.replicated = NamedSharding(self._mesh, P())

    def specs(self, part: parts_lib.StepPart) -> Any:
        """Returns the specs of what a part reads and writes."""
        return tuple(map(self._in_specs.get, part.reads)), tuple(map(self._out_specs.get, part.writes))

    def program(
        self, part: parts_lib.StepPart, places: Sequence[int], brought: Sequence[NamedSharding]
    ) -> Callable[..., Any]:
        """Returns f(*global values, integers if there are places, *arrays in host memory) -> list of global values.

        Args:
          part: the operations.
          places: of the integers that are an argument.
          brought: the shardings on the device of the arrays in host memory, which are results, too.
        """
        reads = part.reads

        def on_device(*values: Any) -> list[Any]:
            own = {var: value if var in self._in_specs else value[0] for var, value in zip(reads, values)}
            integers = {place: values[-1][number] for number, place in enumerate(places)}
            found = part.run(own, integers)
            return [value if var in self._out_specs else value[None] for var, value in zip(part.writes, found)]

        run = jax.shard_map(
            on_device,
            mesh=self._mesh,
            in_specs=(*(self._in_specs.get(var, self._stacked) for var in reads), *([P()] if places else [])),
            out_specs=[self._out_specs.get(var, self._stacked) for var in part.writes],
            axis_names=self._axes,
            check_vma=False,
        )
        count = len(reads) + bool(places)

        def program(*values: Any) -> list[Any]:
            # Without a memory kind the copy would be a hint of the sharding alone.
            there = [sharding.with_memory_kind("device") for sharding in brought]
            copies = [jax.device_put(array, sharding) for array, sharding in zip(values[count:], there)]
            return [*run(*values[:count]), *copies]

        program.__name__ = program.__qualname__ = f"{blocks.NAME}_{part.name}"
        return program


def _is_var(atom: Any) -> bool:
    return isinstance(atom, jex.Var)
