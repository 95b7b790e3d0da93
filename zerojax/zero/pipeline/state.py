"""Puts a train state on the stages of a pipeline. This module decides which group of devices each leaf lives on.

A group of devices is a slice of the mesh along `pipe`. Within it a stage of ZeRO shards as it does without a pipeline. A weight lives on
one group, with its gradient and its optimizer state (`segments` says on which). Leaves that belong to no weight, such as counts, are
replicated over all groups.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, precision, roles, signatures, specs, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.optim import pieces
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.host import create, memory_kind, storage
from zerojax.zero.host import settings as offload_settings
from zerojax.zero.pipeline import passes, segments, travel
from zerojax.zero.sharded_batch import inputs, outputs
from zerojax.zero.weights import partition as partition_lib

EVERYWHERE = -1  # the home of a leaf that belongs to no weight


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
    """How layers are divided into stages, and in which order these run.

    Attributes:
      loss_fn: the loss, as of `make_train_step`.
      batch: one micro-batch, of all devices; abstract arrays do.
      blocks: a `zerojax.Blocks`, or its regex alone: the modules that are cut apart. `make_train_step` takes it from here, as it does
        `batch_specs` and `compute_dtype`, unless they are said there.
      heads: of `blocks`, where that is a regex.
      schedule: one of `order.make`.
      chunks: stages of a group of devices; above 1 for "interleaved".
      costs: of each call of a block, in any unit, or f(operation of the trace) -> its own; None: FLOPs.
      batch_specs, compute_dtype: as of `make_train_step`.
    """

    loss_fn: Callable[..., Any]
    batch: Any
    blocks: str | block_settings.Blocks
    heads: str = ""
    schedule: str = "1f1b"
    chunks: int = 1
    costs: Sequence[float] | Callable[[Any], float] | None = None
    batch_specs: Any = ()
    compute_dtype: Any = None

    def __post_init__(self) -> None:
        """Raises UserError for a value of another type."""
        signatures.check_fields(self)
        for path, leaf in tree.flatten(self.batch):
            if not (tree.is_array(leaf) and hasattr(leaf, "shape")):
                raise UserError(f"batch/{path}: must be an array, and is {errors.shown(leaf)}")

    @property
    def chosen(self) -> block_settings.Blocks:
        """Returns `blocks` as a value."""
        return block_settings.Blocks.of(self.blocks, **({"heads": self.heads} if self.heads else {}))


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A pipeline for a state."""

    pipeline: Pipeline  # its settings
    mesh: Mesh  # of all groups
    groups: Sequence[partition_lib.Partition]  # for each group of devices, how it would hold the whole state
    homes: Mapping[str, int]  # the group of each leaf of the state, or `EVERYWHERE`, by path
    stage_of_call: Sequence[int]  # of each call of a block

    @property
    def stages(self) -> int:
        """Returns the number of stages."""
        return len(self.groups) * self.pipeline.chunks

    @functools.cached_property
    def travel(self) -> travel.Travel:
        """Returns what moves arrays between the groups."""
        return travel.Travel(self.mesh, [group.mesh for group in self.groups])

    def is_here(self, group: int) -> bool:
        """Returns whether this process runs a group."""
        return travel.is_here(self.groups[group].mesh)

    @functools.cached_property
    def here(self) -> int:
        """Returns a group of this process."""
        return next(group for group in range(len(self.groups)) if self.is_here(group))

    def calls(self, group: int) -> int:
        """Returns the number of calls of blocks in the stages of a group."""
        return sum(stage % len(self.groups) == group for stage in self.stage_of_call)

    def offloaded(self) -> list[partition_lib.Partition]:
        """Returns how each group holds the whole state, with its own leaves of it alone in host memory."""
        return [
            dataclasses.replace(own, on_host=frozenset(path for path in own.on_host if self.homes[path] == group))
            for group, own in enumerate(self.groups)
        ]

    def held(self, group: int, leaves: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Returns those of the leaves of a state, with their paths, that a group holds."""
        return [(path, leaf) for path, leaf in leaves if self.homes[path] in (group, EVERYWHERE)]


def partitioned(
    pipeline: Pipeline, mesh: Mesh, partition: Callable[[Mesh], partition_lib.Partition]
) -> partition_lib.Partition:
    """Returns the partition of a state over the groups of a mesh.

    Args:
      pipeline: its settings.
      mesh: with an axis `pipe` above 1.
      partition: f(mesh) -> how the devices of one group hold the whole state.

    Raises:
      UserError: something is offloaded that a pipeline keeps on the devices, or there are fewer blocks than stages.
    """
    groups = [partition(own) for own in mesh_lib.groups(mesh)]
    _check_offload(groups)
    trace = passes.Pass(
        outputs.with_aux(pipeline.loss_fn, lambda state: 1.0),
        groups[0].on_device,
        dataclasses.replace(pipeline.chosen, remat="full", recompute="", offload=""),
        inputs.Layout(groups[0].mesh, 1, pipeline.batch_specs, by_device=True),
        jnp.float32,
        precision.floating("compute_dtype", pipeline.compute_dtype),
    ).traced(pipeline.batch)
    count = len(groups) * pipeline.chunks
    cut = segments.of_trace(trace.inner, count, costs=pipeline.costs, chunks=pipeline.chunks)
    stage_of = {path: stages[0] for path, number in trace.params.items() if (stages := cut.readers(number))}
    stage_of |= {path: stage for path, own in trace.grads(cut).items() if (stage := cut.writer(own)) is not None}
    if any(leaf.padding for leaf in groups[0].leaves.values()) and not all(travel.is_here(own.mesh) for own in groups):
        raise UserError(
            'indivisible: is "pad", and no process sees all the groups of a pipeline, which it would take to cut padding off; use "whole"'
        )
    homes, index = {}, tree.suffix_index(groups[0].placements)
    for path, leaf in {**groups[0].on_device.leaves, **groups[0].leaves}.items():  # in pieces, and as one
        weight = path if path in groups[0].placements else leaf.weight
        if leaf.role == roles.OPT_STATE:  # factored moments have shapes of their own, and the weight's name
            weight = weight or tree.longest_suffix(index, path) or ""
        homes[path] = stage_of.get(weight, cut.stages - 1) % len(groups) if weight else EVERYWHERE
    found = _joined(groups, homes, mesh)
    return dataclasses.replace(
        found,
        resident=_joined([group.on_device for group in groups], homes, mesh) if found.offload else None,
        pipeline=Placed(pipeline, mesh, groups, homes, cut.stage_of_call),
    )


def _check_offload(groups: Sequence[partition_lib.Partition]) -> None:
    """Refuses what a pipeline does not offload.

    Raises:
      UserError: it is on.
    """
    chosen = groups[0].offload
    if chosen is None:
        return
    wrong = {
        f"offload.params: is {chosen.params!r}, and a pipeline reads weights from the devices": chosen.params
        != offload_settings.NONE,
        "offload.late_norm: is True, and the groups of a pipeline wait for the norm of all": chosen.late_norm,
        "offload.by_block: is 'on', and the stages of a pipeline are programs of their own": chosen.by_block
        == offload_settings.ON,
    }
    for line, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"{line}; omit it, or set `pipe=1`")


def _joined(groups: Sequence[partition_lib.Partition], homes: Mapping[str, int], mesh: Mesh) -> partition_lib.Partition:
    """Returns the partition over all groups of which each holds its own leaves."""
    pick = functools.partial(tree.map_with_path, lambda path, *own: own[homes[path]])
    everywhere = NamedSharding(mesh, P())

    def sharding(path: str, *own: NamedSharding) -> NamedSharding:
        return everywhere if homes[path] == EVERYWHERE else own[homes[path]]

    shardings = tree.map_with_path(sharding, *(group.shardings for group in groups))
    abstract = jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
        groups[0].abstract_state,
        shardings,
    )
    return dataclasses.replace(
        groups[0],
        mesh=mesh,
        abstract_state=abstract,
        shardings=shardings,
        specs=pick(*(group.specs for group in groups)),
        placements={path: groups[homes[path]].placements[path] for path in groups[0].placements},
    )


def created(
    init: Callable[..., Any],
    args: Sequence[Any],
    wanted: PyTree,
    placed: Placed,
    params: PyTree = None,
    *,
    keep: storage.Keep,
) -> list[jax.Array]:
    """Returns the leaves of a state, each where it lives: a program for each group makes its own.

    Args:
      init: f(*args) -> the state, or f(params, *args).
      args: arrays that all groups read.
      wanted: the abstract state, or a part of it, with shardings.
      placed: its pipeline.
      params: the weights where they live, whose memory is reused; None if `init` draws them. What is made of one lives where it does.
      keep: from `host.create.begin`.
    """
    init = jax.jit(init)  # traced once for all groups
    names, likes = zip(*tree.flatten(wanted, is_leaf=pieces.is_pieces))
    found: list[Any] = [None] * len(names)
    leaves, structure = jax.tree.flatten(params)
    homes_of_params = [placed.homes[f"params/{path}"] for path, _ in tree.flatten(params)] if leaves else []
    for home in (EVERYWHERE, *range(len(placed.groups))):
        own = [number for number, path in enumerate(names) if placed.homes[path] == home]
        held = [number for number, other in enumerate(homes_of_params) if other == home]

        def make(held_leaves: list[jax.Array], *args: Any, own: list[int] = own, held: list[int] = held) -> list:
            if not leaves:
                return [jax.tree.leaves(init(*args))[number] for number in own]
            known = dict(zip(held, held_leaves))
            given = [known.get(n, jnp.zeros(leaf.shape, leaf.dtype)) for n, leaf in enumerate(leaves)]
            state = init(jax.tree.unflatten(structure, given), *args)
            return [jax.tree.leaves(state)[number] for number in own]

        if own and home != EVERYWHERE and not placed.is_here(home):
            for number in own:
                found[number] = jax.tree.map(travel.absent, likes[number])
        elif any(map(memory_kind.is_on_host, jax.tree.leaves([likes[number] for number in own]))):
            given = ([leaves[number] for number in held], args)
            made = create.from_init(
                lambda held, args, make=make: make(held, *args), given, [likes[n] for n in own], keep
            )
            structure_of_own: Any = jax.tree.structure([likes[number] for number in own])
            for number, leaf in zip(own, jax.tree.unflatten(structure_of_own, made)):
                found[number] = leaf
        elif own:
            program = jax.jit(make, out_shardings=[likes[number].sharding for number in own], donate_argnums=0)
            for number, leaf in zip(own, program([leaves[number] for number in held], *args)):
                found[number] = leaf
    return jax.tree.leaves(found)


def spread(values: PyTree, placed: Placed | None) -> PyTree:
    """Returns leaves of a state, or abstract ones, each sharded over all devices, so that every process has a part; it takes more memory.

    Without a pipeline, or if one process has all devices, they are returned as they are. A program or a checkpoint may then have them all.
    What is offloaded travels through the devices, leaf by leaf and each as one, and is in host memory.
    """
    if placed is None or placed.travel.is_one:
        return values

    def of(leaf: Leaf) -> Leaf:
        home = _home(leaf, placed)
        if home == EVERYWHERE:
            return leaf
        is_far, sharding = memory_kind.is_on_host(leaf), _over_groups(leaf, placed.mesh)
        stored = memory_kind.on_host(sharding) if is_far else sharding
        if isinstance(jax.tree.leaves(leaf)[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=stored)
        if not is_far:
            return placed.travel.spread(leaf, leaf, home, sharding)
        like = memory_kind.as_on_device(leaf)
        own = create.copied(leaf, like) if placed.is_here(home) else None
        return jax.block_until_ready(memory_kind.moved([placed.travel.spread(own, like, home, sharding)], [stored])[0])

    return jax.tree.map(of, values, is_leaf=pieces.is_pieces)


def settled(values: PyTree, likes: PyTree, placed: Placed | None, keep: storage.Keep) -> PyTree:
    """Inverts `spread`: returns leaves where the abstract ones of `likes` live; `keep` is from `host.create.begin`."""
    if placed is None or placed.travel.is_one:
        return values

    def of(like: Leaf, leaf: Leaf) -> Leaf:
        home = _home(like, placed)
        if home == EVERYWHERE:
            return leaf
        if not memory_kind.is_on_host(like):
            return placed.travel.settled(leaf, like, home)
        (near,) = memory_kind.moved([leaf], [memory_kind.on_device(leaf.sharding)])
        near = placed.travel.settled(near, memory_kind.as_on_device(like), home)
        if not placed.is_here(home):
            return jax.tree.map(travel.absent, like)
        return jax.tree.map(keep, pieces.split(near, like) if pieces.is_pieces(like) else near, like)

    return jax.tree.map(of, likes, values, is_leaf=pieces.is_pieces)


def _home(leaf: Leaf, placed: Placed) -> int:
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return next((number for number, group in enumerate(placed.groups) if group.mesh == mesh), EVERYWHERE)


def _over_groups(leaf: Leaf, mesh: Mesh) -> NamedSharding:
    """Returns a leaf's sharding over all groups: its own, with another dim over `pipe` where that divides one."""
    entries = [*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec))]
    for dim, (entry, length) in enumerate(zip(entries, leaf.shape)):
        axes = (mesh_lib.PIPE, *specs.names(entry))
        if length % mesh_lib.size(mesh, axes) == 0:
            return NamedSharding(mesh, P(*entries[:dim], axes, *entries[dim + 1 :]))
    return NamedSharding(mesh, leaf.sharding.spec)


def spec(x: jax.Array) -> P:
    """Returns the spec of an array of some groups."""
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


def view(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns the array that the devices of one group hold of an array that is replicated over groups. Copies nothing."""
    own = set(mesh.devices.flat)
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(mesh, spec(x)), [s.data for s in x.addressable_shards if s.device in own]
    )


def joined(parts: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """Returns the array over all groups that is equal on each of them. Copies nothing."""
    return jax.make_array_from_single_device_arrays(
        parts[0].shape,
        NamedSharding(mesh, spec(parts[0])),
        [shard.data for part in parts for shard in part.addressable_shards],  # of groups of this process
    )
