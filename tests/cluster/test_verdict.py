"""Checks who is named guilty. This module tests zerojax.cluster.verdict with heartbeats and no processes."""

import pytest

from zerojax.cluster import verdict
from zerojax.errors import UserError
from zerojax.launch import watch


def beat(rank=0, phase=watch.STEP, step=5, silent=0.0, still=0.0, state="S", has_beat=True, **more):
    """Returns a heartbeat. A process advances once a step here, and is busy unless `quiet` says otherwise."""
    more = {"advances": step, "quiet": 0.0, "worked": 1.0, "waits": False, "stack": ()} | more
    return verdict.Beat(
        rank, f"host-{rank}", phase, step, silent=silent, still=still, state=state, has_beat=has_beat, **more
    )


ALIVE = {"rank": 3, "silent": 0.0, "still": 0.0, "idle": 0.0, "unmoved": 0.0}


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


def test_the_limit_is_that_of_the_processes_that_the_others_wait_for():
    judge = practised(1.0)
    ahead = beat(0, watch.CHECKPOINT, still=46.0, advances=6)
    assert judge.judge([ahead._replace(still=44.0), beat(1, still=46.0)]) is None
    assert judge.judge([ahead, beat(1, still=46.0)]).beat.rank == 1


@pytest.mark.parametrize(
    "beats, guilty",
    [
        ([beat(0, step=6, still=50), beat(1, step=5, still=50)], 1),
        ([beat(0, watch.STEP, advances=6), beat(1, watch.DATA)], 1),
        ([beat(0, still=50), beat(1, still=51)], 1),
        ([beat(0, quiet=50), beat(1, quiet=51)], 1),
        ([beat(0, quiet=90, waits=True), beat(1, quiet=51)], 1),
        ([beat(0, quiet=90), beat(1, quiet=51, worked=0.1)], 1),
        ([beat(0, stack=("wait",)), beat(1, stack=("wait", "x"), worked=9.0), beat(2, stack=("wait",))], 1),
        ([beat(0, step=3), beat(1, "", step=0, has_beat=False)], 1),
    ],
)
def test_the_process_furthest_behind_is_guilty(beats, guilty):
    assert verdict.furthest_behind(beats)[0].rank == guilty


def test_a_process_whose_data_are_late_is_named_once_before_the_run_ends():
    judge = practised(1.0)
    late = [beat(0, still=46.0, advances=6), beat(1, watch.DATA, still=46.0)]
    assert judge.judge(late) is None
    assert judge.suspect([beat(0, still=44.0), late[1]]) is None
    found = judge.suspect(late)
    assert found.beat.rank == 1 and found.why == "has waited for data for 46 s; the run ends after 600 s"
    assert judge.suspect(late) is None
    assert judge.suspect([beat(0, step=9, still=46.0), beat(1, watch.DATA, step=9, still=46.0)]) is not None
    assert judge.suspect([beat(0, still=99.0)]) is None and judge.suspect([]) is None


@pytest.mark.parametrize(
    "phase", ["", *(name for name in verdict.LIMITS if name not in (verdict.SILENT, verdict.QUIET))]
)
def test_a_quiet_process_is_named_in_every_phase_and_a_busy_one_in_none(phase):
    judge = verdict.Judge()
    beats = [beat(0, phase, quiet=0.0, waits=True, still=44), beat(1, phase, quiet=41.0, still=44)]
    busy = [beat(0, phase, quiet=90.0, waits=True, still=44), beat(1, phase, quiet=39.0, still=44)]
    assert judge.judge(busy) is None and judge.suspect(busy) is None
    assert judge.judge(beats) is None
    found = judge.suspect(beats)
    assert found.beat.rank == 1 and found.why.startswith("gives no sign of life for 41 s")
    assert judge.suspect(beats) is None
    other = [beat(0, phase, quiet=70.0, worked=0.0, still=44), beats[1]._replace(quiet=70.0)]
    assert judge.suspect(other) is None  # one line for one stand-still


def test_a_server_that_was_asked_nothing_is_never_named_and_one_that_hangs_while_the_others_wait_is():
    judge, still = verdict.Judge(), {"quiet": 1e6, "still": 1e6}
    idle = [beat(0, watch.IDLE, **still), beat(1, watch.IDLE, **still)]
    assert judge.judge(idle) is None and judge.suspect(idle) is None
    hung = [beat(0, watch.ANSWER, step=6, quiet=41.0, still=41.0), idle[1]]
    assert judge.judge(hung) is None and judge.suspect(hung).beat.rank == 0
    assert judge.judge([hung[0]._replace(quiet=241.0), idle[1]]).beat.rank == 0


def test_a_process_that_is_ahead_of_the_others_or_like_a_busy_one_is_not_named():
    judge = verdict.Judge()
    assert judge.suspect([beat(0, step=6, quiet=99), beat(1, step=5)]) is None
    assert judge.suspect([beat(0, watch.RESULTS, quiet=99), beat(1, watch.RESULTS)]) is None


def test_a_phase_that_was_quiet_before_and_went_on_has_more_time():
    judge = verdict.Judge()
    for quiet in (0.0, 100.0, 1.0, 149.0):
        beats = [beat(phase=watch.RESULTS, quiet=quiet)]
        assert judge.judge(beats) is None
        assert (judge.suspect(beats) is not None) == (quiet == 100.0)
    assert judge.suspect([beat(phase=watch.RESULTS, quiet=151.0, advances=9)]) is not None
    assert judge.suspect([beat(phase=watch.START, quiet=41.0, advances=10)]) is not None


def test_a_quiet_process_ends_the_run_before_its_phase_would():
    quiet = {"quiet": 241.0, "still": 241.0}
    found = verdict.Judge().judge([beat(phase=watch.EVALUATE, **quiet)])
    assert found.why == "gives no sign of life for 241 s"
    assert verdict.Judge().judge([beat(phase=watch.STEP, **quiet)]) is None
    assert verdict.Judge().judge([beat(phase="", **quiet)]) is None  # a program that never says where it is
    assert verdict.Judge().judge([beat(0), beat(1, "", step=0, has_beat=False, **quiet)]).beat.rank == 1


def test_a_busy_process_is_named_if_it_takes_far_longer_than_before():
    judge = verdict.Judge()
    for advances in range(6):
        assert judge.judge([beat(phase=watch.EVALUATE, advances=advances, still=9.0)]) is None
    assert judge.suspect([beat(phase=watch.EVALUATE, advances=6, still=99.0)]) is None
    found = judge.suspect([beat(phase=watch.EVALUATE, advances=6, still=101.0)])
    assert found.why == "has not moved on for 101 s; before, it took 10 s at most; the run ends after 1800 s"


def test_cpu_is_a_sign_of_life_but_where_a_thread_may_wait_for_a_gpu():
    said = {"rank": 3, "silent": 0, "still": 70, "idle": 2, "unmoved": 60}
    for phase in verdict.LIMITS:
        assert verdict.beat("a", {**said, "phase": phase}).quiet == 2
        expected = 2 if phase in verdict.HOST_PHASES else 60
        assert verdict.beat("a", {**said, "phase": phase}, has_gpus=True).quiet == expected


def test_limits_can_be_set():
    limits = verdict.read_limits("step=300, silent=0")
    assert limits == {**verdict.LIMITS, "step": 300.0, "silent": 0.0}
    assert practised(1.0, limits).judge([beat(still=299.0, silent=1e6)]) is None
    assert practised(1.0, limits).judge([beat(still=301.0)]) is not None
    assert verdict.Judge(verdict.read_limits("data=0")).judge([beat(phase=watch.DATA, still=1e6)]) is None


@pytest.mark.parametrize(
    "text",
    ["", "step=1,", "quiet=1,quiet=2", "steps=3", "step", "step=x", "step=-1", "step=inf", "step=nan", "step=1_0"],
)
def test_wrong_limits_are_named(text):
    with pytest.raises(UserError, match="--limits: "):
        verdict.read_limits(text)


def test_a_heartbeat_says_where_a_process_is():
    found = verdict.beat("a", {**ALIVE, "count": 7, "phase": "data", "step": 9, "still": 2, "stack": ["x"]})
    assert found.place() == "rank 3 on a, step 9 (data)" and found.stack == ("x",)
    assert verdict.beat("a", ALIVE).place() == "rank 3 on a"
