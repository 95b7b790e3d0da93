"""Asks a service whose engine writes given texts, with OpenAI's client. This module tests calls of tools in zerojax.serve.app."""

import asyncio
import contextlib
import json

import httpx
import numpy as np
import pytest
from tool_templates import TALKS

from zerojax.inference.engine import detokenizer, requests
from zerojax.serve import app, tokenizer, tools

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
ASKED = [{"role": "user", "content": "x"}]
WANTED = [("add", {"a": 1, "b": "</tool_call> é"}), ("add", {})]


def text_of(ids):
    return bytes(ids).decode("utf-8", "replace")


class Scripted:
    """An engine whose answers are given: that of stream n is the text n, in a token for each byte, at most `most` tokens."""

    slots, max_len, counts, spare_seconds = 8, 1000, {"running": 0, "waiting": 0}, 0.0

    def __init__(self, texts, most):
        self._texts, self._most, self._running = texts, most, []

    @property
    def is_idle(self):
        return not self._running

    def request(self, prompt, *, on_change, **settings):
        chosen = requests.RequestSettings(**settings)
        growing = detokenizer.Growing(text_of)
        return requests.Request(np.asarray(prompt), chosen, self._most, on_change, text="", so_far=growing)

    def add(self, request):
        self._running.append(request)

    def cancel(self, request):
        self._running.remove(request)

    def step(self):
        for request in list(self._running):
            script = [*self._texts[request.settings.stream].encode(), 0]
            request.add(script[len(request.tokens)], None, (0,))
            if request.finish:
                self._running.remove(request)
            request.on_change(request)


class FormWords(tokenizer.Words):
    """The words of a model with a form of calls, which notes what was asked."""

    def __init__(self, form):
        self.call_form, self.asked = tools.FORMS[form], []

    def conversation(self, messages, tools=()):
        self.asked.append((list(messages), list(tools)))
        return [1, 2]


def asking(form, texts, test, most=1000):
    async def inside():
        import openai  # takes seconds, of each process that collects tests

        words = FormWords(form)
        service = app.Service(Scripted(texts, most), words, name="m", limits=app.Limits(seconds=60))
        service.start()
        web = httpx.AsyncClient(transport=httpx.ASGITransport(service.app()))
        with contextlib.ExitStack() as ending:
            ending.callback(service.stop, 60)
            async with openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=web
            ) as client:
                await test(client.chat.completions, words)

    asyncio.run(inside())


async def streamed(chats, **asked):
    """Returns (text, calls, why it ended) of each answer of a stream."""
    texts, calls, ends = {}, {}, {}
    async for chunk in await chats.create(**asked, stream=True):
        for choice in chunk.choices:
            own = calls.setdefault(choice.index, [])
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                assert call.index == len(own) and call.type == "function"
                own.append((call.id, call.function.name, json.loads(call.function.arguments)))
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return [(texts[n], [call[1:] for call in calls[n]], ends[n]) for n in sorted(texts)]


def whole(choice):
    calls = choice.message.tool_calls or []
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    return (
        choice.message.content,
        [(c.function.name, json.loads(c.function.arguments)) for c in calls],
        choice.finish_reason,
    )


@pytest.mark.parametrize("name", TALKS)
def test_answers_have_calls_and_texts_whole_and_as_a_stream_and_their_client_sends_them_back(name):
    talk = TALKS[name]
    texts = [talk.call + talk.then, "It is 3.\n", (talk.call + talk.then)[:-1]]
    asked = {"model": "m", "messages": ASKED, "tools": [ADD], "n": 3}

    async def test(chats, words):
        found = (await chats.create(**asked)).choices
        several = [whole(choice) for choice in found]
        assert several[0] == (None, WANTED, "tool_calls") and several[1] == ("It is 3.\n", [], "stop")
        if talk.form in ("Hermes", "Qwen 3 Coder", "GLM 4.5"):  # whose first call is complete
            assert several[2][1:] == (WANTED[:1], "tool_calls") and several[2][0].startswith("\n<tool_call>")
        else:
            assert several[2] == (texts[2], [], "stop")
        assert await streamed(chats, **asked) == [(text or "", *rest) for text, *rest in several]
        assert words.asked[0] == (ASKED, [ADD])
        message = found[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await chats.create(**asked | {"messages": [*ASKED, message, result]})
        sent = [
            (call["function"]["name"], call["function"]["arguments"]) for call in words.asked[-1][0][1]["tool_calls"]
        ]
        assert sent == WANTED and words.asked[-1][0][2]["name"] == "add"

    asking(talk.form, texts, test)


def test_without_tools_or_with_tool_choice_none_a_call_is_text_and_one_that_is_cut_is_too():
    text = TALKS["hermes"].call

    async def test(chats, words):
        for more in ({}, {"tools": [ADD], "tool_choice": "none"}):
            (choice,) = (await chats.create(model="m", messages=ASKED, **more)).choices
            assert whole(choice) == (text, [], "stop") and words.asked[-1] == (ASKED, [])

    async def cut(chats, _):
        (choice,) = (await chats.create(model="m", messages=ASKED, tools=[ADD])).choices
        assert whole(choice) == (text[:20], [], "length")

    asking("Hermes", [text], test)
    asking("Hermes", [text], cut, most=20)
