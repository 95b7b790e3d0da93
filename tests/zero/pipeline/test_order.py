"""Checks schedules against closed forms and their own rules. This module tests zerojax.zero.pipeline.order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerojax.errors import UserError
from zerojax.zero.pipeline import order

SIZES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize("name, chunks", SIZES)
@settings(max_examples=25, deadline=None)
@given(devices=st.integers(1, 8), rounds=st.integers(1, 6))
def test_each_pass_runs_once_on_its_device_and_the_bubble_is_that_of_the_papers(name, chunks, devices, rounds):
    micros = devices * rounds
    made = order.make(name, devices, micros, chunks=chunks)
    for device, ops in enumerate(made.of_device):
        assert len(set(ops)) == len(ops) == 2 * micros * chunks
        assert {op.stage % devices for op in ops} == {device}
    forward, backward = 1 / chunks, 2 / chunks
    line = order.run(made, order.PassTimes(forward, backward))
    for op, start in line.start.items():
        assert all(line.end[needed] <= start for needed in order.needs(op, made.stages))
    ends = (devices - 1) * (forward + backward)
    assert line.total == pytest.approx(3 * micros + ends)
    assert line.bubble == pytest.approx(ends / (3 * micros + ends))


@given(devices=st.integers(1, 8), micros=st.integers(1, 24))
def test_1f1b_keeps_at_most_as_many_micro_batches_as_there_are_stages_from_here_on(devices, micros):
    kept = [order.make("1f1b", devices, micros).alive(device) for device in range(devices)]
    assert kept == [min(devices - device, micros) for device in range(devices)]
    assert order.make("gpipe", devices, micros).alive(0) == micros


@given(devices=st.integers(1, 8), rounds=st.integers(1, 6), chunks=st.integers(2, 4))
def test_interleaved_keeps_as_many_chunks_alive_as_the_paper_has_warm_up_passes_and_one(devices, rounds, chunks):
    """Device d of n runs 2 (n - d - 1) + (chunks - 1) n forward passes before its first backward pass (arXiv:2104.04473, figure 4)."""
    made = order.make("interleaved", devices, devices * rounds, chunks=chunks)
    ahead = [2 * (devices - device - 1) + (chunks - 1) * devices for device in range(devices)]
    assert [made.alive(device) for device in range(devices)] == [
        min(count + 1, devices * rounds * chunks) for count in ahead
    ]


@settings(max_examples=40, deadline=None)
@given(
    devices=st.integers(1, 8),
    more=st.integers(0, 16),
    parts=st.sampled_from([(2, 2, 2), (2, 4, 2), (3, 2, 2), (2, 3, 1)]),
)
def test_the_bubble_of_zero_bubble_is_that_of_the_paper(devices, more, parts):
    micros, (forward, inputs, weights) = devices + more, parts
    made = order.make("zero_bubble", devices, micros)
    line = order.run(made, order.PassTimes(forward, inputs + weights, weights))
    assert line.total == pytest.approx(micros * sum(parts) + (devices - 1) * (forward + inputs - weights))
    for op, start in line.start.items():
        assert all(line.end[needed] <= start for needed in order.needs(op, devices))
    for device, ops in enumerate(made.of_device):
        assert len(set(ops)) == len(ops) == 3 * micros
        assert made.alive(device) == devices, "as many as the first device of 1f1b"


def test_the_last_pass_of_a_micro_batch_is_known():
    sent = order.sent(order.make("zero_bubble", 3, 4))
    assert [op.micro for op, is_last in sent if is_last] == [0, 1, 2, 3]
    assert all(op.kind == order.WEIGHTS for op, is_last in sent if is_last)


def test_a_slow_stage_and_slow_links_lengthen_the_step():
    made = order.make("1f1b", 2, 8)
    assert order.run(made, order.PassTimes([1, 2], [2, 4])).total == pytest.approx(1 + 8 * 6 + 2)
    assert order.run(made, order.PassTimes(hop=0.5)).total > order.run(made).total


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("zigzag", 2, 4, 1), "schedule: must be one of gpipe, 1f1b, interleaved, zero_bubble, and is 'zigzag'"),
        (("1f1b", 2, 4, 2), "chunks: 1f1b has one stage a device"),
        (("interleaved", 2, 4, 1), "needs 2 or more chunks"),
        (("interleaved", 4, 6, 2), "take 8"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(arguments, message):
    name, devices, micros, chunks = arguments
    with pytest.raises(UserError, match=message):
        order.make(name, devices, micros, chunks=chunks)


@pytest.mark.parametrize("name, chunks", [*SIZES, ("zero_bubble", 1)])
def test_what_a_pass_needs_is_due_before_it_and_each_pass_is_due_once(name, chunks):
    made = order.make(name, 4, 8, chunks=chunks)
    known = []
    for (op, _), due in zip(order.sent(made), order.due(made), strict=True):
        known += due
        assert set(order.needs(op, made.stages)) <= set(known) and op not in known
    assert len(set(known)) == len(known)
