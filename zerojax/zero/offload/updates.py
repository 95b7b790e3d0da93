"""Updates offloaded weights one group after another. This module divides an optimizer's update into programs of one weight or piece each.

An item is a weight, or one piece of it, with its optimizer state. Its program runs the state's own update for that item alone: params and
optimizer state have `optax.MaskedNode()` in place of all others, as for frozen weights. Items of equal programs share one executable. A
group is a run of items in the order of the params, of about a chunk, that are copied together. It ends where a block of the model ends.

What else the update reads (counts, hyperparameters) is `shared`: every item takes the values from before the step, and the rest of the
update, of what stays on the device, makes the new ones.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.optim import fused, one_pass, pieces
from zerojax.zero import placement
from zerojax.zero import update as update_lib
from zerojax.zero.offload import kept, layout, settings
from zerojax.zero.offload import params as params_lib


@dataclasses.dataclass(frozen=True)
class Item:
    """One weight or piece of a weight. Positions count the leaves of the optimizer state.

    Attributes:
      weight: the weight's path ("params/layer_0/kernel").
      number: seeds stochastic rounding; that of a weight that is not in pieces is its number among the trained weights.
      dim, start, length: the piece's slice of the weight; dim is None for all of it.
      host: positions of its leaves in host memory.
      device: positions of its leaves that stay on the device.
      shared: positions of the leaves that it reads and others update.
      order: for each leaf of its own optimizer state, its position.
      structure: the tree of its own optimizer state.
      nbytes: bytes of `host` on each device.
    """

    weight: str
    number: int
    dim: int | None
    start: int
    length: int
    host: tuple[int, ...]
    device: tuple[int, ...]
    shared: tuple[int, ...]
    order: tuple[int, ...]
    structure: Any
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Items that are copied together, and their bytes of state on each device."""

    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def host(self) -> list[int]:
        """Returns the positions of its leaves in host memory."""
        return [position for item in self.items for position in item.host]

    @property
    def device(self) -> list[int]:
        """Returns the positions of its leaves that stay on the device."""
        return [position for item in self.items for position in item.device]

    @property
    def weights(self) -> list[str]:
        """Returns the paths of its weights, each once."""
        return list(dict.fromkeys(item.weight for item in self.items))


@dataclasses.dataclass(frozen=True)
class Rest:
    """The part of the optimizer state that no item updates.

    Attributes:
      positions: of its leaves in the whole optimizer state.
      partition: the train state's, with its optimizer state reduced to the rest and the offloaded weights frozen, so that an update made
        from it leaves them alone.
      numbers: of its trained weights, see `Item`.
    """

    positions: tuple[int, ...]
    partition: placement.Partition
    numbers: tuple[int, ...]

    @property
    def on_device(self) -> placement.Partition:
        """Returns the partition with params that are in host memory on the device."""
        state = self.partition.abstract_state
        state = state.replace(params=jax.tree.map(layout.as_on_device, state.params))
        return dataclasses.replace(
            self.partition, abstract_state=state, shardings=jax.tree.map(lambda leaf: leaf.sharding, state)
        )

    def of(self, state: Any) -> Any:
        """Returns the train state with only this part of its optimizer state."""
        leaves = jax.tree.leaves(state.opt_state)
        structure = jax.tree.structure(self.partition.abstract_state.opt_state)
        return state.replace(opt_state=jax.tree.unflatten(structure, [leaves[n] for n in self.positions]))


class Handed(NamedTuple):
    """What the updates of groups read beside their state.

    Attributes:
      grads: the gradients of the offloaded weights, sharded as the update, by path.
      shared: the leaves at `Updates.shared`, as they were before the step.
      factor: float32[], multiplies the gradients.
      finite: bool[], whether the step is taken; None where no step is skipped.
    """

    grads: dict[str, Any]
    shared: list[Any]
    factor: Any
    finite: Any


class Done(NamedTuple):
    """The result of a group's update: its new params by path, new leaves that stay on the device by position, and those to store."""

    params: dict[str, jax.Array]
    device: dict[int, jax.Array]
    leaving: list[jax.Array]


class Updates:
    """The update of the offloaded weights of a partition.

    Attributes:
      groups: in the order of the params. No group waits for another.
      rest: what they do not update.
      shared: positions of the leaves that items read and the rest updates.
      weights: the paths of the weights that they update.
      names: the paths of all weights, in the order of the params' leaves.
    """

    def __init__(self, partition: placement.Partition, *, may_skip: bool, has_all: bool = False):
        """Divides the update.

        Args:
          partition: with offloaded leaves.
          may_skip: whether steps may be skipped (loss scaling).
          has_all: whether weights whose optimizer state stays on the device are updated in groups too, if they are as large as those of
            offloaded state. Their gradients then need not wait for those of the whole model.

        Raises:
          UserError: the optimizer cannot be initialised for a part of the weights.
        """
        self._partition, self._may_skip = partition, may_skip
        self._leaves = tree.flatten(partition.abstract_state.opt_state)
        self._position = {path: number for number, (path, _) in enumerate(self._leaves)}
        names = [f"params/{path}" for path, _ in tree.flatten(partition.trainable_part(self._params))]
        self._numbers = {name: number for number, name in enumerate(names)}
        self._weights = {f"params/{path}": leaf for path, leaf in tree.flatten(self._params)}
        self.names = list(self._weights)
        self._on_host = {n for n, (path, _) in enumerate(self._leaves) if f"opt_state/{path}" in partition.on_host}
        self._device_shardings = {n: layout.on_device(self._leaves[n][1].sharding) for n in self._on_host}
        offloaded = set(layout.offloaded_weights(partition))
        least = min((self._weights[name].size for name in offloaded), default=math.inf) if has_all else math.inf
        self.weights = [name for name in names if name in offloaded or self._weights[name].size >= least]
        self._parts = _Parts(partition, self._initialised)
        self.rest = self._rest()
        items = [item for weight in self.weights for item in self._items(weight)]
        self.shared = tuple(sorted({position for item in items for position in item.shared}))
        self.groups = _groups(items, partition.offload.chunk_bytes)
        self._grad_dtypes: dict[str, Any] = {}
        self._scalars: dict[Any, jax.Array] = {}
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._by_trace: dict[Any, jax.stages.Compiled] = {}

    @property
    def in_flight(self) -> int:
        """Returns the number of groups that the device may hold at once."""
        return self._partition.offload.in_flight

    @property
    def is_on_disk(self) -> bool:
        """Returns whether the optimizer state lives in a file."""
        return self._partition.offload.optimizer == settings.NVME

    @property
    def params_on_disk(self) -> bool:
        """Returns whether the params live in a file."""
        return params_lib.are_on_disk(self._partition)

    @property
    def resident_bytes(self) -> int:
        """Returns the bytes of the optimizer state that stays on each device."""
        return sum(layout.shard_bytes(leaf) for n, (_, leaf) in enumerate(self._leaves) if n not in self._on_host)

    @property
    def structure(self) -> Any:
        """Returns the tree of the whole optimizer state."""
        return jax.tree.structure(self._partition.abstract_state.opt_state)

    @property
    def _params(self) -> Any:
        return self._partition.abstract_state.params

    def handed(self, state: Any, grads: Any, factor: Any, finite: Any) -> tuple["Handed"]:
        """Returns what the program that computes gradients hands to the updates of the groups, as a tuple of one; called in its trace."""
        by_path = {f"params/{path}": grad for path, grad in tree.flatten(grads)}
        return (self.handed_to(state, {weight: by_path[weight] for weight in self.weights}, factor, finite),)

    def handed_to(self, state: Any, grads: dict[str, Any], factor: Any, finite: Any) -> "Handed":
        """Returns gradients by path with what else the updates of groups read of a state without offloaded leaves."""
        held = jax.tree.leaves(state.opt_state)
        shared = [held[self.rest.positions.index(n)] for n in self.shared]
        return Handed(grads, shared, jnp.asarray(factor, jnp.float32), finite)

    @property
    def handed_shardings(self) -> "Handed":
        """Returns the shardings of the result of `handed`."""
        mesh = self._partition.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        grads = {weight: self._partition.placements[weight].update for weight in self.weights}
        shared = [self._leaves[n][1].sharding for n in self.shared]
        return Handed(grads, shared, replicated, replicated if self._may_skip else None)

    def load(self, group: Group, leaves: Sequence[Any]) -> kept.Loading:
        """Sends copies of a group's leaves to the device. `leaves` are all leaves of the optimizer state."""
        shardings = [self._device_shardings[n] for n in group.host]
        return kept.load([leaves[n] for n in group.host], shardings)

    def store(self, group: Group, leaving: Sequence[jax.Array], leaves: Sequence[Any]) -> list[Any]:
        """Sends new leaves to where the old ones live."""
        shardings = [self._leaves[n][1].sharding for n in group.host]
        return kept.leave(list(leaving), [leaves[n] for n in group.host], shardings)

    def param_bytes(self, groups: Sequence[Group]) -> int:
        """Returns the bytes on each device of the groups' params that are stored in host memory, where they go after their update."""
        weights = {weight for group in groups for weight in group.weights if weight in self._partition.on_host}
        return sum(layout.shard_bytes(self._weights[weight]) for weight in weights)

    def prefetch(self, leaves: Sequence[Any], groups: Sequence[Group]) -> None:
        """Begins to read groups that live on a disk, in the order in which they will be loaded."""
        kept.prefetch([[leaves[n] for n in group.host] for group in groups])

    def update(
        self,
        group: Group,
        loading: kept.Loading,
        leaves: Sequence[Any],
        params: Mapping[str, jax.Array],
        handed: Handed,
    ) -> Done:
        """Sends a group's update. The loaded leaves and the group's params are deleted.

        Args:
          group: one of `groups`.
          loading: the result of `load`.
          leaves: all leaves of the optimizer state; those of the group that stay on the device are read and deleted.
          params: at least the group's, by path.
          handed: at least the group's gradients.
        """
        done, loaded = Done({}, {}, []), kept.arrived(loading)
        held = dict(zip(self.shared, handed.shared))
        scalars = (handed.factor, *(() if handed.finite is None else (handed.finite,)))
        for item in group.items:
            host, loaded = loaded[: len(item.host)], loaded[len(item.host) :]
            own = [done.device.get(n, leaves[n]) for n in item.device]
            param = done.params.get(item.weight, params[item.weight])
            grad, run = handed.grads[item.weight], self.executable(item)
            number, start = self._scalar(jnp.uint32, item.number), self._scalar(jnp.int32, item.start)
            param, host, own = run(param, list(host), own, grad, [held[n] for n in item.shared], scalars, number, start)
            done.params[item.weight] = param
            done.device.update(zip(item.device, own))
            done.leaving.extend(host)
        return done

    def _scalar(self, dtype: Any, value: int) -> jax.Array:
        """Returns a scalar on the devices. A number from the host would wait for the loads that were sent before it."""
        if (dtype, value) not in self._scalars:
            self._scalars[dtype, value] = jax.device_put(np.asarray(value, dtype), self.handed_shardings.factor)
        return self._scalars[dtype, value]

    def executable(self, item: Item) -> jax.stages.Compiled:
        """Returns an item's compiled program. Equal programs are compiled once."""
        same = (item.weight, item.length)  # pieces of a length differ in their arguments only
        if same not in self._compiled:
            form = len(item.host), len(item.device)  # of the arguments, which a trace does not hold
            traced = self._traced(item), form
            if traced not in self._by_trace:
                self._by_trace[traced] = self.lower(item).compile()
            self._compiled[same] = self._by_trace[traced]
        return self._compiled[same]

    def compile(self) -> list[jax.stages.Compiled]:
        """Compiles all programs, and returns each distinct one."""
        for group in self.groups:
            for item in group.items:
                self.executable(item)
        return list(self._by_trace.values())

    def lower(self, item: Item) -> jax.stages.Lowered:
        """Lowers an item's program: (param, host, device, grad, shared, scalars, number, start) -> (param, host, device)."""
        args = self._arguments(item)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, args[:3])
        run = jax.jit(functools.partial(self._run, item), donate_argnums=(0, 1, 2), out_shardings=shardings)
        return run.lower(*args)

    def _traced(self, item: Item) -> Any:
        """Returns what is equal for items of equal programs. To lower a program takes several times as long as to trace it."""
        args, tx = self._arguments(item), self._partition.abstract_state.tx
        if isinstance(tx, one_pass.OnePass):
            roles = [
                next(n for n, own in enumerate((item.host, item.device, item.shared)) if p in own) for p in item.order
            ]
            decays = tx.decays(self._only({item.weight: self._weights[item.weight]}))
            avals = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(args))
            return item.dim, item.length, tuple(roles), tuple(decays), avals
        with fused.in_plain_jnp():
            traced = str(jax.make_jaxpr(functools.partial(self._run, item))(*args))
        return traced, tuple(leaf.sharding for leaf in jax.tree.leaves(args))

    def _arguments(self, item: Item) -> tuple:
        """Returns the abstract arguments of an item's program."""
        found = self._partition.placements[item.weight]
        mesh = self._partition.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        param = layout.as_on_device(self._weights[item.weight])
        host, device, shared = (
            [layout.as_on_device(self._leaves[n][1]) for n in positions]
            for positions in (item.host, item.device, item.shared)
        )
        grad = jax.ShapeDtypeStruct(param.shape, self._grad_dtypes[item.weight], sharding=found.update)
        factor = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
        finite = jax.ShapeDtypeStruct((), jnp.bool, sharding=replicated)
        scalars = (factor, *((finite,) if self._may_skip else ()))
        number, start = (jax.ShapeDtypeStruct((), dtype, sharding=replicated) for dtype in (jnp.uint32, jnp.int32))
        return param, host, device, grad, shared, scalars, number, start

    @property
    def knows_dtypes(self) -> bool:
        """Returns whether `set_grad_dtypes` was called."""
        return bool(self._grad_dtypes)

    def set_grad_dtypes(self, dtypes: Mapping[str, Any]) -> None:
        """Sets the dtype of each gradient, by the weight's path. The loss function decides it, so it is known when that is traced."""
        self._grad_dtypes = dict(dtypes)

    def _run(
        self,
        item: Item,
        param: jax.Array,
        host: list,
        device: list,
        grad: jax.Array,
        shared: list,
        scalars: tuple,
        number: jax.Array,
        start: jax.Array,
    ) -> tuple[jax.Array, list, list]:
        """Updates one item."""
        found, whole = self._partition.placements[item.weight], param
        if item.dim is not None:
            param, grad = (jax.lax.dynamic_slice_in_dim(x, start, item.length, item.dim) for x in (param, grad))
        param, grad = (jax.lax.with_sharding_constraint(x, found.update) for x in (param, grad))
        held = dict(zip((*item.host, *item.device, *item.shared), (*host, *device, *shared)))
        state = self._partition.abstract_state
        blank: dict[str, Any] = {f.name: () for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)}
        before = state.replace(
            **blank
            | {
                "step": jnp.zeros((), jnp.int32),
                "params": self._only({item.weight: param}),
                "opt_state": jax.tree.unflatten(item.structure, [held[n] for n in item.order]),
            }
        )
        update = update_lib.make(self._frozen_but([item.weight]))
        finite = scalars[1] if self._may_skip else None
        with jax.named_scope("update"):
            after = update(before, before, self._only({item.weight: grad}), scalars[0], finite, numbers=number[None])
        held = dict(zip(item.order, jax.tree.leaves(after.opt_state)))
        (param,) = jax.tree.leaves(after.params)
        param = jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(param, found.update), found.stored)
        if item.dim is not None:
            param = jax.lax.dynamic_update_slice_in_dim(whole, param, start, item.dim)
        return param, [held[n] for n in item.host], [held[n] for n in item.device]

    def _rest(self) -> Rest:
        kept = [name for name in self._numbers if name not in self.weights]
        frozen = self._frozen_but(kept)
        state = self._partition.abstract_state
        opt_state = self._initialised(frozen.trainable_part(state.params))
        leaves = dict(self._leaves)
        reduced = tree.map_with_path(lambda path, _: leaves[path], opt_state)
        state = state.replace(opt_state=reduced)
        return Rest(
            positions=tuple(self._position[path] for path, _ in tree.flatten(reduced)),
            partition=dataclasses.replace(
                frozen, abstract_state=state, shardings=jax.tree.map(lambda leaf: leaf.sharding, state)
            ),
            numbers=tuple(self._numbers[name] for name in kept),
        )

    def _items(self, weight: str) -> list[Item]:
        """Returns the items of a weight."""
        found = self._partition.placements[weight]
        whole = self._weights[weight]
        cut = layout.cut_of(self._partition, weight)
        rest = set(self.rest.positions)
        items, start = [], 0
        for piece, length in enumerate(cut.lengths if cut else (0,)):
            shape = tuple(length if cut and dim == cut.dim else n for dim, n in enumerate(found.shape or ()))
            part = self._only({weight: jax.ShapeDtypeStruct(shape, whole.dtype)})
            paths, structure = self._parts.of(weight, shape, part)
            order = [self._position.get(path, self._position.get(f"{path}/{piece}", -1)) for path in paths]
            assert -1 not in order, f"{weight}: its optimizer state is not part of the whole"
            on_host = [n for n in order if n in self._on_host]
            items.append(
                Item(
                    weight=weight,
                    number=self._numbers[weight] + (piece << 20),
                    dim=cut.dim if cut else None,
                    start=start,
                    length=length,
                    host=tuple(on_host),
                    device=tuple(n for n in order if n not in rest and n not in on_host),
                    shared=tuple(n for n in order if n in rest),
                    order=tuple(order),
                    structure=structure,
                    nbytes=sum(layout.shard_bytes(self._leaves[n][1]) for n in on_host),
                )
            )
            start += length
        return items

    def _initialised(self, params: Any) -> Any:
        """Returns the abstract optimizer state of a part of the weights."""
        try:
            with fused.of_a_part():
                return jax.eval_shape(self._partition.abstract_state.tx.init, params)
        except Exception as error:
            raise UserError(
                f"offload.optimizer: the optimizer cannot be initialised for a part of the weights ({errors.one_line(error, 120)}); give "
                "its masks and labels as functions of the params, which see optax.MaskedNode() in place of the other weights"
            ) from error

    def _only(self, values: Mapping[str, Any]) -> Any:
        """Returns a tree like the params with these leaves, by path, and optax.MaskedNode() in place of the others."""
        leaves = [values.get(name, optax.MaskedNode()) for name in self.names]
        return jax.tree.unflatten(jax.tree.structure(self._params), leaves)

    def _frozen_but(self, weights: Sequence[str]) -> placement.Partition:
        """Returns the partition with all but these weights frozen."""
        trained = set(weights)
        return dataclasses.replace(
            self._partition,
            placements={
                path: dataclasses.replace(found, trainable=path in trained)
                for path, found in self._partition.placements.items()
            },
        )


class _Parts:
    """Finds the optimizer state of one weight: the whole state with `optax.MaskedNode()` in place of what belongs to other weights.

    That is the state that the optimizer makes for this weight alone, which is checked for one weight of each name in its block and each
    shape. To trace `init` for each of a thousand weights would take a minute.
    """

    def __init__(self, partition: placement.Partition, init: Callable[[Any], Any]):
        self._init, state = init, partition.abstract_state.opt_state
        self._structure: Any = jax.tree.structure(state, is_leaf=pieces.is_pieces)
        self._owners = {}
        for path, leaf in tree.flatten(state, is_leaf=pieces.is_pieces):
            stored = f"opt_state/{path}/0" if pieces.is_pieces(leaf) else f"opt_state/{path}"
            self._owners[path] = partition.leaves[stored].weight
        self._is_whole: dict[Any, bool] = {}

    def of(self, weight: str, shape: tuple[int, ...], part: Any) -> tuple[list[str], Any]:
        """Returns the paths of its leaves in the whole state, and its tree.

        Args:
          weight: the weight's path.
          shape: of the weight, or of a piece.
          part: the params with this weight alone.
        """
        paths = [path for path, owner in self._owners.items() if not owner or owner == weight]
        kept = set(paths)
        own = self._structure.unflatten([0 if path in kept else optax.MaskedNode() for path in self._owners])
        structure: Any = jax.tree.structure(own)
        name = weight.removeprefix(block_of(weight)), shape
        if self._is_whole.get(name):
            return paths, structure
        made = self._init(part)
        self._is_whole[name] = jax.tree.structure(made) == structure and [p for p, _ in tree.flatten(made)] == paths
        return [path for path, _ in tree.flatten(made)], jax.tree.structure(made)


def _groups(items: Sequence[Item], chunk_bytes: int) -> list[Group]:
    """Returns runs of items of about `chunk_bytes`, each within a block of the model."""
    groups: list[list[Item]] = []
    for item in items:
        is_full = bool(groups) and sum(i.nbytes for i in groups[-1]) + item.nbytes > chunk_bytes
        if not groups or is_full or block_of(groups[-1][-1].weight) != block_of(item.weight):
            groups.append([])
        groups[-1].append(item)
    return [Group(tuple(group)) for group in groups]


def block_of(weight: str) -> str:
    """Returns the block that a weight belongs to: its path up to the first part that has a number, or its first part.

    >>> block_of("params/model/layer_3/mlp/kernel")
    'params/model/layer_3'
    """
    parts = weight.split("/")
    numbered = next((n for n, part in enumerate(parts) if re.search(r"\d", part)), 1)
    return "/".join(parts[: numbered + 1])
