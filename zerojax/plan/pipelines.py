"""Plans a step over the groups of devices of a pipeline. This module reads the programs of each group as one, and lays them on a timeline.

Collectives, theory and findings are those of the group whose devices need the most memory. All groups have the same mesh, so those of the
others differ by their layers alone.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax import jitted, tree
from zerojax import mesh as mesh_lib
from zerojax.clock import kernels, walk
from zerojax.clock import rates as rates_lib
from zerojax.hlo import buffer_roles, linked, syntax
from zerojax.hlo import buffers as buffers_lib
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import bound as bound_lib
from zerojax.plan import flops, targets
from zerojax.plan.offload import streams
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.pipeline import memory, state
from zerojax.zero.pipeline import order as order_lib
from zerojax.zero.pipeline import step as pipeline_step
from zerojax.zero.weights import partition as partition_lib

PASSES, BUBBLE, UPDATE = "passes of stages", "bubble", "update"


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """What a plan says of a pipeline."""

    order: order_lib.PassOrder  # the schedule
    times: order_lib.PassTimes  # of its passes; in operations where they are not foretold
    stage_of_call: Sequence[int]  # of each call of a block
    calls: Sequence[int]  # of blocks, by group
    memory: Sequence[memory.GroupMemory]  # of each group
    largest: int  # the group whose devices need the most, of those that this process runs
    # the bubble of the schedule, if all stages take equally long, backward passes twice as long as forward passes, and the gradients of
    # weights half of a backward pass
    theory: float
    # when passes run: by the foretold times of their programs, or where there are none by their operations
    line: order_lib.Timeline
    is_foretold: bool  # whether these are seconds
    update: float  # seconds of the slowest group's update; 0 if unknown
    programs: Sequence[syntax.Module]  # of all groups that this process runs, each once

    @property
    def peak(self) -> int:
        """Returns the bytes that a device needs."""
        return self.memory[self.largest].peak

    @property
    def time(self) -> walk.StepTime | None:
        """Returns the time of a step; None if it is not foretold."""
        if not self.is_foretold:
            return None
        passes = sum(self.line.busy) / len(self.line.busy)
        parts = {PASSES: passes, BUBBLE: self.line.total - passes, UPDATE: self.update}
        return walk.StepTime(self.line.total + self.update, parts, {})


def read(
    step: pipeline_step.PipelineStep,
    abstract_state: State,
    batch: PyTree,
    mesh: Mesh,
    target: targets.Target,
    options: Mapping[str, Any] | None,
    rates: rates_lib.GpuRates | None = None,
    *,
    is_absent: bool = False,
) -> tuple[streams.Read, Pipelined]:
    """Compiles the programs of a step, and reads those of its largest group.

    Args:
      step: the train step.
      abstract_state, batch: its arguments, abstract.
      mesh: of all groups.
      target: the kind of device.
      options: XLA's, in addition to the step's own.
      rates: the clock's, if times are foretold.
      is_absent: whether no program is to run, so that equal ones of several groups are compiled once.
    """
    alike: dict[str, jax.stages.Compiled] | None = {} if is_absent or not step.travel.is_one else None
    micro = step.micro(batch)
    found = step.programs(micro, options) if alike is None else step.stand_ins(micro, options, alike)
    updates = step.update_programs(found, alike)
    held = memory.of_groups(
        step.placed,
        step.sent,
        found,
        tree.flatten(abstract_state),
        [
            max([*map(jitted.bytes_beside, programs), streams.bytes_at_once(update.stream) if update.stream else 0])
            for programs, update in zip(updates, step.updates)
        ],
    )
    here = [group for group, is_here in enumerate(step.travel.here) if is_here]
    largest = max(here, key=lambda group: held[group].peak)
    parsed = functools.cache(lambda run: syntax.parse(buffers_lib.text_of(run)))
    modules = {key: parsed(own.run) for key, own in found.programs.items()}
    one = step.placed.groups[0].mesh
    ways = mesh_lib.size(one, set(one.shape) - set(mesh_lib.COMPILER))  # a part is what one of them runs
    counted = {
        key: _total({dtype: ways * n for dtype, n in flops.count(call.closed).items()} for call in own.part.calls)
        for key, own in found.programs.items()
    }
    operations = {key: sum(by_dtype.values()) for key, by_dtype in counted.items()}
    of_updates = [[parsed(own) for own in programs] for programs in updates]
    times, update = _times(step, found, modules, of_updates, operations, rates, mesh, target)
    is_on_disk = any(own.stream is not None and own.stream.updates.is_on_disk for own in step.updates)
    update = max(update, *(_copies(own.host, target, is_on_disk=is_on_disk) for own in held)) if rates else update
    pipelined = Pipelined(
        step.order,
        times,
        list(step.placed.stage_of_call),
        [step.placed.calls(group) for group in range(len(held))],
        held,
        largest,
        order_lib.run(step.order).bubble,
        order_lib.run(step.order, times),
        rates is not None,
        update,
        list({id(own): own for own in (*modules.values(), *itertools.chain(*of_updates))}.values()),
    )
    module = _linked(step, found, modules, of_updates[largest], largest)
    arguments = {
        path: buffers_lib.Argument(
            f"state/{path}",
            buffer_roles.argument_role(f"state/{path}"),
            tree.shard_bytes(leaf),
            buffers_lib.DEVICE,
            step.donate,
        )
        for path, leaf in step.placed.held(largest, tree.flatten(abstract_state))
        if path not in step.placed.groups[largest].on_host
    }
    in_pass = _total(by_dtype for key, by_dtype in counted.items() if found.programs[key].group == largest)
    by_dtype = {dtype: count * step.order.micros for dtype, count in in_pass.items()}
    return streams.Read(streams.buffers_of(arguments), module, by_dtype, step), pipelined


def own(partition: partition_lib.Partition, group: int) -> partition_lib.Partition:
    """Returns how a group holds its own leaves of a state over a pipeline."""
    whole, homes = partition.pipeline.groups[group], partition.pipeline.homes

    def kept(path: str, leaf: Leaf) -> Leaf:
        return leaf if homes[path] in (group, state.EVERYWHERE) else optax.MaskedNode()

    return dataclasses.replace(
        whole,
        abstract_state=tree.map_with_path(kept, whole.abstract_state),
        placements={path: found for path, found in whole.placements.items() if homes[path] == group},
        on_host=partition.pipeline.offloaded()[group].on_host,
    )


def _times(
    step: pipeline_step.PipelineStep,
    found: Any,
    modules: Mapping[tuple[str, int], syntax.Module],
    updates: Sequence[Sequence[syntax.Module]],
    operations: Mapping[tuple[str, int], float],
    rates: rates_lib.GpuRates | None,
    mesh: Mesh,
    target: targets.Target,
) -> tuple[order_lib.PassTimes, float]:
    """Returns the times of passes, and that of the slowest update."""
    group = step.placed.groups[0].mesh
    per_host = bound_lib.per_host(group)

    walked: dict[str, float] = {}  # groups may share a program

    def seconds(module: syntax.Module) -> float:
        assert rates is not None
        if module.text not in walked:
            walked[module.text] = walk.walk(hlo_flow.flow(module), rates, group.size, per_host).seconds
        return walked[module.text]

    known = {key: seconds(module) if rates else operations[key] or 1.0 for key, module in modules.items()}
    forward, backward, weights = (
        [known.get((kind, stage), 0.0) for stage in range(step.order.stages)] for kind in order_lib.PASSES
    )
    times = order_lib.PassTimes(forward, [own + late for own, late in zip(backward, weights)], weights)
    if rates is None:
        return times, 0.0
    largest = max(
        (found.nbytes(n) for own in found.programs.values() for n in own.writes if len(found.readers[n]) > 1), default=0
    )
    near = group.size < bound_lib.per_host(mesh)
    sent = kernels.KernelWork(kernels.COLLECTIVE, "collective-permute", nbytes=largest, group=(0, 1))
    hop = rates.seconds(sent, 0 if near else 1)
    return dataclasses.replace(times, hop=hop), max(sum(map(seconds, modules)) for modules in updates)


def _copies(nbytes: int, target: targets.Target, *, is_on_disk: bool) -> float:
    """Returns the seconds in which optimizer state arrives from host memory or a disk and leaves again, both at once; 0 if unknown."""
    rate = target.host_duplex or target.host_link
    link = nbytes / rate.value if rate else 0.0
    return max(link, 2 * nbytes / target.disk.value) if is_on_disk else link


def _linked(
    step: pipeline_step.PipelineStep,
    found: Any,
    modules: Mapping[tuple[str, int], syntax.Module],
    updates: Sequence[syntax.Module],
    group: int,
) -> syntax.Module:
    """Returns the programs of a group as one module: those of a micro-batch in a loop, and the update after it."""
    update, fresh = step.updates[group], itertools.count(max(found.values) + 1)
    sums = {path: next(fresh) for path in update.trained}
    keys = [key for key, own in found.programs.items() if own.group == group]
    numbers = {number for key in keys for number in found.programs[key].reads} | {found.weight} - {None}
    written = {number for key in keys for number in found.programs[key].writes}
    arguments = {
        number: (_path(found.paths.get(number), number), streams.array(found.values[number]))
        for number in sorted(numbers - written)
    }
    likes = {path: like for key in keys for path, like in found.programs[key].sums.items()}
    arguments |= {number: (f"sums/{path}", streams.array(likes[path])) for path, number in sums.items()}
    row = []
    for key in keys:
        own = found.programs[key]
        named = {f"sums/{place}": sums[path] for place, path in enumerate(own.sums)} | (
            {} if own.weight is None else {"factor": own.weight}
        )
        if own.is_seeded:
            number = named["seed"] = next(fresh)
            arguments[number] = ("pass", syntax.Array("u32", (), False))
        writes = (*own.writes, *(sums[path] for path in own.sums))
        row.append(linked.LinkedProgram(modules[key], tuple(own.reads), writes, named=named))
    known = {path: number for number, (path, _) in arguments.items()}
    leaves = []
    for path, leaf in zip(update.reads, update.abstract):
        number = known.get(f"state/{path}")
        if number is None:
            number = next(fresh)
            arguments[number] = (f"state/{path}", streams.array(leaf))
        leaves.append(number)
    return linked.link(
        row,
        arguments,
        step.order.micros,
        after=_after(step, updates, group, leaves, sums, arguments, fresh, found.weight),
    )


def _after(
    step: pipeline_step.PipelineStep,
    modules: Sequence[syntax.Module],
    group: int,
    leaves: Sequence[int],
    sums: Mapping[str, int],
    arguments: dict[int, tuple[str, syntax.Array]],
    fresh: PyTree,
    weight: int | None,
) -> list[linked.LinkedProgram]:
    """Returns the programs of a group's update, and adds what they read of other groups to `arguments`."""
    scalar = syntax.Array("f32", (), False)
    grads = [next(fresh) for _ in sums]
    squares = {}
    for other, update in enumerate(step.updates):
        for place, path in enumerate(update.trained):
            squares[other, place] = next(fresh)
            if other != group:
                arguments[squares[other, place]] = (f"received/{other}/{path}", scalar)
    count = next(fresh)
    arguments[count] = ("count", scalar)
    first = linked.LinkedProgram(
        modules[0],
        tuple(leaves),
        (*grads, *(squares[group, place] for place in range(len(sums)))),
        named={f"sums/{place}": number for place, number in enumerate(sums.values())} | {"count": count},
    )
    second = linked.LinkedProgram(
        modules[1],
        tuple(leaves),
        tuple(next(fresh) for _ in modules[1].entry.root.arrays),
        named={f"grads/{place}": number for place, number in enumerate(grads)}
        | {f"squares/{other}/{place}": number for (other, place), number in squares.items()},
    )
    return [first, second]


def _total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the sums of counts by dtype."""
    found: dict[str, float] = {}
    for one in counts:
        for dtype, count in one.items():
            found[dtype] = found.get(dtype, 0.0) + count
    return found


def _path(path: str | None, number: int) -> str:
    """Returns the argument of a step that a value is: a leaf of the state or the batch, or what another group sends."""
    if path is None:
        return f"received/{number}"
    root, _, rest = path.partition("/")
    return {"0": f"state/params/{rest}", "1": f"batch/{rest}", "2": f"state/{rest}"}.get(root, "pass")
