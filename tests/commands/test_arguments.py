"""Checks how commands refuse and end. This module tests zerojax.commands.arguments."""

import pytest

from zerojax.commands import arguments
from zerojax.errors import UserError


def ended(command, capsys):
    with pytest.raises(SystemExit) as end:
        arguments.run(command)
    return end.value.code, capsys.readouterr().err


def refused():
    raise UserError("value: is wrong; choose another")


def interrupted():
    raise KeyboardInterrupt


def test_a_command_ends_with_its_status_and_an_error_with_one_line(capsys):
    assert ended(lambda: None, capsys) == (0, "")
    assert ended(lambda: 2, capsys) == (2, "")
    assert ended(refused, capsys) == (2, "zerojax: value: is wrong; choose another\n")
    assert ended(interrupted, capsys) == (130, "zerojax: interrupted\n")


def test_a_wrong_argument_is_one_line_that_names_help():
    parser = arguments.OneLineParser()
    parser.add_argument("--count", type=int)
    with pytest.raises(UserError, match=r"argument --count: invalid int value: 'x'; --help lists the arguments"):
        parser.parse_args(["--count", "x"])
