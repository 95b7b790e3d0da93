"""Defines the form of an optimizer whose update is one pass over memory. This module holds the class that steps look for, and wraps it."""

from collections.abc import Callable
from typing import Any

import optax


class OnePass(optax.GradientTransformationExtraArgs):
    """An optax transformation with a second form, which does a step's update while it reads memory once.

    `apply(grads, state, params, *, scale, finite, shardings, copy_dtype=None) -> (params, state, copies)`; see `fused.fused_adamw`.
    `kinds(params)` returns a value for each leaf, such as whether it decays. Leaves of one kind, shape and dtype are updated alike, each by
    itself. If the update is not elementwise, zeros at the end of a leaf's dims change no other element all the same, where `apply` gets
    `shapes`, a tree of the leaves without them.
    `received(params, shardings)` is the number of elements that each device receives in an update.
    """

    apply: Callable[..., tuple[Any, Any, Any]]
    kinds: Callable[[Any], list[Any]]
    is_elementwise: bool = True
    received: Callable[[Any, Any], int] = staticmethod(lambda params, shardings: 0)


def around(whole: OnePass | None, init: Any, update: Any, apply: Callable[..., Any]) -> Any:
    """Returns a transformation around another. If that is `whole`, of one pass, so is the result."""
    if whole is None:
        return optax.GradientTransformationExtraArgs(init, update)
    found = OnePass(init, update)
    found.apply, found.kinds, found.received = apply, whole.kinds, whole.received
    found.is_elementwise = whole.is_elementwise
    return found
