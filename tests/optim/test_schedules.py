"""Checks learning-rate schedules against their closed forms. This module tests zerojax.optim.schedules."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.optim import schedules

ROUNDING = 1e-6  # schedules are float32 arithmetic in another order


def closed_form(name, peak, warmup, steps, final, step):
    if step < warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    fraction = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + np.cos(np.pi * done)) / 2}[name]
    return peak * (final + (1 - final) * fraction)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from(list(schedules.SCHEDULES)), st.integers(0, 20), st.integers(1, 50), st.sampled_from([0.0, 0.1, 1.0])
)
def test_schedules_follow_their_closed_form(name, warmup, length, final):
    steps = warmup + length
    schedule = schedules.make(name, 0.25, warmup, steps, final)
    for step in {0, 1, warmup // 2, warmup, (warmup + steps) // 2, steps, steps + 5}:
        expected = closed_form(name, 0.25, warmup, steps, final, step)
        assert float(schedule(step)) == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING), step


def test_a_run_of_warm_up_alone_is_allowed_and_a_longer_warm_up_takes_a_tenth_of_the_run():
    assert float(schedules.make("cosine", 1.0, 10, 10, 0.1)(10)) == 1.0
    assert [schedules.fitting_warmup("cosine", 10, steps) for steps in (11, 10, 9, 1)] == [10, 10, 0, 0]
    assert schedules.fitting_warmup("linear", 500, 40) == 4
    assert schedules.fitting_warmup("WarmupLR", 500, 40) == 500  # as DeepSpeed
    assert [schedules.fitting_warmup(name, 0.03, 101) for name in ("cosine", "WarmupLR")] == [
        4,
        4,
    ]  # a share, rounded up


def test_an_unknown_name_lists_the_known():
    with pytest.raises(
        UserError,
        match=r"^schedule: must be one of constant, .* and is 'cos'; did you mean 'cosine'\?$",
    ):
        schedules.make("cos", 1.0, 0, 10, 0.1)
