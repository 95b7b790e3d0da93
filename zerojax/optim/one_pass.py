"""Defines the form of an optimizer whose update is one pass over memory. This module holds the class that steps and wrappers look for."""

from collections.abc import Callable
from typing import Any

import optax


class OnePass(optax.GradientTransformationExtraArgs):
    """An optax transformation with a second form, which does a step's update while it reads memory once.

    `apply(grads, state, params, *, scale, finite, shardings, copy_dtype=None) -> (params, state, copies)`; see `fused.fused_adamw`.
    `decays(params) -> list[bool]` tells which leaves decay. But for that, leaves of one shape and dtype are updated alike, each by itself.
    """

    apply: Callable[..., tuple[Any, Any, Any]]
    decays: Callable[[Any], list[bool]]
