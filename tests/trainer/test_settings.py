"""Checks that only what fits its dataclass is read. This module tests zerojax.settings."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from zerojax.errors import UserError
from zerojax.trainer import settings


@dataclasses.dataclass(frozen=True)
class Inner:
    flag: bool
    rate: float


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    count: int
    axes: tuple
    inner: Inner


GOOD = {"name": "x", "count": 3, "axes": [1, 2], "inner": {"flag": True, "rate": 1}}


def test_a_nested_mapping_becomes_a_nested_dataclass():
    found = settings.read(Outer, GOOD, "config")
    assert found == Outer("x", 3, (1, 2), Inner(True, 1.0)) and isinstance(found.inner.rate, float)


ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.just({}))
FITS = {
    "name": lambda value: isinstance(value, str),
    "count": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "axes": lambda value: isinstance(value, list),
}


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(sorted(FITS)), ANY)
def test_a_value_is_read_exactly_where_it_has_the_fields_type(field, value):
    if FITS[field](value):
        assert getattr(settings.read(Outer, {**GOOD, field: value}, "config"), field) == (
            tuple(value) if field == "axes" else value
        )
    else:
        with pytest.raises(UserError, match=rf"^config\.{field}: must be (str|int|tuple), and is "):
            settings.read(Outer, {**GOOD, field: value}, "config")


BAD = {
    "near": ({"nane": 1}, r"^c\.nane: unknown config key; did you mean 'name'\?$"),
    "far": ({"zzz": 1}, r"^c\.zzz: unknown config key; known keys: name, count, axes, inner$"),
    "group": ({"inner": 3}, r"^c\.inner: must be a group of settings \(flag, rate\), and is 3$"),
    "inner": ({"inner": {"flag": True, "rate": float("nan")}}, r"^c\.inner\.rate: must be float, and is nan$"),
    "missing": ({"inner": {"flag": True}}, r"^c\.inner\.rate: missing; start from configs/base\.py"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_by_its_place(name):
    changes, message = BAD[name]
    with pytest.raises(UserError, match=message):
        settings.read(Outer, {**GOOD, **changes}, "c")
