"""Checks where a pass is cut. This module tests zerojax.zero.pipeline.segments."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from zerojax.zero.pipeline import segments


@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    parts=st.integers(1, 4),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_no_other_cut_has_a_cheaper_costliest_part(costs, parts, before, after):
    parts = min(parts, len(costs))

    def most(found):
        sums = [0.0] * parts
        for cost, part in zip(costs, found):
            sums[part] += cost
        sums[0] += before
        sums[-1] += after
        return max(sums)

    found = segments.balanced(costs, parts, before=before, after=after)
    assert found == sorted(found) and set(found) == set(range(parts))
    for ends in itertools.combinations(range(1, len(costs)), parts - 1):
        other = [sum(end <= number for end in ends) for number in range(len(costs))]
        assert most(found) <= most(other)


@given(layers=st.integers(4, 11), before=st.integers(0, 2), after=st.integers(0, 4), cost=st.floats(0.01, 0.02))
def test_no_other_cut_of_equal_layers_has_a_cheaper_costliest_group(layers, before, after, cost):
    """Two groups of two parts each: a step takes as long as what its costliest group does in all its parts."""

    def most(found):
        sums = [float(found.count(part)) for part in range(4)]
        sums[0] += before
        sums[-1] += after
        return max(sums[0] + sums[2], sums[1] + sums[3]), max(sums)

    found = segments.balanced([cost] * layers, 4, before=before * cost, after=after * cost, chunks=2)
    assert found == sorted(found) and set(found) == set(range(4))
    for ends in itertools.combinations(range(1, layers), 3):
        assert most(found) <= most([sum(end <= number for end in ends) for number in range(layers)])
