"""Checks the list of configs. This module tests zerojax.commands.configs and zerojax.configs."""

import functools

import pytest
import runs

from zerojax import configs as configs_lib
from zerojax.commands import configs


@pytest.fixture
def call(run_main):
    """Returns f(argument, ...) -> (status, stdout, stderr)."""
    return functools.partial(run_main, configs)


def test_every_config_has_one_line_that_says_what_it_is(call):
    status, out, errors = call()
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (status, errors) == (0, "") and all(text.endswith(".") for text in rows.values())
    assert list(rows) == sorted(path.stem for path in (runs.ROOT / "configs").glob("*.py"))


def test_a_named_config_is_printed_and_starts_a_config_of_ones_own(call):
    for name in configs_lib.names():
        status, out, errors = call(name)
        names = {}
        exec(out, names)
        assert (status, errors) == (0, "") and names["get_config"]().to_dict() == configs_lib.get(name).to_dict()


def test_an_unknown_name_is_told_in_one_line(call):
    status, out, errors = call("zero9")
    assert (status, out, errors.count("\n")) == (
        2,
        "",
        1,
    ) and "'zero9' is not a config; known: bart_tiny, base" in errors
