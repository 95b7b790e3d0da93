"""Checks calls of tools in the forms of several families of models, whole and as they come. This module tests zerojax.serve.tools."""

import json
import random

import chats
import pytest
import tokenizers
import tool_templates
from tool_templates import TALKS

from zerojax.errors import UserError
from zerojax.serve import grammars, tools

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
SCHEMAS = {"add": {"type": "object", "properties": PROPERTIES}}


def read(form, text, cuts=()):
    """Returns the text and the calls of an answer that comes in parts."""
    reader = tools.CallReader(tools.FORMS[form], SCHEMAS)
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
    broken = [both[:-1], both[:-4], both.replace("add", "sub")]
    broken += [both.replace("{}", other) for other in ("[]", "{,}") if "{}" in both]
    broken += [both.replace(end, "") for end in ("</function>", "</arg_key>") if end in both]
    for text in broken:
        found, calls = read(talk.form, text)
        assert calls == [] or (tools.BEGIN in text and calls in (CALLS[:1], CALLS[1:])), text
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
    reader = tools.CallReader(tools.FORMS["Hermes"], SCHEMAS)
    assert reader.add("It is <", is_over=False) == ("It is", [])
    assert reader.add(" 3. <tool", is_over=False) == (" < 3.", [])
    assert reader.add('_call>{"name": "add", "arguments": "{}"}</tool_call', is_over=False) == ("", [])
    assert reader.add("> and", is_over=False) == (" and", [tools.ToolCall("add", "{}")])
    assert reader.add(" so on", is_over=True) == (" so on", [])


def test_a_template_of_another_form_has_none():
    for source in ("{{ tools }}", '{"name": 1}'):
        assert tools.form_of(source) is None
    assert tools.ToolCall("add", "{}").described()["function"] == {"name": "add", "arguments": "{}"}
    assert {talk.form for talk in TALKS.values()} == set(tools.FORMS) and tool_templates.ARGUMENTS in TALKS["args"].call


def test_texts_and_values_within_tags_are_told_apart_by_the_schema():
    kinds = {
        "text": "string",
        "whole": "integer",
        "real": "number",
        "flag": "boolean",
        "list": "array",
        "table": "object",
    }
    schema = {
        "properties": {key: {"type": kind} for key, kind in kinds.items()} | {"maybe": {"type": ["string", "null"]}}
    }
    schema["properties"] |= {
        "one": {"enum": ["1", "2"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    }
    for given, wanted in (
        ({"text": "12"}, "12"),
        ({"text": " null\n"}, " null\n"),
        ({"whole": "12"}, 12),
        ({"whole": "twelve"}, "twelve"),
        ({"real": "1"}, 1),
        ({"flag": "True"}, True),
        ({"flag": "false"}, False),
        ({"list": "[1, {}]"}, [1, {}]),
        ({"table": '{"a": "b"}'}, {"a": "b"}),
        ({"maybe": "null"}, None),
        ({"maybe": "7"}, "7"),
        ({"one": "1"}, "1"),
        ({"either": "7"}, 7),
        ({"either": "[7]"}, "[7]"),
        ({"unknown": "[7]"}, [7]),
        ({"unknown": '"a"'}, '"a"'),
    ):
        ((key, text),) = given.items()
        for form, call in (
            ("Qwen 3 Coder", f"<tool_call><function=f><parameter={key}>\n{text}\n</parameter></function></tool_call>"),
            ("GLM 4.5", f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"),
        ):
            reader = tools.CallReader(tools.FORMS[form], {"f": schema})
            told, (found,) = reader.add(call, is_over=True)
            assert (told, json.loads(found.arguments)) == ("", {key: wanted}), call


FIRST = {"type": "function", "function": {"name": "add", "parameters": {"required": ["a"], **SCHEMAS["add"]}}}
OTHER = {"type": "function", "function": {"name": "stop"}}


@pytest.fixture(scope="module")
def model():
    """Gives a tokenizer in which the marks of calls are tokens: special, or not."""
    made = tokenizers.Tokenizer.from_str(chats.file_of("byte_level"))
    made.add_tokens(["</tool_call>", "<arg_key>", "</arg_key>"])
    made.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<arg_value>", "</arg_value>"])
    return made


def state_of(model, path, grammar, text):
    """Returns whether an answer may have a text, whether it may end there, and whether it must."""
    path.write_text(model.to_str())
    bound = grammars.Schemas(path)(grammar, model.get_vocab_size(), (1,))
    for token in model.encode(text, add_special_tokens=False).ids:
        if not bound.mask()[token // 32] >> token % 32 & 1:
            return False, False, False
        is_over = bound.add(token)
    return True, is_over or bool(bound.mask()[0] >> 1 & 1), is_over


@pytest.mark.parametrize("name", TALKS)
def test_an_answer_is_bound_to_calls_of_the_tools_and_their_schemas(name, model, tmp_path):
    talk, path = TALKS[name], tmp_path / "tokenizer.json"
    form = tools.FORMS[talk.form]
    added = {str(own.content): token for token, own in model.get_added_tokens_decoder().items()}
    ids = {text: token for text, token in added.items() if text in form.texts or text == "<think>"}

    def state(text, names=("add", "stop"), is_needed=True, is_one=False):
        bounds = tools.Bounds(names, is_needed=is_needed, is_one=is_one)
        return state_of(model, path, tools.grammar(form, [FIRST, OTHER], ids, bounds), text)

    end = "]" if talk.form == "Mistral" else ""
    one = talk.call.replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
    one = one.replace("</tool_call> é", "é")  # which is a token here, and so no part of a text
    then = talk.then.replace("add", "stop")
    assert state(one + end, is_one=True)[:2] == (True, True)
    assert state(one + then)[:2] == (True, True) and not state(one + then, is_one=True)[0]
    assert state(one + then, ("add",)) == (False, False, False)
    assert not state(one[:-3])[1] and not state("It is 3.")[0] and not state("<think>")[0]
    wrong = {"1": "x"} | {"b": "c", '"a"': '"A"'}
    assert not any(state(one.replace(old, new) + end)[0] for old, new in wrong.items() if old in one and old != "b")
    assert not state(talk.call.replace("[TOOL_CALLS] ", "[TOOL_CALLS]").replace("add", "sub") + end)[0]
    assert state("It is 3.", is_needed=False)[:2] == (True, True)
    assert state(one + end, is_needed=False, is_one=True)[:2] == (True, True)
    if form.begin:
        assert state(f"<think>Let me see. {one}{end}", is_needed=False, is_one=True)[:2] == (True, True)
        assert not state(f"Let me see. {one}".replace("1", "x"), is_needed=False)[0]
    else:
        assert not state(one.replace("1", "x"), is_needed=False)[0]
    reader = tools.CallReader(form, {"add": FIRST["function"]["parameters"], "stop": None})
    told, calls = reader.add(one + then, is_over=True)
    assert told == "" and [call.name for call in calls] == ["add", "stop"]


def test_a_schema_that_a_form_cannot_be_bound_to_is_refused():
    def refused(form, schema, line):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(UserError, match=line):
            tools.grammar(tools.FORMS[form], [tool], {}, tools.Bounds(("f",), is_needed=True, is_one=True))

    refused("Hermes", {"type": "string"}, "^tools: the parameters of f are of type 'string', and must be an object's$")
    refused(
        "GLM 4.5",
        {"properties": {"a": {"type": "string", "pattern": "x"}}},
        "^tools: the schema of 'a' has 'pattern', which",
    )
    refused(
        "Qwen 3 Coder",
        {"minProperties": 1},
        "^tools: the schema has 'minProperties', which these calls cannot be bound to; omit it$",
    )
