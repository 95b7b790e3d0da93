"""DeepSpeed's learning-rate schedules. This module gives each as a function of the steps taken before, like optax's schedules.

DeepSpeed steps its scheduler after the optimizer. So the step taken after s others uses the scheduler's value at s - 1, and the first one
its initial value. The formulas are those of DeepSpeed 0.19 (`runtime/lr_schedules.py`). Each schedule's arguments have DeepSpeed's names.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from zerojax.errors import UserError

Schedule = Callable[[Any], Any]
WARMUPS = ("linear", "log")


def warmup_lr(
    warmup_max_lr: float, warmup_min_lr: float = 0.0, warmup_num_steps: int = 1000, warmup_type: str = "log"
) -> Schedule:
    """Returns a rise from the smallest to the largest rate, which then stays."""
    rise = _rise(warmup_num_steps, warmup_type)
    return lambda count: warmup_min_lr + (warmup_max_lr - warmup_min_lr) * rise(_last(count))


def warmup_decay_lr(
    total_num_steps: int,
    warmup_max_lr: float = 1e-3,
    warmup_min_lr: float = 0.0,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """Returns a rise to the largest rate, and a linear fall to the smallest at `total_num_steps`."""
    rise, length = _rise(warmup_num_steps, warmup_type), max(1.0, total_num_steps - max(2, warmup_num_steps))

    def schedule(count: ArrayLike) -> jax.Array:
        last = _last(count)
        fall = jnp.maximum(0.0, (total_num_steps - last) / length)
        gamma = jnp.where(last < max(2, warmup_num_steps), rise(last), fall)
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * gamma

    return schedule


def warmup_cosine_lr(
    lr: float,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 1e-4,
    warmup_type: str = "log",
) -> Schedule:
    """Returns a rise to `lr`, and a fall along a cosine to lr * `cos_min_ratio`. The first step's rate is 0."""
    rise, length = _rise(warmup_num_steps, warmup_type), max(1, total_num_steps - max(2, warmup_num_steps))

    def schedule(count: ArrayLike) -> jax.Array:
        last = _last(count)
        progress = jnp.minimum(1.0, (last - max(2, warmup_num_steps) + 1) / length)
        fall = cos_min_ratio + (1 - cos_min_ratio) * (1 + jnp.cos(math.pi * progress)) / 2
        warm = warmup_min_ratio + (1 - warmup_min_ratio) * rise(last)
        ratio = jnp.where(last < max(2, warmup_num_steps), warm, jnp.maximum(0.0, fall))
        return lr * jnp.where(last < 0, 0.0, ratio)

    return schedule


def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
) -> Schedule:
    """Returns one linear rise and fall, and then a decay (1Cycle, arXiv:1803.09820). Momentum is not cycled."""
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if first <= 0 or second < 0:
        raise UserError(
            f"scheduler.params: cycle_first_step_size must be above 0 and cycle_second_step_size not below it; they are {first:g} "
            f"and {second:g}"
        )
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )

    def schedule(count: ArrayLike) -> jax.Array:
        at = jnp.asarray(count, jnp.float32)
        inside = at % (first + second)
        up, down = inside / first, (first + second - inside) / (second or 1.0)
        up, down = (jnp.floor(x * n) / n if n else x for x, n in zip((up, down), stairs))
        cycle = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * jnp.where(inside <= first, up, down)
        over = at - (first + second)
        decay = 1 + decay_lr_rate * over / decay_step_size if decay_step_size and decay_lr_rate else jnp.ones(())
        return jnp.where(over <= 0, cycle, cycle_min_lr / decay)

    return schedule


def lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    """Returns a rate that grows without end, to find the largest that trains (arXiv:1803.09820)."""

    def schedule(count: ArrayLike) -> jax.Array:
        interval = jnp.asarray(count, jnp.float32) / lr_range_test_step_size
        interval = jnp.floor(interval) if lr_range_test_staircase else interval
        return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)

    return schedule


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
}


def _last(count: ArrayLike) -> jax.Array:
    """Returns the scheduler's iteration for the step taken after `count` others; -1 before it has started."""
    return jnp.asarray(count, jnp.float32) - 1


def _rise(steps: int, kind: str) -> Schedule:
    """Returns a rise from 0 to 1 in `steps` iterations, counted from 0, as a function of the iteration; DeepSpeed takes 2 at least."""
    steps = max(2, steps)

    def rise(last: Any) -> jax.Array:
        before = jnp.maximum(last, 0.0)
        partial = before / steps if kind == "linear" else jnp.log(before + 1) / math.log(steps)
        return jnp.where(last < steps, partial, 1.0)

    return rise
