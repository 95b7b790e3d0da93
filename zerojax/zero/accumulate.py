"""Gradient accumulation. This module runs several forward and backward passes and returns their mean."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import precision


def value_and_grad(loss_fn: Callable[..., Any], passes: int) -> Callable[..., Any]:
    """Returns f(params, batch, *args) -> ((loss, aux), grads), the mean over `passes` micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch, *args) -> (mean loss, aux)`.
      passes: the number of micro-batches; above 1 the leaves of the batch are [passes, ...].

    Gradients add up in float32 or wider, with the sharding that each pass returns: a sharded gradient stays sharded. Each pass sees the
    `aux["state"]` of the one before, and the last is returned. The rest of `aux`, such as `metrics`, is averaged.
    """
    one_pass = jax.value_and_grad(loss_fn, has_aux=True)
    if passes == 1:
        return one_pass

    def accumulated(params: Any, batch: Any, state: Any) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        (loss, aux), grads = jax.eval_shape(one_pass, params, first, state)
        fields = {name: getattr(state, name) for name in aux.pop("state", {})}
        totals = jax.tree.map(_zeros, (loss, aux, grads))

        def add(carry: Any, micro_batch: Any) -> Any:
            totals, fields = carry
            (loss, aux), grads = one_pass(params, micro_batch, state.replace(**fields) if fields else state)
            fields = aux.pop("state", {})
            return (jax.tree.map(jnp.add, totals, (loss, aux, grads)), fields), None

        (totals, fields), _ = jax.lax.scan(add, (totals, fields), batch)
        loss, aux, grads = jax.tree.map(lambda leaf: leaf / passes, totals)
        return (loss, {**aux, "state": fields}), grads

    return accumulated


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(leaf.shape, precision.at_least_float32(leaf.dtype))
