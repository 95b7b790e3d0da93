"""Scales from earlier steps (delayed scaling). This module keeps the largest magnitudes that each module's matmul saw, in the train state.

The state's field `fp8` has a history for each module: float32[2, steps], of its input and of the gradient of its result, the newest first.
Scales of a step come from the largest magnitude of the history (arXiv:2209.05433, section 3.2), or of the array itself while the history is
empty. Weights have no history: their magnitudes are known before the step.

A backward pass returns the magnitudes that it saw as the gradient of the history. Over devices and passes they are their maximum.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.zero.blocks import hooks

FIELD = "fp8"  # of the train state
Histories = Mapping[str, jax.Array]


def empty(modules: Collection[str], steps: int) -> dict[str, jax.Array]:
    """Returns the histories of modules before the first step, by path."""
    return {path: jnp.zeros((2, steps), jnp.float32) for path in sorted(modules)}


def check(state: State, modules: Collection[str]) -> None:
    """Raises a UserError if a train state has no histories of these modules."""
    found = getattr(state, FIELD, None)
    if not isinstance(found, Mapping) or set(found) != set(modules):
        raise UserError(
            "fp8.recipe: 'delayed' needs a field `fp8` in the train state with a history for each module in fp8; create the state with "
            "fp8=settings.init(params, blocks), as zerojax.TrainState has the field"
        )


class OfState(hooks.Hook):
    """Gives the histories in a train state to the matmuls of a step, and renews them."""

    def __init__(self) -> None:
        self._known: Histories = {}

    def inputs(self, state: State) -> Mapping[str, Histories]:
        return {OVERWRITE_WITH_GRADIENT: getattr(state, FIELD)}

    @contextlib.contextmanager
    def known(self, inputs: Mapping[str, Histories]) -> Iterator[None]:
        before, self._known = self._known, inputs.get(OVERWRITE_WITH_GRADIENT, {})
        try:
            yield
        finally:
            self._known = before

    def of_block(self, weights: Collection[str]) -> Mapping[str, Histories]:
        parents = {path.rpartition("/")[0] for path in weights}
        return {OVERWRITE_WITH_GRADIENT: {path: past for path, past in self._known.items() if path in parents}}

    def renewed(self, state: State, seen: Mapping[str, Histories]) -> dict[str, Histories]:
        newest, before = seen[OVERWRITE_WITH_GRADIENT], getattr(state, FIELD)
        return {FIELD: {path: jnp.concatenate([newest[path][:, :1], past[:, :-1]], 1) for path, past in before.items()}}

    def of_module(self, path: str) -> jax.Array | None:
        """Returns the history of a module, or None if there is none. The module's path may begin later than that of its params."""
        return next((past for name, past in self._known.items() if f"/{name}".endswith(f"/{path}")), None)
