"""A train step whose layers are on several groups of devices. This module sends the programs of the stages in the order of a schedule.

Each stage has two programs, its forward and its backward pass of a micro-batch, or three (`divided`). What one makes and another group
reads is sent as soon as it is made, beside the programs. A backward pass adds its gradients to sums that stay on its group. Each group
updates its own weights, after all have exchanged their gradients' sums of squares.

One thread sends all programs, in the order in which the schedule's timeline begins them. A group runs its own in that order, and each waits
for what it reads. So the order decides what memory holds, and not what is computed. With several processes each walks over the whole order,
sends the programs of its own groups, and joins what travels to and from them (`travel`) when the timeline says that it is made.
"""

import collections
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.pipeline import group_update, passes, sending, stage_programs, state
from zerojax.zero.pipeline import order as order_lib
from zerojax.zero.sharded_batch import arguments, inputs
from zerojax.zero.step_programs import passes as step_passes
from zerojax.zero.step_programs import schedule
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement


def of(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    layout: inputs.Layout,
    scaling: update_lib.Unscaled,
    clip: update_lib.Clip,
    reduce_dtype: DTypeLike | None,
    *,
    compute_dtype: DTypeLike | None,
    in_16_bits: bool,
    one_program: placement.OneProgram | None,
    donate: bool,
    options: Mapping[str, Any],
) -> "PipelineStep":
    """Returns the step of `make_train_step` for a partition with a pipeline. Its arguments are that function's.

    Raises:
      UserError: a setting does not go together with a pipeline.
    """
    group_update.check(partition)
    if reduce_dtype is None:
        raise UserError(
            "reduce_dtype: is None, and a pipeline sums gradients by collectives of its own; pass reduce_dtype=jnp.float32"
        )
    if one_program is not None:
        raise UserError(
            f"{one_program.argument}: {one_program.why}, and the stages of a pipeline are several; {one_program.way_out}, or set `pipe=1`"
        )
    if layout.passes == 1:
        count = len(partition.pipeline.groups)
        warnings.warn(
            f"grad_accum: is 1, so the {count} groups of a pipeline run one after another, and each waits {1 - 1 / count:.0%} of the time; "
            f"divide a step's examples into at least {count} passes, and several times as many to wait less",
            stacklevel=3,
        )
    of_groups = [
        passes.Pass(
            loss_fn,
            dataclasses.replace(group, abstract_state=group.on_device.abstract_state),
            how,
            dataclasses.replace(layout.of_one_pass, mesh=group.mesh),
            reduce_dtype,
            compute_dtype,
            layout.passes,
            in_16_bits and layout.passes > 1,
        )
        for group in partition.pipeline.groups
    ]
    return PipelineStep(of_groups, partition, layout, scaling, clip, donate=donate, options=options)


class PipelineStep:
    """`train_step(state, batch) -> (state, metrics)` over the groups of a pipeline.

    Attributes:
      order: of the passes.
      sent: all of them, in the order in which they are sent, each with whether it is the last of its micro-batch.
      placed: the pipeline of the state.
      updates: of each group.
      donate: whether the old state's memory is reused.

    Args:
      of_groups: one pass on each group.
      partition: with a pipeline.
      layout: of the batch.
      scaling, clip: of the update.
      donate: as the attribute.
      options: XLA's, for each program.
    """

    def __init__(
        self,
        of_groups: Sequence[passes.Pass],
        partition: partition_lib.Partition,
        layout: inputs.Layout,
        scaling: update_lib.Unscaled,
        clip: update_lib.Clip,
        *,
        donate: bool,
        options: Mapping[str, Any],
    ):
        self._of_groups, self._options, self._mesh, self._partition = of_groups, options, partition.mesh, partition
        self._structure: Any = jax.tree.structure(partition.abstract_state)
        self._paths = [path for path, _ in tree.flatten(partition.abstract_state)]
        self.placed: state.Placed = partition.pipeline
        self.donate = donate
        settings, groups = self.placed.pipeline, self.placed.groups
        self.order = order_lib.make(settings.schedule, len(groups), layout.passes, chunks=settings.chunks)
        self.sent = order_lib.sent(self.order)
        self._meshes = [group.mesh for group in groups]
        self.travel = self.placed.travel
        self._here = [group for group, is_here in enumerate(self.travel.here) if is_here]
        self._prepare = jax.jit(functools.partial(layout.micro_batches, of_groups[0].compute_dtype))
        self.updates = [
            group_update.GroupUpdate(self.placed, number, own.reduction, scaling, clip, donate=donate)
            for number, own in enumerate(of_groups)
        ]
        self._zeros = [self._maker_of_zeros(number) for number in range(len(groups))]
        self._programs: dict[Any, stage_programs.StagePrograms] = {}
        self._orders: dict[stage_programs.StagePrograms, tuple[list[sending.Move], schedule.ProgramOrder]] = {}
        self._numbers: dict[tuple[int, int], jax.Array] = {}

    def __call__(self, state: State, batch: PyTree) -> tuple[Any, dict[str, jax.Array]]:
        """Sends a step to the devices, and returns the new state and the metrics."""
        with arguments.explaining(self._partition, state, batch):
            leaves, structure = jax.tree.flatten(state)
            if structure != self._structure:
                raise TypeError("the state is not like the partition's")  # `explaining` says how
            new, metrics = self._updated(dict(zip(self._paths, leaves)), batch)
            return jax.tree.unflatten(structure, [new[path] for path in self._paths]), metrics

    def _updated(self, leaves: dict[str, Any], batch: PyTree) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """Returns the new leaves of the state, by path, and the metrics."""
        groups = {group: self.updates[group].begin(leaves) for group in self._here}
        sums, metrics, count = self._run(leaves, self._prepare(batch))
        # before one reuses the memory of what several read
        read = {group: self.updates[group].read(leaves) for group in self._here}
        done = {group: self.updates[group].squares(own, sums, count[group]) for group, own in read.items()}
        squares = self._exchanged({group: own for group, (_, own) in done.items()})
        shared: dict[str, list[jax.Array]] = collections.defaultdict(list)
        handed: dict[int, Any] = {}
        for group in self._here:
            new, of_update, handed[group] = self.updates[group].apply(read[group], done[group][0], squares[group])
            everywhere = {path for path in new if self.placed.homes[path] == state.EVERYWHERE}
            leaves |= {path: leaf for path, leaf in new.items() if path not in everywhere}
            for path in everywhere:
                shared[path].append(new[path])
        leaves |= {path: state.joined(parts, self._mesh) for path, parts in shared.items()}
        del done
        for _ in itertools.zip_longest(
            *(self.updates[group].streamed(leaves, groups[group], handed.pop(group)) for group in self._here)
        ):
            pass  # all groups in turn, as each waits for its own copies
        return leaves, {**metrics, **of_update}

    def micro(self, batch: PyTree) -> PyTree:
        """Returns one micro-batch of an abstract batch."""
        return jax.eval_shape(self._prepare, batch)[0]

    def programs(self, micro: PyTree, options: Mapping[str, Any] | None = None) -> stage_programs.StagePrograms:
        """Returns the programs for a micro-batch of all devices, abstract or not. This process' own are compiled, once for each shape.

        Args:
          micro: the micro-batch.
          options: XLA's, in addition to the step's own; programs that are compiled before do not have them.
        """
        leaves, structure = jax.tree.flatten(micro)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._programs:
            every = {**self._options, **(options or {})}
            self._programs[key] = stage_programs.compiled(self._of_groups, self.placed, micro, every)
        return self._programs[key]

    def stand_ins(
        self, micro: PyTree, options: Mapping[str, Any] | None, alike: dict[str, jax.stages.Compiled]
    ) -> stage_programs.StagePrograms:
        """Returns `programs` where not all devices are here: all for one group's that are, and equal ones compiled once, in `alike`."""
        every = {**self._options, **(options or {})}
        return stage_programs.compiled([self._of_groups[self._here[0]]], self.placed, micro, every, alike)

    def update_programs(
        self, found: stage_programs.StagePrograms, alike: dict[str, jax.stages.Compiled] | None = None
    ) -> list[tuple[jax.stages.Compiled, ...]]:
        """Returns the two programs of each group's update, compiled apart from those that run; `alike` as of `stand_ins`.

        Those of a group of another process are the ones of a group that is here.
        """
        programs: list[tuple[jax.stages.Compiled, ...]] = []
        for group in range(len(self._meshes)):
            of = group if self.travel.here[group] else self._here[0]
            update = self.updates[of]
            one = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self._meshes[of], P()))
            sums = {path: self._of_groups[of].summed(path) for path in update.trained}
            squares = [dict.fromkeys(other.trained, one) for other in self.updates]
            lowered = update.lowered(sums, self.order.micros if found.weight is None else one, squares)
            programs.append(tuple(stage_programs.together(own, "", alike) for own in lowered))
        return programs

    def _run(self, leaves: Mapping[str, jax.Array], micros: Sequence[Any]) -> tuple[dict[str, jax.Array], Any, Any]:
        """Sends all passes. Returns the sums of gradients, the metrics, and how much the passes count together, on each group."""
        found, totals = self.programs(micros[0]), step_passes.Totals()
        if found not in self._orders:
            due = None if self.travel.is_one else order_lib.due(self.order)
            # emulated devices share threads, which waiting programs may use up
            is_serial = mesh_lib.platform(self._mesh) == "cpu"
            runner = functools.partial(self._runner, found)
            self._orders[found] = sending.of(found, self.sent, due, self._here, runner, is_serial=is_serial)
        moves, order = self._orders[found]

        def done(index: int, values: dict[Any, Any]) -> None:
            def value(own: passes.Result) -> jax.Array:
                if own.number is None:
                    return jnp.asarray(own.atom.val, own.atom.aval.dtype)
                return values[sending.name(found, own.number, moves[index].op.micro, 0)]

            if moves[index].target is None:
                totals.add(jax.tree.map(value, found.metrics, is_leaf=passes.is_result))
                totals.weights += [] if found.weight is None else [value(passes.Result(found.weight, None))]

        values = self._given(found, leaves, micros)
        order.run(values, done)
        sums = {path: values[path] for group in self._here for path in self.updates[group].trained}
        return sums, *self._totals(found, totals, len(micros))

    def _runner(self, found: stage_programs.StagePrograms, move: sending.Move) -> Callable[..., Sequence[Any]]:
        """Returns what a move does with the values that it reads."""
        op, program, target, numbers = move
        if target is None:
            return lambda *left: ()
        if target == program.group:
            return functools.partial(program.on_values, self._number(op.micro, target), op.stage)
        likes = [found.values[number] for number in numbers]
        return lambda *made: self.travel.hop(made or [None] * len(likes), likes, program.group, target)

    def _totals(
        self, found: stage_programs.StagePrograms, totals: step_passes.Totals, count: int
    ) -> tuple[Any, Mapping[int, Any]]:
        """Returns the metrics of a step, and how much its passes count together on each group, from the sums on the first group."""
        metrics = None if totals.metrics is None else step_passes.metric_values(totals.metrics, count)
        weight: Any = totals.weight
        if not self.travel.is_one:
            metrics, weight = self._shared_totals(found, metrics, weight, count)
        if found.weight is None:
            return metrics, dict.fromkeys(self._here, count)
        if self.travel.is_one:
            on = {group: NamedSharding(self._meshes[group], state.spec(weight)) for group in self._here}
            return metrics, {group: jax.device_put(weight, sharding) for group, sharding in on.items()}
        return metrics, {group: state.view(weight, self._meshes[group]) for group in self._here}

    def _shared_totals(self, found: stage_programs.StagePrograms, metrics: PyTree, weight: Any, count: int) -> Any:
        """Returns metrics and weight on all devices. Processes without the first group know their shapes alone."""

        def abstract(own: passes.Result) -> Leaf:
            return own.atom.aval if own.number is None else found.values[own.number]

        likes = jax.tree.map(abstract, found.metrics, is_leaf=passes.is_result)
        likes = jax.eval_shape(functools.partial(step_passes.metric_values, count=count), likes)
        likes = (likes, () if found.weight is None else found.values[found.weight])
        own = [None] * len(jax.tree.leaves(likes)) if metrics is None else jax.tree.leaves((metrics, weight))
        return jax.tree.unflatten(jax.tree.structure(likes), self._shared(own, jax.tree.leaves(likes)))

    def _shared(self, own: Sequence[Any], likes: Sequence[Any], homes: Sequence[int] | None = None) -> list[jax.Array]:
        """Returns replicated arrays of groups, by default the first, on all devices."""
        replicated = NamedSharding(self._meshes[0], P())
        likes = [jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=replicated) for like in likes]
        return self.travel.shared(own, likes, homes or [0] * len(likes))

    def _exchanged(self, squares: Mapping[int, dict[str, jax.Array]]) -> dict[int, list[dict[str, jax.Array]]]:
        """Returns on each group of this process the sums of squares of all groups."""
        if self.travel.is_one:
            of_all = [*squares.values()]
            return {n: jax.device_put(of_all, NamedSharding(self._meshes[n], P())) for n in squares}
        names = [(group, path) for group, update in enumerate(self.updates) for path in update.trained]
        found = [squares[group][path] if group in squares else None for group, path in names]
        likes = [jax.ShapeDtypeStruct((), jnp.float32)] * len(names)
        shared = dict(zip(names, self._shared(found, likes, [group for group, _ in names])))
        return {
            n: [
                {path: state.view(shared[group, path], self._meshes[n]) for path in update.trained}
                for group, update in enumerate(self.updates)
            ]
            for n in self._here
        }

    def _given(
        self, found: stage_programs.StagePrograms, leaves: Mapping[str, jax.Array], micros: Sequence[PyTree]
    ) -> dict[Any, Any]:
        """Returns what programs read and none makes, by name: sums that are 0, the state, micro-batches, and arrays of the trace."""
        values: dict[Any, Any] = {path: zero for group in self._here for path, zero in self._zeros[group]().items()}
        for group in self._here:
            step = state.view(leaves["step"], self._meshes[group]) if "step" in leaves else self._number(0, group)
            values[sending.Name(sending.STEP, sending.ALL, group)] = step
        batches = [dict(tree.flatten(micro)) for micro in micros]
        for number, group in ((number, group) for number, groups in found.readers.items() for group in groups):
            root, _, path = found.paths.get(number, "").partition("/")
            mesh, is_here = self._meshes[group], self.travel.here[group]
            path = f"params/{path}" if root == "0" else path
            home = self.placed.homes[path] if root in ("0", "2") else group
            own: list[Any] = []  # for each micro-batch, or for all
            if home not in (group, state.EVERYWHERE):
                given = leaves[path] if self.travel.here[home] else None
                own = [moved for moved in self.travel.hop([given], [leaves[path]], home, group) if moved is not None]
            elif is_here and root in ("0", "2"):
                own = [leaves[path] if home == group else state.view(leaves[path], mesh)]
            elif is_here and number in found.constants:
                own = [jax.device_put(found.constants[number], NamedSharding(mesh, P()))]
            elif is_here and root == "1":
                own = [state.view(batch[path], mesh) for batch in batches]
            elif is_here and root == "3":
                own = [self._number(micro, group) for micro in range(len(micros))]
            values |= {sending.name(found, number, micro, group): value for micro, value in enumerate(own)}
        return values

    def _maker_of_zeros(self, group: int) -> Callable[[], dict[str, jax.Array]]:
        likes = {path: self._of_groups[group].summed(path) for path in self.updates[group].trained}
        return jax.jit(
            lambda: {path: jnp.zeros(like.shape, like.dtype) for path, like in likes.items()},
            out_shardings={path: like.sharding for path, like in likes.items()},
        )

    def _number(self, number: int, group: int) -> jax.Array:
        key = (number, group)
        if key not in self._numbers:
            self._numbers[key] = jax.device_put(np.int32(number), NamedSharding(self._meshes[group], P()))
        return self._numbers[key]
