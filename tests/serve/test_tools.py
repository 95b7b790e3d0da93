"""Checks calls of tools in the forms of several families of models, whole and as they come. This module tests zerojax.serve.tools."""

import json
import random

import pytest
import tool_templates
from tool_templates import TALKS

from zerojax.serve import tools

NAMES = {"add"}


def read(form, text, cuts=()):
    """Returns the text and the calls of an answer that comes in parts."""
    reader = tools.CallReader(tools.FORMS[form], NAMES)
    told, calls = "", []
    for begin, end in zip((0, *cuts), (*cuts, len(text))):
        new, own = reader.add(text[begin:end], is_over=False)
        told, calls = told + new, calls + own
    new, own = reader.add("", is_over=True)
    return told + new, [(call.name, json.loads(call.arguments)) for call in calls + own]


CALLS = [("add", {"a": 1, "b": "</tool_call> é"}), ("add", {})]


@pytest.mark.parametrize("name", TALKS)
def test_calls_and_text_are_the_same_however_an_answer_is_cut(name):
    talk, rng = TALKS[name], random.Random(0)
    assert tools.form_of(talk.template) is tools.FORMS[talk.form]
    both = talk.call + talk.then
    cases = {both: ("", CALLS), f"  {both}\n": ("", CALLS), "No call.\n": ("No call.\n", [])}
    if talk.form != "Llama 3.1":  # whose calls are the whole answer
        cases |= {f"Let me see. \n{both}": ("Let me see.", CALLS)}
    for text, wanted in cases.items():
        assert read(talk.form, text) == wanted
        assert read(talk.form, text, range(1, len(text))) == wanted
        for _ in range(20):
            assert read(talk.form, text, sorted(rng.sample(range(len(text)), min(4, len(text))))) == wanted


@pytest.mark.parametrize("name", TALKS)
def test_what_is_no_complete_call_of_an_offered_tool_stays_text(name):
    talk = TALKS[name]
    both = talk.call + talk.then
    broken = [both[:-1], both[:-4], both.replace("add", "sub"), both.replace("{}", "[]"), both.replace("{}", "{,}")]
    for text in broken:
        found, calls = read(talk.form, text)
        assert calls == [] or (talk.form == "Hermes" and calls == CALLS[:1]), text
        assert found if calls else found == text
        assert read(talk.form, text, range(1, len(text))) == (found, calls)
    for text in (
        "[TOOL_CALL",
        "<tool_",
        "{",
        "[TOOL_CALLS]",
        "<tool_call>",
        '{"name": "add"}',
        "[" * 5000,
        '{"a":' * 5000,
    ):
        assert read(talk.form, text) == read(talk.form, text, range(1, len(text))) == (text, [])


def test_a_call_of_hermes_is_told_at_once_and_text_before_what_may_begin_one():
    reader = tools.CallReader(tools.FORMS["Hermes"], NAMES)
    assert reader.add("It is <", is_over=False) == ("It is", [])
    assert reader.add(" 3. <tool", is_over=False) == (" < 3.", [])
    assert reader.add('_call>{"name": "add", "arguments": "{}"}</tool_call', is_over=False) == ("", [])
    assert reader.add("> and", is_over=False) == (" and", [tools.ToolCall("add", "{}")])
    assert reader.add(" so on", is_over=True) == (" so on", [])


def test_a_template_of_another_form_has_none():
    for source in ("{{ tools }}", "<tool_call>\n<function=add>", "<tool_call>add\n<arg_key>", '{"name": 1}'):
        assert tools.form_of(source) is None
    assert tools.ToolCall("add", "{}").described()["function"] == {"name": "add", "arguments": "{}"}
    assert {talk.form for talk in TALKS.values()} == set(tools.FORMS) and tool_templates.ARGUMENTS in TALKS["args"].call
