"""Says what an optimizer is whose whole update is one pass over memory. This module holds its form, which steps and wrappers look for."""

from collections.abc import Callable
from typing import Any

import optax


class OnePass(optax.GradientTransformationExtraArgs):
    """An optax transformation with a form that does all of a step's update while it reads memory once, beside optax's own.

    `apply(grads, state, params, *, scale, finite, shardings, copy_dtype=None) -> (params, state, copies)`; see `fused.fused_adamw`.
    """

    apply: Callable[..., tuple[Any, Any, Any]]
