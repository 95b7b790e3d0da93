"""Checks the order of passes and of what travels. This module tests zerojax.zero.pipeline.sending; test_step runs such orders."""

import functools

import jax
import pytest
from pipelines import PASSES, abstract, batch_of, prepared

from zerojax.zero.pipeline import order as order_lib
from zerojax.zero.pipeline import sending


@functools.cache
def made():
    """Returns a step over two groups, and its programs."""
    _, step = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    return step, step.programs(jax.tree.map(lambda leaf: leaf[0], batch_of(0)))


def test_each_pass_is_sent_once_and_reads_what_was_written_before_on_its_group():
    step, found = made()
    moves, order = sending.of(found, step.sent)
    assert [move.op for move in moves if move.target == move.program.group] == [op for op, _ in step.sent]
    assert [move.op.micro for move in moves if move.target is None] == [*range(PASSES)]
    made_here = {number for program in found.programs.values() for number in program.writes}
    alive = set()
    for sent, dropped in zip(order.programs, order.dropped):
        values = {name for name in sent.reads if isinstance(name, sending.Name) and name.number in made_here}
        assert values <= alive
        alive |= {name for name in sent.writes if isinstance(name, sending.Name)}
        alive -= set(dropped)
    assert not alive, "all is dropped in the end but the sums"


def test_what_a_group_only_sends_is_dropped_when_it_is_sent():
    step, found = made()
    moves, order = sending.of(found, step.sent)
    left = 0
    for move, sent, dropped in zip(moves, order.programs, order.dropped):
        if move.target == 1 - move.program.group:
            group = move.program.group
            own = [
                name
                for name in sent.reads
                if not any(name.number in p.reads for p in found.programs.values() if p.group == group)
            ]
            own = [name for name in own if name.number not in found.kept]
            assert set(own) <= set(dropped)
            left += len(own)
    assert left >= 2 * PASSES, "activations and their gradients"


@pytest.mark.parametrize("group", [0, 1])
def test_a_process_sends_the_passes_of_its_groups_and_joins_what_begins_or_ends_there(group):
    step, found = made()
    every, _ = sending.of(found, step.sent)
    moves, order = sending.of(found, step.sent, order_lib.due(step.order), [group])
    passes = [move.op for move in moves if move.target == move.program.group]
    assert passes == [move.op for move in every if move.target == move.program.group == group]
    hops = lambda moves: {(m.op, m.target) for m in moves if m.target not in (None, m.program.group)}  # noqa: E731
    assert hops(moves) == hops(every)
    ends = [move for move in moves if move.target is None]
    assert len(ends) == (PASSES if group == 0 else 0), "metrics are on the first group"
    groups = {name.group for sent in order.programs for name in (*sent.reads, *sent.writes) if hasattr(name, "group")}
    assert groups == {group}
