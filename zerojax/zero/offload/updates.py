"""Updates groups of optimizer state. This module makes a program of each item's update, and sends a group through the device.

A program runs the state's own update for each item alone: params and optimizer state have `optax.MaskedNode()` in place of all others, as
for frozen weights. Where nothing is offloaded, a group is one program. Equal programs share one executable.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import specs, tree
from zerojax.errors import UserError
from zerojax.optim import fused, locality, one_pass
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.host import groups as groups_lib
from zerojax.zero.host import memory_kind, selection, settings, storage
from zerojax.zero.update import one_pass_update
from zerojax.zero.update import update as update_lib
from zerojax.zero.weights import partition as partition_lib


class Handed(NamedTuple):
    """What the updates of groups read beside their state."""

    grads: dict[str, Any]  # the gradients of the offloaded weights, sharded as the update, by path
    shared: list[Any]  # the leaves at `Updates.shared`, as they were before the step
    factor: Any  # float32[], multiplies the gradients
    finite: Any  # bool[], whether the step is taken; None where no step is skipped


class Done(NamedTuple):
    """The result of a group's update: its new params by path, new leaves that stay on the device by position, and those to store."""

    params: dict[str, jax.Array]
    device: dict[int, jax.Array]
    leaving: list[jax.Array]


def of(partition: partition_lib.Partition, *, may_skip: bool) -> "Updates | None":
    """Returns the updates of a partition's offloaded weights; None if nothing is offloaded.

    If params are in host memory, they include those of weights as large whose optimizer state is on the device: their gradients need not
    wait for those of the whole model.
    """
    if not partition.on_host:
        return None
    also: list[str] = []
    if selection.are_params_on_host(partition):
        sizes = {f"params/{path}": leaf.size for path, leaf in tree.flatten(partition.abstract_state.params)}
        least = min((sizes[path] for path in selection.offloaded_weights(partition)), default=math.inf)
        also = [path for path, size in sizes.items() if size >= least]
    return Updates(partition, may_skip=may_skip, also=also)


def of_blocks(partition: partition_lib.Partition, blocks: str, *, may_skip: bool) -> "Updates":
    """Returns the updates of the weights of blocks, of a partition of which nothing is offloaded: those of a block are one program.

    A step's own update has all weights where they are not updated one by one: an optimizer that reads several weights or whole matrices, a
    state that applies gradients in its own way, or masks that are trees.

    Args:
      partition: of the train state.
      blocks: a regex of the blocks' paths.
      may_skip: whether steps may be skipped.
    """
    how: dict[str, Any] = {"may_skip": may_skip}
    with_settings = dataclasses.replace(partition, offload=settings.Offload(), resident=partition)
    state, inside = partition.abstract_state, re.compile(blocks)
    trained = partition.trainable_part(state.params)
    local = locality.in_step(state.tx, trained) if one_pass_update.applies_as_flax(state) else None
    if local is not None and local.kind == locality.ELEMENTWISE:
        paths = [f"params/{path}" for path, leaf in tree.flatten(trained) if leaf.dtype in (jnp.float32, jnp.bfloat16)]
        with contextlib.suppress(UserError):
            also = [path for path in paths if tree.block_of(path, inside)]
            return Updates(with_settings, also=also, local=local, **how)
    return Updates(with_settings, **how)


class Updates(groups_lib.Division):
    """The update of a division's groups.

    Args:
      partition, also, numbers: see `groups.Division`.
      may_skip: whether steps may be skipped (loss scaling).
      local: how far updates reach, where that is known.
    """

    def __init__(
        self,
        partition: partition_lib.Partition,
        *,
        may_skip: bool,
        also: Collection[str] = (),
        numbers: Mapping[str, int] | None = None,
        local: locality.Locality | None = None,
    ):
        super().__init__(partition, also=also, numbers=numbers)
        self._may_skip, self._local = may_skip, local
        self._device_shardings = {n: memory_kind.on_device(self.leaves[n].sharding) for n in self.on_host}
        self._grad_dtypes: dict[str, Any] = {}
        self._scalars: dict[Any, jax.Array] = {}
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        self._by_trace: dict[Any, jax.stages.Compiled] = {}

    @property
    def in_flight(self) -> int:
        """Returns the number of groups that the device may hold at once."""
        return self.partition.offload.chunks_at_once

    @property
    def is_on_disk(self) -> bool:
        """Returns whether the optimizer state lives in a file."""
        return self.partition.offload.optimizer == settings.NVME

    @property
    def params_on_disk(self) -> bool:
        """Returns whether the params live in a file."""
        return selection.are_params_on_disk(self.partition)

    @property
    def resident_bytes(self) -> int:
        """Returns the bytes of the optimizer state that stays on each device."""
        return sum(tree.shard_bytes(leaf) for n, leaf in enumerate(self.leaves) if n not in self.on_host)

    @property
    def structure(self) -> jax.tree_util.PyTreeDef:
        """Returns the tree of the whole optimizer state."""
        return jax.tree.structure(self.partition.abstract_state.opt_state)

    def handed(
        self, state: State, grads: PyTree, factor: jax.Array | float, finite: jax.Array | None
    ) -> tuple["Handed"]:
        """Returns what the program that computes gradients hands to the updates of the groups, as a tuple of one; called in its trace."""
        by_path = {f"params/{path}": grad for path, grad in tree.flatten(grads)}
        return (self.handed_to(state, {weight: by_path[weight] for weight in self.weights}, factor, finite),)

    def handed_to(
        self, state: State, grads: dict[str, Any], factor: jax.Array | float, finite: jax.Array | None
    ) -> "Handed":
        """Returns gradients by path with what else the updates of groups read of a state without offloaded leaves."""
        held = jax.tree.leaves(state.opt_state)
        shared = [held[self.rest.positions.index(n)] for n in self.shared]
        return Handed(grads, shared, jnp.asarray(factor, jnp.float32), finite)

    @property
    def handed_shardings(self) -> "Handed":
        """Returns the shardings of the result of `handed`."""
        mesh = self.partition.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        grads = {weight: self.partition.placements[weight].update for weight in self.weights}
        shared = [self.leaves[n].sharding for n in self.shared]
        return Handed(grads, shared, replicated, replicated if self._may_skip else None)

    def load(self, group: groups_lib.Group, leaves: Sequence[Any]) -> storage.Loading:
        """Sends copies of a group's leaves to the device. `leaves` are all leaves of the optimizer state."""
        shardings = [self._device_shardings[n] for n in group.host]
        return storage.load([leaves[n] for n in group.host], shardings)

    def store(self, group: groups_lib.Group, leaving: Sequence[jax.Array], leaves: Sequence[Any]) -> list[Any]:
        """Sends new leaves to where the old ones live."""
        shardings = [self.leaves[n].sharding for n in group.host]
        return storage.leave(list(leaving), [leaves[n] for n in group.host], shardings)

    def param_bytes(self, groups: Sequence[groups_lib.Group]) -> int:
        """Returns the bytes on each device of the groups' params that are stored in host memory, where they go after their update."""
        weights = {weight for group in groups for weight in group.weights if weight in self.partition.on_host}
        return sum(tree.shard_bytes(self.params[weight]) for weight in weights)

    def prefetch(self, leaves: Sequence[Any], groups: Sequence[groups_lib.Group]) -> None:
        """Begins to read groups that live on a disk, in the order in which they will be loaded."""
        storage.prefetch([[leaves[n] for n in group.host] for group in groups])

    def update(
        self,
        group: groups_lib.Group,
        loading: storage.Loading,
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
        done, loaded = Done({}, {}, []), storage.arrived(loading)
        held = dict(zip(self.shared, handed.shared))
        scalars = (handed.factor, *(() if handed.finite is None else (handed.finite,)))
        for items in self.together(group):
            owned, read, seeds = [], [], []
            for item in items:
                host, loaded = loaded[: len(item.host)], loaded[len(item.host) :]
                own = [done.device.get(n, leaves[n]) for n in item.device]
                owned.append((done.params.get(item.weight, params[item.weight]), list(host), own))
                grad = self._placed(item.weight, handed.grads[item.weight])
                read.append((grad, [held[n] for n in item.shared]))
                seeds.append((self._scalar(jnp.uint32, item.number), self._scalar(jnp.int32, item.start)))
            for item, (param, host, own) in zip(items, self.executable(items)(owned, read, scalars, seeds)):
                done.params[item.weight] = param
                done.device.update(zip(item.device, own))
                done.leaving.extend(host)
        return done

    def together(self, group: groups_lib.Group) -> list[tuple[groups_lib.Item, ...]]:
        """Returns the items of a group that one program updates: all, or each by itself where some arrive from elsewhere."""
        return [(item,) for item in group.items] if self.on_host else [group.items]

    def _placed(self, weight: str, grad: jax.Array) -> jax.Array:
        """Returns a gradient sharded as the update. The compiler may replicate one that is 0 for all, where it shards the weight."""
        update = self.partition.placements[weight].update
        is_certain = specs.axes(update.spec).isdisjoint(mesh_lib.COMPILER)
        return grad if is_certain or grad.sharding.is_equivalent_to(update, grad.ndim) else jax.device_put(grad, update)

    def _scalar(self, dtype: DTypeLike | None, value: int) -> jax.Array:
        """Returns a scalar on the devices. A number from the host would wait for the loads that were sent before it."""
        if (dtype, value) not in self._scalars:
            self._scalars[dtype, value] = jax.device_put(np.asarray(value, dtype), self.handed_shardings.factor)
        return self._scalars[dtype, value]

    def executable(self, items: tuple[groups_lib.Item, ...]) -> jax.stages.Compiled:
        """Returns the compiled program of items that are updated together. Equal programs are compiled once."""
        same = tuple((item.weight, item.length) for item in items)  # pieces of a length differ in their arguments only
        if same not in self._compiled:
            # A trace does not hold the form of the arguments.
            traced = tuple((self._traced(item), len(item.host), len(item.device)) for item in items)
            if traced not in self._by_trace:
                self._by_trace[traced] = self.lower(items).compile()
            self._compiled[same] = self._by_trace[traced]
        return self._compiled[same]

    def compile(self) -> list[jax.stages.Compiled]:
        """Compiles all programs, and returns each distinct one."""
        for group in self.groups:
            for items in self.together(group):
                self.executable(items)
        return list(self._by_trace.values())

    def lower(self, items: tuple[groups_lib.Item, ...]) -> jax.stages.Lowered:
        """Lowers a program: ([(param, host, device)], [(grad, shared)], scalars, [(number, start)]) -> [(param, host, device)]."""

        args = [self._arguments(item) for item in items]
        owned, read, seeds = ([own[part] for own in args] for part in (slice(3), slice(3, 5), slice(6, 8)))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, owned)
        # A param whose master weight is read instead of it gives its memory to the new one, too.
        jitted = jax.jit(
            functools.partial(self._run, items), donate_argnums=0, out_shardings=shardings, keep_unused=True
        )
        return jitted.lower(owned, read, args[0][5], seeds)

    def _traced(self, item: groups_lib.Item) -> Any:
        """Returns what is equal for items of equal programs. To lower a program takes several times as long as to trace it."""
        args, found = self._arguments(item), self.partition.placements[item.weight]
        if self._kinds is not None:
            roles = [
                next(n for n, own in enumerate((item.host, item.device, item.shared)) if p in own) for p in item.order
            ]
            avals = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(args))
            return item.dim, item.length, tuple(roles), self._kinds[item.weight], found.shape, found.overwritten, avals
        with fused.in_plain_jnp():
            param, host, device, grad, shared, scalars, *seed = args
            given = [(param, host, device)], [(grad, shared)], scalars, [tuple(seed)]
            traced = str(jax.make_jaxpr(functools.partial(self._run, (item,)))(*given))
        return traced, tuple(leaf.sharding for leaf in jax.tree.leaves(args))

    @functools.cached_property
    def _kinds(self) -> dict[str, Any] | None:
        """Returns what is equal for weights that the optimizer updates alike, by path; None if only a trace of each tells."""
        state = self.partition.abstract_state
        trained = self.partition.trainable_part(state.params)
        if isinstance(state.tx, one_pass.OnePass):
            kinds: Sequence[Any] = state.tx.kinds(trained)
        elif one_pass_update.applies_as_flax(state):
            local = self._local or locality.of(state.tx, trained)
            if local.kind == locality.GLOBAL:
                return None
            kinds = local.alike
        else:
            return None
        return {f"params/{path}": kind for (path, _), kind in zip(tree.flatten(trained), kinds, strict=True)}

    def _arguments(self, item: groups_lib.Item) -> tuple:
        """Returns the abstract arguments of an item's program."""
        found = self.partition.placements[item.weight]
        mesh = self.partition.mesh
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        param = memory_kind.as_on_device(self.params[item.weight])
        host, device, shared = (
            [memory_kind.as_on_device(self.leaves[n]) for n in positions]
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
        self, items: Sequence[groups_lib.Item], owned: list, read: list, scalars: tuple, seeds: list
    ) -> list[tuple[jax.Array, list, list]]:
        """Updates items, which are of different weights; see `lower`."""
        params, grads, held = dict[str, jax.Array](), dict[str, jax.Array](), dict[int, Any]()
        for item, (param, host, device), (grad, shared), (_, start) in zip(items, owned, read, seeds):
            found = self.partition.placements[item.weight]
            if item.dim is not None:
                param, grad = (jax.lax.dynamic_slice_in_dim(x, start, item.length, item.dim) for x in (param, grad))
            param, grad = (jax.lax.with_sharding_constraint(x, found.update) for x in (param, grad))
            params[item.weight], grads[item.weight] = param, grad
            held |= zip((*item.host, *item.device, *item.shared), (*host, *device, *shared))
        order, structure = self.own_state(items)
        state = self.partition.abstract_state
        blank: dict[str, Any] = {f.name: () for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)}
        before = state.replace(
            **blank
            | {
                "step": jnp.zeros((), jnp.int32),
                "params": self._only(params),
                "opt_state": jax.tree.unflatten(structure, [held[n] for n in order]),
            }
        )
        update = update_lib.make(self.partition.training(list(params)))
        finite = scalars[1] if self._may_skip else None
        numbers = jnp.concatenate([number[None] for number, _ in seeds])
        with jax.named_scope("update"):
            after = update(before, before, self._only(grads), scalars[0], finite, numbers)
        held |= zip(order, jax.tree.leaves(after.opt_state))
        new = dict(zip((name for name in self.names if name in params), jax.tree.leaves(after.params), strict=True))
        return [
            (
                self._stored(item, param, new[item.weight], start),
                [held[n] for n in item.host],
                [held[n] for n in item.device],
            )
            for item, (param, _, _), (_, start) in zip(items, owned, seeds)
        ]

    def _stored(self, item: groups_lib.Item, whole: jax.Array, param: jax.Array, start: jax.Array) -> jax.Array:
        """Returns an item's new param as it is stored, in the whole one if it is a piece."""
        found = self.partition.placements[item.weight]
        param = jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(param, found.update), found.stored)
        return param if item.dim is None else jax.lax.dynamic_update_slice_in_dim(whole, param, start, item.dim)
