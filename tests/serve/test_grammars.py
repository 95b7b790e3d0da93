"""Binds the answers of a small model with random weights to JSON schemas. This module tests zerojax.serve.grammars."""

import asyncio
import functools
import importlib.util
import json
import re

import chats
import httpx
import pytest
import small_engine
import tokenizers

from zerojax.errors import UserError
from zerojax.inference.engine import engine as engine_lib
from zerojax.serve import app, grammars, tokenizer, tools

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["é", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
END = 1  # "</s>"


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "tokenizer.json"
    found.write_text(chats.file_of("byte_level"))
    return found


def test_a_text_may_have_the_tokens_of_its_schema_and_ends_after_them(path):
    model = tokenizers.Tokenizer.from_file(str(path))
    size = model.get_vocab_size() + 40  # of a model's vocabulary, which may be larger
    made = grammars.Schemas(path)(json.dumps(SCHEMA), size, (END,))
    ids = model.encode('{"a":7,"b":"é"}', add_special_tokens=False).ids
    for token in ids:
        mask, is_last = made.mask(), token == ids[-1]
        allowed = {n for n in range(size) if mask[n // 32] >> (n % 32) & 1}
        assert token in allowed and END not in allowed and max(allowed) < size - 40
        assert made.add(token) == is_last
    wrong = grammars.Schemas(path)(json.dumps(SCHEMA), size, (END,))
    (word,) = model.encode("[", add_special_tokens=False).ids
    assert not wrong.mask()[word // 32] >> (word % 32) & 1


def test_a_schema_that_is_not_applied_and_a_library_that_is_not_there_are_told(path, monkeypatch):
    made = grammars.Schemas(path)
    for schema in ({"type": "nope"}, {"type": "object", "not": {}}, {"$ref": "http://example.com/x"}):
        with pytest.raises(UserError, match=r"^grammar: the schema is not applied \(.+\); change it$"):
            made(json.dumps(schema), 600, (END,))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"grammar: needs llguidance, .*pip install 'zerojax\[serve\]'"):
        made("{}", 600, (END,))


class PathWords(tokenizer.Words):
    """The words of a tokenizer.json without a model's folder."""

    def __init__(self, path):
        self._model, self.grammar_of = tokenizers.Tokenizer.from_file(str(path)), grammars.Schemas(path)
        self.call_form, self.call_ids = tools.FORMS["Hermes"], {tools.BEGIN: self._model.token_to_id(tools.BEGIN)}

    def text_of(self, ids):
        return self._model.decode(list(ids))

    def conversation(self, messages, tools=()):
        return [5, 6, 7]


async def calls_are_forced(ask, body):
    """Asks a model of random weights, which would call nothing, whole and as a stream."""
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    stop = {
        "type": "function",
        "function": {"name": "stop", "parameters": {"properties": {}, "additionalProperties": False}},
    }
    asked = {**body, "tools": [tool, stop], "tool_choice": {"type": "function", "function": {"name": "add"}}, "n": 2}
    choices = (await ask(json=asked)).json()["choices"]
    for choice in choices:
        (call,) = choice["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert call["function"]["name"] == "add" and 0 <= found["a"] <= 99 and found["b"] in ("é", "no")
    streamed = (await ask(json={**asked, "stream": True})).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["delta"].get("tool_calls")]
    told = {delta["index"]: delta["delta"]["tool_calls"][0]["function"] for delta in deltas}
    assert told == {choice["index"]: choice["message"]["tool_calls"][0]["function"] for choice in choices}
    several = {**asked, "tool_choice": "required", "parallel_tool_calls": False, "n": 1}
    (choice,) = (await ask(json=several)).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] in ("add", "stop")
    wrong = {**tool, "function": {**tool["function"], "strict": True, "parameters": {"type": "object", "not": {}}}}
    error = (await ask(json={**body, "tools": [wrong]})).json()["error"]
    assert error["param"] == "tools" and error["message"].startswith("tools: the schema is not applied ("), error


async def what_llguidance_cannot_follow_is_told(ask, body):
    """No finite text has this schema, which is found when a token is to be drawn."""
    wrong = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    answer = await ask(json={**body, "response_format": wrong})
    assert (answer.status_code, (error := answer.json()["error"])["param"]) == (400, "response_format")
    assert re.fullmatch(
        r"response_format: no text of the schema can be continued \(.+\); simplify it", error["message"]
    )
    last = (await ask(json={**body, "response_format": wrong, "stream": True})).text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"] == error


def test_a_schema_that_is_too_large_to_follow_is_told(path):
    wide = {"type": "object", "properties": {f"k{number}": {} for number in range(600)}}
    text = grammars.Schemas(path)(json.dumps(wide), 600, (END,))
    text.mask()
    assert not text.failure
    (token,) = tokenizers.Tokenizer.from_file(str(path)).encode("{", add_special_tokens=False).ids
    assert text.add(token) and "max is 2000" in text.failure


def test_answers_of_a_server_are_of_their_schemas_beside_others(path):
    words = PathWords(path)
    model = small_engine.model(vocab_size=words._model.get_vocab_size())
    how = {"slots": 3, "max_len": 512, "chunk": 16, "text_of": words.text_of, "grammar_of": words.grammar_of}
    service = app.Service(engine_lib.Engine(model, **how), words, name="m", limits=app.Limits())
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": 3, "top_k": 200}
    named = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}

    async def test():
        web = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=web, base_url="http://localhost", timeout=120) as client:
            ask = functools.partial(client.post, "/v1/chat/completions")
            bound, free = await asyncio.gather(
                ask(json={**body, "response_format": named, "n": 2}), ask(json={**body, "max_tokens": 20})
            )
            for choice in bound.json()["choices"]:
                found = json.loads(choice["message"]["content"])
                assert choice["finish_reason"] == "stop" and {*found} == {"a", "b"}
                assert 0 <= found["a"] <= 99 and found["b"] in ("é", "no")
            again = await ask(json={**body, "max_tokens": 20, "response_format": {"type": "text"}})
            assert again.json()["choices"] == free.json()["choices"]
            (cut,) = (await ask(json={**body, "max_tokens": 3, "response_format": {"type": "json_object"}})).json()[
                "choices"
            ]
            assert cut["message"]["content"].lstrip()[:1] in ("{", "") and cut["finish_reason"] in ("length", "stop")
            await calls_are_forced(ask, body)
            await what_llguidance_cannot_follow_is_told(ask, body)
            wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}
            error = (await ask(json={**body, "response_format": wrong})).json()["error"]
            assert error["param"] == "response_format" and error["message"].startswith("response_format: the schema is")

    service.start()
    try:
        asyncio.run(test())
    finally:
        service.stop(60)
