"""Reads what a request asks. This module turns the body of a request to OpenAI's API into values, and refuses the rest by name.

A field that is unknown, or that would change an answer in a way that is not there, is refused: an answer is never silently another than
asked for. Ranges of settings of generation are those of `inference.engine.requests`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from zerojax import bounded, errors
from zerojax.errors import UserError
from zerojax.serve import tools as tools_lib

MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings, and letters of one
MOST_CHOICES = 128  # answers to a prompt
DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it; a chat's answer may fill the rest of the text
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}  # of messages, beside role and content
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")  # of a tool


class NotAnswered(Exception):
    """A request that is not answered.

    Attributes:
      status: of HTTP.
      message: one line.
      param: the field; None for none.
      code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code
        self.message = str(UserError(message))  # printable
        self.param = None if param is None else str(UserError(param[:60]))

    @classmethod
    def by(cls, error: UserError, *, is_chat: bool, has_calls: bool = False) -> "NotAnswered":
        """Returns the refusal of a request whose settings raise a UserError, which begins with the engine's name of one.

        Args:
          has_calls: whether the grammar is that of calls of tools.
        """
        line = str(error)
        name, is_named, rest = line.partition(":")
        names = _NAMES | (_CHAT_NAMES if is_chat else {}) | ({"grammar": "tools"} if has_calls else {})
        name = names.get(name, name)
        is_field = bool(is_named) and name in {*COMMON, *CHAT, *COMPLETION}
        code = "context_length_exceeded" if is_field and " fit" in line else None
        return cls(400, f"{name}:{rest}" if is_field else line, name if is_field else None, code)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a request asks."""

    model: str  # the name
    prompts: list[str | list[int]]  # of a completion, each a text or token ids
    messages: list[dict[str, Any]]  # of a chat; arguments of calls are tables, as chat templates read them
    tools: list[dict[str, Any]]  # that the answer may call, in OpenAI's form
    bounds: tools_lib.Bounds | None  # of its calls; None: it is not bound
    settings: dict[str, Any]  # of generation, by the names of `requests.RequestSettings`
    seed: int | None  # of the draws; None: any
    n: int  # answers to each prompt
    is_streamed: bool  # whether tokens are sent as they come
    tells_usage: bool  # whether a stream ends with the numbers of tokens


def read(body: bytes, *, is_chat: bool) -> Wanted:
    """Returns what the body of a request asks.

    Raises:
      NotAnswered: it is no JSON, or a field is unknown, missing or of another type.
    """
    try:
        found = bounded.parse_json(body, is_strict=True)
    except ValueError as error:  # bytes that are no text too
        raise NotAnswered(
            400, f"the body cannot be read as JSON ({errors.one_line(error, 160)})", code="invalid_json"
        ) from error
    if not isinstance(found, Mapping):
        raise NotAnswered(400, f"the body must be a JSON object, and is {errors.shown(found, 60)}", code="invalid_json")
    known = {**COMMON, **(CHAT if is_chat else COMPLETION)}
    given: dict[str, Any] = {}
    for name, value in found.items():
        if name in known:
            if value is not None:
                given[name] = known[name](name, value)
        elif name in NEUTRAL:
            _neutral(name, value)
        else:
            line = f"{errors.shown(name, 60)}: is not a field that is known; {errors.choose(name, known)}"
            raise NotAnswered(400, line, name, "unknown_parameter")
    for name in ("model", "messages" if is_chat else "prompt"):
        if name not in given:
            raise NotAnswered(400, f"{name}: is missing", name, "missing_required_parameter")
    return _asked(given, is_chat=is_chat)


def _asked(given: dict[str, Any], *, is_chat: bool) -> Wanted:
    settings = {own: given[name] for name, own in _SETTINGS.items() if given.get(name, "") != ""}
    if is_chat:
        if "max_tokens" in given and "max_completion_tokens" in given:
            raise NotAnswered(400, "max_tokens: max_completion_tokens is given too; omit one", "max_tokens")
        if "top_logprobs" in given and not given.get("logprobs"):
            raise NotAnswered(400, "top_logprobs: needs logprobs=true", "top_logprobs")
        settings.pop("logprobs", None)
        if given.get("logprobs"):
            settings["logprobs"] = given.get("top_logprobs", 0)
        if "grammar" in settings and given.get("tools") and given.get("tool_choice") != "none":
            line = "response_format: binds the whole answer, so no tool can be called; omit it, or the tools"
            raise NotAnswered(400, line, "response_format")
    else:
        settings.setdefault("max_tokens", DEFAULT_TOKENS)
    settings.setdefault("temperature", 1.0)
    options = given.get("stream_options", {})
    if options and not given.get("stream"):
        raise NotAnswered(400, "stream_options: needs stream=true", "stream_options")
    n = given.get("n", 1)
    if not 1 <= n <= MOST_CHOICES:
        raise NotAnswered(400, f"n: must be from 1 to {MOST_CHOICES}, and is {errors.shown(n, 40)}", "n")
    return Wanted(
        model=given["model"],
        prompts=given.get("prompt", []),
        messages=given.get("messages", []),
        tools=given.get("tools", []) if given.get("tool_choice") != "none" else [],
        bounds=_bounds(given),
        settings=settings,
        seed=None if "seed" not in given else given["seed"] % 2**32,  # OpenAI's have 64 bits
        n=n,
        is_streamed=given.get("stream", False),
        tells_usage=bool(options.get("include_usage")),
    )


def _bounds(given: Mapping[str, Any]) -> tools_lib.Bounds | None:
    """Returns what the calls of an answer are bound to; None if nothing is asked of them."""
    choice, is_one = given.get("tool_choice", "auto"), not given.get("parallel_tool_calls", True)
    tools = [tool["function"] for tool in given.get("tools", [])]
    names = tuple(function["name"] for function in tools)
    for name, is_given in (("tool_choice", choice not in ("auto", "none")), ("parallel_tool_calls", is_one)):
        if is_given and not tools:
            raise NotAnswered(400, f"{name}: needs tools; give them, or omit it", name)
    if isinstance(choice, dict):
        if (name := choice["name"]) not in names:
            line = f"tool_choice: {errors.shown(name, 60)} is no tool that is offered; {errors.choose(name, names)}"
            raise NotAnswered(400, line, "tool_choice")
        return tools_lib.Bounds((name,), is_needed=True, is_one=True)
    if choice == "none" or not (choice == "required" or is_one or any(function.get("strict") for function in tools)):
        return None
    return tools_lib.Bounds(names, is_needed=choice == "required", is_one=is_one)


def _wrong(name: str, form: str, value: object) -> NotAnswered:
    return NotAnswered(400, f"{name}: must be {form}, and is {errors.shown(value, 60)}", name, "invalid_type")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        raise _wrong(name, "a whole number", value)
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 1e30:
        raise _wrong(name, "a number", value)
    return float(value)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotAnswered(
            400, f"{name}: holds half of a surrogate pair, which is no letter; correct it", name
        ) from error
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _wrong(name, "a list of token ids", value)
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
            raise NotAnswered(
                400, f"{name}: holds {errors.shown(token, 60)}, which is no token id", name, "invalid_type"
            )
    return tuple(value)


def _stops(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MOST_STOPS or "" in texts:
        raise _wrong(name, f"a text or up to {MOST_STOPS} texts, of a letter or more", value)
    if any(len(_text(name, text)) > LONGEST_STOP for text in texts):
        raise NotAnswered(400, f"{name}: a text has more than {LONGEST_STOP} letters; shorten it", name)
    return tuple(texts)


def _prompts(name: str, value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [_text(name, value)]
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a text, token ids, or a list of either", value)
    if isinstance(value[0], int):
        return [list(_ids(name, value))]
    return [_text(name, part) if isinstance(part, str) else list(_ids(name, part)) for part in value]


def _messages(name: str, value: object) -> list[dict[str, Any]]:
    form = '[{"role": ..., "content": ...}, ...]'
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise _wrong(name, form, value)
    found: list[dict[str, Any]] = []
    asked: dict[str, str] = {}  # names of tools by the ids of calls
    for number, message in enumerate(value):
        place = f"{name}[{number}]"
        given = {key: part for key, part in message.items() if part is not None}
        role = given.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise NotAnswered(
                400, f"{place}: role must be one of {', '.join(ROLES)}, and is {errors.shown(role, 60)}", name
            )
        fields = ("role", "content", *FIELDS.get(role, ()))
        if unknown := [key for key in given if key not in fields and given[key] not in ([], "")]:
            raise NotAnswered(400, f"{place}: has {errors.shown(unknown[0], 60)}, which is not applied; omit it", name)
        if "content" not in given and not given.get("tool_calls"):
            raise NotAnswered(400, f"{place}: content is missing", name, "missing_required_parameter")
        own: dict[str, Any] = {"role": ROLES[role], "content": _content(place, given.get("content", ""), name)}
        if calls := given.get("tool_calls"):
            own["tool_calls"] = _calls(f"{place}.tool_calls", calls)
            asked |= {call["id"]: call["function"]["name"] for call in own["tool_calls"]}
        if role == "tool":
            own |= {key: _text(f"{place}.{key}", given[key]) for key in FIELDS[role] if key in given}
            if own.get("tool_call_id") not in asked:
                line = f"{place}: tool_call_id must be the id of a call before it, and is {errors.shown(given.get('tool_call_id'), 60)}"
                raise NotAnswered(400, line, name)
            own.setdefault("name", asked[own["tool_call_id"]])  # Hermes' templates need it
        found.append(own)
    if found[-1]["role"] == "assistant":
        raise NotAnswered(400, f"{name}: the last one is the assistant's, and an answer follows another's", name)
    return found


def _calls(place: str, value: object) -> list[dict[str, Any]]:
    """Returns calls of tools, whose arguments were texts of JSON."""
    form = '[{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}, ...]'
    found = []
    call: Any
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise _wrong(place, form, value)
        text = _text(f"{place}: arguments", function.get("arguments"))
        try:
            arguments = bounded.parse_json(text, is_strict=True)
        except ValueError as error:
            line = f"{place}: arguments must be a text of JSON ({errors.one_line(error, 160)})"
            raise NotAnswered(400, line, "messages") from error
        if not isinstance(arguments, Mapping):
            raise _wrong(f"{place}: arguments", "a JSON object, as a text", text)
        own = {"name": _text(f"{place}: name", function.get("name")), "arguments": arguments}
        found.append({"id": _text(f"{place}: id", call.get("id")), "type": "function", "function": own})
    return found


def _content(place: str, value: object, name: str) -> str:
    """Returns the text of a message: a text, or parts with texts."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
    texts = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and set(part) <= {"type", "text"}
        if not is_text or not isinstance(part.get("text"), str):
            line = f"{place}: content must be a text, or parts of type text, and is {errors.shown(value, 60)}"
            raise NotAnswered(400, line, name, "invalid_type")
        texts.append(_text(name, part["text"]))
    return "".join(texts)


def _tools(name: str, value: object) -> list[dict[str, Any]]:
    form = '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, ...]'
    if not isinstance(value, list):
        raise _wrong(name, form, value)
    names = set()
    tool: Any
    for number, tool in enumerate(value):
        place = f"{name}[{number}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise _wrong(place, form[1:-6], tool)
        own = _text(f"{place}: name", function.get("name"))
        if not _NAME.fullmatch(own) or own in names:
            rule = "is there twice" if own in names else "must have up to 64 letters, digits, and _ . -"
            raise NotAnswered(400, f"{place}: the name {errors.shown(own, 60)} {rule}", name)
        if not isinstance(function.get("parameters"), Mapping | None):
            raise _wrong(f"{place}: parameters", "a JSON schema", function["parameters"])
        if not isinstance(function.get("strict"), bool | None):
            raise _wrong(f"{place}: strict", "true or false", function["strict"])
        names.add(own)
    return value


def _tool_choice(name: str, value: object) -> str | dict[str, str]:
    """Returns "none", "auto" or "required", or the name of a tool in a dict."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if not isinstance(function, Mapping) or set(function) != {"name"}:
        form = '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise _wrong(name, form, value)
    return {"name": _text(name, function["name"])}


def _response_format(name: str, value: object) -> str:
    """Returns the JSON schema that an answer is bound to, as a text; "" for none."""
    given = {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else {}
    kind, known = given.get("type"), {"type"}
    form: Any = {"schema": {"type": "object"}}
    if kind == "json_schema":
        form, known = given.get("json_schema"), {"type", "json_schema"}
    schema = form.get("schema") if isinstance(form, Mapping) else None
    if kind not in ("text", "json_object", "json_schema") or not isinstance(schema, Mapping):
        form = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise _wrong(name, form, value)
    if unknown := (given.keys() - known) | (form.keys() - {"name", "description", "schema", "strict"}):
        line = f"{name}: has {errors.shown(min(unknown), 60)}, which is not applied; omit it"
        raise NotAnswered(400, line, name, "unknown_parameter")
    return "" if kind == "text" else json.dumps(schema)


def _stream_options(name: str, value: object) -> Mapping[str, bool]:
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    for key, part in value.items():
        if key != "include_usage" or not isinstance(part, bool | None):
            line = f"{name}: knows include_usage, true or false, and holds {errors.shown({key: part}, 60)}"
            raise NotAnswered(400, line, name, "unknown_parameter")
    return value


def _neutral(name: str, value: object) -> None:
    """Refuses a field that is not applied, unless its value changes nothing."""
    neutral = NEUTRAL[name]
    is_same = value is None or neutral is None
    if isinstance(neutral, bool) or isinstance(value, bool):
        is_same = is_same or value is neutral
    elif isinstance(neutral, int):
        is_same = is_same or (isinstance(value, int | float) and value == neutral)
    else:
        is_same = is_same or value == neutral
    if not is_same:
        line = f"{name}: is {errors.shown(value, 60)}, which is not applied; omit it, or give {errors.shown(neutral)}"
        raise NotAnswered(400, line, name, "unsupported_parameter")


Reader = Callable[[str, Any], Any]
COMMON: dict[str, Reader] = {
    "model": _text,
    "max_tokens": _whole,
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole,
    "min_p": _number,
    "repetition_penalty": _number,
    "seed": _whole,
    "stop": _stops,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "n": _whole,
    "stream": _flag,
    "stream_options": _stream_options,
}
CHAT: dict[str, Reader] = {
    "messages": _messages,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _flag,
    "response_format": _response_format,
    "max_completion_tokens": _whole,
    "logprobs": _flag,
    "top_logprobs": _whole,
}
COMPLETION: dict[str, Reader] = {"prompt": _prompts, "logprobs": _whole}
# Fields of OpenAI's API that are not applied, and the value that changes nothing; None: every value changes nothing.
NEUTRAL: dict[str, Any] = {
    "user": None,
    "safety_identifier": None,
    "metadata": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prediction": None,
    "service_tier": None,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "reasoning_effort": "none",
    "verbosity": "medium",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
}
_NAMES = {
    "stop_strings": "stop",
    "stop_ids": "stop_token_ids",
    "ignores_end": "ignore_eos",
    "grammar": "response_format",
}
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logprobs")
# field -> setting of a request
_SETTINGS = {name: name for name in _SAME} | {"max_completion_tokens": "max_tokens"}
_SETTINGS |= {field: setting for setting, field in _NAMES.items()}
_CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
