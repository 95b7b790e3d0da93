"""Checks which weights are on the device while programs run. This module tests zerojax.zero.offload.schedule."""

import jax
import numpy as np
import pytest
from block_nets import Net, abstract, parts

from zerojax.zero.offload import programs, schedule


@pytest.fixture(scope="module")
def net():
    _, nested, *args = parts(Net(4), remat="full")
    cut = programs.cut(nested, *abstract(args))
    return cut, nested, args, schedule.Schedule(cut)(*args)


@pytest.mark.parametrize(("ahead", "small"), [(1, 40), (2, 2**20), (3, 0)])
def test_weights_from_the_host_give_the_same_and_few_are_on_the_device(net, ahead, small, monkeypatch):
    _, nested, (params, *rest), expected = net
    monkeypatch.setattr(programs, "SMALL", small)
    on_device = set(range(len(jax.tree.leaves(params))))
    cut = programs.cut(nested, *abstract((params, *rest)), on_host=on_device, ahead=ahead)
    apart, inside = (any(getattr(program, how) for program in cut.programs) for how in ("after", "brings"))
    assert (apart, inside) == (small <= 40, small > 0)
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    most = []

    def done(index, written, values):
        held = {number for number in values if number in on_device}
        near = {n for program in cut.programs[index : index + ahead + 1] for n in program.reads if n in on_device}
        assert held <= near, "a weight is held only near its use"
        most.append(len(held))

    found = schedule.Schedule(cut)(on_host, *rest, done=done)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert max(most) <= 4 * (ahead + 1) < len(on_device)


def test_a_run_that_is_followed_by_another_sends_its_first_weights_beside_its_last_programs(net):
    _, nested, (params, *rest), expected = net
    on_device = set(range(len(jax.tree.leaves(params))))
    cut = programs.cut(nested, *abstract((params, *rest)), on_host=on_device)
    own = schedule.Schedule(cut)
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    first = {n for program in cut.programs[:2] for n in program.reads if n in on_device}
    early, sent = {}, []
    for goes_on in (True, False):
        found = own(on_host, *rest, done=lambda *_: sent.append(set(early)), early=early, goes_on=goes_on)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert set(early) == (first if goes_on else set())
    count = len(cut.programs)
    begin = max(0, count - schedule.EARLY)
    assert begin and not any(sent[:begin]) and sent[begin + 1] == sent[count - 1] == first and not any(sent[count:])


def test_a_result_that_is_taken_as_it_comes_is_not_held(net):
    cut, _, args, _ = net
    results = {result for result in cut.results if isinstance(result, int)}
    taken = {}

    def done(index, written, values):
        for number in results.intersection(written):
            taken[number], values[number] = values[number], None

    found = schedule.Schedule(cut)(*args, done=done)
    assert set(taken) == results and set(jax.tree.leaves(found, is_leaf=lambda leaf: leaf is None)) <= {None}
