"""The trainer's state. This module adds a random key, a loss scale and the like to flax's TrainState. Any other works too."""

from collections.abc import Container, Mapping
from typing import Any, Self

import jax
from flax import nnx
from flax.training import train_state

from zerojax.errors import UserError
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

    @classmethod
    def create(cls, *, apply_fn: Any, params: PyTree, tx: Any, **fields: Any) -> Self:
        """Returns the state before the first step."""
        if not isinstance(params, Container):  # flax asks whether a name is in the params
            raise UserError(
                f"params: is a {type(params).__name__}, in which flax's TrainState can look up no name; put its arrays into a dict: "
                'params={"net": equinox.filter(module, equinox.is_array)}'
            )
        return super().create(apply_fn=apply_fn, params=params, tx=tx, **fields)


def create(params: PyTree, tx: Any, rng: jax.Array, apply_fn: Any = None, **fields: Any) -> TrainState:
    """Returns the state before the first step; the key is stored as raw words, which every checkpoint format supports."""
    if jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.key_data(rng)
    return TrainState.create(apply_fn=apply_fn, params=params, tx=tx, rng=rng, **fields)


def way_to_one(state: State) -> str:
    """Returns what to do with a state of another form, as the end of an error's line."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    own = "write your own step around zerojax.where_used (as examples/{}.py of the repository does)"
    if any(isinstance(node, nnx.Variable) for node in nodes):
        return (
            "for NNX use zerojax.TrainState.create(apply_fn=None, params=nnx.state(model, nnx.Param), tx=tx), with other variables in a "
            f"field of a subclass, or {own.format('nnx_model')}"
        )
    parts = [*state.values()] if isinstance(state, Mapping) else list(state) if isinstance(state, tuple) else []
    if sum(isinstance(part, train_state.TrainState) for part in parts) > 1:
        return (
            "shard each of its train states by itself and make a step for each, or hold all weights in one: params={...}, "
            "tx=optax.partition({...}, labels)"
        )
    return (
        "use flax's TrainState or a subclass: zerojax.TrainState.create(apply_fn=None, params=params, tx=tx), or "
        f"{own.format('own_train_step')}"
    )
