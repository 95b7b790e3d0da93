"""Learning-rate schedules by name. This module maps names to functions of the step, made of optax's."""

from collections.abc import Callable
from typing import Any

import optax

from zerojax import errors
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


FALLING = ("linear", "cosine")  # those that read the final fraction


def make(name: str, peak: float, warmup_steps: int, steps: int, final_fraction: float) -> Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    Raises:
      UserError: the name is unknown.
    """
    if name not in SCHEDULES:
        raise UserError(
            f"config.optimizer.schedule: must be one of {', '.join(SCHEDULES)}, and is {name!r}; {errors.choose(name, SCHEDULES)}"
        )
    return SCHEDULES[name](peak, warmup_steps, steps, final_fraction)


def check(warmup_steps: int, steps: int) -> None:
    """Raises a UserError if the warm-up is longer than the run."""
    if warmup_steps > steps:
        raise UserError(
            f"config.optimizer.warmup_steps: {warmup_steps} is longer than the run of config.steps={steps} steps; "
            f"set --config.optimizer.warmup_steps={steps // 10}"
        )
