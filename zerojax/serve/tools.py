"""Reads calls of tools in answers. This module holds the forms in which models write calls, told apart by what their chat templates write.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Hermes, Qwen 2.5 and 3, Granite 4
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]        Mistral
    [TOOL_CALLS]name[ARGS]{...}                                 Mistral since 2025
    {"name": ..., "parameters": {...}}                          Llama 3.1: a whole answer, calls separated by ;
    <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>                     Qwen 3 Coder and 3.5
    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>                         GLM 4.5 to 4.7

What is not a complete call of a tool that was offered stays text. The last two write texts as they are and other values as JSON, so the
schema of a tool tells which a value is. `grammar` binds an answer to calls.
"""

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax import bounded, errors
from zerojax.errors import UserError

BEGIN, END, LIST, ARGS, ID = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME, BARE, ARGUMENTS, KEY, VALUE = (f"\0{n}" for n in range(5))  # places: of a name in quotes or bare, and so on
ANY = r"(.|\n)*"
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
      read: f(text between these, {name of a tool: schema of its arguments}) -> (name, arguments) of each call; raises ValueError for what
        is no call.
      written: what is written of one call after `begin`, with NAME or BARE and ARGUMENTS in their places.
      first, between, last: what is written after the first `begin`, between two calls and after all.
      bound: f(schema of arguments, f(text) -> its rule) -> the rule of ARGUMENTS, in the grammars of llguidance.
      value_end: what ends a text among the arguments; "" where all are JSON.
      is_open: f(a text between `begin` and `end`) -> whether this end is part of a value.
      tokens: texts beside `begin` and `end` that may be special tokens.
    """

    marks: tuple[str, ...]
    begin: str
    end: str
    read: Callable[[str, Mapping[str, Any]], list[tuple[Any, Any]]]
    written: tuple[str, ...]
    first: str = ""
    between: tuple[str, ...] = ()
    last: str = ""
    bound: Callable[[Mapping[str, Any], Callable[..., str]], str] = lambda schema, rule: _json(schema)
    is_open: Callable[[str], bool] = lambda text: len(_QUOTE.findall(text)) % 2 == 1
    value_end: str = ""
    tokens: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Returns texts of calls that may be special tokens."""
        return tuple(dict.fromkeys(filter(None, (self.begin, self.end, *self.tokens))))


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What an answer is bound to.

    Attributes:
      names: of the tools that it may call.
      is_needed: whether it must be calls.
      is_one: whether it has at most one.
    """

    names: tuple[str, ...]
    is_needed: bool
    is_one: bool


def grammar(form: CallForm, tools: Sequence[Mapping[str, Any]], ids: Mapping[str, int], bounds: Bounds) -> str:
    """Returns the grammar of llguidance of an answer whose calls are of the tools' schemas.

    Args:
      form: of the calls.
      tools: in OpenAI's form.
      ids: the tokens that are one text of `form.texts`, or another text that is neither special nor made of smaller tokens.
      bounds: what is called.

    Raises:
      UserError: a schema is not of an object, or the form cannot write it.
    """

    def rule(*texts: str) -> str:
        plain = ((json.dumps(text, ensure_ascii=False), ids.get(text)) for text in texts if text)
        return " ".join(text if token is None else f"({text} | <[{token}]>)" for text, token in plain)

    def ended(name: str, end: str) -> list[str]:
        """Returns the rules of any text up to an end, which is a token or a text; both are part of it."""
        own = f" | {name.upper()} <[{ids[end]}]>" if end in ids else ""
        lines = [f"{name}: {name}_text{own}", f"{name}_text[suffix={json.dumps(end)}]: /{ANY}/"]
        return [*lines, f"{name.upper()}: /{ANY}/"] if own else lines

    count, rules = 0, []
    for function in (tool["function"] for tool in tools if tool["function"]["name"] in bounds.names):
        name, schema = function["name"], {"type": "object", **(function.get("parameters") or {})}
        if schema["type"] != "object":
            kind = errors.shown(schema["type"], 40)
            raise UserError(f"tools: the parameters of {name} are of type {kind}, and must be an object's")
        places = {NAME: json.dumps(json.dumps(name)), BARE: json.dumps(name), ARGUMENTS: f"arguments_{count}"}
        written = " ".join(places.get(part) or rule(part) for part in form.written)
        rules += [f"call_{count}: {written}", f"arguments_{count}: {form.bound(schema, rule)}"]
        count += 1
    if form.value_end:
        rules += ended("raw", form.value_end)
    more = "" if bounds.is_one else f"({rule(*form.between)} call)*"
    rules += [
        f"calls: {rule(form.first)} call {more} {rule(form.last)}",
        f"call: {_either(f'call_{n}' for n in range(count))}",
    ]
    if bounds.is_needed:
        rules = [f"start: {rule(form.begin)} calls", *rules]
    elif form.begin:  # a text has no beginning of a call, nor tokens that only calls have
        others = _either(["PLAIN", *(f"<[{token}]>" for text, token in ids.items() if text not in form.texts)])
        plain = f"PLAIN: /{ANY}/ & ~/{ANY}{re.escape(form.begin)}{ANY}/"
        rules = ["start: text | text begin calls", f"text: ({others})*", plain, *ended("begin", form.begin), *rules]
    else:
        rules = ["start: PLAIN | calls", rf"PLAIN: /(\s*[^{{\s]{ANY})?/", *rules]
    return "\n".join(rules) + "\n"


def _either(rules: Iterable[str]) -> str:
    return " | ".join(rules)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(schema)}"


def _in_tags(*parts: str) -> Callable[[Mapping[str, Any], Callable[..., str]], str]:
    """Returns `CallForm.bound` of a form that writes each argument so, with its key for KEY and its value, with the end, for VALUE."""

    def bound(schema: Mapping[str, Any], rule: Callable[..., str]) -> str:
        if unknown := set(schema) - _OF_OBJECTS:
            line = (
                f"tools: the schema has {errors.shown(min(unknown), 40)}, which these calls cannot be bound to; omit it"
            )
            raise UserError(line)
        needed, shared = (
            schema.get("required", ()),
            {key: schema[key] for key in ("$defs", "definitions") if key in schema},
        )
        found = []
        for key, own in (schema.get("properties") or {}).items():
            places = {KEY: rule(key), VALUE: _value(key, own, shared, rule(parts[-1]))}
            words = " ".join(places.get(part) or rule(part) for part in parts[:-1])
            found.append(words if key in needed else f"({words})?")
        return " ".join(found) or '""'

    return bound


def _value(key: str, schema: Any, shared: Mapping[str, Any], end: str) -> str:
    """Returns the rule of a value and its end: a text as it is, or JSON."""
    if "string" not in _types(schema):
        return f"(%json {json.dumps({**schema, **shared} if isinstance(schema, Mapping) else schema)}) {end}"
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
        texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
        return f"({_either(json.dumps(text, ensure_ascii=False) for text in texts)}) {end}"
    if unknown := set(schema) - _OF_TEXTS:
        line = f"tools: the schema of {errors.shown(key, 40)} has {errors.shown(min(unknown), 40)}, "
        raise UserError(f"{line}which these calls cannot bind a text to; omit it")
    return "raw"


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema names, {} where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    if "type" not in schema and ("enum" in schema or "const" in schema):
        values = schema.get("enum", [schema.get("const")])
        return {"string" if isinstance(value, str) else "other" for value in values}
    own = schema.get("type", ())
    found = {own} if isinstance(own, str) else {one for one in own if isinstance(one, str)}
    return found.union(*(_types(part) for name in ("anyOf", "oneOf") for part in schema.get(name) or ()))


def form_of(source: str) -> CallForm | None:
    """Returns the form of calls that a chat template writes; None for one that is not known."""
    return next((form for form in FORMS.values() if all(mark in source for mark in form.marks)), None)


def _one(text: str, _: Any) -> list[tuple[Any, Any]]:
    return [_pair(bounded.parse_json(text), "arguments")]


def _listed(text: str, _: Any) -> list[tuple[Any, Any]]:
    values = bounded.parse_json(text)
    return [_pair(value, "arguments") for value in (values if isinstance(values, list) else [values])]


def _named(text: str, _: Any) -> list[tuple[Any, Any]]:
    found = []
    for part in text.split(LIST):
        name, _, arguments = part.partition(ARGS)
        found.append((name.partition(ID)[0].strip(), bounded.parse_json(arguments)))
    return found


def _separated(text: str, _: Any) -> list[tuple[Any, Any]]:
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


def _tagged(text: str, schemas: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Reads Qwen 3 Coder's call."""
    if not (found := _FUNCTION.fullmatch(text)):
        raise ValueError("is no function")
    return [_keyed(found[1], found[2], _PARAMETER, schemas)]


def _paired(text: str, schemas: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Reads GLM's call."""
    name, mark, rest = text.partition(_TAGS[0])
    return [_keyed(name, mark + rest, _ARGUMENT, schemas)]


def _keyed(name: str, text: str, form: re.Pattern[str], schemas: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the arguments that a text of keys and values is."""
    name, found, at = name.strip(), {}, 0
    properties = (schemas.get(name) or {}).get("properties") or {}
    for part in form.finditer(text):
        if text[at : part.start()].strip():
            break
        found[part[1]], at = _typed(part[2], properties.get(part[1])), part.end()
    if text[at:].strip():
        raise ValueError("is no list of arguments")
    return name, found


def _typed(text: str, schema: Any) -> Any:
    """Returns the value that a text is by its schema: JSON, or the text itself."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _PYTHON[text] if text in _PYTHON else bounded.parse_json(text)
    except ValueError:
        return text
    kinds = _KINDS.get(type(value), {"string"})
    return text if "string" in kinds or ("string" in types and types.isdisjoint(kinds)) else value


def _has_more(begin: str, end: str) -> Callable[[str], bool]:
    return lambda text: text.count(begin) > text.count(end)


_PYTHON = {"True": True, "False": False, "None": None}  # as Qwen's template writes them
_KINDS = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    dict: {"object"},
    list: {"array"},
}
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_OF_TEXTS = {"type", "description", "title", "default", "examples", "anyOf", "oneOf"}
_OF_OBJECTS = {
    "type",
    "description",
    "title",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
}
_PAIR = (NAME, ', "arguments": ', ARGUMENTS)
# The first whose marks are in the template is its form.
FORMS = {
    "Qwen 3 Coder": CallForm(
        (BEGIN, "<function="),
        BEGIN,
        END,
        _tagged,
        ("\n<function=", BARE, ">\n", ARGUMENTS, "</function>\n", END),
        between=("\n", BEGIN),
        bound=_in_tags("<parameter=", KEY, ">\n", VALUE, "\n</parameter>\n"),
        value_end="\n</parameter>\n",
        is_open=_has_more("<parameter=", "</parameter>"),
    ),
    "GLM 4.5": CallForm(
        (BEGIN, _TAGS[0]),
        BEGIN,
        END,
        _paired,
        (BARE, "\n", ARGUMENTS, END),
        between=("\n", BEGIN),
        bound=_in_tags(*_TAGS[:1], KEY, _TAGS[1], "\n", _TAGS[2], VALUE, "\n", _TAGS[3]),
        value_end=_TAGS[3],
        is_open=_has_more(*_TAGS[2:]),
        tokens=_TAGS,
    ),
    "Hermes": CallForm((BEGIN,), BEGIN, END, _one, ('\n{"name": ', *_PAIR, "}\n", END), between=("\n", BEGIN)),
    "Mistral with [ARGS]": CallForm(
        (LIST, ARGS), LIST, "", _named, (BARE, ARGS, ARGUMENTS), between=(LIST,), tokens=(ARGS, ID)
    ),
    "Mistral": CallForm((LIST,), LIST, "", _listed, ('{"name": ', *_PAIR, "}"), "[", (", ",), "]"),
    "Llama 3.1": CallForm(
        ('{"name": ', '"parameters": '),
        "",
        "",
        _separated,
        ('{"name": ', NAME, ', "parameters": ', ARGUMENTS, "}"),
        between=("; ",),
    ),
}


class CallReader:
    """Tells text and calls of a growing answer apart. Text that may belong to a call is told when that is known.

    Args:
      form: of the model's calls.
      schemas: of the arguments of the tools that were offered, by their names.
    """

    def __init__(self, form: CallForm, schemas: Mapping[str, Any]):
        self._form, self._schemas = form, schemas
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
            if not self._form.is_open(inside):
                return left[: stop + len(end)], (), after
            at = stop + 1  # it is within a value
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
            for name, arguments in self._form.read(text, self._schemas):
                if isinstance(arguments, str):
                    arguments = bounded.parse_json(arguments)
                if name not in self._schemas or not isinstance(arguments, Mapping):
                    return []
                found.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, TypeError):  # a name may be a list
            return []
        return found
