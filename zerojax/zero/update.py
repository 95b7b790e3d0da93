"""Applies gradients to a train state. This module takes the optimizer's one-pass form where it has one, see `precision.OnePass`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.training import train_state

from zerojax import precision, tree
from zerojax.zero import placement


def make(partition: Any) -> Callable[..., Any]:
    """Returns update(before, after, grads, factor, finite) -> the new train state.

    Its arguments are the state that the step began with; the same with the fields that the loss returned; gradients of the trainable
    part, laid out as `Placement.update` says; float32[] or a number, which multiplies them; bool[], whether the step is taken, or None
    where every one is. A step that is not taken leaves the state of its beginning, to the last bit. Gradients keep their dtype where every
    step is taken, and are float32 otherwise: in 16 bits they may vanish without their loss scale.

    Args:
      partition: the state's placement.
    """
    apply = _apply(partition)

    def update(before: Any, after: Any, grads: Any, factor: Any, finite: Any) -> Any:
        own_before, own_after = (
            state.replace(params=partition.trainable_part(state.params)) for state in (before, after)
        )
        new = apply(own_before, own_after, grads, factor, finite)
        return new.replace(params=placement.with_frozen(new.params, before.params))

    return update


def _apply(partition: Any) -> Callable[..., Any]:
    """Returns f(before, after, grads, factor, finite) -> the new train state, where params are the trainable ones alone."""
    state = partition.abstract_state
    tx = getattr(state, "tx", None)
    # A state that applies gradients in a way of its own (averages of weights, say) is left to do so.
    is_flax = getattr(type(state), "apply_gradients", None) is train_state.TrainState.apply_gradients
    if not isinstance(tx, precision.OnePass) or not is_flax:
        return _by_parts
    trained = partition.trainable_part(state.params)
    if not all(f"params/{path}" in partition.placements for path, _ in tree.flatten(trained)):
        return (
            _by_parts  # some are placed in another role, and no shardings of a gradient and moments are known for them
        )
    shardings = tree.map_with_path(lambda path, _: partition.placements[f"params/{path}"].update, trained)
    return functools.partial(_in_one_pass, functools.partial(tx.apply, shardings=shardings))


def _by_parts(before: Any, after: Any, grads: Any, factor: Any, finite: Any) -> Any:
    grads = precision.cast_floating(grads, None if finite is None else jnp.float32)
    grads = jax.tree.map(lambda g: g * jnp.asarray(factor, g.dtype), grads)
    return _kept(finite, after.apply_gradients(grads=grads), before)


def _in_one_pass(apply: Callable[..., Any], before: Any, after: Any, grads: Any, factor: Any, finite: Any) -> Any:
    params, opt_state = apply(grads, before.opt_state, before.params, scale=factor, finite=finite)[:2]
    blank = {"params": (), "opt_state": ()}
    rest = _kept(finite, after.replace(step=after.step + 1, **blank), before.replace(**blank))
    return rest.replace(params=params, opt_state=opt_state)


def _kept(finite: Any, new: Any, old: Any) -> Any:
    """Returns the new tree where the step is taken, else the old one."""
    return new if finite is None else jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
