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
from typing import Any, NamedTuple

import numpy as np

from zerojax import bounded, errors, files
from zerojax.data import token_files
from zerojax.data.pairs import chat_child
from zerojax.errors import UserError

_PARTS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WHOLE = re.compile(r"\s*-?[0-9]{1,9}\s*")  # a number in a table of texts
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
AUTO = "auto"
CHOICES = (AUTO, "own", "plain")  # of chat templates
ROLES = {"human": USER, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}  # other names for a role
JINJA_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
DATE = "strftime_now"  # the function that gives a template the date
FUNCTION_CALL = "function_call"  # of a message, before there were TOOL_CALLS
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
TOOLS, TOOL_CALLS, VARIABLES = (
    "tools",
    "tool_calls",
    "chat_template_kwargs",
)  # fields of examples and of messages, as in TRL's datasets
REASONING = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names of a message's reasoning, the first that is there counts
_MOST_BYTES = 2**20  # of a chat template; the longest known ones have a few thousand
_OTHER_TEMPLATE = "remove it, or give the tokenizer a chat template that does (chat_template.jinja)"

Message = Mapping[str, Any]  # with "role" and mostly "content", and what else the template reads
# a conversation: messages, or (role, content) of each
Messages = Sequence[Message | tuple[str, str]]
# (messages, whether the header of an answer follows) -> text
Chat = Callable[..., str]


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
      text: the text.
      parts: the first character, and the one after the last, of each part that the template marks as an answer.
    """

    text: str
    parts: list[tuple[int, int]]


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

    def messages(self, example: Mapping[str, Any], place: str) -> list[Message] | None:
        """Returns the messages that an example has in the field, if the template is nothing else; None for a text.

        Raises:
          UserError: it has a list that is no conversation.
        """
        (before, field), *rest = self._parts
        value = nested(example, field) if field is not None and not before and rest == [("", None)] else None
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
        value = nested(example, field)
        if value is None and field not in example:
            raise UserError(
                f"{place}: has no field {field!r}, which `{self.key}` names; name one of its fields: {', '.join(map(str, example))}"
            )
        if hasattr(value, "item") and not getattr(value, "shape", ()):
            value = value.item()  # a numpy scalar
        with errors.below(f"{place}: field {field!r} "):
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


def nested(example: Mapping[str, Any], field: str) -> Any:
    """Returns the value of a field. With dots it may be that of a field within a field ("reward_model.ground_truth"); None for none."""
    found: Any = example
    for name in [field] if field in example else field.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def messages_of(value: Any, place: str, key: str, *, is_answered: bool = True) -> list[Message]:
    """Returns the messages of a conversation, without what is null in them.

    Args:
      value: a list of {"role": ..., "content": ...} or of {"from": ..., "value": ...}, one of these, or a table of such columns. What else
        a message has stays: "tool_calls", "reasoning_content", "weight". A content may be a list of {"type": "text", "text": ...}.
      place: of the example, for errors.
      key: the name of its field.
      is_answered: whether a message must be the assistant's.

    Raises:
      UserError: it is not one of them, has images or the like, or lacks a message of the assistant.
    """
    with errors.below(f"{place}: {key}: a text "):
        value = plain(value)
    if isinstance(value, Mapping):
        columns = list(value.values())
        if all(map(_is_list, columns)) and len(set(map(len, columns))) == 1:  # as tensorflow-datasets gives sequences
            value = [dict(zip(value, row)) for row in zip(*columns)]
        else:
            value = [value]
    form = f'{key} must be a list of {{"role": ..., "content": ...}}'
    if not value or not isinstance(value, list):
        raise UserError(f"{place}: {form}, and is {errors.shown(value)}")
    found = [
        _message(message, f"{place}: {form}, and a message is {errors.shown(message)}", place) for message in value
    ]
    if is_answered and all(message["role"] != ASSISTANT for message in found):
        raise UserError(f"{place}: no message is the {ASSISTANT}'s, so there is no answer to learn; remove the example")
    return found


def _message(message: Any, line: str, place: str) -> Message:
    """Returns a message under the names of transformers; `line` is the error for one that is none."""
    if not isinstance(message, Mapping):
        raise UserError(line)
    names: Mapping[Any, str] = {"from": "role", "value": "content"} if "from" in message else {}
    found: dict[str, Any] = {names.get(name, name): value for name, value in message.items() if value is not None}
    role, content, calls = found.get("role"), found.get("content"), found.get(TOOL_CALLS, [])
    if not isinstance(role, str):
        raise UserError(line)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{place}: a message's {TOOL_CALLS} must be a list of tables, and is {errors.shown(calls)}")
    if content is None and not any(found.get(name) for name in (*REASONING, TOOL_CALLS)):
        raise UserError(line)
    if not isinstance(content, str | list | None):
        raise UserError(line)
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            told = f"of type {kind!r}" if isinstance(kind, str) and kind != "text" else errors.shown(part)
            raise UserError(
                f"{place}: a message has a part {told}, and models read text alone here; remove the example, or the part"
            )
    if found.get("weight", 1) not in (0, 1) or not isinstance(found.get("train", True), bool | int):
        name = "train" if found.get("weight", 1) in (0, 1) else "weight"
        raise UserError(
            f"{place}: a message's {name} is {errors.shown(found[name])}, and must be 1 (learned) or 0 (not learned)"
        )
    return {**found, "role": ROLES.get(role, role)}


def tools_of(value: Any) -> list[Any] | None:
    """Returns the tools that an example offers: a list of JSON schemas, or a text with one; None for none.

    Raises:
      UserError: it is no such list.
    """
    value = plain(value)
    if isinstance(value, str):
        try:
            value = bounded.parse_json(value) if value.strip() else None
        except ValueError as error:
            raise UserError(f"{TOOLS} is no JSON ({errors.first_line(error)}); mend it") from error
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise UserError(f"{TOOLS} must be a list of JSON schemas, and is {errors.shown(value)}")
    return value


def is_learned(message: Message) -> bool:
    """Returns whether a message is an answer that is learned: the assistant's, without `weight` or `train` of 0."""
    return message["role"] == ASSISTANT and bool(message.get("weight", 1)) and bool(message.get("train", True))


def text_of(message: Message) -> str:
    """Returns the text of a message; "" where it only calls tools."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def plain(value: Any) -> Any:
    """Returns a value of a dataset in Python's own types: arrays as lists, bytes as text."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist() if value.shape else value.item()
    if isinstance(value, bytes):
        return _decoded(value)
    if isinstance(value, Mapping):
        return {str(plain(name)): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def _is_list(value: Any) -> bool:
    """Returns whether a field's value is a list, and no text; an array of one number or text is none."""
    is_several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    return is_several and getattr(value, "shape", None) != ()


def _decoded(value: Any) -> Any:
    """Returns bytes as text, and other values as they are. Raises UserError for bytes that are no UTF-8."""
    return bounded.decoded(value) if isinstance(value, bytes) else value


def plain_chat(messages: Messages, is_answered: bool) -> str:
    """Returns a conversation in the plain template; see this module's docstring.

    Raises:
      UserError: a message has what the plain template does not write.
    """
    listed = [tabled(message) for message in messages]
    for message in listed:
        for name in (*REASONING, TOOL_CALLS):
            if message.get(name):
                raise UserError(f"the plain chat template writes no {name}; {_OTHER_TEMPLATE}")
    text = "".join(f"### {message['role']}\n{text_of(message)}\n\n" for message in listed)
    return text + f"### {ASSISTANT}\n" if is_answered else text


def plain_source(begin: str, end: str) -> str:
    """Returns the plain template as one of Jinja, for servers. `begin` is the token that begins a text, `end` the one after an answer."""
    header, turn, first, last = (json.dumps(text) for text in (f"### {ASSISTANT}\n", "\n\n", begin, end))
    return (
        f"{{{{ {first} }}}}{{% for message in messages %}}{{{{ '### ' + message['role'] + '\\n' + message['content'] }}}}"
        f"{{% if message['role'] == '{ASSISTANT}' %}}{{{{ {last} }}}}{{% endif %}}{{{{ {turn} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {header} }}}}{{% endif %}}"
    )


def tabled(message: Message | tuple[str, str]) -> Message:
    """Returns a message as a table."""
    return message if isinstance(message, Mapping) else {"role": message[0], "content": message[1]}


def chat_of(folder: pathlib.Path | None, wanted: str, now: float | None = None) -> tuple[Chat, str]:
    """Returns the chat template of a tokenizer's folder, or the plain one, and a line that says which and why.

    Args:
      folder: with the tokenizer's files; None for none.
      wanted: "auto" takes the folder's where it has one and jinja2 is installed, "own" needs it, "plain" does not look.
      now: see `JinjaChat`.

    Raises:
      UserError: "own" cannot be had, or the folder's template is damaged.
    """
    key = "chat_template"
    if wanted == "plain":
        return plain_chat, "conversations are written in zerojax's plain chat template"
    sources = own_templates(folder) if folder is not None else {}
    if folder is None or not sources:
        why = "there is no chat template beside the tokenizer"
    elif importlib.util.find_spec("jinja2") is None:
        why = "the tokenizer's chat template needs jinja2 (pip install jinja2)"
    else:
        return JinjaChat(
            sources, token_files.named(folder), f"{folder}", now
        ), f"conversations are written in the chat template of {folder}"
    if wanted == "own":
        raise UserError(f'{key}: is "own", and {why}; set it to "plain"')
    return plain_chat, f"{why}: conversations are written in zerojax's plain chat template"


def own_templates(folder: pathlib.Path) -> Mapping[str, str]:
    """Returns the sources of a folder's chat templates by name, as transformers finds them; none if it has none.

    Raises:
      UserError: one cannot be read.
    """
    path, file = folder / token_files.TOKENIZER_CONFIG, folder / JINJA_FILE
    paths = {found.stem: found for found in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    paths |= {DEFAULT: file} if os.path.lexists(file) else {}
    if paths:
        found = {}
        for name, own in paths.items():
            with files.reading(own, "fix that", "is not UTF-8 text; save the tokenizer again"):
                found[name] = bounded.read_text(own, _MOST_BYTES)
        return found
    listed: Any = token_files.table(path).get("chat_template") or {}
    if isinstance(listed, list):  # several by name
        listed = {str(entry.get("name")): entry.get("template") for entry in listed if isinstance(entry, Mapping)}
    named = listed if isinstance(listed, Mapping) else {DEFAULT: listed}
    for source in named.values():
        if not isinstance(source, str) or len(source) > _MOST_BYTES:
            raise UserError(
                f"{path}: chat_template must be a text of at most {_MOST_BYTES} characters, and is {errors.shown(source, 40)}; save the "
                "tokenizer again"
            )
    return named


class JinjaChat:
    """The chat of Jinja templates, rendered in a process of its own with limits on time and memory; see `chat_child`.

    Args:
      sources: the templates, by name. One named "tool_use" is taken where an example has tools.
      named: special tokens by name, which are variables.
      place: the tokenizer's folder, for errors.
      now: the time that templates are told, in seconds since 1970; None for that of each call.

    Attributes:
      sources: the templates.

    Raises:
      UserError: a template cannot be read.
    """

    def __init__(self, sources: Mapping[str, str], named: Mapping[str, str], place: str, now: float | None = None):
        self._place, self.sources = place, sources
        self._first = [dict(sources), {"tools": None, "documents": None, **named}, now]
        self._start()

    def reads(self, name: str, given: Mapping[str, Any]) -> bool:
        """Returns whether the template names a field or a variable anywhere."""
        return re.search(rf"\b{name}\b", self.source(given)) is not None

    def source(self, given: Mapping[str, Any]) -> str:
        """Returns the template for a conversation with these variables."""
        return self.sources[self._chosen(given)]

    def _chosen(self, given: Mapping[str, Any]) -> str:
        """Returns the name of the template for a conversation."""
        if given.get(TOOLS) is not None and TOOL_USE in self.sources:
            return TOOL_USE
        if DEFAULT not in self.sources:
            raise UserError(
                f"{self._place}: has the chat templates {', '.join(self.sources)}, and none is named {DEFAULT!r}; name one so, or set "
                "`chat_template=plain`"
            )
        return DEFAULT

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", chat_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=chat_child.environment(),
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._ask(self._first, "is damaged")

    def __call__(self, messages: Messages, is_answered: bool) -> str:
        """Returns the text of messages; `is_answered`: whether the header of an answer follows."""
        return self.render(messages, is_answered=is_answered).text

    def render(
        self, messages: Messages, *, is_answered: bool = False, given: Mapping[str, Any] | None = None
    ) -> Rendered:
        """Returns the text of messages, and the parts of it that the template marks as answers; `given` are more of its variables.

        Raises:
          UserError: the template refuses the conversation or fails.
        """
        listed = [_aliased(tabled(message)) for message in messages]
        if self._process.poll() is not None:  # an earlier conversation took more time or memory than there is
            self._end()
            self._start()
        variables = {"messages": listed, "add_generation_prompt": is_answered, **(given or {})}
        return self._ask([self._chosen(given or {}), variables], "fails")

    def _ask(self, question: Any, verb: str) -> Rendered:
        """Returns what the process answers.

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
        return Rendered(str(found["text"]), [(int(first), int(end)) for first, end in found["parts"]])


def _aliased(message: Message) -> Message:
    """Returns a message with its reasoning under the names that templates read, as transformers gives them."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _end(process: subprocess.Popen) -> None:
    """Ends the process of a template."""
    process.kill()
    process.communicate()
