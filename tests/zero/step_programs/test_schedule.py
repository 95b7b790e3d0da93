"""Checks what is held while programs run. This module tests zerojax.zero.step_programs.schedule."""

import jax
from block_nets import Net, abstract, parts

from zerojax.zero.step_programs import programs, schedule


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
