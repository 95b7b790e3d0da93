"""Checks who is named guilty. This module tests zerojax.launch.cluster.verdict with heartbeats and no processes."""

import pytest

from zerojax.errors import UserError
from zerojax.launch import watch
from zerojax.launch.cluster import verdict


def beat(rank=0, phase=watch.STEP, step=5, silent=0.0, still=0.0, state="S", has_beat=True):
    return verdict.Beat(rank, f"host-{rank}", phase, step, silent, still, state, (), has_beat)


def practised(seconds: float, limits=verdict.LIMITS) -> verdict.Judge:
    """Returns a judge that has seen steps of `seconds`."""
    judge = verdict.Judge(limits)
    for step in range(6):
        assert judge.judge([beat(step=step, still=seconds - 1)]) is None
    return judge


def test_a_stopped_process_is_named_soon_and_a_silent_one_later():
    judge = verdict.Judge()
    assert judge.judge([beat(0), beat(1, silent=11.0)]) is None
    found = judge.judge([beat(0, still=9), beat(1, silent=11.0, state="T")])
    assert found.beat.rank == 1 and found.why == "is stopped for 11 s"
    assert judge.judge([beat(1, silent=41.0)]).why == "gives no sign of life for 41 s"


def test_a_process_that_starts_may_hold_the_interpreter_for_longer():
    judge = verdict.Judge()
    assert judge.judge([beat(phase="", silent=100.0)]) is None
    assert judge.judge([beat(phase=watch.START, silent=100.0)]) is None
    assert judge.judge([beat(phase="", silent=301.0)]) is not None


def test_processes_without_heartbeats_are_not_judged():
    assert verdict.Judge().judge([beat(phase="", silent=1e6, still=1e6, has_beat=False)]) is None
    assert verdict.Judge().judge([beat(phase="", still=1e6)]) is None


def test_short_steps_have_a_short_limit_and_long_steps_a_long_one():
    assert practised(1.0).judge([beat(still=44.0)]) is None
    assert practised(1.0).judge([beat(still=46.0)]).beat.rank == 0
    assert practised(100.0).judge([beat(still=990.0)]) is None
    assert practised(100.0).judge([beat(still=1001.0)]) is not None


def test_the_first_steps_have_time():
    judge = verdict.Judge()
    assert judge.judge([beat(step=1, still=1700.0)]) is None
    assert judge.judge([beat(step=1, still=1801.0)]) is not None


def test_a_run_waits_for_its_slowest_phase():
    judge = practised(1.0)
    waiting = [beat(1, still=500.0), beat(0, watch.CHECKPOINT, still=500.0)]
    assert judge.judge(waiting) is None
    assert judge.judge([beat(1, still=1801.0), beat(0, watch.CHECKPOINT, still=1801.0)]).beat.rank == 0


@pytest.mark.parametrize(
    "beats, guilty",
    [
        ([beat(0, step=6, still=50), beat(1, step=5, still=50)], 1),
        ([beat(0, watch.STEP, still=50), beat(1, watch.DATA, still=700)], 1),
        ([beat(0, still=50), beat(1, still=51)], 1),
    ],
)
def test_the_process_furthest_behind_is_guilty(beats, guilty):
    assert verdict.furthest_behind(beats).rank == guilty


def test_a_process_whose_data_are_late_is_named_once_before_the_run_ends():
    judge = practised(1.0)
    late = [beat(0, still=46.0), beat(1, watch.DATA, still=46.0)]
    assert judge.judge(late) is None
    assert judge.suspect([beat(0, still=44.0), late[1]]) is None
    found = judge.suspect(late)
    assert found.beat.rank == 1 and found.why == "has waited for data for 46 s; the run ends after 600 s"
    assert judge.suspect(late) is None
    assert judge.suspect([beat(0, step=9, still=46.0), beat(1, watch.DATA, step=9, still=46.0)]) is not None
    assert judge.suspect([beat(0, still=99.0)]) is None and judge.suspect([]) is None


def test_limits_can_be_set():
    limits = verdict.read_limits("step=300, silent=0")
    assert limits == {**verdict.LIMITS, "step": 300.0, "silent": 0.0}
    assert practised(1.0, limits).judge([beat(still=299.0, silent=1e6)]) is None
    assert practised(1.0, limits).judge([beat(still=301.0)]) is not None
    assert verdict.Judge(verdict.read_limits("data=0")).judge([beat(phase=watch.DATA, still=1e6)]) is None


@pytest.mark.parametrize("text", ["steps=3", "step", "step=x", "step=-1", "step=inf", "step=nan"])
def test_wrong_limits_are_named(text):
    with pytest.raises(UserError, match="--limits: "):
        verdict.read_limits(text)


def test_a_heartbeat_says_where_a_process_is():
    found = verdict.beat(
        "a", {"rank": 3, "count": 7, "phase": "data", "step": 9, "silent": 0.1, "still": 2, "stack": ["x"]}
    )
    assert found.place() == "rank 3 on a, step 9 (data)" and found.stack == ("x",)
    assert verdict.beat("a", {"rank": 3, "silent": 0, "still": 0}).place() == "rank 3 on a"
