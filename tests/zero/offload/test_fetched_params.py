"""Checks which weights are on the device while programs run. This module tests zerojax.zero.offload.fetched_params."""

import types

import jax
import numpy as np
import pytest
from block_nets import Net, abstract, parts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.zero.offload import fetched_params
from zerojax.zero.step_programs import arrivals, programs, schedule


@pytest.fixture(scope="module")
def net():
    _, nested, *args = parts(Net(4), remat="full")
    return nested, args, schedule.Schedule(programs.cut(nested, *abstract(args)))(*args)


def cut_of(nested, params, rest, frozen=(), **how):
    """Returns the programs of a pass whose params are in host memory; `frozen` are the numbers of those that a step leaves as they are."""
    paths = dict(enumerate(f"params/{path}" for path, _ in tree.flatten(params)))
    source = fetched_params.FetchedParams(set(paths.values()), frozen={paths[n] for n in frozen}, **how)
    return programs.cut(nested, *abstract((params, *rest)), late=paths, source=source)


@pytest.mark.parametrize(("ahead", "small"), [(1, 40), pytest.param(2, 2**20, marks=pytest.mark.long), (3, 0)])
def test_weights_from_the_host_give_the_same_and_few_are_on_the_device(net, ahead, small, monkeypatch):
    nested, (params, *rest), expected = net
    monkeypatch.setattr(fetched_params, "SMALL", small)
    cut = cut_of(nested, params, rest, ahead=ahead)
    on_device = set(range(len(jax.tree.leaves(params))))
    apart, inside = map(any, (cut.arrivals.after, cut.arrivals.brings))
    assert (apart, inside) == (small <= 40, small > 0)
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    planned, most = {*cut.arrivals.sent(-1)}, []
    for index, program in enumerate(cut.programs):
        planned |= {*cut.arrivals.sent(index)}
        assert on_device.intersection(program.reads) <= planned, "what is counted is what is sent"
        planned -= cut.arrivals.dropped(index)

    def done(index, written, values):
        held = {number for number in values if number in on_device}
        near = {n for program in cut.programs[index : index + ahead + 1] for n in program.reads if n in on_device}
        assert held <= near, "a weight is held only near its use"
        most.append(len(held))

    found = schedule.Schedule(cut)(on_host, *rest, done=done)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert max(most) <= 4 * (ahead + 1) < len(on_device)


def test_a_result_of_all_rows_is_replicated_so_that_every_process_can_read_it(monkeypatch):
    partition = types.SimpleNamespace(mesh=zerojax.make_mesh())
    monkeypatch.setattr(fetched_params.selection, "are_params_on_host", lambda _: True)
    monkeypatch.setattr(fetched_params, "by_row", lambda *_, **__: lambda params, batch: params + batch[0])
    rows = jax.device_put(np.arange(16.0), NamedSharding(partition.mesh, P("data")))
    found = fetched_params.on_all(None, partition)(1.0, rows)
    assert found.is_fully_replicated and not rows.is_fully_replicated
    np.testing.assert_array_equal(found, np.arange(16) + 1.0)


def test_a_run_that_is_followed_by_another_sends_its_first_weights_beside_its_last_programs(net):
    nested, (params, *rest), expected = net
    on_device = set(range(len(jax.tree.leaves(params))))
    cut = cut_of(nested, params, rest)
    own, source = schedule.Schedule(cut), cut.arrivals._source
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    first = {n for program in cut.programs[:2] for n in program.reads if n in on_device}
    sent = []
    for follows in (arrivals.PASS, arrivals.NOTHING):
        found = own(on_host, *rest, done=lambda *_: sent.append(set(cut.arrivals._early)), follows=follows)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert set(source.early[1]._copies) == (first if follows else set())
    count = len(cut.programs)
    begin = max(0, count - fetched_params.EARLY)
    assert begin and not any(sent[:begin]) and sent[begin + 1] == sent[count - 1] == first and not any(sent[count:])


@pytest.mark.parametrize(
    ("follows", "layers"),
    [pytest.param(arrivals.PASS, 4, marks=pytest.mark.long), (arrivals.STEP, 4), (arrivals.STEP, 0)],
)
def test_copies_for_the_next_step_are_of_frozen_weights_and_come_last_and_their_memory_is_planned(follows, layers):
    _, nested, params, *rest = parts(Net(layers), remat="full")
    numbers = range(len(jax.tree.leaves(params)))
    cut = cut_of(nested, params, rest)
    first = {n for program in cut.programs[:2] for n in program.reads if n in numbers}
    frozen = set(sorted(first)[1:])
    cut = cut_of(nested, params, rest, frozen=frozen)
    own = schedule.Schedule(cut)
    on_host = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")), params)
    more = []

    def done(index, written, values):
        early = cut.arrivals._early
        assert follows == arrivals.PASS or not early or not any(cut.arrivals.brings[index:])
        more.append(sum(cut.nbytes(n) for n, copy in early.items() if values.get(n) is not copy))

    own(on_host, *rest, done=done, follows=follows)
    early = cut.arrivals._source.early[1]._copies
    assert set(early) == (frozen if follows == arrivals.STEP else first)
    assert np.subtract(own.used(follows=follows), own.used()).tolist() == more
    stored = jax.tree.leaves(params)
    for number, copy in early.items():
        np.testing.assert_array_equal(copy, stored[number])
