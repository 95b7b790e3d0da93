"""Optimizers and learning-rate schedules by name. This module maps names to optax; the arithmetic is optax's own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.errors import UserError

Schedule = Callable[[Any], Any]


def _constant(peak: float, warmup: int, steps: int, final: float) -> Schedule:
    return optax.schedules.warmup_constant_schedule(0.0 if warmup else peak, peak, warmup)


def _linear(peak: float, warmup: int, steps: int, final: float) -> Schedule:
    rise = optax.linear_schedule(0.0, peak, warmup)
    fall = optax.linear_schedule(peak, peak * final, max(1, steps - warmup))
    return optax.join_schedules([rise, fall], [warmup])


def _cosine(peak: float, warmup: int, steps: int, final: float) -> Schedule:
    rise = optax.linear_schedule(0.0, peak, warmup)
    fall = optax.cosine_decay_schedule(peak, max(1, steps - warmup), alpha=final)
    return optax.join_schedules([rise, fall], [warmup])


SCHEDULES: dict[str, Callable[[float, int, int, float], Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}


def decays(params: Any) -> Any:
    """Says which leaves take weight decay: matrices do, scales and biases do not."""
    return jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)


# name -> f(learning rate or schedule, b1, b2, eps, weight decay). A mask costs a tree walk at trace time only.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adam": lambda lr, b1, b2, eps, wd: optax.adam(lr, b1, b2, eps),
    "adamw": lambda lr, b1, b2, eps, wd: optax.adamw(lr, b1, b2, eps, weight_decay=wd, mask=decays),
    "adafactor": lambda lr, b1, b2, eps, wd: optax.adafactor(
        lr, weight_decay_rate=wd or None, weight_decay_mask=decays
    ),
    "lamb": lambda lr, b1, b2, eps, wd: optax.lamb(lr, b1, b2, eps, weight_decay=wd, mask=decays),
    "lion": lambda lr, b1, b2, eps, wd: optax.lion(lr, b1, b2, weight_decay=wd, mask=decays),
    "sgd": lambda lr, b1, b2, eps, wd: optax.sgd(lr, momentum=b1 or None),
}
WITHOUT_DECAY = ("adam", "sgd")


def make_schedule(name: str, peak: float, warmup_steps: int, steps: int, final_fraction: float) -> Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    Raises:
      UserError: an unknown name, or a warm-up longer than the run.
    """
    if name not in SCHEDULES:
        raise UserError(f"config.optimizer.schedule: must be one of {', '.join(SCHEDULES)}, and is {name!r}")
    if warmup_steps > steps:
        raise UserError(
            f"config.optimizer.warmup_steps: {warmup_steps} is longer than the run of {steps} steps; "
            f"set --config.optimizer.warmup_steps={steps // 10}"
        )
    return SCHEDULES[name](peak, warmup_steps, steps, final_fraction)


def make_optimizer(
    name: str, learning_rate: float | Schedule, *, b1: float, b2: float, eps: float, weight_decay: float
) -> optax.GradientTransformation:
    """Returns the optax transformation of that name.

    Raises:
      UserError: an unknown name, or weight decay for one that has none.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"config.optimizer.name: must be one of {', '.join(OPTIMIZERS)}, and is {name!r}")
    if weight_decay and name in WITHOUT_DECAY:
        raise UserError(
            f"config.optimizer.weight_decay: {name} applies none, and it is {weight_decay}; "
            "set --config.optimizer.weight_decay=0, or use adamw"
        )
    return OPTIMIZERS[name](learning_rate, b1, b2, eps, weight_decay)
