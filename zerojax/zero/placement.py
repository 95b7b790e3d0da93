"""Says where each leaf of a train state lives. This module holds these decisions as values; `stages` makes them.

Where the optimizer state is stored and where gradient and update are computed are two questions, and so two fields of a `Placement`.
Frozen weights are stored and gathered as others are. They have no gradient, no moments and no update, so a step works on two parts of the
params: `trainable_part` is what it differentiates and updates, and `with_frozen` puts the rest back.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs as specs_lib
from zerojax import tree


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one weight lives, and what belongs to it.

    Attributes:
      stored: the weight between two steps.
      used: the weight in the forward pass.
      grad: the gradient as a backward pass leaves it.
      opt_state: the moments and the master weight between two steps, with their memory kind.
      update: the gradient, the moments and the weight while the update is computed.
      padding: how many elements longer the stored array is than what the model sees, dim by dim; () for none.
      shape: the stored array's; a weight of another shape is not the one meant. None fits any.
      trainable: whether the weight has a gradient and an update. Of a frozen weight `grad`, `opt_state` and `update` are not read.
    """

    stored: NamedSharding
    used: NamedSharding
    grad: NamedSharding
    opt_state: NamedSharding
    update: NamedSharding
    padding: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    trainable: bool = True


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was decided for one leaf: `spec` as stored, `split` as it is where its role is sharded, and why."""

    role: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P
    split: P
    reason: str
    padding: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Partition:
    """A train state's placement. Trees have the state's shape.

    Attributes:
      mesh: the device mesh.
      stage: the ZeRO stage.
      abstract_state: ShapeDtypeStructs as stored, with shardings.
      specs: PartitionSpecs.
      shardings: NamedShardings.
      leaves: what was decided, by path.
      placements: where each weight is stored, used, and its gradient reduced to, by path.
    """

    mesh: Mesh
    stage: int
    abstract_state: Any
    specs: Any
    shardings: Any
    leaves: Mapping[str, Decision]
    placements: Mapping[str, Placement]

    @property
    def kept_whole(self) -> dict[str, str]:
        """Says, for each weight that the stage would shard but that stays replicated, why."""
        whole = {path: self.leaves[path] for path in self.placements if self.leaves[path].reason != "split"}
        return {path: leaf.reason for path, leaf in whole.items() if mesh_lib.DATA not in specs_lib.axes(leaf.split)}

    @property
    def batch_sharding(self) -> NamedSharding:
        """Returns the sharding for arrays whose first dim counts examples."""
        return mesh_lib.batch_sharding(self.mesh)

    def trainable_part(self, params: Any) -> Any:
        """Returns params, or a tree like them, with `optax.MaskedNode()`, which has no leaves, in place of frozen weights."""
        if all(placement.trainable for placement in self.placements.values()):
            return params
        index = tree.suffix_index(self.placements)

        def keep(path: str, leaf: Any) -> Any:
            found = tree.longest_suffix(index, path)
            return leaf if found is None or self.placements[found].trainable else optax.MaskedNode()

        return tree.map_with_path(keep, params)


def with_frozen(part: Any, params: Any) -> Any:
    """Returns the leaves of a trainable part, and those of `params` where it has none."""
    if not has_frozen(part):
        return part
    return jax.tree.map(lambda own, rest: rest if is_frozen(own) else own, part, params, is_leaf=is_frozen)


def has_frozen(part: Any) -> bool:
    """Says whether a tree leaves out weights that are frozen."""
    return any(map(is_frozen, jax.tree.leaves(part, is_leaf=is_frozen)))


def is_frozen(node: Any) -> bool:
    """Says whether a node of a trainable part stands for a frozen weight."""
    return isinstance(node, optax.MaskedNode)
