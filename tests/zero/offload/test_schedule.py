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
    for follows in (schedule.PASS, schedule.NOTHING):
        found = own(on_host, *rest, done=lambda *_: sent.append(set(early)), early=early, follows=follows)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert set(early) == (first if follows else set())
    count = len(cut.programs)
    begin = max(0, count - schedule.EARLY)
    assert begin and not any(sent[:begin]) and sent[begin + 1] == sent[count - 1] == first and not any(sent[count:])


@pytest.mark.parametrize(("follows", "layers"), [(schedule.PASS, 4), (schedule.STEP, 4), (schedule.STEP, 0)])
def test_copies_for_the_next_step_are_of_frozen_weights_and_come_last_and_their_memory_is_planned(follows, layers):
    _, nested, params, *rest = parts(Net(layers), remat="full")
    numbers = range(len(jax.tree.leaves(params)))
    cut = programs.cut(nested, *abstract((params, *rest)), on_host=set(numbers))
    first = {n for program in cut.programs[:2] for n in program.reads if n in numbers}
    frozen = set(sorted(first)[1:])
    own = schedule.Schedule(cut, frozen)
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    early, more = {}, []

    def done(index, written, values):
        assert follows == schedule.PASS or not early or not any(own.brings for own in cut.programs[index:])
        more.append(sum(cut.nbytes(n) for n, copy in early.items() if values.get(n) is not copy))

    own(on_host, *rest, done=done, early=early, follows=follows)
    assert set(early) == (frozen if follows == schedule.STEP else first)
    assert np.subtract(own.used(follows=follows), own.used()).tolist() == more
    stored = jax.tree.leaves(params)
    for number, copy in early.items():
        np.testing.assert_array_equal(copy, stored[number])


def test_a_result_that_is_taken_as_it_comes_is_not_held(net):
    cut, _, args, _ = net
    results = {result for result in cut.results if isinstance(result, int)}
    taken = {}

    def done(index, written, values):
        for number in results.intersection(written):
            taken[number], values[number] = values[number], None

    found = schedule.Schedule(cut)(*args, done=done)
    assert set(taken) == results and set(jax.tree.leaves(found, is_leaf=lambda leaf: leaf is None)) <= {None}
