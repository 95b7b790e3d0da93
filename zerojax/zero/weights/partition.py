"""Describes how a train state is sharded. This module holds the decisions as values; `stages` makes them.

Frozen weights are stored and gathered like other weights. They have no gradient, no moments and no update, so a step divides the params in
two parts. It differentiates and updates the `trainable_part`; `with_frozen` adds the frozen weights again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs as specs_lib
from zerojax import tree
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.weights import placement
from zerojax.zero.weights.placement import Placement, Wire


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision for one leaf: `spec` as stored, `sharded` the spec at stages that shard its role, the reason, the path of the weight
    whose shape or blocks it has ("" for none), the axes over which a stage shards it, and how many of its first dims count layers."""

    role: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    sharded: P
    reason: str
    padding: tuple[int, ...] = ()
    weight: str = ""
    over: tuple[str, ...] = mesh_lib.STATE
    layer_dims: int = 0


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a train state is sharded. Trees have the state's structure.

    Attributes:
      mesh: the device mesh.
      stage: the ZeRO stage.
      abstract_state: ShapeDtypeStructs as stored, with shardings.
      specs: PartitionSpecs.
      shardings: NamedShardings.
      leaves: the decision for each leaf, by path.
      placements: the shardings of each weight, its gradient and its optimizer state, by path.
      offload: what lives in host memory; None for nothing.
      resident: the partition of the same state with nothing offloaded; None if nothing is.
      on_host: the paths of the leaves in host memory. Shardings say it too, but not those of devices that are only compiled for.
      keeper: f(partition) -> f(array, abstract leaf) that brings a leaf from host memory to where it lives; None if that is host memory.
      cuts: the slices of each weight whose offloaded state is in pieces, by path.
      pipeline: `pipeline.state.Placed`; None without one.
    """

    mesh: Mesh
    stage: int
    abstract_state: Any
    specs: Any
    shardings: Any
    leaves: Mapping[str, Decision]
    placements: Mapping[str, Placement]
    offload: Any = None
    resident: "Partition | None" = None
    on_host: frozenset[str] = frozenset()
    keeper: Callable[[Any], Callable[[Any, Any], Any]] | None = None
    cuts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pipeline: Any = None

    @property
    def on_device(self) -> "Partition":
        """Returns the partition of the same state with nothing offloaded."""
        return self.resident or self

    @property
    def offloaded(self) -> "list[Partition]":
        """Returns the partition of each group of devices with other leaves in host memory: those of a pipeline, or this one."""
        return self.pipeline.offloaded() if self.pipeline else [self]

    @property
    def kept_whole(self) -> dict[str, str]:
        """Returns the reason for each weight, by path, that the stage would shard but that stays replicated.

        Other leaves that stay replicated follow if they are as large as a sharded one. Moments of a weight that is listed are not.
        """
        decided = {path: self.leaves[path] for path in self.placements if self.leaves[path].reason != "sharded"}
        kept = {path: leaf.reason for path, leaf in decided.items() if not is_over_state(leaf.sharded)}
        smallest = min(
            (math.prod(leaf.shape) for leaf in self.leaves.values() if is_over_state(leaf.spec)), default=None
        )
        if smallest is None:
            return kept
        index = tree.suffix_index(kept)
        for path, leaf in self.leaves.items():
            if path in self.placements or is_over_state(leaf.spec) or math.prod(leaf.shape) < smallest:
                continue
            weight = tree.longest_suffix(index, path)
            if weight is None or self.leaves[weight].shape != leaf.shape:
                kept[path] = leaf.reason
        return kept

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding for arrays whose first dim counts examples."""
        return mesh_lib.batch_sharding(self.mesh)

    def with_wires(self, wires: Mapping[str, Wire]) -> "Partition":
        """Returns the same partition with other wires for these weights, by path, also in the groups of a pipeline."""
        changed = {path: dataclasses.replace(self.placements[path], wire=wire) for path, wire in wires.items()}
        placed = self.pipeline
        if placed and wires:
            placed = dataclasses.replace(placed, groups=[group.with_wires(wires) for group in placed.groups])
        return dataclasses.replace(self, placements={**self.placements, **changed}, pipeline=placed)

    @property
    def freezes(self) -> bool:
        """Returns whether any weight is frozen."""
        return bool(self.frozen)

    @functools.cached_property
    def frozen(self) -> frozenset[str]:
        """Returns the paths of the weights that are not trained."""
        return frozenset(path for path, weight in self.placements.items() if not weight.trainable)

    def training(self, weights: Collection[str]) -> "Partition":
        """Returns the same with all weights frozen but these, by path."""
        kept = frozenset(weights)
        placements = {path: dataclasses.replace(own, trainable=path in kept) for path, own in self.placements.items()}
        return dataclasses.replace(self, placements=placements)

    def trainable_part(self, params: PyTree) -> PyTree:
        """Returns params, or a tree like them, with `optax.MaskedNode()` (a node without leaves) for each frozen weight."""
        if not self.freezes:
            return params

        def keep(path: str, leaf: Leaf) -> Leaf:
            full = f"params/{path}"
            found = full if full in self.placements else tree.longest_suffix(self._by_suffix, path)
            return leaf if found is None or self.placements[found].trainable else optax.MaskedNode()

        return tree.map_with_path(keep, params)

    @functools.cached_property
    def _by_suffix(self) -> dict[str, str]:
        return tree.suffix_index(self.placements)


def with_frozen(part: PyTree, params: PyTree) -> PyTree:
    """Returns a trainable part with the frozen weights of `params` added."""
    if not has_frozen(part):
        return part
    return jax.tree.map(
        lambda own, rest: rest if placement.is_frozen(own) else own, part, params, is_leaf=placement.is_frozen
    )


def around(update: Callable[..., Any], partition: Partition) -> Callable[..., Any]:
    """Returns `update` (see `update.make`) of the trainable part of a state and of gradients; frozen weights stay as they are."""
    part = partition.trainable_part

    def updated(before: State, after: State, grads: PyTree, *how: Any) -> State:
        own = [state.replace(params=part(state.params)) for state in (before, after)]
        new = update(*own, part(grads), *how)
        return new.replace(params=with_frozen(new.params, before.params))

    return updated


def has_frozen(part: PyTree) -> bool:
    """Returns whether a tree omits frozen weights."""
    return any(map(placement.is_frozen, jax.tree.leaves(part, is_leaf=placement.is_frozen)))


def is_over_state(spec: P) -> bool:
    """Returns whether a spec shards over an axis over which a stage shards."""
    return not specs_lib.axes(spec).isdisjoint(mesh_lib.STATE)
