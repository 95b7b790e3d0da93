"""Scales from earlier steps (delayed scaling). This module keeps the largest magnitudes that each module's matmul saw, in the train state.

The state's field `fp8` has a history for each module: float32[2, steps], of its input and of the gradient of its result, the newest first.
Scales of a step come from the largest magnitude of the history (arXiv:2209.05433, section 3.2), or of the array itself while the history is
empty. Weights have no history: their magnitudes are known before the step.

A backward pass returns the magnitudes that it saw as the gradient of the history. Over devices and passes they are their maximum.
"""

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from zerojax.errors import UserError

FIELD = "fp8"  # of the train state
Histories = Mapping[str, jax.Array]
_KNOWN: contextvars.ContextVar[Histories | None] = contextvars.ContextVar("fp8_histories", default=None)


def empty(modules: Collection[str], steps: int) -> dict[str, jax.Array]:
    """Returns the histories of modules before the first step, by path."""
    return {path: jnp.zeros((2, steps), jnp.float32) for path in sorted(modules)}


def check(state: Any, modules: Collection[str]) -> None:
    """Raises a UserError if a train state has no histories of these modules."""
    found = getattr(state, FIELD, None)
    if not isinstance(found, Mapping) or set(found) != set(modules):
        raise UserError(
            "fp8.recipe: 'delayed' needs a field `fp8` in the train state with a history for each module in fp8; create the state with "
            "fp8=settings.init(params, blocks), as zerojax.TrainState has the field"
        )


def inputs(state: Any, *, is_delayed: bool) -> dict[str, Histories]:
    """Returns what a loss is differentiated with respect to, besides the params, so that its gradient is what the matmuls saw."""
    return {OVERWRITE_WITH_GRADIENT: getattr(state, FIELD)} if is_delayed else {}


def renewed(state: Any, seen: Mapping[str, Histories]) -> dict[str, Histories]:
    """Returns the state's field after a step, as {field: value}; nothing without histories.

    Args:
      state: the train state before the step.
      seen: the gradient of `inputs`.
    """
    if not seen:
        return {}
    newest = seen[OVERWRITE_WITH_GRADIENT]
    before = getattr(state, FIELD)
    return {FIELD: {path: jnp.concatenate([newest[path][:, :1], past[:, :-1]], 1) for path, past in before.items()}}


@contextlib.contextmanager
def known(given: Mapping[str, Histories]) -> Iterator[None]:
    """Makes histories, as `inputs` holds them, known to the matmuls that are traced inside."""
    token = _KNOWN.set(given.get(OVERWRITE_WITH_GRADIENT))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def of_block(weights: Collection[str]) -> dict[str, Histories]:
    """Returns the histories of a block's modules, in the form of `inputs`; its weights are given by path."""
    histories = _KNOWN.get()
    if not histories:
        return {}
    parents = {path.rpartition("/")[0] for path in weights}
    return {OVERWRITE_WITH_GRADIENT: {path: past for path, past in histories.items() if path in parents}}


def of_module(path: str) -> jax.Array | None:
    """Returns the history of a module, or None if there is none. The module's path may begin later than that of its params."""
    histories = _KNOWN.get() or {}
    return next((past for name, past in histories.items() if f"/{name}".endswith(f"/{path}")), None)
