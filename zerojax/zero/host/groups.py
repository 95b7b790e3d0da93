"""Divides optimizer state into groups, which move and are updated one after another. This module holds what belongs to each.

An item is a weight, or one piece of it, with its optimizer state. A group is a run of items in the order of the params, of about a chunk,
that are copied together. It ends where a block of the model ends.

What else an update reads (counts, hyperparameters) is `shared`: every item takes the values from before the step, and the rest of the
update, of what stays on the device, makes the new ones.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from zerojax import errors, tree
from zerojax.errors import UserError
from zerojax.optim import fused, pieces
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.host import memory_kind, selection
from zerojax.zero.weights import partition as partition_lib


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
      structure: () -> the tree of its own optimizer state.
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
    structure: Callable[[], Any]
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
    """The part of the optimizer state that no item updates."""

    positions: tuple[int, ...]  # of its leaves in the whole optimizer state
    # the train state's, with its optimizer state reduced to the rest and the offloaded weights frozen, so that an update made from it
    # leaves them alone
    partition: partition_lib.Partition
    numbers: tuple[int, ...]  # of its trained weights, see `Item`

    @property
    def on_device(self) -> partition_lib.Partition:
        """Returns the partition with params that are in host memory on the device."""
        state = self.partition.abstract_state
        state = state.replace(params=jax.tree.map(memory_kind.as_on_device, state.params))
        return dataclasses.replace(
            self.partition, abstract_state=state, shardings=jax.tree.map(lambda leaf: leaf.sharding, state)
        )

    def of(self, state: State) -> State:
        """Returns the train state with only this part of its optimizer state."""
        leaves = jax.tree.leaves(state.opt_state)
        structure = jax.tree.structure(self.partition.abstract_state.opt_state)
        return state.replace(opt_state=jax.tree.unflatten(structure, [leaves[n] for n in self.positions]))


class Division:
    """The optimizer state of a partition, divided.

    Attributes:
      partition: of the state.
      groups: in the order of the params. No group waits for another.
      rest: what they do not update.
      shared: positions of the leaves that items read and the rest updates.
      weights: the paths of the weights that they update.
      names: the paths of all weights, in the order of the params' leaves.
      params: the abstract weights, by path.
      leaves: the abstract leaves of the optimizer state, by position.
      on_host: the positions of those that are offloaded.

    Args:
      partition: as the attribute.
      also: the paths of weights that are updated in groups too, though their optimizer state stays on the device.
      numbers: of the weights (see `Item`), if others of the model are updated elsewhere; None: their places among the trained ones.

    Raises:
      UserError: the optimizer cannot be initialised for a part of the weights.
    """

    def __init__(
        self,
        partition: partition_lib.Partition,
        *,
        also: Collection[str] = (),
        numbers: Mapping[str, int] | None = None,
    ):
        self.partition = partition
        flat = tree.flatten(partition.abstract_state.opt_state)
        self.leaves = [leaf for _, leaf in flat]
        self._position = {path: number for number, (path, _) in enumerate(flat)}
        trained = partition.trainable_part(partition.abstract_state.params)
        places = {f"params/{path}": place for place, (path, _) in enumerate(tree.flatten(trained))}
        self._numbers = {path: numbers[path] if numbers else place for path, place in places.items()}
        self.params = {f"params/{path}": leaf for path, leaf in tree.flatten(partition.abstract_state.params)}
        self.names = list(self.params)
        self.on_host = {n for path, n in self._position.items() if f"opt_state/{path}" in partition.on_host}
        chosen = {*selection.offloaded_weights(partition), *also}
        self.weights = [name for name in self._numbers if name in chosen]
        self._parts = _Parts(partition, self._initialised)
        self.rest = self._rest()
        items = [item for weight in self.weights for item in self._items(weight)]
        self.shared = tuple(sorted({position for item in items for position in item.shared}))
        self.groups = _groups(items, partition.offload.chunk_bytes)

    def _rest(self) -> Rest:
        apart = set(self.weights)
        own = [name for name in self._numbers if name not in apart]
        frozen = self.partition.training(own)
        state = self.partition.abstract_state
        opt_state = self._initialised(frozen.trainable_part(state.params))
        reduced = tree.map_with_path(lambda path, _: self.leaves[self._position[path]], opt_state)
        state = state.replace(opt_state=reduced)
        return Rest(
            positions=tuple(self._position[path] for path, _ in tree.flatten(reduced)),
            partition=dataclasses.replace(
                frozen, abstract_state=state, shardings=jax.tree.map(lambda leaf: leaf.sharding, state)
            ),
            numbers=tuple(self._numbers[name] for name in own),
        )

    def _items(self, weight: str) -> list[Item]:
        """Returns the items of a weight."""
        found = self.partition.placements[weight]
        whole = self.params[weight]
        cut = self.partition.cuts.get(weight)
        rest = set(self.rest.positions)
        items, start = [], 0
        for piece, length in enumerate(cut.lengths if cut else (0,)):
            shape = tuple(length if cut and dim == cut.dim else n for dim, n in enumerate(found.shape or ()))
            alone = functools.partial(self._only, {weight: jax.ShapeDtypeStruct(shape, whole.dtype)})
            paths, structure = self._parts.of(weight, shape, alone)
            order = [self._position.get(path, self._position.get(f"{path}/{piece}", -1)) for path in paths]
            assert -1 not in order, f"{weight}: its optimizer state is not part of the whole"
            on_host = [n for n in order if n in self.on_host]
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
                    nbytes=sum(tree.shard_bytes(self.leaves[n]) for n in on_host),
                )
            )
            start += length
        return items

    def own_state(self, items: Sequence[Item]) -> tuple[Sequence[int], Any]:
        """Returns the positions of the leaves of the optimizer state of items' weights, and its tree. Several items are full weights."""
        if len(items) == 1:
            return items[0].order, items[0].structure()
        state = self._initialised(self._only({item.weight: self.params[item.weight] for item in items}))
        return [self._position[path] for path, _ in tree.flatten(state)], jax.tree.structure(state)

    def _initialised(self, params: PyTree) -> PyTree:
        """Returns the abstract optimizer state of a part of the weights."""
        try:
            with fused.of_a_part():
                return jax.eval_shape(self.partition.abstract_state.tx.init, params)
        except Exception as error:
            raise UserError(
                f"offload.optimizer: the optimizer cannot be initialised for a part of the weights ({errors.one_line(error, 120)}); give "
                "its masks and labels as functions of the params, which see optax.MaskedNode() in place of the other weights"
            ) from error

    def _only(self, values: Mapping[str, Any]) -> PyTree:
        """Returns a tree like the params with these leaves, by path, and optax.MaskedNode() in place of the others."""
        leaves = [values.get(name, _MASKED) for name in self.names]
        return jax.tree.unflatten(jax.tree.structure(self.partition.abstract_state.params), leaves)


_MASKED: Any = optax.MaskedNode()


class _Parts:
    """Finds the optimizer state of one weight: the whole state with `optax.MaskedNode()` in place of what belongs to other weights.

    That is the state that the optimizer makes for this weight alone, which is checked for one weight of each name in its block and each
    shape. To trace `init` for each of a thousand weights would take a minute.
    """

    def __init__(self, partition: partition_lib.Partition, init: Callable[[Any], Any]):
        self._init, state = init, partition.abstract_state.opt_state
        self._structure: Any = jax.tree.structure(state, is_leaf=pieces.is_pieces)
        self._paths: list[str] = []
        self._places: dict[str, list[int]] = {"": []}  # the numbers of the leaves of each weight, and of none
        for path, leaf in tree.flatten(state, is_leaf=pieces.is_pieces):
            stored = f"opt_state/{path}/0" if pieces.is_pieces(leaf) else f"opt_state/{path}"
            self._places.setdefault(partition.leaves[stored].weight or "", []).append(len(self._paths))
            self._paths.append(path)
        self._is_whole: dict[Any, bool] = {}

    def of(
        self, weight: str, shape: tuple[int, ...], alone: Callable[[], PyTree]
    ) -> tuple[list[str], Callable[[], Any]]:
        """Returns the paths of its leaves in the whole state, and a function of its tree, which is as large as that of the whole.

        Args:
          weight: the weight's path.
          shape: of the weight, or of a piece.
          alone: () -> the params with this weight alone.
        """
        places = sorted([*self._places[""], *self._places.get(weight, ())])
        paths, structure = [self._paths[place] for place in places], functools.partial(self._structure_of, places)
        name = weight.removeprefix(block_of(weight)), shape
        if self._is_whole.get(name):
            return paths, structure
        made: Any = self._init(alone())
        own: Any = jax.tree.structure(made)
        self._is_whole[name] = own == structure() and [path for path, _ in tree.flatten(made)] == paths
        return [path for path, _ in tree.flatten(made)], lambda: own

    def _structure_of(self, places: Sequence[int]) -> Any:
        """Returns the tree of the whole state with the leaves at these places alone."""
        nodes = [_MASKED] * len(self._paths)
        for place in places:
            nodes[place] = 0
        return jax.tree.structure(self._structure.unflatten(nodes))


def _groups(items: Sequence[Item], chunk_bytes: int) -> list[Group]:
    """Returns runs of items of about `chunk_bytes`, each within a block of the model."""
    blocks = [list(block) for _, block in itertools.groupby(items, key=lambda item: block_of(item.weight))]
    return [Group(tuple(run)) for block in blocks for run in tree.runs(block, lambda item: item.nbytes, chunk_bytes)]


def block_of(weight: str) -> str:
    """Returns the block that a weight belongs to: its path up to the first part that has a number, or its first part.

    >>> block_of("params/model/layer_3/mlp/kernel")
    'params/model/layer_3'
    """
    parts = weight.split("/")
    numbered = next((n for n, part in enumerate(parts) if re.search(r"\d", part)), 1)
    return "/".join(parts[: numbered + 1])
