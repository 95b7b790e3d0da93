"""Pads weights that no dim divides, and takes the padding away again. This module holds `indivisible="pad"` of states and updates.

An elementwise optimizer, or one of one pass, updates padded arrays. Any other, and a state's own `apply_gradients`, get weights, gradients
and state without padding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import tree
from zerojax.optim import locality
from zerojax.optim import one_pass as one_pass_lib
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.host import memory_kind, storage
from zerojax.zero.weights import partition as partition_lib


def pad(state: State, partition: partition_lib.Partition) -> State:
    """Adds the zeros of `indivisible="pad"`; other leaves are unchanged."""

    def extend(path: str, leaf: Leaf) -> Leaf:
        padding = partition.leaves[path].padding if path in partition.leaves else ()
        return jnp.pad(leaf, [(0, extra) for extra in padding]) if padding else leaf

    return tree.map_with_path(extend, state)


def unpad(state: State, partition: partition_lib.Partition) -> State:
    """Removes the zeros that `pad` added. A part of a state will do: {"params": grads} gives gradients in the weights' own shapes."""

    def cut(path: str, leaf: Leaf) -> Leaf:
        decided = partition.leaves.get(path)
        if (
            decided is not None
            and decided.padding
            and not isinstance(leaf, jax.core.Tracer)
            and memory_kind.is_on_host(leaf)
        ):
            # XLA's slices of host memory have open bugs.
            (leaf,) = storage.arrived(storage.load([leaf], [memory_kind.on_device(leaf.sharding)]))
        return leaf[tuple(slice(n) for n in decided.shape)] if decided is not None and decided.padding else leaf

    return tree.map_with_path(cut, state)


def changes_update(partition: partition_lib.Partition, *, is_own: bool) -> bool:
    """Returns whether the padding of weights could change their update; `is_own`: the state applies gradients in its own way.

    That of a one-pass optimizer it does not: zeros at the end of a dim change no other element, but for the random bits of its
    rounding. One that is not elementwise must know the shapes without them, which it is told in one pass alone.
    """
    if not any(leaf.padding for leaf in partition.leaves.values()):
        return False
    state = partition.abstract_state
    tx = getattr(state, "tx", None)
    if tx is None or is_own:
        return True
    if isinstance(tx, one_pass_lib.OnePass):
        return not tx.is_elementwise and any(found.overwritten for found in partition.placements.values())
    padded = partition.trainable_part(state.params)
    plain = tree.map_with_path(lambda path, leaf: unpadded(partition, path, leaf), padded)
    return locality.of(tx, plain, pieces=padded).kind != locality.ELEMENTWISE


def unpadded(partition: partition_lib.Partition, path: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns a weight without its padding, by its path below the params."""
    decided = partition.leaves.get(f"params/{path}")
    return jax.ShapeDtypeStruct(leaf.shape if decided is None else decided.shape, leaf.dtype)


def around(apply: Callable[..., Any], partition: partition_lib.Partition) -> Callable[..., Any]:
    """Returns `apply` on a state and gradients without padding. The compiler keeps them sharded, and moves elements at shards' ends."""

    def apply_unpadded(before: State, after: State, grads: PyTree, *how: Any) -> State:
        before, after = (unpad(state, partition) for state in (before, after))
        grads = unpad({"params": grads}, partition)["params"]
        return pad(apply(before, after, grads, *how), partition)

    return apply_unpadded
