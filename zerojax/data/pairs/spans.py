"""Finds the answers in a conversation's text. This module tells which part of a rendered chat each message of the assistant is.

A template that marks its answers with {% generation %} says it itself. Of another one it is found by rendering. An answer begins where
the text of the messages before it ends, with the header that asks for an answer (add_generation_prompt), and ends where the text up to and
with it ends. Templates may render earlier messages otherwise when later ones follow (without their reasoning, say). Then the place of an
answer in the whole text is where this text changes when the answer does: a character that the text has nowhere stands in its place.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax.data.pairs import templates
from zerojax.errors import UserError

Part = tuple[int, int]  # the first character and the one after the last
Places = Callable[[str], np.ndarray]
ALL, LAST, NO_REASONING = "all", "last", "reasoning off"
LEARNED = (ALL, LAST, NO_REASONING)  # of a conversation's answers
_THOUGHT = re.compile(r".*</think>\s*", re.DOTALL)  # reasoning that stands in a content
_ASKED: list[templates.Message] = [{"role": templates.USER, "content": "a"}]  # a conversation that most templates take
_UNUSED = range(0xE000, 0xF8FF)  # characters for private use


def wanted(messages: Sequence[templates.Message], begin: int, learn: str) -> list[int]:
    """Returns the numbers of the messages that are learned, among those from `begin` on."""
    found = [number for number in range(begin, len(messages)) if templates.is_learned(messages[number])]
    return found[-1:] if learn == LAST else found


class Talk:
    """A conversation and its text.

    Args:
      chat: the template.
      messages: the conversation.
      given: more variables of the template.
      places: (text) -> the first characters of its special tokens, and those after their last, int[tokens, 2]. Where two texts stop being
        alike is within no such token.

    Attributes:
      text: the rendered conversation.

    Raises:
      UserError: the template refuses the conversation.
    """

    def __init__(
        self, chat: templates.JinjaChat, messages: Sequence[templates.Message], given: Mapping[str, Any], places: Places
    ):
        self._chat, self._messages, self._given, self._places = chat, list(messages), given, places
        self.text, self._marked = chat.render(messages, given=given)

    def learned(self, numbers: Sequence[int], learn: str) -> list[Part]:
        """Returns the parts of the text that are learned, in order; `numbers`: of the messages. May be empty.

        Raises:
          UserError: an answer cannot be found in the text.
        """
        answers = [n for n, message in enumerate(self._messages) if message["role"] == templates.ASSISTANT]
        if self._marked and list(numbers) == answers and learn != NO_REASONING:
            return self._marked
        if not self._marked:
            found = [(number, self.place(number)) for number in numbers]
        elif len(self._marked) == len(answers):
            found = [(number, self._marked[answers.index(number)]) for number in numbers]
        else:
            places = [(number, self.place(number)) for number in numbers]
            found = [(n, _both(mark, own)) for mark in self._marked for n, own in places if _overlap(mark, own)]
        if learn != NO_REASONING:
            return [part for _, part in found]
        said = {number: self._said(number) for number in numbers}
        return [(max(said[number], first), end) for number, (first, end) in found if said[number] < end]

    def place(self, number: int) -> Part:
        """Returns the part that is the answer in message `number`, with the token that ends it.

        Raises:
          UserError: it cannot be told.
        """
        before = self._rendered(self._messages[:number], is_answered=True)
        is_last = number + 1 == len(self._messages)
        after = self.text if is_last else self._rendered(self._messages[: number + 1])
        if before is not None and after is not None and self.text.startswith(after) and after.startswith(before):
            return len(before), len(after)
        return self._searched(number, before or "")

    def _searched(self, number: int, before: str) -> Part:
        """Returns the part of an answer by what changes in the text when the answer does."""
        first, end = self._changing(number)
        plain = self._rendered(self._messages[:number])
        if not number or not before or plain is None:  # templates may refuse a beginning, such as no message at all
            plain = self._rendered(_ASKED) or ""
            before = self._rendered(_ASKED, is_answered=True) or plain
        header = before[self._same(plain, before) :]
        start = self._changing(number - 1)[1] if number else 0
        at = self.text.find(header, start) if header else -1
        if header and at >= 0 and at + len(header) <= first:
            begin = at + len(header)
        elif any(self.text.endswith(header[:size], start, first) for size in range(len(header), 0, -1)):
            begin = first  # the header of a new answer has more than that of an earlier one
        elif found := self._beginning(header, start, first):
            begin = found
        elif not header:
            own = self._same(self._tail(number - 1), self.text[start:]) if number else self._same(plain, self.text)
            begin = min(first, start + own)
        else:
            raise self._untold(number)
        end += self._same(self._tail(number), self.text[end:]) or self._before_next(number, end)
        later = itertools.takewhile(
            lambda at: self._messages[at]["role"] == templates.TOOL, range(number + 1, len(self._messages))
        )
        if any(self._replaced(at, self._messages)[0] and self._changing(at)[0] < end for at in later):
            raise self._untold(number)  # the template writes what a tool says into the message that calls it
        return begin, end

    def _beginning(self, header: str, start: int, first: int) -> int:
        """Returns where the longest beginning of a header ends between two characters, if it is more than half of it; else 0."""
        for size in range(len(header) - 1, len(header) // 2, -1):
            if (at := self.text.find(header[:size], start, first)) >= 0:
                return at + size
        return 0

    def _before_next(self, number: int, end: int) -> int:
        """Returns how many characters from `end` on are before the header of the next message, which that message has alone too."""
        if number + 1 == len(self._messages):
            return 0
        between = self.text[end : self._changing(number + 1)[0]]
        alone, mark = self._replaced(0, self._messages[number + 1 : number + 2])
        header = "" if alone is None else alone[: alone.index(mark)]
        size = self._same(between[::-1], header[::-1], is_reversed=True)
        if mark and size == len(between):  # what the template writes before all messages may end as the answer does
            message = {"role": self._messages[number + 1]["role"], "content": mark}
            twice = (self._rendered([message, message]) or "").split(mark)
            header = twice[1][self._same(twice[-1], twice[1]) :] if len(twice) == 3 else header
            size = self._same(between[::-1], header[::-1], is_reversed=True)
        return len(between) - size if size else 0

    def _tail(self, number: int) -> str:
        """Returns what follows the content of a message where it is the last one."""
        way = next((way for way, *_ in self._changed(number, self._messages)), 0)
        found = {own: (text, mark) for own, text, mark in self._changed(number, self._messages[: number + 1])}
        if not found:
            return ""
        text, mark = found.get(way) or next(iter(found.values()))
        return text[text.index(mark) + len(mark) :]

    def _same(self, one: str, other: str, *, is_reversed: bool = False) -> int:
        """Returns with how many equal characters both begin, without a part of a special token of one; both may be reversed."""
        size = _alike(one, other)
        for text in (one, other):
            places = self._places(text[::-1] if is_reversed else text)
            places = len(text) - places[:, ::-1] if is_reversed else places
            inside = places[(places[:, 0] < size) & (places[:, 1] > size)]
            size = min([size, *inside[:, 0].tolist()])
        return size

    def _changing(self, number: int) -> Part:
        """Returns the part of the text that another content of a message changes."""
        changed, _ = self._replaced(number, self._messages)
        if changed is None:
            raise self._untold(number)
        first = _alike(self.text, changed)
        most = min(len(self.text), len(changed)) - first
        same = self._same(self.text[::-1], changed[::-1], is_reversed=True)
        return first, len(self.text) - min(same, most)

    def _replaced(self, number: int, messages: list[templates.Message]) -> tuple[str | None, str]:
        """Returns the text with another content in one message, None if the template has it nowhere or more than once, and that content."""
        return next(((text, mark) for _, text, mark in self._changed(number, messages)), (None, ""))

    def _changed(self, number: int, messages: list[templates.Message]) -> Iterator[tuple[int, str, str]]:
        """Yields texts that have another thing in place of what one message says, once; each after its number, and before that thing.

        It stands in place of the message's content: without its calls, or beside them. A template may drop the content of a message with
        calls: then in place of the arguments of its last call, a number where they are a table, since its text has no marks around it.
        """
        message, mark = messages[number], self._mark()
        dropped = (*templates.REASONING, templates.TOOL_CALLS)
        plain = {name: value for name, value in message.items() if name not in dropped}
        ways: list[tuple[templates.Message, str]] = [
            ({**plain, "content": mark}, mark),
            ({**message, "content": mark}, mark),
        ]
        *calls, last = message.get(templates.TOOL_CALLS) or [None]
        if isinstance(last, Mapping):
            function = last.get("function", last)
            is_text = isinstance(function, Mapping) and isinstance(function.get("arguments"), str)
            own = mark if is_text else next(str(n) for n in itertools.count(10**8 + 7) if str(n) not in self.text)
            call = _with_arguments(last, own if is_text else {"a": int(own)})
            ways.append(({**message, templates.TOOL_CALLS: [*calls, call]}, own))
        order = [*enumerate(ways)]
        if not templates.text_of(message).strip():  # calls alone: what a tool answers may stand in place of a content
            order = [*order[2:], *order[:2]]
        for way, (other, own) in order:
            found = self._rendered([*messages[:number], other, *messages[number + 1 :]])
            if found is not None and found.count(own) == 1:
                yield way, found, own

    def _mark(self) -> str:
        """Returns a character that the text has nowhere."""
        return next(chr(code) for code in _UNUSED if chr(code) not in self.text)

    def _said(self, number: int) -> int:
        """Returns where an answer's text begins after its reasoning."""
        message = self._messages[number]
        mark = self._mark()
        content = templates.text_of(message)
        thought = _THOUGHT.match(content)
        other = {**message, "content": (thought.group() if thought else "") + mark}
        changed = self._rendered([*self._messages[:number], other, *self._messages[number + 1 :]])
        if changed is None or changed.count(mark) != 1:
            raise self._untold(number)
        return _alike(self.text, changed)

    def _rendered(self, messages: Sequence[templates.Message], *, is_answered: bool = False) -> str | None:
        """Returns the text of messages; None if the template refuses them."""
        try:
            return self._chat.render(messages, is_answered=is_answered, given=self._given).text
        except UserError:
            return None

    def _untold(self, number: int) -> UserError:
        return UserError(
            f"message {number + 1} of {len(self._messages)} cannot be found in the text that the tokenizer's chat template makes, so what "
            "is learned cannot be told; mark answers with {% generation %} in the template, or set `chat_template=plain`"
        )


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> Mapping[str, Any]:
    """Returns a call of a tool with other arguments."""
    function = call.get("function")
    own = (
        {"function": {**function, "arguments": arguments}}
        if isinstance(function, Mapping)
        else {"arguments": arguments}
    )
    return {**call, **own}


def _alike(one: str, other: str) -> int:
    """Returns with how many equal characters both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves, since Python compares slices far faster than characters
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _overlap(one: Part, other: Part) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _both(one: Part, other: Part) -> Part:
    return max(one[0], other[0]), min(one[1], other[1])
