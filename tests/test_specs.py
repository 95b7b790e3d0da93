"""Checks the arithmetic on specs. This module tests zerojax.specs."""

import hypothesis
import hypothesis.strategies as st
import pytest
from jax.sharding import PartitionSpec as P

from zerojax import specs

AXES = ("replica", "data", "model")


@pytest.mark.parametrize(
    ("spec", "axes", "rest"),
    [
        (P(), set(), P()),
        (P(None, "data"), {"data"}, P()),
        (P("model", "data"), {"model", "data"}, P("model")),
        (P(("model", "data"), None), {"model", "data"}, P("model")),
        (P(("replica", "data", "model")), set(AXES), P(("replica", "model"))),
        (P("data", None, "model"), {"data", "model"}, P(None, None, "model")),
    ],
)
def test_axes_are_listed_and_data_is_removed(spec, axes, rest):
    assert specs.axes(spec) == axes
    assert specs.without(spec, ["data"]) == rest


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(st.permutations(AXES), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sampled_from(AXES))
def test_without_removes_only_one_axis(order, dims, axis):
    entries = [tuple(name for name, at in zip(order, dims) if at == dim) or None for dim in range(4)]
    rest = specs.without(P(*entries), [axis])
    assert specs.axes(rest) == set(AXES) - {axis}
    assert rest == specs.without(rest, [axis])
    assert not rest or rest[-1] is not None


def test_trimmed_drops_trailing_none():
    assert specs.trimmed([None, "data", None]) == P(None, "data")
    assert specs.trimmed([None, None]) == P()
