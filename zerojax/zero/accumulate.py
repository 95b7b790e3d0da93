"""Gradient accumulation. This module runs several forward and backward passes and returns their mean."""

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import precision, tree
from zerojax.zero import placement
from zerojax.zero.sharded_batch import keys, outputs, totals

_NO_KEYS: tuple[Collection[str], Collection[str]] = ((), ())


def value_and_grad(loss_fn: Callable[..., Any], passes: int, own_keys: Any = _NO_KEYS) -> Callable[..., Any]:
    """Returns f(params, batch, *args) -> ((loss, aux), grads), the mean over `passes` micro-batches.

    Args:
      loss_fn: `loss_fn(params, batch, *args) -> (loss, aux)` of `totals.objective`: passes count alike unless `aux` has a "weight".
      passes: the number of micro-batches; above 1 the leaves of the batch are [passes, ...].
      own_keys: the paths of random keys in the state, and in the batch, into which the number of the pass is folded.

    Gradients add up in float32 or wider, with the sharding that each pass returns: a sharded gradient stays sharded. Each pass sees the
    `aux["state"]` of the one before, and the last is returned. The rest of `aux`, such as `metrics`, is that of `outputs.terms`.
    """
    one_pass = jax.value_and_grad(loss_fn, has_aux=True)
    if passes == 1:
        return one_pass

    def accumulated(params: Any, batch: Any, state: Any) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        (loss, aux), grads = jax.eval_shape(one_pass, params, first, state)
        fields = {name: getattr(state, name) for name in aux.pop("state", {})}
        sums = jax.tree.map(_zeros, (loss, aux, grads))

        def add(carry: Any, numbered: Any) -> Any:
            (loss_sum, aux_sum, grad_sum), fields = carry
            number, micro_batch = numbered
            before = state.replace(**fields) if fields else state
            with keys_of_pass(own_keys, fields, number):
                (loss, aux), grads = one_pass(params, *of_pass(micro_batch, before, own_keys, fields, number))
            fields, weight = aux.pop("state", {}), aux.get("weight")
            loss_sum += loss if weight is None else weight * loss
            return ((loss_sum, outputs.added(aux_sum, aux), added(grad_sum, grads, weight)), fields), None

        (sums, fields), _ = jax.lax.scan(add, (sums, fields), (jnp.arange(passes), batch))
        loss, aux, grads = sums
        count = aux.pop("weight", passes)
        return (_over(loss, count), {**outputs.divided(aux, passes), "state": fields}), averaged(grads, count)

    return accumulated


def of_pass(batch: Any, state: Any, own_keys: Any, renewed: Collection[str], number: Any) -> tuple[Any, Any]:
    """Returns the batch and the state of one of several passes, with its number folded into random keys.

    Args:
      batch, state: of the pass.
      own_keys: see `value_and_grad`.
      renewed: fields of the state that the loss returns, and so renews the keys of.
      number: int32[], of the pass.
    """
    state_keys = [path for path in own_keys[0] if path.split("/")[0] not in renewed]
    return keys.fold(batch, own_keys[1], number), keys.fold(state, state_keys, number)


def keys_of_pass(own_keys: Any, renewed: Collection[str], number: Any) -> contextlib.AbstractContextManager[None]:
    """Folds the number of a pass into the keys that Linen draws with, unless the loss renews random keys of the state itself.

    A loss that splits the state's key and returns the rest has other keys in each pass already.
    """
    renews = any(path.split("/")[0] in renewed for path in own_keys[0])
    return contextlib.nullcontext() if renews else keys.folded_in_linen(number)


def begun(grads: Any, weight: Any) -> Any:
    """Returns the sum of one pass's gradients, float32 or wider; see `added`."""
    return added(jax.tree.map(_zeros, grads), grads, weight)


def added(sums: Any, grads: Any, weight: Any) -> Any:
    """Returns the sums of gradients with those of one more pass, times its weight; None: passes count alike."""

    def add(path: str, total: jax.Array, grad: jax.Array) -> jax.Array:
        if placement.is_overwritten(path):
            return jnp.maximum(total, grad)
        return total + (grad if weight is None else weight.astype(total.dtype) * grad)

    return tree.map_with_path(add, sums, grads)


def averaged(sums: Any, count: Any) -> Any:
    """Returns the gradients of a step from their sums over passes; `count` is the number of passes, or the sum of their weights."""
    return tree.map_with_path(
        lambda path, total: total if placement.is_overwritten(path) else _over(total, count), sums
    )


def _over(total: jax.Array, count: Any) -> jax.Array:
    return total / count if isinstance(count, int) else totals.ratio(total, count).astype(total.dtype)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    is_inexact = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return jnp.zeros(leaf.shape, precision.at_least_float32(leaf.dtype) if is_inexact else leaf.dtype)
