"""Checks what is read of a request's body. This module tests zerojax.serve.requests."""

import json

import pytest

from zerojax.errors import UserError
from zerojax.inference.engine import requests
from zerojax.serve import requests as reading


def read(is_chat=False, **fields):
    least = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    return reading.read(json.dumps({"model": "m", **least, **fields}).encode(), is_chat=is_chat)


def test_fields_become_settings_of_the_engine_and_what_is_null_is_not_given():
    found = read(
        temperature=0,
        top_p=0.5,
        stop="a",
        stop_token_ids=[3, 2**31 - 1],
        ignore_eos=True,
        seed=4,
        n=2,
        min_p=None,
        user="me",
    )
    assert found.settings == {
        "temperature": 0.0,
        "top_p": 0.5,
        "stop_strings": ("a",),
        "stop_ids": (3, 2**31 - 1),
        "ignores_end": True,
        "max_tokens": 16,
    }
    assert (found.seed, found.n, found.prompts) == (4, 2, ["x"])
    assert [read(seed=seed).seed for seed in (-1, 2**40 + 3, None)] == [2**32 - 1, 3, None]
    requests.RequestSettings(**found.settings)
    chat = read(True, max_completion_tokens=5, logprobs=True, top_logprobs=2)
    assert chat.settings == {"max_tokens": 5, "logprobs": 2, "temperature": 1.0}
    assert read(True).settings == read(True, response_format={"type": "text"}).settings == {"temperature": 1.0}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    assert read(True, response_format=named).settings["grammar"] == '{"type": "array"}'
    assert read(True, response_format={"type": "json_object"}).settings["grammar"] == '{"type": "object"}'


def test_prompts_and_messages_have_all_forms_of_openai():
    for prompt, found in (("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2]], [[1], [2]])):
        assert read(prompt=prompt).prompts == found
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    listed = [{"role": "developer", "content": "s", "name": None}, {"role": "user", "content": parts}]
    wanted = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
    assert read(True, messages=listed).messages == wanted


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "x"}
CALLED = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}


def test_calls_have_tables_as_chat_templates_read_them_and_results_the_name_of_their_tool():
    found = read(True, messages=[ASKED, CALLED, RESULT], tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found.messages[1:] == [{"role": "assistant", "content": "", "tool_calls": [call]}, {**RESULT, "name": "add"}]
    assert found.tools == [TOOL] and read(True, tools=[TOOL]).tools == [TOOL]
    assert read(True, tools=[TOOL], tool_choice="none").tools == read(True, tools=None).tools == []


def named(name):
    return {"type": "function", "function": {"name": name}}


def test_what_the_calls_of_an_answer_are_bound_to():
    other = {"type": "function", "function": {"name": "stop", "strict": False}}
    strict = {"type": "function", "function": {"name": "go", "strict": True}}
    for fields, wanted in (
        ({}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tool_choice": "required"}, (("add", "stop"), True, False)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (("add", "stop"), True, True)),
        ({"tool_choice": named("stop")}, (("stop",), True, True)),
        ({"parallel_tool_calls": False}, (("add", "stop"), False, True)),
        ({"tools": [TOOL, strict]}, (("add", "go"), False, False)),
        ({"tools": [TOOL, strict], "tool_choice": "none"}, None),
    ):
        bounds = read(True, **{"tools": [TOOL, other], **fields}).bounds
        assert (None if bounds is None else (bounds.names, bounds.is_needed, bounds.is_one)) == wanted, fields


@pytest.mark.parametrize("name", reading.NEUTRAL)
def test_a_field_that_is_not_applied_passes_only_with_the_value_that_changes_nothing(name):
    neutral = reading.NEUTRAL[name]
    read(**{name: neutral})
    if neutral is not None:
        with pytest.raises(reading.NotAnswered, match=f"{name}: is .* which is not applied") as error:
            read(**{name: 2.5})
        assert (error.value.status, error.value.param) == (400, name)


def test_the_defaults_of_openai_that_clients_spell_out_pass():
    read(echo=False, store=False, best_of=1, suffix="", frequency_penalty=0, presence_penalty=0, logit_bias={})
    read(True, store=False, tools=[], tool_choice="none", response_format={"type": "text"}, modalities=["text"])


WRONG = {
    "'temprature': is not a field that is known; did you mean 'temperature'": {"temprature": 1},
    "model: must be a text": {"model": 3},
    "prompt: is missing": {"prompt": None},
    "prompt: must be a text, token ids, or a list of either": {"prompt": []},
    "prompt: holds -1, which is no token id": {"prompt": [-1]},
    "stop_token_ids: holds 2147483648, which is no token id": {"stop_token_ids": [2**31]},
    "prompt: holds True": {"prompt": [3, True]},
    "max_tokens: must be a whole number": {"max_tokens": 2.0},
    "temperature: must be a number, and is True": {"temperature": True},
    "n: must be from 1 to 128, and is 0": {"n": 0},
    "stop: must be a text or up to 16 texts": {"stop": ["a"] * 17},
    "of a letter or more, and is ''": {"stop": ""},
    "stream_options: needs stream=true": {"stream_options": {"include_usage": True}},
    "stream_options: knows include_usage": {"stream": True, "stream_options": {"other": 1}},
    "prompt: holds half of a surrogate pair": {"prompt": "\ud800"},
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_field_is_named(line):
    with pytest.raises(reading.NotAnswered) as error:
        read(**WRONG[line])
    assert line in error.value.message and error.value.status == 400


def with_(arguments):
    return {**CALL, "function": {"name": "add", "arguments": arguments}}


def test_tools_that_cannot_be_offered_as_asked_are_refused():
    def tool(**function):
        return {**TOOL, "function": TOOL["function"] | function}

    for line, fields in (
        ("tools: must be [{", {"tools": {}}),
        ('tools[0]: must be {"type": "function"', {"tools": [3]}),
        ("tools[1]: the name 'add' is there twice", {"tools": [TOOL, TOOL]}),
        ("tools[0]: the name 'a b' must have up to 64", {"tools": [tool(name="a b")]}),
        ("tools[0]: parameters: must be a JSON schema", {"tools": [tool(parameters=3)]}),
        ("tools[0]: strict: must be true or false", {"tools": [tool(strict=1)]}),
        ("tool_choice: needs tools", {"tool_choice": "required"}),
        ("tool_choice: must be", {"tools": [TOOL], "tool_choice": "add"}),
        ("tool_choice: must be", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}),
        ("tool_choice: 'sub' is no tool that is offered; known: add", {"tools": [TOOL], "tool_choice": named("sub")}),
        ("response_format: binds the whole answer", {"tools": [TOOL], "response_format": {"type": "json_object"}}),
        ("response_format: must be {", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("response_format: must be {", {"response_format": {"type": "xml"}}),
        ("response_format: has 'schema', which is not", {"response_format": {"type": "json_object", "schema": {}}}),
        (
            "response_format: has 'strct', which is not",
            {"response_format": {"type": "json_schema", "json_schema": {"strct": True, "schema": {}}}},
        ),
        ("parallel_tool_calls: needs tools", {"parallel_tool_calls": False}),
    ):
        with pytest.raises(reading.NotAnswered) as error:
            read(True, **fields)
        assert line in error.value.message and error.value.status == 400


def test_a_wrong_conversation_is_named():
    for line, messages in (
        ("messages: must be", []),
        ("messages[0]: role must be one of", [{"role": "function", "content": "x"}]),
        ("messages[0]: tool_call_id must be the id of a call before it, and is 'c1'", [RESULT, ASKED]),
        ("messages[1]: tool_call_id must be", [CALLED, {**RESULT, "tool_call_id": "c2"}]),
        ("messages[0]: has 'tool_call_id'", [{**ASKED, "tool_call_id": "c1"}]),
        ("messages[0].tool_calls: must be", [{**CALLED, "tool_calls": [1]}]),
        ("messages[0].tool_calls: arguments must be a text of JSON", [{**CALLED, "tool_calls": [with_("{")]}]),
        ("messages[0].tool_calls: arguments: must be a JSON object", [{**CALLED, "tool_calls": [with_("3")]}]),
        ("messages[0].tool_calls: arguments: must be a text", [{**CALLED, "tool_calls": [with_({})]}]),
        ("messages[0]: content must be", [{"role": "user", "content": 3}]),
        ("messages[0]: content is missing", [{"role": "user", "content": None}]),
        ("messages[1]: content is missing", [ASKED, {"role": "assistant"}, ASKED]),
        ("messages[0]: content must be", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("messages[0]: has 'tool_calls'", [{"role": "user", "content": "x", "tool_calls": [1]}]),
        ("messages: the last one is the assistant's", [{"role": "assistant", "content": "x"}]),
    ):
        with pytest.raises(reading.NotAnswered) as error:
            read(True, messages=messages)
        assert line in error.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"model": "a", "model": "a"}',
        b'{"model": NaN}',
        b"[" * 10**5,
        b'{"model": 1e999}',
        b"3",
    ],
)
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(reading.NotAnswered, match="the body"):
        reading.read(body, is_chat=False)


def test_an_error_of_the_engine_names_the_field():
    for setting, field in (("stop_strings", "stop"), ("max_tokens", "max_tokens"), ("stop_ids", "stop_token_ids")):
        found = reading.NotAnswered.by(UserError(f"{setting}: is wrong"), is_chat=False)
        assert (found.status, found.param, found.message) == (400, field, f"{field}: is wrong")
    assert reading.NotAnswered.by(UserError("other: is wrong"), is_chat=False).param is None
    for is_chat, field in ((False, "prompt"), (True, "messages")):
        found = reading.NotAnswered.by(UserError("prompt: has 9 tokens, and at most 8 fit"), is_chat=is_chat)
        assert (found.code, found.param) == ("context_length_exceeded", field)
        assert found.message.startswith(f"{field}: has 9 tokens")
