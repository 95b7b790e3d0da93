"""Clips gradients by the norm of the step before. This module holds that rule, and the field of the train state that keeps the norm.

    factor_t = min(1, clip_norm / norm_{t-1})        factor_1 = min(1, clip_norm / norm_1)

The norm of a step is known after its last gradient. That of the step before is known before the first, so no update waits. A step that
starts without a norm (the first of a run, or of one that resumes from a checkpoint that has none) takes its own, and waits for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.zero.host import settings
from zerojax.zero.update import update
from zerojax.zero.weights import partition as partition_lib

FIELD = "last_norm"
UNKNOWN = -1.0


def first_norm() -> jax.Array:
    """Returns the train state's field `last_norm` before the first step: float32[], -1 for a norm that is not known."""
    return jnp.asarray(UNKNOWN, jnp.float32)


def is_known(norm: Any) -> bool:
    """Returns whether a field `last_norm` holds a norm. Waits for it."""
    return not float(np.asarray(norm.addressable_data(0))) < 0


@dataclasses.dataclass(frozen=True)
class LateClip(update.Clip):
    """Limits the norm of the step before."""

    @property
    def is_early(self) -> bool:
        """Returns whether the factor is known before the gradients, and every step is taken."""
        return True

    def factor(self, state: State, norm: jax.Array) -> jax.Array | float:
        """Returns what the gradients of a step are multiplied by, for its own norm."""
        return self.factor_of(self._clipped(state, norm))

    def after(self, before: State, state: State, norm: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        """Returns the train state with the norm of this step, and as a metric the norm that its gradients were clipped by."""
        return state.replace(**{FIELD: norm}), {"clipped_norm": self._clipped(before, norm)}

    def factor_of(self, norm: jax.Array) -> jax.Array:
        """Returns the factor for the norm that gradients are clipped by."""
        return jnp.minimum(1.0, self.limit / norm)  # a norm of 0 gives inf, so 1

    def _clipped(self, state: State, norm: jax.Array) -> jax.Array:
        last = getattr(state, FIELD)
        return jnp.where(last < 0, norm, last)


def clip(partition: partition_lib.Partition, limit: float, *, may_skip: bool) -> update.Clip:
    """Returns how the gradients of a step are clipped.

    Args:
      partition: of the train state; its offload says whether the norm is one step late.
      limit: of the norm; 0 for none.
      may_skip: whether the loss is scaled, and steps may be skipped.

    Raises:
      UserError: a late norm cannot take effect, the loss is scaled, or the state has no field for the norm.
    """
    offload: settings.Offload | None = partition.offload
    if offload is None or not offload.late_norm:
        return update.Clip(limit, may_skip)
    if not limit:
        raise UserError(
            "offload.late_norm: is True and cannot take effect, since clip_norm is 0; set clip_norm, or omit it"
        )
    if may_skip:
        raise UserError(
            "offload.late_norm: does not go together with loss scaling, where an update must wait until all gradients are known to be "
            "finite; omit it, or train in bf16"
        )
    if not hasattr(getattr(partition.abstract_state, FIELD, ()), "dtype"):
        raise UserError(
            f"offload.late_norm: needs a field `{FIELD}` in the train state; declare `{FIELD}: Any` in your TrainState and create it with "
            f"{FIELD}=zerojax.first_norm()"
        )
    return LateClip(limit)
