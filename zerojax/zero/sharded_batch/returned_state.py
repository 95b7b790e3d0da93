"""Makes the values of the state that a loss function returned equal on all devices, by the rule of `outputs`. This module also keeps
their structure and dtypes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import dependence, outputs


def of_batch(returned: Mapping[str, Any], before: State) -> dict[str, Any]:
    """Returns the values of the state that a loss returned on the whole batch, in the structure and the dtypes of the state."""
    return {
        field: _fitted(field, new, getattr(before, field), lambda path, new, old: outputs.value(new))
        for field, new in returned.items()
    }


def of_devices(
    returned: Mapping[str, Any], before: State, program: Callable[[], dependence.TracedLoss]
) -> dict[str, Any]:
    """Returns values of the state that are equal on all devices; call it inside `jax.shard_map`.

    Args:
      returned: {field: value} of one device.
      before: the train state that the loss was called with, but for keys of this device alone.
      program: traces the loss function.
    """

    def equal(path: str, new: Leaf, old: Leaf) -> Leaf:
        if any(map(jnp.ndim, jax.tree.leaves(new))):
            dependence.refuse_rows(f"state/{path}", new, program())
        if isinstance(new, outputs.Mean):
            return outputs.ratio(*outputs.psum((new.total, new.weight)))
        if isinstance(new, outputs.Sum):
            return old + outputs.psum(new.total - old)
        if jnp.issubdtype(new.dtype, jnp.inexact):
            return jax.lax.pmean(new, mesh_lib.SUMMED)
        kind = program().kind(f"state/{path}", path)
        if kind == dependence.SAME:
            return dependence.of_whole_batch(program(), f"state/{path}", before, new)
        dependence.refuse_repeated(f"state/{path}", kind, program())
        if kind == dependence.GROWN and jnp.issubdtype(new.dtype, jnp.integer):
            return old + outputs.psum(new - old)
        what = "neither a mean nor the old value plus a sum over examples"
        raise UserError(
            f"loss_fn: returned state/{path}, {outputs.type_of(new)}, which differs between devices and is {what}; {outputs.WAY_OUT}"
        )

    returned = jax.tree.map(outputs.without_gradient, dict(returned))
    return {field: _fitted(field, value, getattr(before, field), equal) for field, value in returned.items()}


def _fitted(field: str, returned: PyTree, before: State, combine: Callable[[str, Any, Any], Any]) -> PyTree:
    """Maps `combine(path, new, old)` over a field of the state; returns the old structure and dtypes."""
    old = {f"{field}/{path}".rstrip("/"): leaf for path, leaf in tree.flatten(before)}
    new = {f"{field}/{path}".rstrip("/"): leaf for path, leaf in tree.flatten(returned, is_leaf=outputs.is_total)}
    if odd := sorted(set(old) ^ set(new)):
        raise UserError(
            f"loss_fn: returned state.{field} {'without' if odd[0] in old else 'with'} {odd[0]}, and a state keeps its structure; return "
            "the same leaves that the field has"
        )
    return jax.tree.unflatten(
        jax.tree.structure(before), [_cast(path, combine(path, new[path], leaf), leaf) for path, leaf in old.items()]
    )


def _cast(path: str, new: Leaf, old: Leaf) -> Leaf:
    """Returns a new value of the state in the dtype of the old one."""
    dtype = tree.dtype_of(old)
    new = jnp.asarray(new)
    kinds = [
        next((k for k in (jnp.floating, jnp.complexfloating, jnp.integer) if jnp.issubdtype(d, k)), d)
        for d in (new.dtype, dtype)
    ]
    if kinds[0] != kinds[1] or new.shape != jnp.shape(old):
        raise UserError(
            f"loss_fn: returned state/{path} as {outputs.type_of(new)}, and the state holds {outputs.type_of(old)}; a "
            "state keeps its shapes and dtypes"
        )
    return new if new.dtype == dtype else new.astype(dtype)
