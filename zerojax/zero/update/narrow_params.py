"""Applies gradients through optax to a state whose params have 16 bits. This module keeps its dtypes, and the copies of master weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import tree
from zerojax.optim import master_weights
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.update import one_pass_update
from zerojax.zero.weights import partition as partition_lib


def are_in(partition: partition_lib.Partition) -> bool:
    """Returns whether any param has fewer bits than a sum of gradients."""
    return any(tree.dtype_of(leaf).itemsize < 4 for leaf in jax.tree.leaves(partition.abstract_state.params))


def applied(partition: partition_lib.Partition) -> Callable[[Any, Any, PyTree], Any]:
    """Returns f(before, after, grads) -> the state `after` with gradients applied; `before` is the one at the start of the step."""
    state = partition.abstract_state
    overwrites = any(weight.overwritten for weight in partition.placements.values())
    is_copied = isinstance(getattr(state, "opt_state", None), master_weights.MasterWeightsState)
    is_copied &= one_pass_update.applies_as_flax(state) and not overwrites

    def applied(before: State, after: State, grads: PyTree) -> State:
        new = after.apply_gradients(grads=_in_dtypes_that_keep(before, grads))
        if not is_copied:
            return new
        # Sums of 16-bit params and updates may round ties the other way than the master weights, from which a state is restored.
        return new.replace(params=jax.tree.map(lambda m, p: m.astype(p.dtype), new.opt_state.master, new.params))

    return applied


def _in_dtypes_that_keep(state: State, grads: PyTree) -> PyTree:
    """Returns gradients in their own dtypes if the update keeps those of the state, and otherwise in those of the params.

    Sums over devices and passes are float32. An optimizer of 16-bit weights without float32 masters takes its moments' dtype from the
    gradients, or mixes both in a branch.
    """

    def narrowed(grad: jax.Array, param: jax.Array) -> jax.Array:
        return grad.astype(param.dtype) if jnp.promote_types(grad.dtype, param.dtype) == grad.dtype else grad

    own = jax.tree.map(narrowed, grads, state.params)
    if jax.tree.map(tree.dtype_of, own) == jax.tree.map(tree.dtype_of, grads):
        return grads
    try:
        after = jax.eval_shape(lambda state, grads: state.apply_gradients(grads=grads), state, grads)
    except TypeError:
        return own
    return grads if jax.tree.map(tree.dtype_of, after) == jax.tree.map(tree.dtype_of, state) else own
