"""The trainer's state. This module adds a random key, a loss scale and the like to flax's TrainState. Any other works too."""

from typing import Any

import jax
from flax.training import train_state

from zerojax.tree import PyTree

State = Any  # a train state: flax's, a subclass of it, one of the user's own, or a tree like one of these


class TrainState(train_state.TrainState):
    """step, params, opt_state, a random key, a loss scale and histories; `apply_fn` and `tx` are static.

    Attributes:
      rng: the key from which each step folds its own, so that a resumed run draws the same numbers as an uninterrupted one, or () if
        nothing is drawn.
      loss_scale: a `loss_scale.LossScaleState`, or () if the loss is not scaled.
      fp8: the histories of `zero.fp8.history`, or () if scales are not delayed.
      last_norm: the gradients' norm in the last step (`zero.offload.late_norm`), or () if they are not clipped by it.
      unsent_grads: what packed wires did not send yet (`zero.wires.unsent`), or () without error feedback.
    """

    rng: Any = ()
    loss_scale: Any = ()
    fp8: Any = ()
    last_norm: Any = ()
    unsent_grads: Any = ()


def create(params: PyTree, tx: Any, rng: jax.Array, apply_fn: Any = None, **fields: Any) -> TrainState:
    """Returns the state before the first step; the key is stored as raw words, which every checkpoint format supports."""
    if jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.key_data(rng)
    return TrainState.create(apply_fn=apply_fn, params=params, tx=tx, rng=rng, **fields)
