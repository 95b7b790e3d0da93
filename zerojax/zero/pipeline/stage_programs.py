"""Compiles the passes of stages as programs. This module decides what a program takes and returns, and on which groups a value is read."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree
from zerojax.zero.gradients import accumulate
from zerojax.zero.host import memory_kind
from zerojax.zero.pipeline import divided, passes, segments, state, turns
from zerojax.zero.pipeline.order import BACKWARD, DIVIDED, FORWARD, WEIGHTS
from zerojax.zero.step_programs import cut, programs
from zerojax.zero.step_programs import passes as step_passes


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """One pass of a stage."""

    group: int  # of devices that run it
    reads: Sequence[int]  # the numbers of the values that it takes
    writes: Sequence[int]  # the numbers of the values that it returns
    sums: Mapping[str, jax.ShapeDtypeStruct]  # what it adds up, abstract, by the path of the weight
    weight: int | None  # the number of the weight of the micro-batch, if it takes it
    is_seeded: bool  # whether it takes a seed, by which its sums are rounded to bf16
    # f(values, sums, the weight or None, the seed or None) -> (values, sums), compiled; it reuses the memory of the sums, which are in
    # the order of `sums` and have no names, so that equal stages have equal programs. None for a group that another process runs.
    run: Any
    part: cut.StepPart  # its operations in the trace

    def on_values(self, micro: jax.Array, stage: int, *arrays: jax.Array) -> list[jax.Array]:
        """Runs the pass of a micro-batch. `arrays` are what `run` takes, one by one, with the number of the step in the place of a seed."""
        rest = iter(arrays)
        read, sums = ([next(rest) for _ in own] for own in (self.reads, self.sums))
        factor = None if self.weight is None else next(rest)
        seed = step_passes.seed(next(rest), micro, stage) if self.is_seeded else None
        written, sums = self.run(read, sums, factor, seed)
        return [*written, *sums]


@dataclasses.dataclass(frozen=True, eq=False)
class StagePrograms:
    """The programs for one shape of a micro-batch. Values have the numbers of the traces, which are equal on all groups."""

    programs: dict[tuple[str, int], StageProgram]  # by kind and stage
    paths: Mapping[int, str]  # where a value comes from that no program makes, as of `passes.Trace`, by number
    constants: Mapping[int, Any]  # the values that are arrays and random keys of the trace, by number
    readers: dict[int, Sequence[int]]  # the groups that read a value, by number; the first one gets all of `kept`
    metrics: Any  # the tree of the metrics, with `passes.Result`s
    weight: int | None  # the number of the weight of a micro-batch among those of a step; None if they count alike
    kept: set[int]  # the numbers of what a micro-batch leaves: its weight and its metrics
    values: dict[int, jax.ShapeDtypeStruct]  # all values, abstract, as some group holds them, by number

    def nbytes(self, number: int) -> int:
        """Returns the bytes of a value on each device of a group."""
        return tree.shard_bytes(self.values[number])


def compiled(
    of_groups: Sequence[passes.Pass],
    placed: state.Placed,
    micro: PyTree,
    options: Mapping[str, Any],
    alike: dict[str, jax.stages.Compiled] | None = None,
) -> StagePrograms:
    """Compiles the programs of all stages.

    Args:
      of_groups: one pass on each group, or one that stands for all, where nothing runs.
      placed: the pipeline of the state.
      micro: a micro-batch of all devices, abstract or not.
      options: XLA's.
      alike: programs by their text, of which equal ones are compiled once; None if they run, for each is its group's.

    Raises:
      UserError: the loss returns values of the state.
    """
    traces = [own.traced(micro) for own in of_groups]
    cuts = [segments.of_trace(trace.inner, placed.stages, stage_of_call=placed.stage_of_call) for trace in traces]
    if placed.pipeline.schedule in DIVIDED:
        cuts = [divided.of(cut, trace.inner) for cut, trace in zip(cuts, traces)]
    count = len(placed.groups)
    if len(traces) < count:
        traces, cuts = traces * count, cuts * count
    (_, aux), _ = traces[0].results(cuts[0])
    if aux["state"]:
        raise UserError(
            f"pipe: the loss returns the state's field {min(aux['state'])!r}, which each micro-batch would need from the one before; "
            "return metrics alone, or set `pipe=1`"
        )
    grads, weight = traces[0].grads(cuts[0]), aux["weight"].number if "weight" in aux else None
    results = [weight, *(result.number for result in jax.tree.leaves(aux["metrics"], is_leaf=passes.is_result))]
    kept, known = {number for number in results if number is not None}, dict(traces[0].values)
    found = StagePrograms({}, traces[0].paths, traces[0].constants, {}, aux["metrics"], weight, kept, known)
    stages = range(placed.stages)
    keys = [
        *((FORWARD, n) for n in stages),
        *((BACKWARD, n) for n in reversed(stages)),
        *((WEIGHTS, n) for n in stages),
    ]
    for key in filter(cuts[0].segments.__contains__, keys):
        group = key[1] % count
        of_group = of_groups[group % len(of_groups)], traces[group], cuts[group]
        found.programs[key] = _program(found, *of_group, key, placed, grads, options, alike)
    weighing = {own.group for own in found.programs.values() if own.weight is not None}
    for number in known:
        groups = _groups(cuts[0], number, count, kept)
        found.readers[number] = sorted({*groups, *(weighing if number == weight else ())})
    return found


def _groups(cut: segments.Segments, number: int, count: int, kept: Collection[int]) -> set[int]:
    """Returns the groups that read a value; the first one gets what a micro-batch leaves."""
    return {stage % count for stage in cut.readers(number)} | ({0} if number in kept else set())


def _program(
    before: StagePrograms,
    of_group: passes.Pass,
    trace: passes.Trace,
    found: segments.Segments,
    key: tuple[str, int],
    placed: state.Placed,
    grads: Mapping[str, int],
    options: Mapping[str, Any],
    alike: dict[str, jax.stages.Compiled] | None,
) -> StageProgram:
    """Compiles one program, and adds the abstract values that it returns to those `before` it."""
    part, reads, count = found.segments[key], found.reads[key], len(placed.groups)
    mesh, writes, group = of_group.partition.mesh, found.writes[key], key[1] % count
    weight, values = before.weight, before.values
    read_elsewhere = before.kept.union(*(numbers for other, numbers in found.reads.items() if other != key))
    leaving = {number for number in writes if _groups(found, number, count, before.kept) - {group}}
    own = dict(sorted((path, number) for path, number in grads.items() if number in writes))
    kept = [number for number in writes if number in read_elsewhere or number not in own.values()]
    far = {number for number, var in zip(writes, part.writes) if var.aval.memory_space == jax.memory.Space.Host}
    mapped = programs.Mapped(trace.call)
    var_of = {**dict(zip(reads, part.reads)), **dict(zip(writes, part.writes))}
    taken_weight = weight if own and weight not in writes else None
    is_seeded = of_group.in_16_bits and bool(own)
    grad_of = {path: var_of[number] for path, number in own.items()}
    kind = FORWARD if key[0] == FORWARD else BACKWARD
    weights = [var_of[number] for number in trace.params.values() if number in reads]
    gathered = set(filter(mapped.is_sharded, weights))
    weight_of = {var: var_of.get(trace.params[path]) for path, var in grad_of.items()}
    in_turns = turns.of(part, kind, weight_of) if kind == BACKWARD or gathered else [part]
    factor_var = var_of[weight] if own and weight in writes else None
    if len(in_turns) == 1 or factor_var not in {None, *in_turns[0].writes}:
        run = _summed_after(mapped, part, grad_of, factor_var)
    else:
        run = _summed_in_turns(mapped, part, in_turns, grad_of, factor_var, gathered, lags=mesh.size > 1)

    def program(read: list[jax.Array], sums: list[jax.Array], factor: Any, seed: Any) -> tuple[list[Any], list[Any]]:
        made, total = run(read, sums, factor, seed)
        return [made[var_of[number]] for number in kept], total

    taken = [on_mesh(values[number], mesh) for number in reads]
    sums = {path: of_group.summed(path) for path in own}
    # What leaves has a sharding that each process knows, also if it does not compile the program.
    specs = dict(zip(writes, mapped.specs_of_writes(part)))
    known = [NamedSharding(mesh, specs[number]) if number in leaving else None for number in kept]
    shardings = (known, [like.sharding for like in sums.values()])
    program.__name__ = program.__qualname__ = f"stage_{key[1]}_{key[0]}"
    factor = None if taken_weight is None else on_mesh(values[taken_weight], mesh)
    seed = jax.ShapeDtypeStruct((), np.uint32, sharding=NamedSharding(mesh, P())) if is_seeded else None
    if alike is None and not placed.is_here(group):
        made, _ = jax.eval_shape(program, taken, [*sums.values()], factor, seed)
        for number, like in zip(kept, made):
            sharding = memory_kind.of_value(mesh, specs[number], is_on_host=number in far)
            values[number] = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
        return StageProgram(group, reads, kept, sums, taken_weight, is_seeded, None, part)
    lowered = jax.jit(program, donate_argnums=1, out_shardings=shardings).lower(taken, [*sums.values()], factor, seed)
    done = together(lowered, program.__name__, alike, options)
    for number, like, sharding in zip(kept, done.out_info[0], done.output_shardings[0]):
        place = memory_kind.of_value(mesh, sharding.spec, is_on_host=number in far)
        values[number] = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)
    return StageProgram(group, reads, kept, sums, taken_weight, is_seeded, done, part)


# f(what the pass reads, sums, the weight or None, the seed or None) -> (what it makes, by variable, sums)
_Summing = Callable[[list[Any], list[Any], Any, Any], tuple[dict[Any, Any], list[Any]]]


def _summed_after(mapped: programs.Mapped, part: cut.StepPart, grad_of: Mapping[str, Any], factor_var: Any) -> _Summing:
    """Returns a pass that adds up its gradients at its end; `grad_of` are their variables by path, `factor_var` is that of its weight."""
    run = mapped.program(part, (), lambda *arrays: ())

    def program(read: list[Any], sums: list[Any], factor: Any, seed: Any) -> tuple[dict[Any, Any], list[Any]]:
        made = dict(zip(part.writes, run(*read)))
        grads = {path: made[var] for path, var in grad_of.items()}
        added = accumulate.added(dict(zip(grad_of, sums)), grads, made.get(factor_var, factor), seed)
        return made, [added[path] for path in grad_of]

    return program


def _summed_in_turns(
    mapped: programs.Mapped,
    part: cut.StepPart,
    in_turns: Sequence[cut.StepPart],
    grad_of: Mapping[str, Any],
    factor_var: Any,
    gathered: Collection[Any],
    *,
    lags: bool,
) -> _Summing:
    """Returns the same in turns: each adds up its gradients, and the next one waits for them or, if it `lags`, for those before.

    `gathered` are the variables of weights that the pass gathers.
    """

    def then(turn: int, made: dict[Any, Any], total: dict[Any, Any], more: tuple[Any, Any]) -> None:
        new = {path: var for path, var in grad_of.items() if var in in_turns[turn].writes}
        sums, grads = ({path: of[var] for path, var in new.items()} for of in (total, made))
        factor, seed = more
        numbers = [number for number, path in enumerate(grad_of) if path in new]  # as without turns
        places = {} if seed is None else {path: mapped.place(var) for path, var in new.items()}
        added = accumulate.added(sums, grads, made.get(factor_var, factor), seed, numbers, places)
        total |= {new[path]: value for path, value in added.items()}
        held, waited = turns.ends(in_turns, turn, total, gathered, lags=lags)
        # The tokens of `overlap` do not pass between programs. Without this XLA mixes the turns, and holds what all blocks compute again.
        now, summed = jax.lax.optimization_barrier(([made[var] for var in held], [total[var] for var in waited]))
        made.update(zip(held, now))
        total.update(zip(waited, summed))

    run = mapped.summing(part, in_turns, [*grad_of.values()], then)

    def program(read: list[Any], sums: list[Any], factor: Any, seed: Any) -> tuple[dict[Any, Any], list[Any]]:
        made, total = run(read, sums, (factor, seed))
        return dict(zip(part.writes, made)), total

    return program


def together(
    lowered: jax.stages.Lowered,
    name: str,
    alike: dict[str, jax.stages.Compiled] | None,
    options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles a program, or returns the one of `alike` whose text is the same but for its name."""
    own = dict(options or {})
    if alike is None:
        return lowered.compile(compiler_options=own)
    text = hashlib.sha256(lowered.as_text().replace(name, "").encode()).hexdigest()
    if text not in alike:
        alike[text] = lowered.compile(compiler_options=own)
    return alike[text]


def on_mesh(like: Leaf, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Returns an abstract array of a group on another one."""
    place = memory_kind.of_value(mesh, like.sharding.spec, is_on_host=memory_kind.is_on_host(like))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)
