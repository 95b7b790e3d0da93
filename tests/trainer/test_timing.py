"""Checks when numbers arrive, and that waits are not counted as work. This module tests zerojax.trainer.timing."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.trainer import timing


def test_the_late_reader_returns_the_step_before_as_floats():
    reader = timing.LateReader()
    steps = {s: {"loss": jnp.float32(s / 4), "is_finite": jnp.array(True), "eval": {"loss": 2.0}} for s in (1, 2, 3)}
    got = [reader.push(step, tree) for step, tree in steps.items()] + [reader.flush(), reader.flush()]
    expected = [(s, {"loss": s / 4, "is_finite": 1.0, "eval/loss": 2.0}) for s in steps]
    assert got[0] is None and got[-1] is None
    assert [reading[:2] for reading in got[1:-1]] == expected


def test_the_arrival_time_does_not_depend_on_when_it_is_read():
    reader = timing.LateReader()
    began = time.perf_counter()
    reader.push(1, {"loss": jnp.float32(1.0)})
    time.sleep(0.5)
    assert reader.flush().arrived - began < 0.4


def test_the_late_reader_needs_no_implicit_transfer():
    reader = timing.LateReader()
    value = jax.device_put(np.float32(3.0))
    with jax.transfer_guard("disallow"):
        reader.push(1, {"loss": value})
        assert reader.flush()[:2] == (1, {"loss": 3.0})


def test_own_time_excludes_away_blocks(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 5.5, 6.0, 6.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    own = timing.OwnTime()
    with own.away():
        pass  # from 1.0 to 5.0
    assert own.lap() == 1.5
    with pytest.raises(RuntimeError), own.away():
        raise RuntimeError  # from 6.0 to 6.25
    now = iter([7.0])
    assert own.lap() == 1.25
