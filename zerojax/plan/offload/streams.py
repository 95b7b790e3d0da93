"""Plans the stream of offloaded optimizer state through a device. This module counts its bytes and its device memory; `times` its time.

before the gradients    the first groups arrive, beside the program of the gradients: half of those in flight
after them              the other groups arrive, are updated and leave, both directions at once
in the next step        the last groups leave, beside its gradients

In a step block by block each block's pass is a program of its own (`offload.step_by_block`). Params in host memory arrive beside the
programs before their use. Where params are on the device, all groups in flight may arrive before the last backward pass. Where no norm is
waited for, the others arrive and are updated beside it. The plan of such a step is read from these programs, linked in their order by
`hlo.linked`. Sums of gradients over passes, their norm, the metrics and the updates are programs of their own, and are not linked: `times`
counts the traffic of sums and updates.
"""

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zerojax import jitted, tree
from zerojax.hlo import buffer_roles, linked, syntax
from zerojax.hlo import buffers as buffers_lib
from zerojax.plan import flops
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.offload import state_stream, step_by_block, streamed_step
from zerojax.zero.step_programs import passes, programs

# XLA of jax 0.10.2, without a GPU to try kernels on, finds no Triton kernel for some matmuls; cuBLAS has one for each.
_NO_KERNEL, _BY_CUBLAS = "find output tile sizes", {"xla_gpu_enable_triton_gemm": False}
_SCOPES = {"backward": "transpose(jvp())/"}  # autodiff's name, which a gather inside of a nested function lacks
_DTYPES = {"bfloat": "bf", "float8_": "f8", "float": "f", "uint": "u", "int": "s", "bool": "pred"}  # JAX -> HLO


Step = streamed_step.StreamedStep | step_by_block.BlockwiseStep


@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of one step on one device."""

    nbytes: int  # bytes of optimizer state in host memory, or on a disk. As many arrive in each step, and leave.
    groups: int  # the number of groups
    # device bytes of groups that arrive before the program of the gradients ends, or the last backward pass begins
    before: int
    in_flight: int  # device bytes of the groups that may leave beside the next step
    at_once: int  # device bytes of the groups in flight, and of the temporaries of an update
    peak: int  # device bytes during the updates: the state that stays, the gradients and `at_once`
    is_on_disk: bool = False  # whether the bytes are on a disk
    params_on_disk: bool = False  # whether params are
    # of a step block by block, whose peak is `peak`; None: the step is one program and its updates
    by_block: step_by_block.Memory | None = None
    is_early: bool = False  # whether the groups of a step block by block are updated beside the backward pass

    @property
    def fetched(self) -> int:
        """Returns the bytes of params that arrive in a step."""
        return self.by_block.fetched if self.by_block else 0

    @property
    def disk(self) -> int:
        """Returns the bytes on a disk. A step writes as many."""
        params = self.by_block.params if self.by_block and self.params_on_disk else 0
        return params + (self.nbytes if self.is_on_disk else 0)

    @property
    def read(self) -> int:
        """Returns the bytes that a step reads from a disk: params in each pass of a block."""
        params = self.by_block.fetched if self.by_block and self.params_on_disk else 0
        return params + (self.nbytes if self.is_on_disk else 0)


def plan(step: Step, gradients: buffers_lib.Buffers, state: State, batch: PyTree) -> Stream:
    """Plans the stream of a step whose program of the gradients is compiled. Compiles the programs of the updates, and those of blocks.

    Args:
      step: traced before, so that the gradients' dtypes are known.
      gradients: the memory of the program of the gradients.
      state, batch: of the step, abstract.
    """
    by_block = step.memory(state, batch) if isinstance(step, step_by_block.BlockwiseStep) else None
    groups, at_once = step.updates.groups, bytes_at_once(step.stream)
    held = sum(argument.nbytes for argument in gradients.arguments if argument.space == "device") + gradients.outputs
    counts = [group.nbytes for group in groups]
    # Where params arrive from the host, a group is sent a few programs before its update (`step_by_block.LEAD`).
    ahead = 0 if by_block is not None and by_block.params else step.ahead
    return Stream(
        nbytes=sum(counts),
        groups=len(groups),
        before=sum(counts[:ahead]),
        in_flight=sum(counts[: step.ahead]),
        at_once=at_once,
        peak=(by_block.passes if by_block else held) + at_once,
        is_on_disk=step.updates.is_on_disk,
        params_on_disk=step.updates.params_on_disk,
        by_block=by_block,
        is_early=isinstance(step, step_by_block.BlockwiseStep) and step.is_early,
    )


def bytes_at_once(stream: state_stream.StateStream) -> int:
    """Returns the device bytes of the groups in flight, of params that leave with them, and of the temporaries of an update.

    Compiles the programs of the updates.
    """
    updates, in_flight = stream.updates, stream.in_flight
    extra = max(map(jitted.bytes_beside, updates.compile()), default=0)
    windows = [updates.groups[n : n + in_flight] for n in range(len(updates.groups))]
    return max((sum(g.nbytes for g in window) + updates.param_bytes(window) for window in windows), default=0) + extra


def of(train_step: Any, gradients: buffers_lib.Buffers, state: State, args: Sequence[Any]) -> Stream | None:
    """Returns the stream of a step that has one."""
    return plan(train_step, gradients, state, *args) if isinstance(train_step, Step) else None


class Read(NamedTuple):
    """What a plan reads of a step."""

    buffers: buffers_lib.Buffers  # its memory
    module: str | syntax.Module  # its program, or its programs as one
    operations: dict[str, float]  # on all devices, by dtype
    executable: Any  # the step, compiled


def read(
    train_step: Any,
    state: State,
    args: Sequence[Any],
    *,
    from_cache: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Read:
    """Compiles a step and reads it; see `step_plan.plan_step`. Of a streamed step, the program of the gradients."""
    if isinstance(train_step, step_by_block.BlockwiseStep):
        return _read_blocks(train_step, state, *args, compiler_options=compiler_options)
    traced = train_step.trace(state, *args)
    lowered, options = traced.lower(), compiler_options or {}
    try:
        compiled, held = buffers_lib.compile_with_buffers(lowered, from_cache=from_cache, compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        options = {**options, **_BY_CUBLAS}
        compiled, held = buffers_lib.compile_with_buffers(lowered, from_cache=from_cache, compiler_options=options)
    executable = train_step.with_gradients(compiled) if isinstance(train_step, streamed_step.StreamedStep) else compiled
    return Read(held, held.hlo_text, flops.count(traced), executable)


def _read_blocks(
    step: step_by_block.BlockwiseStep, state: State, batch: PyTree, *, compiler_options: Mapping[str, Any] | None = None
) -> Read:
    """Compiles the programs of a pass and reads them.

    Args:
      step: the train step.
      state, batch: its arguments, abstract.
      compiler_options: XLA's, in addition to the step's own.
    """
    one_pass, count = step.one_pass(state, batch, compiler_options), step.passes.count
    cut = one_pass.schedule.cut
    leaves = {number: _leaf(step, one_pass, number) for number in one_pass.paths}
    runs = {id(program.run): program.run for program in cut.programs}
    modules = {key: syntax.parse(buffers_lib.text_of(run)) for key, run in runs.items()}
    first: dict[int, programs.StepProgram] = {}
    row = [
        linked.LinkedProgram(
            modules[id(program.run)],
            (*program.reads, *map(operator.invert, program.rider.gives)),
            (*program.writes, *program.rider.gives),
            _SCOPES.get(program.name, ""),
            _names(one_pass.paths, first.setdefault(id(program.run), program), program),
        )
        for program in cut.programs
    ]
    # A program reads a weight in device memory, and brings it from where it is stored: ~number.
    arguments = {~number: (leaf.path, array(cut.values[number], leaf.space)) for number, leaf in leaves.items()}
    arguments |= {number: (leaf.path, array(cut.values[number])) for number, leaf in leaves.items()}
    arguments |= {number: (f"constants/{number}", array(cut.values[number])) for number in cut.constants}
    module = linked.link(row, arguments, count, kept=() if step.donate else _kept(one_pass, leaves.values()))
    operations = {dtype: number * count for dtype, number in flops.count(cut.trace).items()}
    held = {leaf.path: leaf for leaf in (*leaves.values(), *_of_updates(step))}
    return Read(buffers_of(held), module, operations, step)


def _of_updates(step: step_by_block.BlockwiseStep) -> Iterable[buffers_lib.Argument]:
    """Yields the optimizer state on the device that only the updates of groups read."""
    updates = step.updates
    rest = {*updates.rest.positions, *updates.on_host}
    for number, (path, leaf) in enumerate(tree.flatten(updates.partition.abstract_state.opt_state)):
        if number not in rest:
            name = f"state/opt_state/{path}"
            role = buffer_roles.argument_role(name)
            yield buffers_lib.Argument(name, role, tree.shard_bytes(leaf), buffers_lib.DEVICE, step.donate)


def _names(paths: Mapping[int, str], first: programs.StepProgram, own: programs.StepProgram) -> dict[str, str]:
    """Returns the parts of weights' paths that differ between a program and the first of the same text."""
    pairs = [
        (paths[a].split("/"), paths[b].split("/")) for a, b in zip(first.reads, own.reads) if a in paths and b in paths
    ]
    return {a: b for one, other in pairs if len(one) == len(other) for a, b in zip(one, other) if a != b}


def _leaf(step: step_by_block.BlockwiseStep, one_pass: passes.PassPrograms, number: int) -> buffers_lib.Argument:
    """Returns a leaf of the arguments of a pass, where it is stored."""
    path, on_host = one_pass.paths[number], step.updates.rest.partition.on_host
    return buffers_lib.Argument(
        path,
        buffer_roles.argument_role(path),
        one_pass.schedule.cut.nbytes(number),
        buffers_lib.HOST if path.removeprefix("state/") in on_host else buffers_lib.DEVICE,
        step.donate and path.startswith("state/"),
    )


def _kept(one_pass: passes.PassPrograms, leaves: Iterable[buffers_lib.Argument]) -> set[str]:
    """Returns the paths of the device's leaves that a step that donates nothing returns in new memory: of params, the trained ones."""
    trained = {f"state/{path}" for path in one_pass.grads}
    state = {leaf.path for leaf in leaves if leaf.space == buffers_lib.DEVICE and leaf.path.startswith("state/")}
    return {path for path in state if path in trained or not path.startswith("state/params/")}


def array(value: jax.ShapeDtypeStruct, space: str = buffers_lib.DEVICE) -> syntax.Array:
    """Returns the type of a device's shard in HLO."""
    name = str(value.dtype)
    for jax_name, own in _DTYPES.items():
        if name.startswith(jax_name):
            name = own + name.removeprefix(jax_name)
            break
    dims = value.sharding.shard_shape(value.shape) if value.sharding else value.shape
    return syntax.Array(re.sub(r"\W", "", name), tuple(dims), space == buffers_lib.HOST)


def buffers_of(arguments: Mapping[str, buffers_lib.Argument]) -> buffers_lib.Buffers:
    """Returns the step's arguments. `Schedule.peak` is its peak, and `Stream` counts what it moves."""
    return buffers_lib.Buffers(buffers_lib.PROGRAMS, tuple(arguments.values()))
