"""Applies gradients to a train state, or skips a step whose gradients overflowed. This module holds the part of a step after the gradients.

An optimizer with a one-pass form updates in that pass (`one_pass_update`), any other through optax. Where padding
would change the update, it is made without (`padding`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import precision, tree
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.update import narrow_params, one_pass_update, padding
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement


def make(partition: partition_lib.Partition) -> Callable[..., Any]:
    """Returns f(before, after, grads, factor, finite, numbers) -> the new train state.

    Its arguments:
      before: the state at the start of the step.
      after: the same with the fields that the loss function returned.
      grads: gradients of the trainable part, sharded as `Placement.update`.
      factor: float32[] or a number that multiplies them.
      finite: bool[], whether the step is taken; None: every step is.
      numbers: uint32[leaves], the number of each weight of the trainable part, which seeds stochastic rounding; None: its place.

    A skipped step returns `before`, bit for bit. Gradients keep their dtype if every step is taken, and are float32 otherwise: in 16 bits
    they may underflow without their loss scale. They get the params' dtype if the state's dtypes would change otherwise
    (`narrow_params`).

    Args:
      partition: how the state is sharded.
    """
    applied = lambda before, after, grads: after.apply_gradients(grads=grads)  # noqa: E731
    if narrow_params.are_in(partition):
        applied = narrow_params.applied(partition)
    update = one_pass_update.of(partition) or functools.partial(_by_parts, applied)
    if padding.changes_update(partition, is_own=not one_pass_update.applies_as_flax(partition.abstract_state)):
        update = padding.around(update, partition)
    return partition_lib.around(update, partition) if partition.freezes else update


def _by_parts(
    applied: Callable[[Any, Any, PyTree], Any],
    before: State,
    after: State,
    grads: PyTree,
    factor: jax.Array | float,
    finite: jax.Array | None,
    numbers: jax.Array | None = None,
) -> State:
    grads = precision.cast_floating(grads, None if finite is None else jnp.float32)

    def scaled(path: str, grad: jax.Array) -> jax.Array:
        return grad if placement.is_overwritten(path) else grad * jnp.asarray(factor, grad.dtype)

    return tree.where(finite, applied(before, after, tree.map_with_path(scaled, grads)), before)


class Own(NamedTuple):
    """The weights that an update here is for: a partition that freezes the others, and their numbers among all trained ones."""

    partition: partition_lib.Partition
    numbers: tuple[int, ...]


def finish(
    partition: partition_lib.Partition, own: Own | None, scaling: "Unscaled", clip: "Clip"
) -> Callable[..., Any]:
    """Returns f(state, aux, grads, squares) -> (new state, metrics, factor, finite): a step after its gradients and their `squares`.

    Args:
      partition: how the state is sharded.
      own: the weights that are updated here, if others are updated elsewhere; None: all.
      scaling: of the loss.
      clip: limits the gradients' global norm.

    Gradients that are applied elsewhere are to be multiplied by `factor`. A step that is not `finite` is skipped.
    """
    resident, numbers = own or (partition, None)
    update = make(resident)

    def finish(state: State, aux: PyTree, grads: PyTree, squares: PyTree) -> tuple[Any, ...]:
        with jax.named_scope("clip"):
            norm, unscale = jnp.sqrt(sum(jax.tree.leaves(squares))), 1.0 / scaling.scale(state)
            factor = unscale * clip.factor(state, norm)
            verdict = scaling.verdict(squares)
        with jax.named_scope("update"):
            after = state.replace(**aux.get("state", {}), **aux.get("kept", {}))
            new_state = update(state, after, grads, factor, verdict.finite, numbers)
            new_state, scaling_metrics = scaling.adjust(new_state, verdict)
            new_state, clip_metrics = clip.after(state, new_state, norm)
            # Cast and add on the shards, then gather, so that 16-bit params are sent.
            new_state = new_state.replace(params=constrain(partition, new_state.params))
        metrics = {**aux["metrics"], "grad_norm": norm, **clip_metrics, **scaling_metrics}
        return new_state, metrics, factor, verdict.finite

    return finish


def squares(grads: PyTree, unscale: jax.Array | float) -> PyTree:
    """Returns each gradient's sum of squares, float32[]; 0 for a frozen weight, and for one that its gradient overwrites.

    Args:
      grads: the gradients by path, or a tree like the params.
      unscale: multiplies them.
    """

    def of_leaf(path: str, grad: Leaf) -> jax.Array:
        if placement.is_frozen(grad) or placement.is_overwritten(path):
            return jnp.zeros((), jnp.float32)
        if jnp.iscomplexobj(grad):
            return of_leaf(path, grad.real) + of_leaf(path, grad.imag)
        return jnp.sum(jnp.square(grad.astype(jnp.float32) * unscale))

    return tree.map_with_path(of_leaf, grads, is_leaf=placement.is_frozen)


def constrain(partition: partition_lib.Partition, params_like: PyTree) -> PyTree:
    """Constrains a tree like params to the update's sharding, so that the update is local; frozen weights are unchanged."""
    index = tree.suffix_index(partition.placements)

    def constrain_leaf(path: str, leaf: Leaf) -> Leaf:
        found = tree.longest_suffix(index, path)
        if found is None or not partition.placements[found].trainable:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, partition.placements[found].update)

    return tree.map_with_path(constrain_leaf, params_like)


@dataclasses.dataclass(frozen=True)
class Clip:
    """Limits the gradients' global norm."""

    limit: float = 0.0  # of the norm; 0 for none
    may_skip: bool = False  # whether a step is skipped if its gradients are not all finite

    @property
    def is_early(self) -> bool:
        """Returns whether the factor is known before the gradients, and every step is taken."""
        return not self.limit and not self.may_skip

    def factor(self, state: State, norm: jax.Array) -> jax.Array | float:
        """Returns what the gradients of a step are multiplied by, for its own norm: float32[] or a number."""
        return jnp.minimum(1.0, self.limit / norm) if self.limit else 1.0  # a norm of 0 gives inf, so 1

    def after(self, before: State, state: State, norm: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state after a step that began with `before`, and metrics."""
        return state, {}


class Verdict(NamedTuple):
    """Whether a step's gradients are finite."""

    finite: Any = None  # bool[], whether all are finite; None without loss scaling, where every step is taken
    leaf: Any = None  # int32[], the index of the first that is not, or -1; None without loss scaling


class Unscaled:
    """The identity of loss scaling: scale 1, and every step is taken."""

    def scale(self, state: State) -> jax.Array | float:
        """Returns the factor of the loss."""
        return 1.0

    def verdict(self, squares: PyTree) -> Verdict:
        """Judges a step by its gradients' sums of squares."""
        return Verdict()

    def adjust(self, state: State, verdict: Verdict) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state with the scale adjusted, and metrics."""
        return state, {}
