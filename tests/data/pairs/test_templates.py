"""Checks prompt and chat templates. This module tests zerojax.data.pairs.templates."""

import importlib.util
import json
import re
import signal
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zerojax.data.pairs import templates
from zerojax.errors import UserError

TURNS = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")]
CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    st.lists(st.tuples(st.text(), st.text(st.characters(exclude_characters="{}"), min_size=1))), st.text()
)
def test_a_template_is_its_text_with_each_field_in_place(parts, end):
    def escaped(text):
        return text.replace("{", "{{").replace("}", "}}")

    template = templates.Template("".join(f"{escaped(t)}{{{field}}}" for t, field in parts) + escaped(end), "key")
    example = {field: f"<{field}>" for _, field in parts}
    assert template.fill(example, "place") == "".join(f"{text}<{field}>" for text, field in parts) + end


def test_numbers_are_text_and_those_with_names_are_names():
    template = templates.Template("{a} {b} {c}", "key")
    assert template.fill({"a": 1.5, "b": np.int64(1), "c": b"x"}, "p", {"b": ["no", "yes"]}) == "1.5 yes x"


@pytest.mark.parametrize("value", [1, "1", " 1 ", b"1", "yes"])
def test_a_label_is_its_number_also_in_a_table_of_texts_or_its_name(value):
    assert templates.Template("{a}", "key").fill({"a": value}, "p", {"a": ["no", "yes"]}) == "yes"


def test_names_that_are_numbers_stand_for_themselves():
    assert templates.Template("{a}", "key").fill({"a": "1"}, "p", {"a": ["1", "2"]}) == "1"


def test_other_texts_may_stand_beside_a_label():
    template = templates.Template("{a} {b}", "key")
    assert template.fill({"a": 1, "b": "since"}, "p", {key: ["no", "yes"] for key in "ab"}) == "yes since"


@pytest.mark.parametrize(
    "text, example, message",
    [
        ("{a", {}, "key: '{a' has a '{' without its partner"),
        ("a}", {}, "key: 'a}' has a '}' without its partner"),
        ("{a}", {"b": 1}, "f:3: has no field 'a', which `key` names; name one of its fields: b"),
        ("{a}", {"a": None}, "f:3: field 'a' is None, and `key` needs text or a number"),
        ("{c}", {"c": float("nan")}, "f:3: field 'c' is nan, and `key` needs text or a number"),
        ("{a}", {"a": "-1"}, "f:3: a is -1, and there are 2 labels (no, yes)"),
        ("{a}", {"a": "maybe"}, "f:3: a is 'maybe', and must be one of the 2 labels (no, yes) or its number"),
        ("{a}", {"a": 2}, "f:3: a is 2, and there are 2 labels (no, yes)"),
    ],
)
def test_a_template_that_cannot_be_filled_is_one_line(text, example, message):
    with pytest.raises(UserError, match=re.escape(message)):
        templates.Template(text, "key").fill(example, "f:3", {"a": ["no", "yes"]})


def test_conversations_of_all_forms_are_the_same():
    listed = [{"role": role, "content": content} for role, content in TURNS]
    shared = [{"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text} for role, text in TURNS]
    columns = {"role": np.array([t[0].encode() for t in TURNS]), "content": np.array([t[1].encode() for t in TURNS])}
    for value in (listed, shared, columns):
        assert templates.messages_of(value, "f:1", "messages") == listed


def test_a_message_keeps_what_it_has_but_what_is_null():
    calls = [{"type": "function", "function": {"name": "f", "arguments": np.array([1, 2])}}]
    given = {"role": "gpt", "content": None, "tool_calls": calls, "weight": np.float32(0), "name": None}
    (found,) = templates.messages_of([given], "f:1", "messages")
    assert found == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": [1, 2]}}],
        "weight": 0.0,
    }
    assert not templates.is_learned(found) and templates.is_learned({"role": "assistant", "train": True})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert templates.text_of({"content": parts}) == "ab" and templates.text_of(found) == ""


@pytest.mark.parametrize(
    "message, line",
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of type 'image_url'"),
        ({"role": "user", "content": ["text"]}, "a part 'text'"),
        (
            {"role": "assistant", "content": "a", "weight": 0.5},
            "weight is 0.5, and must be 1 (learned) or 0",
        ),
        (
            {"role": "assistant", "content": "a", "train": "no"},
            "train is 'no', and must be 1 (learned) or 0",
        ),
        (
            {"role": "assistant", "tool_calls": '[{"name": "f"}]'},
            "tool_calls must be a list of tables, and is '[{",
        ),
    ],
)
def test_images_odd_weights_and_odd_calls_are_refused_by_name(message, line):
    with pytest.raises(UserError, match=rf"^f:1: .*{re.escape(line)}"):
        templates.messages_of([message], "f:1", "messages", is_answered=False)


def test_tools_are_a_list_of_schemas_or_its_json():
    assert templates.tools_of('[{"a": 1}]') == templates.tools_of(np.array([{"a": 1}], object)) == [{"a": 1}]
    assert templates.tools_of(None) is templates.tools_of(" ") is None and templates.tools_of([]) == []
    for value in ("{", {"a": 1}, [1]):
        with pytest.raises(UserError, match=r"^tools "):
            templates.tools_of(value)


def test_bytes_are_read_as_utf8_and_refused_with_their_place_where_they_are_none():
    found = templates.messages_of([{"role": b"assistant", "content": "\u00e9".encode()}], "f:1", "messages")
    assert found == [{"role": "assistant", "content": "\u00e9"}]
    assert templates.Template("{text}!", "prompt").fill({"text": b"a"}, "f:1") == "a!"
    with pytest.raises(UserError, match=r"^f:1: messages: a text is not UTF-8 at its byte 1 \(near b'a\\xff'\)"):
        templates.messages_of([{"role": b"assistant", "content": b"a\xff"}], "f:1", "messages")
    with pytest.raises(UserError, match=r"^f:1: field 'text' is not UTF-8 at its byte 0 "):
        templates.Template("{text}", "prompt").fill({"text": b"\xff"}, "f:1")


@pytest.mark.parametrize(
    "value",
    [
        "hi",
        3,
        [],
        {},
        [{"role": "user"}],
        [{"role": "user", "content": "no answer"}],
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": 5},
        {"role": ["assistant", "user"], "content": ["one"]},
    ],
)
def test_what_is_no_conversation_with_an_answer_is_named(value):
    with pytest.raises(UserError, match=r"^f:1: "):
        templates.messages_of(value, "f:1", "messages")


def test_the_tokenizers_own_template_is_taken_if_it_can_be(tmp_path):
    assert templates.chat_of(None, "auto")[0] is templates.plain_chat
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": {"content": "<|im_end|>"}})
    )
    chat, line = templates.chat_of(tmp_path, "auto")
    assert str(tmp_path) in line
    assert chat(TURNS[1:2], True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert templates.chat_of(tmp_path, "plain")[0] is templates.plain_chat
    with mock.patch.object(importlib.util, "find_spec", lambda name: None):
        found, line = templates.chat_of(tmp_path, "auto")
        assert found is templates.plain_chat and "pip install jinja2" in line
        with pytest.raises(UserError, match=r'chat_template: is "own", and the tokenizer.s chat template needs jinja2'):
            templates.chat_of(tmp_path, "own")


@pytest.mark.parametrize("kind", ["list", "table", "files"])
def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_some(tmp_path, kind):
    named = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    if kind == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        (tmp_path / "chat_template.jinja").write_text(named["default"])
    else:
        listed = [{"name": name, "template": source} for name, source in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": listed if kind == "list" else named})
        )
    chat, _ = templates.chat_of(tmp_path, "own")
    assert chat(TURNS, False) == "plain" and chat.render(TURNS, given={"tools": [{"name": "t"}]}).text == "t"


def test_several_templates_without_a_default_are_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": {"other": "x"}}))
    with pytest.raises(UserError, match="has the chat templates other, and none is named 'default'"):
        templates.chat_of(tmp_path, "own")[0](TURNS, False)


def test_the_plain_template_as_one_of_jinja_writes_the_same_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(templates.plain_source("", ""))
    chat, _ = templates.chat_of(tmp_path, "own")
    for is_answered in (False, True):
        assert chat(TURNS, is_answered) == templates.plain_chat(TURNS, is_answered)
    (tmp_path / "chat_template.jinja").write_text(templates.plain_source("<s>", '"</s>'))
    assert (
        templates.chat_of(tmp_path, "own")[0](TURNS[1:], False) == '<s>### user\nHi\n\n### assistant\nHello."</s>\n\n'
    )


def test_a_template_that_still_computes_ends_with_its_chat(tmp_path):
    source = "{% for n in range(99999) %}{% for m in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(source)
    chat, _ = templates.chat_of(tmp_path, "own")
    process = chat._process
    process.stdin.write(json.dumps([templates.DEFAULT, {"messages": []}]).encode() + b"\n")
    process.stdin.flush()
    del chat
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('no system role') }}", "{{ messages.x.y.z }}"])
def test_a_template_that_fails_is_one_line(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(UserError, match="chat template"):
        templates.chat_of(tmp_path, "own")[0](TURNS, False)
