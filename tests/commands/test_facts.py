"""Checks how facts are printed. This module tests zerojax.commands.facts."""

import json
import sys

import pytest

from zerojax.commands import facts
from zerojax.commands.facts import NOTE, WRONG, Fact

FACTS = [Fact("a", "one", "1"), Fact("a", "two", "2", NOTE, "do this"), Fact("b", "three", "3", WRONG, "do that")]


def test_text_has_a_remedy_below_each_line_that_needs_one():
    text = facts.text(FACTS)
    assert text.splitlines()[:4] == ["a", "  [ok] one    1", "  [--] two    2", "              -> do this"]
    assert text.endswith("1 wrong") and "\033" not in text
    assert "\033[31m[!!]" in facts.text(FACTS, colours=True) and facts.text(FACTS[:2]).endswith("nothing is wrong")


def test_the_status_says_whether_something_is_wrong(capsys):
    assert facts.show(FACTS, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["facts"][2]["remedy"] == "do that"
    assert facts.show(FACTS[:2], as_json=False) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def test_a_narrow_terminal_gets_short_lines_and_a_pipe_long_ones():
    found = [Fact("a", "name", "word " * 30, WRONG, "do " * 30)]
    lines = facts.text(found, columns=40).splitlines()
    assert max(map(len, lines)) <= 40 and lines[2].startswith(" " * 13 + "word")
    assert max(map(len, facts.text(found).splitlines())) > 100
    assert max(map(len, facts.text(found, columns=12).splitlines())) > 100  # too narrow for columns


@pytest.mark.parametrize("term, has_colours", [("xterm", True), ("dumb", False)])
def test_colours_are_for_terminals_that_have_them(monkeypatch, capsys, term, has_colours):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("NO_COLOR", raising=False)
    facts.show([Fact("a", "name", "value")], as_json=False)
    assert ("\033[" in capsys.readouterr().out) == has_colours
