"""Stores one leaf as several arrays. This module defines their pytree, which keeps the leaf's shape and dtype.

Offloaded state is streamed through the device in pieces of bounded size. Each piece is a slice of the leaf along one dim that its spec does
not shard, so it has the leaf's spec, and a buffer of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zerojax.tree import Leaf, PyTree


@jax.tree_util.register_pytree_with_keys_class
class Pieces:
    """A leaf as slices along `dim`, in order. `shape` and `dtype` are the leaf's.

    Attributes:
      arrays: the slices: arrays, or the same for abstract arrays, shardings and specs.
      dim: the dim along which they are concatenated.
    """

    def __init__(self, arrays: Sequence[Any], dim: int):
        self.arrays, self.dim = tuple(arrays), dim

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], int]:
        return [(jax.tree_util.SequenceKey(n), array) for n, array in enumerate(self.arrays)], self.dim

    def tree_flatten(self) -> tuple[tuple[Any, ...], int]:
        return self.arrays, self.dim

    @classmethod
    def tree_unflatten(cls, dim: int, arrays: Sequence[Any]) -> "Pieces":
        return cls(arrays, dim)

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.arrays[0].shape
        return (*first[: self.dim], sum(array.shape[self.dim] for array in self.arrays), *first[self.dim + 1 :])

    @property
    def dtype(self) -> Any:
        return self.arrays[0].dtype

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Returns the sharding of each piece, which is one of the leaf too."""
        return self.arrays[0].sharding

    @property
    def lengths(self) -> tuple[int, ...]:
        """Returns the length of each piece along `dim`."""
        return tuple(array.shape[self.dim] for array in self.arrays)

    def __repr__(self) -> str:
        return f"Pieces({len(self.arrays)} along dim {self.dim})"


def is_pieces(node: PyTree) -> bool:
    """Returns whether a node of a tree is a leaf in pieces."""
    return isinstance(node, Pieces)


def whole(leaf: Leaf) -> Leaf:
    """Returns an abstract leaf in pieces as one ShapeDtypeStruct with its sharding; any other leaf unchanged."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_pieces(leaf) else leaf


def slices(lengths: Sequence[int], dim: int, leaf: Leaf) -> list[Any]:
    """Returns an array's slices of these lengths along `dim`."""
    ends = np.cumsum(lengths)
    return [leaf[(slice(None),) * dim + (slice(int(end - n), int(end)),)] for end, n in zip(ends, lengths)]


def join(leaf: Leaf) -> Leaf:
    """Returns a leaf in pieces as one array on the host; any other leaf unchanged.

    With several processes the result is a jax.Array with the sharding of the pieces, and each process joins the shards of its devices.
    """
    if not is_pieces(leaf):
        return leaf
    if all(array.is_fully_addressable for array in leaf.arrays):
        return np.concatenate([np.asarray(array) for array in leaf.arrays], leaf.dim)
    return _over_shards(leaf.sharding, leaf.shape, leaf.arrays, lambda parts: np.concatenate(parts, leaf.dim))


def split(array: jax.Array, like: Pieces) -> Pieces:
    """Inverts `join` for an array with the sharding of the pieces. Works on each device's shard, on the host."""
    parts = []
    for number, piece in enumerate(like.arrays):
        cut = lambda shards, n=number: slices(like.lengths, like.dim, shards[0])[n]  # noqa: E731
        parts.append(_over_shards(piece.sharding, piece.shape, [array], cut))
    return Pieces(parts, like.dim)


def _over_shards(sharding: NamedSharding, shape: tuple[int, ...], arrays: Sequence[Any], function: Any) -> jax.Array:
    """Returns the global array whose shards are `function` of the arrays' shards, as numpy arrays, on the same device."""
    by_device: dict[Any, list[Any]] = {device: [] for device in sharding.addressable_devices}
    for array in arrays:
        for shard in array.addressable_shards:
            by_device[shard.device].append(np.asarray(shard.data))
    placed = [
        jax.device_put(function(parts), jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, parts in by_device.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
