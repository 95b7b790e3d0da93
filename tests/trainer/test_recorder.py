"""Checks that steps are recorded one step late. This module tests zerojax.trainer.recorder."""

import io
import math

import jax.numpy as jnp
import pytest

from zerojax.errors import UserError
from zerojax.trainer import health as health_lib
from zerojax.trainer import metrics, progress, recorder, timing


class Health(health_lib.Health):
    """The health of a run without checkpoints."""

    def __init__(self):
        super().__init__({}, None, start=0, learning_rate=0.1, min_scale=1.0)

    def end(self, step, why, way_out=""):
        return UserError(f"step {step}: {why}")


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def opened(tmp_path, out):
    with metrics.MetricsLog(tmp_path, enabled=True) as log, progress.Progress(4, log_every=1, out=out) as shown:
        found = recorder.Recorder(log, shown, Health(), tokens=100, is_logged=lambda step: step != 2)
        found.open(is_over=False)
        found.begin()
        yield found


def numbers(loss=2.0):
    return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(1)}


def steps(tmp_path):
    return [record["step"] for record in metrics.read(tmp_path)]


def test_a_step_is_recorded_when_the_next_one_is_pushed_or_on_demand(opened, tmp_path):
    opened.push(1, numbers())
    assert steps(tmp_path) == []
    opened.push(2, numbers())
    assert steps(tmp_path) == [1]
    opened.push(3, numbers())
    opened.flush()
    opened.flush()
    assert steps(tmp_path) == [1, 3]  # the second is not logged


def test_a_record_holds_the_times_of_its_step(opened, tmp_path):
    opened.push(1, numbers())
    opened.flush()
    (record,) = metrics.read(tmp_path)
    assert record["tokens_per_second"] == pytest.approx(100 / record["step_seconds"])
    assert 0 <= record["host_seconds"] <= record["step_seconds"]


def test_what_makes_a_steps_batch_is_told_apart_from_its_training(opened, tmp_path):
    for step, before in ((1, {}), (3, {"rollout_seconds": -3.0, "log_prob_seconds": -1.0})):
        opened.push(step, numbers() | before)
        opened.flush()
    plain, made = metrics.read(tmp_path)
    assert "train_seconds" not in plain
    assert made["train_seconds"] == pytest.approx(made["step_seconds"] + 4.0)
    assert made["train_tokens_per_second"] == pytest.approx(100 / made["train_seconds"])


def test_of_a_batch_that_other_devices_made_the_wait_alone_is_told_apart(opened, tmp_path):
    for step, wait in ((1, -2.0), (3, 0.0)):
        opened.push(step, numbers() | {"rollout_seconds": 50.0, "train_wait_seconds": wait})
        opened.flush()
    waited, hidden = metrics.read(tmp_path)
    assert waited["train_seconds"] == pytest.approx(waited["step_seconds"] + 2.0)
    assert hidden["train_seconds"] == hidden["step_seconds"]


def test_two_results_that_are_read_at_once_do_not_make_a_step_fast(opened, tmp_path):
    opened._clock = 0.0
    for step, arrived in enumerate((3.0, 4.0, 5.0, 7.0, 7.001, 8.0), 1):
        opened._record(timing.Reading(step, {"loss": 2.0, "grad_norm": 1.0}, arrived))
    rates = [record["tokens_per_second"] for record in metrics.read(tmp_path)]
    assert max(rates) <= 100.1 and rates[-1] == pytest.approx(100)


def test_the_line_of_a_step_shows_its_reward_where_there_is_one(opened, out):
    opened.push(1, numbers() | {"reward": jnp.float32(0.75)})
    opened.push(2, numbers())
    opened.flush()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 1/4  loss 2  reward 0.75  grad_norm 1  ") and second.startswith(
        "step 2/4  loss 2  grad_norm 1  "
    )


def test_an_action_is_done_once_after_the_line_of_its_step(opened, out):
    opened.after(2, lambda: opened.say("compared"))
    for step in (1, 2, 3):
        opened.push(step, numbers())
    opened.flush()
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/4",
        "step 2/4",
        "compared",
        "step 3/4",
    ]


def test_a_step_that_ends_the_run_is_logged_before_it_does(opened, tmp_path):
    opened.push(2, numbers(math.nan))
    with pytest.raises(UserError, match="step 2: loss is nan"):
        opened.flush()
    assert steps(tmp_path) == [2]


def test_an_evaluation_that_is_not_finite_is_logged_and_ends_the_run(opened, tmp_path, out):
    opened.evaluated(1, 2.5)
    with pytest.raises(UserError, match="step 3: eval_loss is nan"):
        opened.evaluated(2, math.nan)
    assert steps(tmp_path) == [1, 2] and "step 1: evaluation loss 2.5000 on held-out text" in out.getvalue()


def test_a_state_is_checked_after_the_steps_before_it_are_recorded(opened, tmp_path):
    opened.push(1, numbers())
    opened.check(1, {"w": jnp.ones(2)})
    assert steps(tmp_path) == [1]
    opened.push(3, numbers(math.nan))
    with pytest.raises(UserError, match="step 3: loss is nan"):
        opened.check(3, {"w": jnp.array(math.nan)})
    with pytest.raises(UserError, match="step 3: w is not finite after it"):
        opened.check(3, {"w": jnp.array(math.nan)})


def test_a_finished_run_opens_no_file(tmp_path, out):
    with metrics.MetricsLog(tmp_path, enabled=True) as log, progress.Progress(4, out=out) as shown:
        recorder.Recorder(log, shown, Health(), tokens=1, is_logged=bool).open(is_over=True)
    assert not list(tmp_path.iterdir())


def test_the_time_of_an_evaluation_is_told_apart_from_that_of_steps(opened, monkeypatch):
    clock, seen = [0.0], []
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(opened._shown, "update", lambda step, *, seconds, paused, **_: seen.append((seconds, paused)))
    opened.begin()
    for step in (1, 2, 3):
        clock[0] += 1.0
        opened.push(step, numbers())
        opened.flush()
        if step == 2:
            clock[0] += 50.0
            opened.evaluated(step, 2.0)
            clock[0] += 8.0
            opened.saved()
    assert seen == [(1.0, 0.0), (1.0, 0.0), (1.0, 58.0)]
