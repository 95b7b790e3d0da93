"""Reads calls of tools in answers. This module holds the forms in which models write calls, told apart by what their chat templates write.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen 2.5 and 3, Granite 4
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]        Mistral
    [TOOL_CALLS]name[ARGS]{...}                                 Mistral since 2025
    {"name": ..., "parameters": {...}}                          Llama 3.1: a whole answer, calls separated by ;

What is not a complete call of a tool that was offered stays text.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax import bounded

BEGIN, LIST, ARGS, ID = "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')
_BETWEEN = re.compile(r"[;\s]*")


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` is a text of JSON."""

    name: str
    arguments: str

    def described(self) -> dict[str, Any]:
        """Returns the call in OpenAI's form. Mistral's templates refuse ids other than nine letters and digits."""
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": self._asdict()}


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How a model writes calls.

    Attributes:
      marks: texts that its chat template has, all of them.
      begin: what begins a call; "" for the beginning of an answer.
      end: what ends one; "" for the end of the answer.
      read: f(text between these) -> (name, arguments) of each call; raises ValueError for what is no call.
    """

    marks: tuple[str, ...]
    begin: str
    end: str
    read: Callable[[str], list[tuple[Any, Any]]]

    @property
    def texts(self) -> tuple[str, ...]:
        """Returns texts of calls that may be special tokens."""
        return tuple(
            dict.fromkeys(text for text in (self.begin, self.end, *(ARGS, ID) * (self.read is _named)) if text)
        )


def form_of(source: str) -> CallForm | None:
    """Returns the form of calls that a chat template writes; None for one that is not known."""
    if any(mark in source for mark in _OTHERS):
        return None
    return next((form for form in FORMS.values() if all(mark in source for mark in form.marks)), None)


def _one(text: str) -> list[tuple[Any, Any]]:
    return [_pair(bounded.parse_json(text), "arguments")]


def _listed(text: str) -> list[tuple[Any, Any]]:
    values = bounded.parse_json(text)
    return [_pair(value, "arguments") for value in (values if isinstance(values, list) else [values])]


def _named(text: str) -> list[tuple[Any, Any]]:
    found = []
    for part in text.split(LIST):
        name, _, arguments = part.partition(ARGS)
        found.append((name.partition(ID)[0].strip(), bounded.parse_json(arguments)))
    return found


def _separated(text: str) -> list[tuple[Any, Any]]:
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := _BETWEEN.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        begin = at
        try:
            at = decoder.raw_decode(text, begin)[1]
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        found.append(_pair(bounded.parse_json(text[begin:at]), "parameters"))
    return found


def _pair(value: Any, key: str) -> tuple[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("is no table")
    return value.get("name"), value.get(key)


# The first whose marks are in the template is its form.
FORMS = {
    "Hermes": CallForm((BEGIN,), BEGIN, "</tool_call>", _one),
    "Mistral with [ARGS]": CallForm((LIST, ARGS), LIST, "", _named),
    "Mistral": CallForm((LIST,), LIST, "", _listed),
    "Llama 3.1": CallForm(('{"name": ', '"parameters": '), "", "", _separated),
}
# What marks a form within <tool_call> that is not JSON: Qwen 3 Coder's and GLM's.
_OTHERS = ("<function=", "<arg_key>")


class CallReader:
    """Tells text and calls of a growing answer apart. Text that may belong to a call is told when that is known.

    Args:
      form: of the model's calls.
      names: of the tools that were offered.
    """

    def __init__(self, form: CallForm, names: Collection[str]):
        self._form, self._names = form, names
        self._left, self._space = "", ""  # what is not told yet; spaces after the text, which are dropped before a call
        self._has_begun = self._has_calls = False

    def add(self, text: str, *, is_over: bool) -> tuple[str, list[ToolCall]]:
        """Returns the text and the calls that `text` completes; `is_over`: no more comes."""
        self._left += text
        told = ""
        calls: list[ToolCall] = []
        while self._left and (found := self._next(is_over)) is not None:
            plain, own, self._left = found
            if own:
                calls += own
                self._space, self._has_calls = "", True
            elif not plain:
                break
            plain = self._space + plain
            told += plain.rstrip()
            self._space = plain[len(plain.rstrip()) :]
            self._has_begun = self._has_begun or bool(told or calls)
        if is_over and not self._has_calls:
            told, self._space = told + self._space, ""
        return told, calls

    def _next(self, is_over: bool) -> tuple[str, Sequence[ToolCall], str] | None:
        """Returns (text, calls, what is left), of which text or calls come first; None where more must come."""
        begin, end, left = self._form.begin, self._form.end, self._left
        if not begin and (self._has_begun or left.lstrip()[:1] not in ("", "{")):
            return left, (), ""
        at = left.find(begin)
        if at < 0:  # its end may begin a call
            kept = 0 if is_over else next((n for n in range(len(begin) - 1, 0, -1) if left.endswith(begin[:n])), 0)
            return left[: len(left) - kept], (), left[len(left) - kept :]
        if at:
            return left[:at], (), left[at:]
        at = len(begin)
        while end and (stop := left.find(end, at)) >= 0:
            inside, after = left[len(begin) : stop], left[stop + len(end) :]
            if calls := self._read(inside):
                return "", calls, after
            if len(_QUOTE.findall(inside)) % 2 == 0:
                return left[: stop + len(end)], (), after
            at = stop + 1  # it is within a text of JSON
        if not is_over:
            return None
        calls = [] if end else self._read(left[len(begin) :])
        if calls:
            return "", calls, ""
        cut = len(begin) or len(left)
        return left[:cut], (), left[cut:]

    def _read(self, text: str) -> list[ToolCall]:
        """Returns the calls that a text is; [] if it is none."""
        found = []
        try:
            for name, arguments in self._form.read(text):
                if isinstance(arguments, str):
                    arguments = bounded.parse_json(arguments)
                if name not in self._names or not isinstance(arguments, Mapping):
                    return []
                found.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, TypeError):  # a name may be a list
            return []
        return found
