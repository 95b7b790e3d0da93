"""Updates weights by an optimizer whose update is one pass over memory (`optim.one_pass.OnePass`). This module tells it their shardings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax.training import train_state

from zerojax import tree
from zerojax.optim import one_pass
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.update import padding
from zerojax.zero.weights import partition as partition_lib


def of(partition: partition_lib.Partition) -> Callable[..., Any] | None:
    """Returns f(before, after, grads, factor, finite, numbers) -> the new train state, for states with trainable params only; see
    `update.make`. None if the update is made through optax."""
    shardings = _shardings(partition)
    if shardings is None:
        return None
    tx, how = partition.abstract_state.tx, {"shardings": shardings}
    if not tx.is_elementwise:
        trained = partition.trainable_part(partition.abstract_state.params)
        how["shapes"] = tree.map_with_path(lambda path, leaf: padding.unpadded(partition, path, leaf), trained)
    return functools.partial(_updated, functools.partial(tx.apply, **how))


def received(partition: partition_lib.Partition) -> int:
    """Returns the elements that each device receives in the optimizer's update, which moves matrices to owners (`optim.owners`)."""
    shardings = _shardings(partition)
    if shardings is None:
        return 0
    state = partition.abstract_state
    return state.tx.received(partition.trainable_part(state.params), shardings)


def applies_as_flax(state: State) -> bool:
    """Returns whether a state applies gradients as flax does. Another one (with averages of weights, say) keeps its own way."""
    return getattr(type(state), "apply_gradients", None) is train_state.TrainState.apply_gradients


def _shardings(partition: partition_lib.Partition) -> PyTree:
    """Returns the shardings of the trainable weights in their update; None if it is made through optax."""
    state = partition.abstract_state
    overwrites = any(weight.overwritten for weight in partition.placements.values())
    if not isinstance(getattr(state, "tx", None), one_pass.OnePass) or not applies_as_flax(state) or overwrites:
        return None
    trained = partition.trainable_part(state.params)
    if not all(f"params/{path}" in partition.placements for path, _ in tree.flatten(trained)):
        return None  # some have another role, so the shardings of their gradients and moments are unknown
    return tree.map_with_path(lambda path, _: partition.placements[f"params/{path}"].update, trained)


def _updated(
    apply: Callable[..., Any],
    before: State,
    after: State,
    grads: PyTree,
    factor: jax.Array | float,
    finite: jax.Array | None,
    numbers: jax.Array | None = None,
) -> State:
    how = {"scale": factor, "finite": finite} | ({} if numbers is None else {"numbers": numbers})
    params, opt_state = apply(grads, before.opt_state, before.params, **how)[:2]
    blank = {"params": (), "opt_state": ()}
    rest = tree.where(finite, after.replace(step=after.step + 1, **blank), before.replace(**blank))
    return rest.replace(params=params, opt_state=opt_state)
