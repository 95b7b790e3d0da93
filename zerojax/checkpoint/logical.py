"""Defines the form of a state in a checkpoint. This module converts states to that form, and their leaves to plain arrays, and back."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.typing import DTypeLike

from zerojax import precision, tree
from zerojax.checkpoint import in_file
from zerojax.optim import master_weights, pieces
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree


def to_logical(state: State) -> State:
    """Returns a TrainState without its 16-bit copy: params are the master weights. Checkpoints store this form.

    The form is the same for every stage and precision, so each restores into any other. Only dtypes differ, and restoring casts them.
    """
    if not isinstance(state.opt_state, master_weights.MasterWeightsState):
        return state
    params = jax.tree.map(
        lambda master, param: param if _is_frozen(master) else master,
        state.opt_state.master,
        state.params,
        is_leaf=lambda node: _is_frozen(node) or pieces.is_pieces(node),
    )
    return state.replace(params=params, opt_state=state.opt_state.inner)


def from_logical(logical: State, copy_dtype: DTypeLike | None) -> State:
    """Inverts `to_logical`: params become a copy of the master weights in `copy_dtype`. None makes no copy. No weight is frozen."""
    if copy_dtype is None:
        return logical
    opt_state = master_weights.MasterWeightsState(logical.params, logical.opt_state)
    return logical.replace(params=precision.cast_floating(logical.params, copy_dtype), opt_state=opt_state)


def _is_frozen(node: PyTree) -> bool:
    """Returns whether a node of the master weights belongs to a frozen weight, which has no master weight."""
    return isinstance(node, optax.MaskedNode)


def to_stored(state: State) -> dict[str, Any]:
    """Returns {path: array}: random keys as their data, numbers and process-local arrays as numpy copies, leaves in pieces as one.

    With one process, leaves in host memory are numpy copies too, so that a save in the background does not keep pinned memory that the next
    step needs, and leaves in a file are `in_file.InFile`s, which must not change until the save has ended. With several, each reads its
    shards of leaves in a file into host memory.
    """

    def convert(leaf: Leaf) -> Leaf:
        if jax.process_count() == 1 and all(map(_is_in_file, jax.tree.leaves(leaf))):
            return in_file.InFile(functools.partial(_read, leaf), leaf.shape, leaf.dtype)
        array = pieces.join(jax.random.key_data(leaf) if tree.is_key(leaf) else leaf)
        array = array.to_host() if _is_in_file(array) else array
        if isinstance(array, np.ndarray) and array is not leaf:
            return array
        is_local = jax.process_count() > 1 and getattr(array, "is_fully_addressable", False)
        if isinstance(array, jax.Array) and not is_local and not _is_apart(array):
            return array
        return np.array(array, dtype=tree.dtype_of(array))

    leaves = tree.flatten(state, is_leaf=pieces.is_pieces)
    stored = {name: convert(leaf) for name, leaf in leaves}
    assert len(stored) == len(leaves), "two leaves of the state have one path"
    return stored


def _is_in_file(leaf: Leaf) -> bool:
    return getattr(leaf, "is_in_file", False)


def _read(leaf: Leaf) -> np.ndarray:
    return np.asarray(pieces.join(leaf))


def _is_apart(array: jax.Array) -> bool:
    """Returns whether this process holds all of an array in a memory other than its devices' own."""
    kind, default = array.sharding.memory_kind, next(iter(array.devices())).default_memory().kind
    return jax.process_count() == 1 and kind not in (None, default)


def form(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns the abstract array that stores a leaf, with the leaf's sharding."""
    wanted = tree.abstract(pieces.whole(leaf))
    if tree.is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(wanted.shape, wanted.dtype))
        wanted = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=wanted.sharding)
    if wanted.sharding is not None:
        wanted.sharding.shard_shape(wanted.shape)  # raises here, so that the error is not taken for a damaged file
    return wanted


def from_stored(array: Any, leaf: Leaf) -> Leaf:
    """Returns a restored array as the kind of the abstract leaf: an array, an array in pieces or a random key."""
    if pieces.is_pieces(leaf):
        return pieces.split(array, leaf)
    if not tree.is_key(leaf):
        return array
    aval = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    impls: list = []  # only a traced key has its implementation
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(array, impl=impls[0])
