"""Checks that a warm-up compiles what the first texts run before they run. This module tests zerojax.inference.engine.rehearsal."""

import types

import jax
import pytest
from small_engine import LENGTH, model

from zerojax.inference.engine import engine as engine_lib
from zerojax.inference.engine import rehearsal


def test_a_warm_up_compiles_all_programs_before_it_runs_any():
    own, compiled, told = engine_lib.Engine(model(), slots=3, max_len=LENGTH, chunk=20), [], []
    is_heard = [True]

    def hear(name, *_, **__):
        if is_heard[0] and "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(hear)
    own.warm_up(lambda number, count: told.append((number, count, len(compiled))))
    is_heard[0] = False
    count = told[-1][1]
    assert [one[:2] for one in told] == [(number, count) for number in range(1, count + 1)]
    assert told[-1][2] == len(compiled) >= count > 3
    assert own.is_idle


def test_a_program_that_does_not_compile_ends_the_warm_up_and_leaves_the_programs_as_they_were(monkeypatch):
    own = engine_lib.Engine(model(), slots=3, max_len=LENGTH, chunk=20)
    first = own._programs.first

    def fail():
        raise RuntimeError("no room")

    def lower(*given):
        return types.SimpleNamespace(out_info=first.lower(*given).out_info, compile=fail)

    monkeypatch.setattr(own._programs, "first", types.SimpleNamespace(lower=lower))
    before = [getattr(own._programs, name) for name in rehearsal.NAMES]
    with pytest.raises(RuntimeError, match="no room"):
        own.warm_up()
    assert [getattr(own._programs, name) for name in rehearsal.NAMES] == before
