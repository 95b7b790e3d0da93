"""Turns an example's fields into text. This module holds prompt templates with fields in braces, and chat templates.

The plain chat template writes each message under its role, and the answer after the last role:

    ### user
    What is the capital of France?

    ### assistant
    Paris
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax import bounded, errors, files
from zerojax.data.pairs import chat_child
from zerojax.errors import UserError

_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WHOLE = re.compile(r"\s*-?[0-9]{1,9}\s*")  # a number in a table of texts
USER, ASSISTANT = "user", "assistant"
AUTO = "auto"
CHOICES = (AUTO, "own", "plain")  # of chat templates
ROLES = {"human": USER, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}  # other names for a role
TOKENIZER_CONFIG, JINJA_FILE = "tokenizer_config.json", "chat_template.jinja"
_MOST_BYTES = 2**20  # of a chat template; the longest known ones have a few thousand
# Variables of a template.
_SPECIAL = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

# a conversation: (role, content) of each message
Messages = Sequence[tuple[str, str]]
# (messages, whether the header of an answer follows) -> text
Chat = Callable[[Messages, bool], str]


class Template:
    """Text with fields in braces: "Tweet: {text} Label: ". Two braces stand for one.

    Args:
      text: the template.
      key: the config key of the template, for errors.

    Raises:
      UserError: a brace has no partner.
    """

    def __init__(self, text: str, key: str):
        self.key, end = key, 0
        self._parts: list[tuple[str, str | None]] = []
        for found in _PARTS.finditer(text):
            if found.group() in "{}":
                raise UserError(
                    f"{key}: {text!r} has a {found.group()!r} without its partner; name a field as in '{{text}}', and write {{{{ and }}}} "
                    "for braces"
                )
            self._parts.append((text[end : found.start()], found.group(1)))
            if found.group(1) is None:
                self._parts[-1] = (text[end : found.start()] + found.group()[0], None)
            end = found.end()
        self._parts.append((text[end:], None))

    @property
    def fields(self) -> list[str]:
        """Returns the names of the fields."""
        return [field for _, field in self._parts if field is not None]

    def messages(self, example: Mapping[str, Any], place: str) -> list[tuple[str, str]] | None:
        """Returns the messages that an example has in the field, if the template is nothing else; None for a text.

        Raises:
          UserError: it has a list that is no conversation.
        """
        (before, field), *rest = self._parts
        value = example.get(field) if field is not None and not before and rest == [("", None)] else None
        if not isinstance(value, Mapping) and not _is_list(value):
            return None
        return messages_of(value, place, str(field), is_answered=False)

    def fill(self, example: Mapping[str, Any], place: str, names: Mapping[str, Sequence[str]] | None = None) -> str:
        """Returns the text for an example.

        Args:
          example: its fields. Numbers are written as text.
          place: of the example, for errors.
          names: {field: the text for each of its whole numbers}. A number may be written as text, as in a CSV file, and a text may be
            one of these names. A template of several fields may also have other texts in such a field.

        Raises:
          UserError: a field is missing, has no text, or is none of its names.
        """
        return "".join(
            text if field is None else text + self._text(example, field, place, (names or {}).get(field))
            for text, field in self._parts
        )

    def _text(self, example: Mapping[str, Any], field: str, place: str, names: Sequence[str] | None) -> str:
        if field not in example:
            raise UserError(
                f"{place}: has no field {field!r}, which `{self.key}` names; name one of its fields: {', '.join(map(str, example))}"
            )
        value = example[field]
        if hasattr(value, "item") and not getattr(value, "shape", ()):
            value = value.item()  # a numpy scalar
        value = _decoded(value)
        if names is not None and isinstance(value, str) and value not in names and _WHOLE.fullmatch(value):
            value = int(value)
        if names is not None and isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < len(names):
                raise UserError(f"{place}: {field} is {value}, and there are {len(names)} labels ({', '.join(names)})")
            return names[value]
        if names is not None and isinstance(value, str | float) and value not in names and len(self.fields) == 1:
            raise UserError(
                f"{place}: {field} is {errors.shown(value)}, and must be one of the {len(names)} labels ({', '.join(names)}) or its number"
            )
        is_lost = isinstance(value, float) and not math.isfinite(value)  # tables have NaN where nothing is
        if not isinstance(value, str | int | float) or isinstance(value, bool) or is_lost:
            raise UserError(
                f"{place}: field {field!r} is {errors.shown(value)}, and `{self.key}` needs text or a number"
            )
        return str(value)


def messages_of(value: Any, place: str, key: str, *, is_answered: bool = True) -> list[tuple[str, str]]:
    """Returns the messages of a conversation.

    Args:
      value: a list of {"role": ..., "content": ...} or of {"from": ..., "value": ...}, one of these, or a table of such columns.
      place: of the example, for errors.
      key: the name of its field.
      is_answered: whether a message must be the assistant's.

    Raises:
      UserError: it is not one of them, or lacks a message of the assistant.
    """
    if isinstance(value, Mapping):
        columns = list(value.values())
        if all(map(_is_list, columns)) and len(set(map(len, columns))) == 1:  # as tensorflow-datasets gives sequences
            value = [dict(zip(value, row)) for row in zip(*columns)]
        else:
            value = [value]
    form = f'{key} must be a list of {{"role": ..., "content": ...}}'
    try:
        listed = list(value)
    except TypeError:
        listed = []
    if not listed or isinstance(value, str | bytes):
        raise UserError(f"{place}: {form}, and is {errors.shown(value)}")
    found = []
    for message in listed:
        pair = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None, None]
        if isinstance(message, Mapping) and "from" in message:
            pair = [message["from"], message.get("value")]
        role, content = (_decoded(part) for part in pair)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{place}: {form}, and a message is {errors.shown(message)}")
        found.append((ROLES.get(role, role), content))
    if is_answered and all(role != ASSISTANT for role, _ in found):
        raise UserError(f"{place}: no message is the {ASSISTANT}'s, so there is no answer to learn; remove the example")
    return found


def _is_list(value: Any) -> bool:
    """Returns whether a field's value is a list, and no text; an array of one number or text is none."""
    is_several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    return is_several and getattr(value, "shape", None) != ()


def _decoded(value: Any) -> Any:
    """Returns bytes as text, and other values as they are."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def plain_chat(messages: Messages, is_answered: bool) -> str:
    """Returns a conversation in the plain template; see this module's docstring."""
    text = "".join(f"### {role}\n{content}\n\n" for role, content in messages)
    return text + f"### {ASSISTANT}\n" if is_answered else text


def chat_of(folder: pathlib.Path | None, wanted: str) -> tuple[Chat, str]:
    """Returns the chat template of a tokenizer's folder, or the plain one, and a line that says which and why.

    Args:
      folder: with the tokenizer's files; None for none.
      wanted: "auto" takes the folder's where it has one and jinja2 is installed, "own" needs it, "plain" does not look.

    Raises:
      UserError: "own" cannot be had, or the folder's template is damaged.
    """
    key = "chat_template"
    if wanted == "plain":
        return plain_chat, "conversations are written in zerojax's plain chat template"
    source, settings = _own_template(folder) if folder is not None else ("", {})
    if not source:
        why = "there is no chat template beside the tokenizer"
    elif importlib.util.find_spec("jinja2") is None:
        why = "the tokenizer's chat template needs jinja2 (pip install jinja2)"
    else:
        return _JinjaChat(source, settings, f"{folder}"), f"conversations are written in the chat template of {folder}"
    if wanted == "own":
        raise UserError(f'{key}: is "own", and {why}; set it to "plain"')
    return plain_chat, f"{why}: conversations are written in zerojax's plain chat template"


def _own_template(folder: pathlib.Path) -> tuple[str, Mapping[str, Any]]:
    """Returns the source of a folder's template, "" if it has none, and the settings beside it."""
    path, file = folder / TOKENIZER_CONFIG, folder / JINJA_FILE
    settings: Any = {}
    if os.path.lexists(path):
        with files.reading(path, "fix that", "is not JSON ({}); save the tokenizer again"):
            settings = bounded.parse_json(bounded.read_bytes(path))
    if not isinstance(settings, Mapping):
        raise UserError(f"{path}: is not a table of settings; save the tokenizer again")
    if os.path.lexists(file):
        with files.reading(file, "fix that", "is not UTF-8 text; save the tokenizer again"):
            return bounded.read_text(file, _MOST_BYTES), settings
    found: Any = settings.get("chat_template") or ""
    if isinstance(found, list):  # several by name
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        found = named.get("default") or ""
    if not isinstance(found, str) or len(found) > _MOST_BYTES:
        raise UserError(
            f"{path}: chat_template must be a text of at most {_MOST_BYTES} characters, and is {errors.shown(found, 40)}; save the "
            "tokenizer again"
        )
    return found, settings


class _JinjaChat:
    """The chat of a Jinja template, rendered in a process of its own with limits on time and memory; see `chat_child`.

    Args:
      source: the template.
      settings: the contents of tokenizer_config.json, whose special tokens are variables.
      place: the tokenizer's folder, for errors.

    Raises:
      UserError: the template cannot be read.
    """

    def __init__(self, source: str, settings: Mapping[str, Any], place: str):
        self._place = place
        variables = {name: _content(settings[name]) for name in _SPECIAL if name in settings}
        self._first = [source, {"tools": None, "documents": None, **variables}]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", chat_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._ask(self._first, "is damaged")

    def __call__(self, messages: Messages, is_answered: bool) -> str:
        listed = [{"role": role, "content": content} for role, content in messages]
        if self._process.poll() is not None:  # an earlier conversation took more time or memory than there is
            self._end()
            self._start()
        return self._ask([listed, is_answered], "fails")

    def _ask(self, question: Any, verb: str) -> str:
        """Returns the text that the process answers.

        Raises:
          UserError: it ended, or answers with an error.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        way_out = "set `chat_template=plain`"
        if not line:
            status = self._process.wait()
            is_slow = status == -signal.SIGPROF
            why = (
                f"it computes for more than {chat_child.SECONDS:g} s" if is_slow else f"its process ends with {status}"
            )
            raise UserError(f"{self._place}: its chat template {verb} ({why}); {way_out}")
        found = json.loads(line)
        if "refused" in found:
            raise UserError(f"{self._place}: its chat template refuses a conversation: {found['refused']}; {way_out}")
        if "error" in found:
            raise UserError(
                f"{self._place}: its chat template {verb} ({found['error']}); save the tokenizer again, or {way_out}"
            )
        return str(found["text"])


def _end(process: subprocess.Popen) -> None:
    """Ends the process of a template."""
    process.kill()
    process.communicate()


def _content(token: Any) -> str:
    """Returns a special token's text, which may be in a table of its properties."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")
