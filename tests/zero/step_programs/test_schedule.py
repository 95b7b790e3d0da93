"""Checks what is held while programs run. This module tests zerojax.zero.step_programs.schedule."""

import dataclasses

import jax
import jax.numpy as jnp
from block_nets import Net, abstract, parts

from zerojax.zero.step_programs import programs, schedule


def test_an_order_drops_what_is_read_no_more_and_waits_for_the_devices_that_are_far_behind(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda array: waited.append(float(array)))
    add = lambda *arrays: [sum(arrays)]  # noqa: E731
    chain = [schedule.SentProgram(add, [n, "kept"], [n + 1]) for n in range(4)]
    beside = schedule.SentProgram(add, [0], ["sent"], devices=None)
    order = schedule.ProgramOrder([*chain, beside], lambda name: 4, kept=["kept"])
    held, values = [], {0: jnp.float32(1), "kept": jnp.float32(1)}
    order.run(values, lambda index, values: held.append(set(values) - {"kept"}))
    assert held == [{0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}, {0, "sent"}]
    assert set(values) == {"kept"} and waited == [2, 3], "for all but the last two"


def test_a_result_that_is_taken_as_it_comes_is_not_held():
    _, nested, *args = parts(Net(1), remat="full")
    cut = programs.cut(nested, *abstract(args))
    results = {result for result in cut.results if isinstance(result, int)}
    taken = {}

    def done(index, written, values):
        for number in results.intersection(written):
            taken[number], values[number] = values[number], None

    found = schedule.Schedule(cut)(*args, done=done)
    assert set(taken) == results and set(jax.tree.leaves(found, is_leaf=lambda leaf: leaf is None)) <= {None}


def test_fewer_programs_are_in_flight_where_what_they_read_would_need_more_memory():
    _, nested, *args = parts(Net(3), remat="none")
    alone = programs.cut(nested, *abstract(args))
    found = schedule.Schedule(dataclasses.replace(alone, in_flight=2))
    held = found._held((), "")
    without = [own.nbytes + found._ending(held, index, 2) for index, own in enumerate(held)]
    assert max(without) > max(found.used()) == max(schedule.Schedule(alone).used())
    assert 0 <= min(found.order.ahead) < max(found.order.ahead) == 2
