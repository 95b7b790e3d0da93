"""Writes answers in the form of OpenAI's API. This module turns requests of the engine into JSON values, whole or as chunks of a stream."""

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from zerojax.inference.engine import detokenizer, requests
from zerojax.serve import tokenizer as words_lib
from zerojax.serve import tools as tools_lib

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclasses.dataclass
class Sent:
    """An answer and what was sent of it.

    Attributes:
      request: the engine's.
      index: its number.
      reader: of calls of tools; None where none were offered.
      letters, tokens: how many of its text and of its tokens were sent.
      offset: the letters of the tokens that were sent.
      is_told: whether its end was sent.
      calls: how many were sent.
    """

    request: requests.Request
    index: int
    reader: tools_lib.CallReader | None = None
    letters: int = 0
    tokens: int = 0
    offset: int = 0
    is_told: bool = False
    calls: int = 0

    @property
    def finish(self) -> str:
        """Returns why it ended in OpenAI's words; "" before."""
        found = self.request.finish
        return "tool_calls" if self.calls and found == requests.STOP else found


class Writer:
    """Writes the answer to one call.

    Args:
      words: for the texts of tokens.
      model: the name.
      is_chat: whether it is a chat's.
      prompts: how many prompts were asked.
      choices: the answers to all prompts.
      make_reader: returns what reads an answer's calls of tools; None where none were offered.
    """

    def __init__(
        self,
        words: words_lib.Words,
        model: str,
        *,
        is_chat: bool,
        prompts: int,
        choices: Sequence[requests.Request],
        make_reader: Callable[[], tools_lib.CallReader] | None = None,
    ):
        self._words, self._is_chat, self._prompts = words, is_chat, prompts
        readers = [None if make_reader is None else make_reader() for _ in choices]
        self.choices = [Sent(*each) for each in zip(choices, range(len(choices)), readers)]
        name = "chatcmpl" if is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """Returns the answer, of which all choices have ended."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        listed = []
        for choice in self.choices:
            text, calls, logprobs = self._next(choice, is_over=True)
            form: dict[str, Any] = {"text": text}
            if self._is_chat:
                form = {"message": {"role": "assistant", "content": text, "refusal": None}}
            if calls:
                form["message"] |= {"content": text or None, "tool_calls": [call.described() for call in calls]}
            listed.append({"index": choice.index, **form, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head, "object": kind, "choices": listed, "usage": self.usage()}

    def begin(self, *, has_usage: bool) -> list[dict[str, Any]]:
        """Returns the chunks with which a stream begins: of a chat, the role of each answer."""
        if not self._is_chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": choice.index, **delta}], has_usage) for choice in self.choices]

    def changes(self, *, has_usage: bool) -> list[dict[str, Any]]:
        """Returns chunks with what has come since the last call."""
        found = []
        for choice in self.choices:
            if choice.is_told:
                continue
            is_over, before = bool(choice.request.finish), choice.calls  # first, so that then no text is missing
            text, calls, logprobs = self._next(choice, is_over=is_over)
            if not text and not calls and not is_over and not logprobs:
                continue
            choice.is_told = is_over
            form: dict[str, Any] = {"text": text}
            if self._is_chat:
                form = {"delta": {"content": text} if text else {}}
            if calls:
                told = [{"index": number, **call.described()} for number, call in enumerate(calls, before)]
                form["delta"]["tool_calls"] = told
            reason = choice.finish if is_over else None
            values = {"index": choice.index, **form, "logprobs": logprobs, "finish_reason": reason}
            found.append(self._chunk([values], has_usage))
        return found

    def end(self) -> dict[str, Any]:
        """Returns the last chunk of a stream that tells its usage."""
        return {**self._chunk([], True), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens."""
        each = len(self.choices) // self._prompts
        asked = [choice.request for choice in self.choices[::each]]
        before, new = sum(len(r.prompt) for r in asked), sum(len(c.request.tokens) for c in self.choices)
        reused = {"cached_tokens": sum(request.reused for request in asked)}
        counts = {"prompt_tokens": before, "completion_tokens": new, "total_tokens": before + new}
        return {**counts, "prompt_tokens_details": reused}

    def _chunk(self, choices: list[dict[str, Any]], has_usage: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices} | ({"usage": None} if has_usage else {})

    def _next(self, choice: Sent, *, is_over: bool) -> tuple[str, list[tools_lib.ToolCall], dict[str, Any] | None]:
        """Returns the text, the calls and the logarithms of the tokens that were not sent yet; None if no logarithms were asked for."""
        request, before = choice.request, choice.letters
        text = request.settled
        if text and not self._is_chat:  # it goes on with the prompt
            text = self._words.before(request.tokens[0]) + text
        text = self._words.cleaned(text, is_over=is_over)[before:]
        calls: list[tools_lib.ToolCall] = []
        choice.letters += len(text)
        if choice.reader is not None:
            text, calls = choice.reader.add(text, is_over=is_over)
            choice.calls += len(calls)
        if request.settings.logprobs is None:
            return text, calls, None
        known = list(zip(request.tokens, request.logprobs))[choice.tokens :]
        choice.tokens += len(known)
        if not known and not text:
            return text, calls, None
        return text, calls, self._chat_logprobs(known) if self._is_chat else self._logprobs(choice, known)

    def _chat_logprobs(self, known: Sequence[tuple[int, requests.LogProb]]) -> dict[str, Any]:
        def told(token: int, logarithm: float) -> dict[str, Any]:
            name = self._words.name_of(token)
            own = None if detokenizer.CUT in name else list(name.encode())  # a part of a letter
            return {"token": name, "logprob": max(logarithm, LEAST_LOGPROB), "bytes": own}

        content = [
            {**told(token, found.own), "top_logprobs": [told(*pair) for pair in found.likeliest.items()]}
            for token, found in known
        ]
        return {"content": content, "refusal": None}

    def _logprobs(self, choice: Sent, known: Sequence[tuple[int, requests.LogProb]]) -> dict[str, Any]:
        names, offsets, likeliest = [], [], []
        for token, found in known:
            names.append(self._words.name_of(token))
            offsets.append(choice.offset)
            choice.offset += len(names[-1])
            named: dict[str, float] = {}
            for other, logarithm in found.likeliest.items():  # of two tokens with one text the likelier stays
                named.setdefault(self._words.name_of(other), max(logarithm, LEAST_LOGPROB))
            likeliest.append(named)
        own = [max(found.own, LEAST_LOGPROB) for _, found in known]
        return {"tokens": names, "token_logprobs": own, "top_logprobs": likeliest, "text_offset": offsets}


def event(value: dict[str, Any]) -> bytes:
    """Returns a chunk as a server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Returns an error in OpenAI's form."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
