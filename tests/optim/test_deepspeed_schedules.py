"""Checks DeepSpeed's schedules against its recurrences, step by step. This module tests zerojax.optim.deepspeed_schedules."""

import math

import pytest

from zerojax.errors import UserError
from zerojax.optim import deepspeed_schedules, schedules

ROUNDING = 1e-5  # float32 arithmetic; cosines of some hundred steps


def rise(last, steps, kind):
    return math.log(last + 1) / math.log(steps) if kind == "log" else last / steps


def warmup(last, *, lowest, highest, steps, kind):
    if last < 0:
        return lowest
    return lowest + (highest - lowest) * (rise(last, steps, kind) if last < steps else 1.0)


@pytest.mark.parametrize("kind", deepspeed_schedules.WARMUPS)
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_warmup_lr_is_one_step_late_and_takes_two_steps_at_least(kind, steps):
    schedule = deepspeed_schedules.warmup_lr(1e-3, 1e-5, steps, kind)
    for count in range(15):
        expected = warmup(count - 1, lowest=1e-5, highest=1e-3, steps=max(2, steps), kind=kind)
        assert float(schedule(count)) == pytest.approx(expected, rel=ROUNDING)


def test_the_rate_after_four_steps_is_that_of_a_checkpoint_of_deepspeed():
    """The golden checkpoints: lr 1e-3, 10 steps of warm-up, four steps taken; the fourth had scheduler iteration 2."""
    schedule = deepspeed_schedules.warmup_lr(1e-3, warmup_num_steps=10)
    assert float(schedule(4)) == pytest.approx(0.0006020599913279623, rel=ROUNDING)


@pytest.mark.parametrize("kind", deepspeed_schedules.WARMUPS)
def test_warmup_decay_lr_falls_to_the_smallest_rate(kind):
    schedule = deepspeed_schedules.warmup_decay_lr(20, 1e-3, 1e-5, 5, kind)
    for count in range(25):
        last = count - 1
        gamma = 0.0 if last < 0 else rise(last, 5, kind) if last < 5 else max(0.0, (20 - last) / 15)
        assert float(schedule(count)) == pytest.approx(1e-5 + (1e-3 - 1e-5) * gamma, rel=ROUNDING, abs=1e-10)


@pytest.mark.parametrize("kind", deepspeed_schedules.WARMUPS)
def test_warmup_cosine_lr_starts_at_0_and_stays_at_its_floor(kind):
    schedule = deepspeed_schedules.warmup_cosine_lr(1e-3, 20, 0.1, 5, 0.01, kind)
    for count in range(25):
        last = count - 1
        if last < 0:
            ratio = 0.0
        elif last < 5:
            ratio = 0.1 + 0.9 * rise(last, 5, kind)
        else:
            ratio = 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, (last - 4) / 15))) / 2
        assert float(schedule(count)) == pytest.approx(1e-3 * ratio, rel=ROUNDING, abs=1e-9)


def test_one_cycle_rises_falls_and_decays():
    schedule = deepspeed_schedules.one_cycle(1e-4, 1e-3, 0.5, 4, 6, decay_step_size=2)
    expected = [1e-4 + 9e-4 * up for up in (0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 0.5, 2 / 6, 1 / 6, 0)]
    expected += [1e-4 / (1 + 0.5 * over / 2) for over in (1, 2, 3)]
    assert [float(schedule(count)) for count in range(14)] == pytest.approx(expected, rel=1e-4)
    stairs = deepspeed_schedules.one_cycle(0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert [float(stairs(count)) for count in range(9)] == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])
    with pytest.raises(UserError, match="cycle_first_step_size must be above 0"):
        deepspeed_schedules.one_cycle(0.0, 1.0, cycle_first_step_size=0)


def test_lr_range_test_grows_without_end():
    schedule = deepspeed_schedules.lr_range_test(1e-3, 4, 2.0)
    assert [float(schedule(count)) for count in (0, 2, 8)] == pytest.approx([1e-3, 2e-3, 5e-3])
    stairs = deepspeed_schedules.lr_range_test(1e-3, 4, 2.0, True)
    assert [float(stairs(count)) for count in (0, 3, 4)] == pytest.approx([1e-3, 1e-3, 3e-3])


def test_a_config_names_them():
    made = schedules.make("WarmupDecayLR", 1e-3, 5, 20, 0.0, warmup="linear", initial_fraction=0.01)
    direct = deepspeed_schedules.warmup_decay_lr(20, 1e-3, 1e-5, 5, "linear")
    assert [float(made(c)) for c in range(22)] == [float(direct(c)) for c in range(22)]
    made = schedules.make("WarmupCosineLR", 1e-3, 5, 20, 0.01, warmup="log", initial_fraction=0.1)
    assert float(made(9)) == float(deepspeed_schedules.warmup_cosine_lr(1e-3, 20, 0.1, 5, 0.01)(9))
    assert float(schedules.make("WarmupLR", 1e-3, 10, 3, 0.0, warmup="log")(4)) == pytest.approx(0.00060206, rel=1e-4)
