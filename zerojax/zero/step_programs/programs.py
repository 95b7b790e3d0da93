"""Compiles a step that is cut into parts, as one program for each part. This module makes the programs; `schedule` sends them.

A step that is one compiled program holds what it reads from start to end, and XLA's scheduler decides when copies begin. Programs that are
sent to the device one by one are ordered by the sender.

A value that passes from one program to the next may differ between devices, whatever its spec would be. It is stored stacked over devices:
with a leading dim that is sharded over the mesh. Equal parts are compiled once, so a model of equal layers compiles one layer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs, traces, tree
from zerojax.errors import UserError
from zerojax.optim import rounded
from zerojax.tree import PyTree
from zerojax.zero.gradients import explicit
from zerojax.zero.step_programs import arrivals as arrivals_lib
from zerojax.zero.step_programs import blocks, operations
from zerojax.zero.step_programs import cut as cut_lib


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """One program of a step."""

    part: cut_lib.StepPart  # its operations in the trace
    reads: tuple[int, ...]  # the numbers of the values that it takes
    writes: tuple[int, ...]  # the numbers of the values that it returns
    rider: arrivals_lib.Rider  # what it does beside its part
    run: jax.stages.Compiled  # f(*values, *arrays of the rider) -> list of values, compiled

    @property
    def name(self) -> str:
        """Returns "forward" or "backward" of a block, or "between"."""
        return self.part.name


@dataclasses.dataclass(frozen=True, eq=False)
class CutStep:
    """A step as programs. Values have numbers: first the leaves of the arguments, then constants and what the programs write."""

    programs: tuple[StepProgram, ...]  # in the order of execution
    values: tuple[jax.ShapeDtypeStruct, ...]  # the abstract values as programs read them, with shardings, by number
    arguments: int  # the number of leaves of the arguments
    arrivals: arrivals_lib.Arrivals  # those of the arguments that arrive while programs are sent
    # values that programs read and no program writes, by number: arrays and random keys that the loss closes over, and integers
    constants: Mapping[int, Any]
    # for each leaf of the step's result the number of its value, or an array if it is a constant
    results: tuple[Any, ...]
    structure: Any  # the tree of the result
    trace: jex.ClosedJaxpr  # of the whole
    # programs that may run when the next is sent, whose memory is not free yet: they hold what they read last
    in_flight: int = 0
    is_serial: bool = False  # whether each program ends before the next is sent, as those of emulated devices must that share no value

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a value on one device."""
        return self._sizes[number]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [tree.shard_bytes(value) for value in self.values]


def cut(
    run: Callable[..., Any],
    *args: Any,
    late: Mapping[int, str] | None = None,
    source: arrivals_lib.ArgumentSource | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    in_order: Callable[[list[cut_lib.StepPart]], list[cut_lib.StepPart]] = list,
) -> CutStep:
    """Cuts `run(*args)` into programs and compiles them.

    Args:
      run: a function that is one `jax.shard_map` of its arguments, as `explicit.value_and_grad` returns.
      *args: trees of `jax.ShapeDtypeStruct`, with the shardings that the programs read.
      late: the paths of the arguments' leaves that arrive while programs are sent, by number.
      source: where they come from.
      compiler_options: XLA's, for each program.
      in_order: f(parts in the order of the trace) -> the parts that become programs.
    """
    late, source = late or {}, source or arrivals_lib.ArgumentSource()
    trace = MappedTrace(run, *args)
    traced, call, values, given, number_of = trace.closed, trace.call, trace.values, trace.constants, trace.number_of
    mapped, inner = Mapped(call), call.params["jaxpr"]
    parts = in_order(cut_lib.cut(inner, {var for var, number in number_of.items() if number in late}))
    has_ahead = any(blocks.GATHER in part.also for part in parts)
    known: operations.Known = {}
    integers = _differing([operations.described(part, known) for part in parts])
    late_reads = [[number_of[var] for var in part.reads if number_of.get(var) in late] for part in parts]
    arrivals = source.arrivals(late, late_reads, values)
    compiled: dict[Any, jax.stages.Compiled] = {}
    programs = []
    for index, (part, (key, places, own)) in enumerate(zip(parts, integers)):
        rider = arrivals.rider(index)
        reads = [number_of[var] for var in part.reads]
        if places:
            given[len(values)] = own
            reads.append(len(values))
            values.append(jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=mapped.replicated))
        taken = [*(values[n] for n in reads), *rider.takes]
        same = (key, places, mapped.specs(part), *((like.shape, like.dtype, like.sharding) for like in taken))
        if same not in compiled:
            program = mapped.program(part, places, rider.run)
            compiled[same] = jax.jit(program).lower(*taken).compile(compiler_options=dict(compiler_options or {}))
        run_part = compiled[same]
        number_of |= {var: len(values) + number for number, var in enumerate(part.writes)}
        writes = range(len(values), len(values) + len(part.writes))
        likes = zip(jax.tree.leaves(run_part.out_info), run_part.output_shardings)
        shaped = [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding) for like, sharding in likes]
        values += shaped[: len(part.writes)]
        programs.append(StepProgram(part, tuple(reads), tuple(writes), rider, run_part))
    number_of |= {outer: number_of[var] for outer, var in zip(call.outvars, inner.outvars) if traces.is_var(var)}
    literals = {outer: var.val for outer, var in zip(call.outvars, inner.outvars) if not traces.is_var(var)}
    results = tuple(
        number_of[var] if var in number_of else jnp.asarray(literals[var], var.aval.dtype)
        for var in traced.jaxpr.outvars
    )
    return CutStep(
        programs=tuple(programs),
        values=tuple(values),
        arguments=len(traced.jaxpr.invars),
        arrivals=arrivals,
        constants=given,
        results=results,
        structure=trace.structure,
        trace=traced,
        in_flight=arrivals.ahead if has_ahead else 0,
        is_serial=mapped.is_emulated and has_ahead,
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


class MappedTrace:
    """The trace of a function that is one `jax.shard_map` of its arguments.

    Attributes:
      closed: the trace.
      call: its only equation.
      structure: the tree of its results.
      values: the abstract values that are there before it runs: leaves of the arguments, then arrays and keys that it closes over.
      constants: the latter, by number.
      number_of: the numbers of these values, by their variables in the trace and in the mapped function.
    """

    def __init__(self, run: Callable[..., Any], *args: Any):
        self.closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
        (self.call,) = self.closed.jaxpr.eqns
        assert self.call.primitive.name == "shard_map", self.call.primitive.name
        if any(isinstance(array, jax.core.Tracer) for array in self.closed.consts):  # JAX 0.10 does not refuse it
            raise UserError(explicit.LEAKED)
        self.structure: Any = jax.tree.structure(shapes)
        self.values: list[Any] = jax.tree.leaves(args)
        closed_over = [array if tree.is_key(array) else np.asarray(array) for array in self.closed.consts]
        self.constants: dict[int, Any] = dict(enumerate(closed_over, len(self.values)))
        replicated = NamedSharding(self.call.params["mesh"], P())
        self.values += [jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=replicated) for own in closed_over]
        outer = [*self.closed.jaxpr.invars, *self.closed.jaxpr.constvars]
        self.number_of: dict[Any, int] = {var: number for number, var in enumerate(outer)}
        inner = self.call.params["jaxpr"].invars
        self.number_of |= {var: self.number_of[own] for var, own in zip(inner, self.call.invars)}


class Mapped:
    """Maps parts of a step in the same way as the `jax.shard_map` that the step is."""

    def __init__(self, call: jex.JaxprEqn):
        self._mesh, inner = call.params["mesh"], call.params["jaxpr"]
        self._axes = mesh_lib.manual(self._mesh)
        self._in_specs = dict(zip(inner.invars, call.params["in_specs"]))
        self._out_specs = {
            var: spec for var, spec in zip(inner.outvars, call.params["out_specs"]) if traces.is_var(var)
        }
        self._plain = {**self._out_specs, **self._in_specs}  # what is not stacked, also where a program reads a result
        self._over = tuple(axis for axis in self._mesh.axis_names if axis in self._axes)
        self._stacked = P(self._over)
        self.replicated = NamedSharding(self._mesh, P())
        self.is_emulated = mesh_lib.platform(self._mesh) == "cpu" and self._mesh.size > 1

    def specs(self, part: cut_lib.StepPart) -> PyTree:
        """Returns the specs of what a part reads and writes."""
        return tuple(map(self._plain.get, part.reads)), tuple(map(self._out_specs.get, part.writes))

    def specs_of_writes(self, part: cut_lib.StepPart) -> list[P]:
        """Returns a spec for each value that a part writes. Over the compiler's axes it divides the last dim but one if it can."""
        axes = tuple(axis for axis in self._mesh.axis_names if axis not in self._axes)
        ways = mesh_lib.size(self._mesh, axes)
        found = []
        for var in part.writes:
            shape: Any = getattr(var.aval, "shape", ())
            spec = self._out_specs.get(var, self._stacked)
            if var not in self._out_specs and len(shape) > 2 and axes and shape[-2] % ways == 0:
                spec = P(self._over, *[None] * (len(shape) - 2), axes)  # a leading dim counts devices
            found.append(spec)
        return found

    def program(
        self, part: cut_lib.StepPart, places: Sequence[int], beside: Callable[..., Sequence[Any]]
    ) -> Callable[..., Any]:
        """Returns f(*global values, integers if there are places, *arrays of the rider) -> list of global values.

        Args:
          part: the operations.
          places: of the integers that are an argument.
          beside: the rider's function, which is not mapped.
        """
        taken, reads = self._taken(part.reads), part.reads

        def on_device(*values: Any) -> list[Any]:
            integers = {place: values[-1][number] for number, place in enumerate(places)}
            own = self._own(reads, dict(zip(taken, values)))
            return self._stacked_if_own(part.writes, operations.run(part, own, integers, in_turn=self.is_emulated))

        run = self._over_devices(
            on_device, (*self._read_specs(reads, taken), *([P()] if places else [])), self._written_specs(part.writes)
        )
        count = len(reads) + bool(places)
        passed = [*taken, *range(len(reads), count)]

        def program(*values: Any) -> list[Any]:
            return [*run(*(values[number] for number in passed)), *beside(*values[count:])]

        program.__name__ = program.__qualname__ = f"{blocks.NAME}_{part.name}"
        return program

    def summing(
        self, part: cut_lib.StepPart, turns: Sequence[cut_lib.StepPart], grads: Sequence[Any], then: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns f(global values, sums, more) -> (global values, sums), which runs the parts of a part one after the other.

        Args:
          part: the operations.
          turns: they, in parts.
          grads: the variables of results whose sums the program takes and returns.
          then: f(number of a turn, values by variable, sums by variable of the gradient, more), called on each device after each turn. It
            changes both.
        """
        taken, reads = self._taken(part.reads), part.reads

        def on_device(values: list[Any], sums: list[Any], more: Any) -> tuple[list[Any], list[Any]]:
            made, total = self._own(reads, dict(zip(taken, values))), dict(zip(grads, sums))
            for number, turn in enumerate(turns):
                own = {var: made[var] for var in turn.reads}
                made.update(zip(turn.writes, operations.run(turn, own, {})))
                then(number, made, total, more)
            return self._stacked_if_own(part.writes, [made[var] for var in part.writes]), list(total.values())

        run = self._over_devices(
            on_device,
            (self._read_specs(reads, taken), self._written_specs(grads), P()),
            (self._written_specs(part.writes), self._written_specs(grads)),
        )
        return lambda values, sums, more: run([values[number] for number in taken], sums, more)

    def is_sharded(self, var: Any) -> bool:
        """Returns whether each device has a shard of an argument."""
        return bool(specs.axes(self._in_specs[var]))

    def place(self, var: Any) -> rounded.Place:
        """Returns where this device's shard of a result is, inside of a mapped function."""
        shape = var.aval.shape
        axes = [specs.names(entry) for entry in (*self._out_specs[var], *[None] * len(shape))]
        start = (jax.lax.axis_index(own) * length if own else 0 for own, length in zip(axes, shape))
        ways = (mesh_lib.size(self._mesh, own) for own in axes)
        return rounded.Place(tuple(start), tuple(length * count for length, count in zip(shape, ways)))

    def _taken(self, reads: Sequence[Any]) -> list[int]:
        """Returns the places of what a mapped function takes.

        An array without elements is made there: JAX 0.11.2 ends the process at a mapped function that gets one and does not read it.
        """
        return [number for number, var in enumerate(reads) if 0 not in getattr(var.aval, "shape", ())]

    def _own(self, reads: Sequence[Any], values: Mapping[int, Any]) -> dict[Any, Any]:
        """Returns what a device has of each variable."""
        own = lambda number, var: values[number] if var in self._plain else values[number][0]  # noqa: E731
        empty = lambda var: jnp.zeros(var.aval.shape, var.aval.dtype)  # noqa: E731
        return {var: own(number, var) if number in values else empty(var) for number, var in enumerate(reads)}

    def _stacked_if_own(self, writes: Sequence[Any], found: Sequence[Any]) -> list[Any]:
        return [value if var in self._out_specs else value[None] for var, value in zip(writes, found)]

    def _read_specs(self, reads: Sequence[Any], taken: Sequence[int]) -> list[P]:
        return [self._plain.get(reads[number], self._stacked) for number in taken]

    def _written_specs(self, writes: Sequence[Any]) -> list[P]:
        return [self._out_specs.get(var, self._stacked) for var in writes]

    def _over_devices(self, on_device: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            on_device, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, axis_names=self._axes, check_vma=False
        )
