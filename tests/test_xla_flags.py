"""Checks the names of the user's options. This module tests zerojax.xla_flags."""

import pytest

from zerojax import xla_flags


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, set()),
        ("", set()),
        ("--xla_dump_to=/tmp/x", {"xla_dump_to"}),
        ("--xla_a=1 --xla_b --xla_c=--x", {"xla_a", "xla_b", "xla_c", "x"}),
    ],
)
def test_names_are_those_of_the_variable(monkeypatch, value, names):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if value is not None:
        monkeypatch.setenv("XLA_FLAGS", value)
    assert xla_flags.names() == names
