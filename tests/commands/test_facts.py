"""Checks how facts are printed. This module tests zerojax.commands.facts."""

import json

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
