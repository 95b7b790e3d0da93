"""Finds the contents of a compiled step's memory over time. This module compiles the step and reads XLA's buffer assignment.

    peak = arguments + outputs that reuse no argument + constants + temporaries

XLA packs the temporaries into one block, in which values that are alive at different times share memory. The size of the block is the
maximum of the bytes alive at a time, plus the waste of the packing. The numbers are the same for real and for compile-only devices.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from zerojax import errors
from zerojax import roles as roles_lib
from zerojax.errors import UserError
from zerojax.hlo import buffer_dump, buffer_roles, parameters, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.hlo.buffer_dump import DEVICE, HOST, TEMPORARY, Dump, Value

ASSIGNMENT, ANALYSIS, PROGRAMS = "buffer assignment", "memory analysis", "programs of blocks"
_ROOM = 4 << 20  # bytes that are free on a disk with room for XLA's dump
_POINTS = 400  # maximum points of a curve; a step of a 70B model has a hundred thousand instructions


@dataclasses.dataclass(frozen=True)
class Argument:
    """A leaf of the step's arguments on one device."""

    path: str  # the argument's name in the step, then the leaf's path in it ("state/params/layer_0/kernel")
    role: str  # one of `roles.PARAMS`, MASTER, MOMENTS and REST, or a role of the caller's table
    nbytes: int  # on one device
    space: str  # "device" or "host"
    is_donated: bool  # whether an output reuses its memory


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A value that is alive at the peak.

    Attributes:
      name: the instruction that computes it; "name{2}" is element 2 of its tuple.
      role: one of `roles.TEMPORARY`.
      nbytes, type: its size and its type in HLO.
      start, end: the first and last position in the order of instructions where it is alive.
      op_name, source: the scopes and the source line that it was traced from; "" if XLA lost them.
    """

    name: str
    role: str
    nbytes: int
    type: str
    start: int
    end: int
    op_name: str
    source: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """Bytes of temporaries in the order of instructions, at the fullest position of each of a few hundred intervals."""

    positions: tuple[int, ...]
    by_role: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Buffers:
    """A step's memory on one device, in bytes.

    Attributes:
      source: "buffer assignment", or "memory analysis" if XLA dumped no assignment. The analysis has totals only. Those of several programs
        ("programs of blocks") have arguments only.
      arguments: every leaf.
      outputs, constants: outputs that reuse no argument's memory, and constants.
      temporaries: the size of the block of temporaries.
      host: bytes in host memory.
      peak_position, length: the position of the peak in the order of instructions, and the number of instructions.
      at_peak: the temporaries that are alive at the peak, the largest first.
      curve: temporaries in the order of instructions; None without an assignment.
      hlo_text: the compiled program.
    """

    source: str
    arguments: tuple[Argument, ...]
    outputs: int = 0
    constants: int = 0
    temporaries: int = 0
    host: int = 0
    peak_position: int = 0
    length: int = 0
    at_peak: tuple[Temporary, ...] = ()
    curve: Curve | None = None
    hlo_text: str = dataclasses.field(default="", repr=False)

    @property
    def peak(self) -> int:
        """Returns the bytes of device memory that the step needs."""
        held = sum(argument.nbytes for argument in self.arguments if argument.space == DEVICE)
        return held + self.outputs + self.constants + self.temporaries

    @property
    def arguments_by_role(self) -> dict[str, int]:
        """Returns the bytes of arguments in device memory, by role."""
        return _sums((a.role, a.nbytes) for a in self.arguments if a.space == DEVICE)

    @property
    def temporaries_by_role(self) -> dict[str, int]:
        """Returns the bytes of temporaries at the peak, by role. PACKING is the unused part of the block."""
        found = _sums((t.role, t.nbytes) for t in self.at_peak)
        return found | {roles_lib.PACKING: self.temporaries - sum(found.values())}


def compile_with_buffers(
    lowered: jax.stages.Lowered, *, from_cache: bool = False, compiler_options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, Buffers]:
    """Compiles a step and returns it with its memory.

    Args:
      lowered: `jax.jit(step).lower(abstract_state, abstract_batch)`.
      from_cache: uses JAX's persistent compilation cache, if it is on. Then, or if the disk of temporary files is full, there are totals
        only, because XLA assigns or dumps no buffers.
      compiler_options: XLA options.

    Raises:
      UserError: the disk of temporary files is full.

    >>> compiled, buffers = compile_with_buffers(train_step.lower(partition.abstract_state, batch))
    """
    is_cached = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if from_cache and (is_cached or _free(tempfile.gettempdir()) < _ROOM):
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
        return compiled, _buffers(lowered, compiled, None)
    with tempfile.TemporaryDirectory(prefix="zerojax-buffers-") as folder:
        options = {**(compiler_options or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        _check_room(folder)
        with _without_cache():
            compiled = lowered.compile(compiler_options=options)
        _check_room(folder)  # XLA reports a full disk to stderr alone, and goes on
        dump = buffer_dump.read(pathlib.Path(folder))
    return compiled, _buffers(lowered, compiled, dump)


def _check_room(folder: str) -> None:
    """Raises a UserError if the disk of a temporary folder is full, on which XLA's dump would be cut or missing."""
    if (free := _free(folder)) < _ROOM:
        raise UserError(
            f"{os.path.dirname(folder)}: has {free} bytes free, and XLA writes there how a compiled step uses memory; make room, or name "
            "another folder by TMPDIR"
        )


def _free(folder: str) -> int:
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Turns off the persistent cache. XLA assigns no buffers for a program from the cache, and so dumps nothing."""
    is_enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not (is_enabled and jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the cache reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", is_enabled)
        compilation_cache.reset_cache()


def _buffers(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, dump: Dump | None) -> Buffers:
    text = text_of(compiled)
    module = syntax.parse(text)
    leaves = parameters.leaves(lowered, module)
    if dump is None:
        return _from_analysis(compiled.memory_analysis(), module, leaves)
    flow = hlo_flow.flow(module)
    arguments = tuple(_arguments(dump, leaves))
    own = [a for a in dump.allocations if a.space == DEVICE]
    kinds = _sums((a.kind, a.nbytes) for a in own)
    reader = _reader(flow, dump, leaves)
    values = [v for a in own if a.kind == TEMPORARY for v in _one_at_a_time(a.values)]
    curve, position = _curve(values, reader, dump.length)
    alive = sorted((v for v in values if v.start <= position <= v.end), key=lambda v: -v.nbytes)
    return Buffers(
        source=ASSIGNMENT,
        arguments=arguments,
        outputs=kinds.get(buffer_dump.OUTPUT, 0),
        constants=kinds.get(buffer_dump.CONSTANT, 0),
        temporaries=kinds.get(TEMPORARY, 0),
        host=sum(a.nbytes for a in dump.allocations if a.space == HOST),
        peak_position=position,
        length=dump.length,
        at_peak=tuple(_temporary(value, reader, module) for value in alive),
        curve=curve,
        hlo_text=text,
    )


def text_of(compiled: Any) -> str:
    """Returns the text of a compiled program.

    Raises:
      UserError: JAX cannot read what the compiler, a plugin of another version, has written.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"the compiled program: jax {jax.__version__} cannot read what its compiler wrote ({errors.first_line(error)}); install the "
            "version of the compiler's plugin that goes with it: pip install 'zerojax[plan-tpu]' or 'zerojax[plan-gpu]'"
        ) from error


def _from_analysis(stats: Any, module: syntax.Module, leaves: Mapping) -> Buffers:
    """Returns buffers with totals only."""
    donated = set(module.aliases.values())
    arguments = []
    for number, parameter in module.entry.parameters.items():
        path = leaves[number].path
        space = HOST if any(array.is_on_host for array in parameter.arrays) else DEVICE
        nbytes = sum(array.nbytes for array in parameter.arrays)
        arguments.append(Argument(path, buffer_roles.argument_role(path), nbytes, space, number in donated))
    found = Buffers(ANALYSIS, tuple(arguments), length=len(module.entry.instructions), hlo_text=module.text)
    host = sum(a.nbytes for a in arguments if a.space == HOST)
    if stats is None:
        return dataclasses.replace(found, host=host)
    kept = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return dataclasses.replace(
        found,
        outputs=max(0, kept - found.peak),
        temporaries=stats.temp_size_in_bytes,
        host=host + stats.host_temp_size_in_bytes,
    )


def _arguments(dump: Dump, leaves: Mapping[int, parameters.ArgumentLeaf]) -> Iterable[Argument]:
    for allocation in dump.allocations:
        if allocation.parameter is not None and allocation.parameter in leaves:
            path = leaves[allocation.parameter].path
            role = buffer_roles.argument_role(path)
            yield Argument(path, role, allocation.nbytes, allocation.space, allocation.is_output)


def _reader(flow: hlo_flow.Flow, dump: Dump, leaves: Mapping[int, parameters.ArgumentLeaf]) -> buffer_roles.Reader:
    known = {number: buffer_roles.argument_role(leaf.path) for number, leaf in leaves.items()}
    weights = [number for number, role in known.items() if role in (roles_lib.PARAMS, roles_lib.MASTER)]
    shapes = buffer_roles.shapes((known[number], leaf.shape, leaf.part) for number, leaf in leaves.items())
    return buffer_roles.Reader(flow, dump.started, weights, shapes)


def _one_at_a_time(values: Iterable[Value]) -> list[Value]:
    """Shortens the lives of values at the same offset so that none overlap: such values are one buffer with several names."""
    free_from: dict[int, int] = {}
    disjoint = []
    for value in sorted(values, key=lambda v: (v.start, -v.nbytes)):
        start = max(value.start, free_from.get(value.offset, 0))
        if value.start >= 0 and start <= value.end:
            disjoint.append(dataclasses.replace(value, start=start))
            free_from[value.offset] = value.end + 1
    return disjoint


def _curve(values: Sequence[Value], reader: buffer_roles.Reader, length: int) -> tuple[Curve, int]:
    """Returns the bytes that are alive, by role, and the position of their maximum."""
    changes = {role: np.zeros(length + 2, np.int64) for role in roles_lib.TEMPORARY}
    for value in values:
        change = changes[reader.role(value)]
        change[min(value.start, length)] += value.nbytes
        change[min(value.end, length) + 1] -= value.nbytes
    live = {role: np.cumsum(change)[: length + 1] for role, change in changes.items()}
    total = sum(live.values(), np.zeros(length + 1, np.int64))
    edges = np.unique(np.linspace(0, length + 1, min(_POINTS, length + 1) + 1).astype(int))
    positions = [int(start + np.argmax(total[start:end])) for start, end in itertools.pairwise(edges)]
    by_role = {role: tuple(int(column[position]) for position in positions) for role, column in live.items()}
    return Curve(tuple(positions), by_role), int(np.argmax(total))


def _temporary(value: Value, reader: buffer_roles.Reader, module: syntax.Module) -> Temporary:
    found = reader.find(value)
    source = module.source(found[1]) if found is not None else ""
    name = f"{value.name}{{{value.index}}}" if value.index else value.name
    return Temporary(
        name, reader.role(value), value.nbytes, value.type, value.start, value.end, reader.op_name(value), source
    )


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, nbytes in pairs:
        found[key] = found.get(key, 0) + nbytes
    return found
