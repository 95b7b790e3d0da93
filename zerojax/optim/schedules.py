"""Learning-rate schedules by name. This module maps names to functions of the step, made of optax's, and to DeepSpeed's."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from zerojax import errors
from zerojax.optim import deepspeed_schedules

Schedule = Callable[[Any], Any]
WARMUPS = deepspeed_schedules.WARMUPS


# name -> the schedule after the warm-up, counted from its end: peak, steps from there and final fraction of the peak -> schedule
SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "constant": lambda peak, steps, final: optax.constant_schedule(peak),
    "linear": lambda peak, steps, final: optax.linear_schedule(peak, peak * final, steps),
    "cosine": lambda peak, steps, final: optax.cosine_decay_schedule(peak, steps, alpha=final),
}

# DeepSpeed's, by its names: peak, warm-up steps and its form, steps, initial and final fraction of the peak -> schedule
DEEPSPEED: dict[str, Callable[[float, int, str, int, float, float], Schedule]] = {
    "WarmupLR": lambda peak, warmup, kind, steps, first, final: deepspeed_schedules.warmup_lr(
        peak, peak * first, warmup, kind
    ),
    "WarmupDecayLR": lambda peak, warmup, kind, steps, first, final: deepspeed_schedules.warmup_decay_lr(
        steps, peak, peak * first, warmup, kind
    ),
    "WarmupCosineLR": lambda peak, warmup, kind, steps, first, final: deepspeed_schedules.warmup_cosine_lr(
        peak, steps, first, warmup, final, kind
    ),
}

FALLING = ("linear", "cosine", "WarmupCosineLR")  # those that read the final fraction


def make(
    schedule: str,
    peak: float,
    warmup_steps: int,
    steps: int,
    final_fraction: float,
    *,
    warmup: str = "linear",
    initial_fraction: float = 0.0,
) -> Schedule:
    """Returns the learning rate as a function of the step, counted from 0.

    Args:
      schedule: of SCHEDULES or DEEPSPEED.
      peak: the rate after the warm-up.
      warmup_steps: steps of the warm-up.
      steps: of the run.
      final_fraction: of the peak, at the last step.
      warmup: "linear", or "log": ln(step + 1) / ln(warmup_steps + 1). DeepSpeed's schedules have ln(warmup_steps) below.
      initial_fraction: of the peak, at step 0.

    Raises:
      UserError: a name is unknown.
    """
    errors.one_of("schedule", schedule, [*SCHEDULES, *DEEPSPEED])
    errors.one_of("warmup", warmup, WARMUPS)
    if schedule in DEEPSPEED:
        return DEEPSPEED[schedule](peak, warmup_steps, warmup, steps, initial_fraction, final_fraction)
    rising = _logarithmic if warmup == "log" else optax.linear_schedule
    rise = rising(peak * initial_fraction, peak, warmup_steps)
    return optax.join_schedules(
        [rise, SCHEDULES[schedule](peak, max(1, steps - warmup_steps), final_fraction)], [warmup_steps]
    )


def fitting_warmup(name: str, warmup_steps: float, steps: int) -> int:
    """Returns the steps of the warm-up in a run of `steps`: a tenth of them if the warm-up is longer than the run.

    A warm-up below 1 is a share of the steps, rounded up.

    DeepSpeed's schedules keep theirs, which may end after the run.
    """
    if 0 < warmup_steps < 1:
        return math.ceil(warmup_steps * steps)
    return steps // 10 if name in SCHEDULES and warmup_steps > steps else int(warmup_steps)


def _logarithmic(first: float, peak: float, steps: int) -> Schedule:
    """Returns a rise along a logarithm."""
    return lambda step: first + (peak - first) * jnp.log(step + 1.0) / math.log(max(1, steps) + 1)
