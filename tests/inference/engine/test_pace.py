"""Checks when the devices are foretold to lack work. This module tests zerojax.inference.engine.pace."""

import pytest
import small_engine

from zerojax.inference.engine import pace


def test_a_step_waits_until_it_must_be_sent(monkeypatch):
    """Programs of 10 ms and steps of 1 ms, of which one of each is slow."""
    now = 0.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    own = pace.Pace()
    for number in range(pace.LAST):
        assert own.spare("decode") == 0
        own.begin()
        now += 0.5 if number == 3 else 0.001
        own.sent()
        now += 0.009
        own.read("decode")
    assert own.spare("decode") == pytest.approx(pace.SOONEST * 0.01 - pace.SENDS * 0.001) and own.spare("first") == 0
    now += 0.006
    assert own.spare("decode") == pytest.approx(0.001)
    now += 0.006
    assert own.spare("decode") == 0


def test_a_host_that_waited_for_slow_programs_soon_waits_no_longer_than_for_those_that_run_now(monkeypatch):
    """Programs of 100 ms, then of 10 ms. A step is sent in 1 ms, after the wait, and the next program begins when both are done."""
    now = 0.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    own = pace.Pace()

    def step(runs):
        nonlocal now
        ends = now + runs
        now += own.spare("decode")
        own.begin()
        now += 0.001
        own.sent()
        was_done, now = ends <= now, max(now, ends)
        own.read("decode", was_done=was_done)

    for _ in range(2 * pace.LAST):
        step(0.1)
    began = now
    for _ in range(100):
        step(0.01)
    assert 100 * 0.01 <= now - began < 4 * 100 * 0.01
    began = now
    for _ in range(100):
        step(0.01)
    assert now - began == pytest.approx(100 * 0.01) and own.spare("decode") > 0


def test_only_an_engine_with_room_that_adds_tokens_waits(monkeypatch):
    monkeypatch.setattr(pace.Pace, "spare", lambda self, kind: 1.0)
    engine = small_engine.engine()
    assert engine.spare_seconds == 0
    asked = [engine.submit([9, 11], max_tokens=8, ignores_end=True) for _ in range(2)]
    engine.step()
    engine.step()
    assert engine.spare_seconds == 1
    asked.append(engine.submit([9, 12], max_tokens=8, ignores_end=True))
    assert engine.spare_seconds == 0
    engine.step()
    assert engine.spare_seconds == 0  # all slots are taken
    engine.run()
    assert engine.spare_seconds == 0 and all(len(request.tokens) == 8 for request in asked)
