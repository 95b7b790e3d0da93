"""Applies gradients to a train state, or skips a step whose gradients overflowed. This module is what follows the gradients.

An optimizer with a one-pass form (`optim.one_pass.OnePass`) updates in that pass; any other as optax does.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.training import train_state

from zerojax import precision, tree
from zerojax.errors import UserError
from zerojax.optim import one_pass as one_pass_lib
from zerojax.zero import loss_scale as loss_scale_lib
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
    if not isinstance(tx, one_pass_lib.OnePass) or not is_flax:
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


class Verdict(NamedTuple):
    """What a step's gradients are.

    Attributes:
      finite: bool[], whether all are finite; None where nobody asks, and every step is taken.
      leaf: int32[], the number of the first that is not, or -1; None likewise.
    """

    finite: Any = None
    leaf: Any = None


class Unscaled:
    """The identity of loss scaling: scale 1, and every step is taken."""

    def scale(self, state: Any) -> Any:
        """Returns what multiplies the loss."""
        return 1.0

    def verdict(self, squares: Any) -> Verdict:
        """Judges a step by its gradients' sums of squares."""
        return Verdict()

    def adjust(self, state: Any, verdict: Verdict) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state with the scale adjusted, and what to report."""
        return state, {}


@dataclasses.dataclass(frozen=True)
class Scaled(Unscaled):
    """Loss scaling inside a train step; the train state's field `loss_scale` holds its state."""

    scaler: loss_scale_lib.LossScale

    def scale(self, state: Any) -> jax.Array:
        """Returns what multiplies the loss."""
        return state.loss_scale.scale

    def verdict(self, squares: Any) -> Verdict:
        """Judges a step by its gradients' sums of squares, unscaled and over all devices: a tree of float32[].

        A sum is not finite if an element is not, or if one is beyond 1e19, which no float16 is.
        """
        is_bad = ~jnp.isfinite(jnp.stack(jax.tree.leaves(squares)))
        finite = ~jnp.any(is_bad)
        return Verdict(finite, jnp.where(finite, -1, jnp.argmax(is_bad)))

    def adjust(self, state: Any, verdict: Verdict) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state with the scale adjusted, and what to report."""
        adjusted = self.scaler.update(state.loss_scale, verdict.finite)
        return state.replace(loss_scale=adjusted), {
            "loss_scale": state.loss_scale.scale,
            "skipped_steps": adjusted.skipped_steps,
            "overflow_leaf": verdict.leaf,
            "is_exhausted": adjusted.is_exhausted,
        }


def in_step(loss_scale: loss_scale_lib.LossScale | None, abstract_state: Any) -> Unscaled:
    """Returns what a train step does about loss scaling; None is nothing.

    Raises:
      UserError: the train state has no place for the scale, or has one that would never be read.
    """
    if loss_scale is not None and not callable(getattr(loss_scale, "update", None)):
        raise UserError(
            f"make_train_step: loss_scale must be a DynamicLossScale or a StaticLossScale, and is {loss_scale!r}; "
            "for a constant one give StaticLossScale(1024.0)"
        )
    is_there = isinstance(getattr(abstract_state, "loss_scale", None), loss_scale_lib.LossScaleState)
    if loss_scale is None and is_there:
        raise UserError(
            "make_train_step: the state holds a loss scale and none was given; pass loss_scale=, or create the state without one"
        )
    if loss_scale is not None and not is_there:
        raise UserError(
            "make_train_step: loss scaling needs a field `loss_scale` in the train state; declare `loss_scale: Any` in your TrainState "
            "and create it with loss_scale=scaler.init()"
        )
    return Unscaled() if loss_scale is None else Scaled(loss_scale)
