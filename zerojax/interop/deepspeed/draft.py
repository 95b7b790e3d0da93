"""Collects what a foreign config becomes. This module holds the report's lines, and the draft that readers of a format fill.

A reader takes values from a draft by their names in the foreign format, and puts settings in by their places in a config. The draft
remembers which name decided which setting, so that the report can account for every name.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerojax import errors
from zerojax.errors import UserError
from zerojax.interop.deepspeed import keys as keys_lib

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Line:
    """The account of one key.

    Attributes:
      key: the dotted name in the file; an absent key that matters has one too.
      value: the value in the file; None if the key is absent.
      verdict: one of `keys.VERDICTS`.
      text: what becomes of it, and why.
    """

    key: str
    value: Any
    verdict: str
    text: str


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a foreign config becomes.

    Attributes:
      settings: {place in a config: value}, such as {"zero.stage": 2}.
      sources: {place: the keys that decided it}.
      lines: the account of every key of the file, in its order, and of absent keys that matter.
      devices: the number of devices that the file speaks of; None if it does not say.
    """

    settings: dict[str, Any]
    sources: dict[str, tuple[str, ...]]
    lines: tuple[Line, ...]
    devices: int | None = None

    @property
    def unsupported(self) -> tuple[Line, ...]:
        """Returns the lines of what has no counterpart here."""
        return tuple(line for line in self.lines if line.verdict == keys_lib.UNSUPPORTED)


class Draft:
    """A translation in the making.

    Args:
      content: the file's content, nested mappings.
      table: the rows of its keys.
      canonical: (name) -> the name in the table, for older names.
      auto: values for keys that the file leaves to the training script ("auto"), by canonical name.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        table: Mapping[str, keys_lib.Key],
        *,
        canonical: Callable[[str], str] = lambda name: name,
        auto: Mapping[str, Any] | None = None,
    ):
        self._content, self._table = content, table
        self._names = {name: canonical(name) for name, _ in leaves(content)}
        self._given = dict(leaves(content))
        self._auto = dict(auto or {})
        self.settings: dict[str, Any] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        self._said: dict[str, tuple[str, str]] = {}
        self._absent: list[Line] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value under a canonical name; the default if it is absent, null, or left to the training script."""
        for own, canonical in self._names.items():
            if canonical == name and self._given[own] is not None:
                value = self._given[own]
                value = self._auto.get(name, AUTO) if value == AUTO else value
                return default if value == AUTO else value
        return default

    def has(self, name: str) -> bool:
        """Returns whether the file holds a canonical name, or a group of that name."""
        return any(own == name or own.startswith(f"{name}.") for own in self._names.values())

    def is_auto(self, name: str, *, filled: bool = False) -> bool:
        """Returns whether the file leaves a value to the training script; with `filled`, also one that is known."""
        return any(self._names[own] == name and value == AUTO for own, value in self._given.items()) and (
            filled or name not in self._auto
        )

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value; texts as YAML and shells write them are read."""
        return is_true(self.get(name, default))

    def number(self, name: str, default: Any = None) -> Any:
        """Returns a float.

        Raises:
          UserError: the value is not a number.
        """
        value = self.get(name, default)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError(value)
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{name}: must be a number, and is {errors.shown(value)}; correct it in the file"
            ) from error

    def whole(self, name: str, default: Any = None) -> Any:
        """Returns an int; a float without a fraction is one.

        Raises:
          UserError: the value is not a whole number.
        """
        value = self.number(name, default)
        if value is None or (math.isfinite(value) and value == int(value)):
            return None if value is None else int(value)
        raise UserError(f"{name}: must be a whole number, and is {self.get(name)!r}; correct it in the file")

    def put(self, place: str, value: Any, *names: str) -> None:
        """Sets a setting, decided by these canonical names."""
        self.settings[place] = value
        self.sources[place] = tuple(name for name in names if self.has(name)) or self.sources.get(place, ())

    def say(self, name: str, verdict: str, text: str) -> None:
        """Overrides the table for one canonical name."""
        self._said[name] = (verdict, text)

    def absent(self, name: str, verdict: str, text: str) -> None:
        """Reports a key that the file lacks."""
        self._absent.append(Line(name, None, verdict, text))

    def finish(self, devices: int | None = None) -> Translation:
        """Returns the translation, with a line for every key."""
        lines = [self._line(own, canonical, self._given[own]) for own, canonical in self._names.items()]
        return Translation(self.settings, self.sources, (*lines, *self._absent), devices)

    def _line(self, own: str, name: str, value: Any) -> Line:
        verdict, text = self._account(own, name, value)
        now = f" (now {name})" if name != own else ""
        return Line(own, value, verdict, text + now)

    def _account(self, own: str, name: str, value: Any) -> tuple[str, str]:
        """Returns the verdict on a key and its reason."""
        if name in self._said:
            return self._said[name]
        if isinstance(value, Mapping):
            return keys_lib.NO_EFFECT, "it is empty"
        row = keys_lib.find(name, self._table)
        if row is None:
            return _unknown(own, self._table)
        if value == AUTO and row.verdict == keys_lib.TAKEN and name not in self._auto:
            where = ", ".join(f"config.{place}" for place in row.into)
            return keys_lib.NO_EFFECT, f"auto is the training script's value; set {where}"
        asks = row.verdict in (keys_lib.TAKEN, keys_lib.UNSUPPORTED)
        if _is_one_of(value, row.off) or (asks and is_off(self._content, own, self._auto)):
            return keys_lib.NO_EFFECT, "it is off"
        if row.verdict != keys_lib.TAKEN:
            return row.verdict, row.why
        found = {place: self.settings[place] for place in self.settings if name in self.sources[place]}
        if not found:
            return keys_lib.NO_EFFECT, row.why or "other keys decide it"
        return keys_lib.TAKEN, "; ".join(filter(None, (shown(found), row.why)))


def shown(settings: Mapping[str, Any]) -> str:
    """Returns settings as text."""
    return ", ".join(f"config.{place} = {value!r}" for place, value in settings.items())


def leaves(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every value that is not a group; an empty group is a value."""
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def is_true(value: Any) -> bool:
    """Returns the truth of a value; "no", "false", "off", "none" and "0" are false."""
    if isinstance(value, str):
        return value.strip().lower() not in ("", "no", "false", "off", "none", "0", AUTO)
    return bool(value)


def is_off(content: Mapping[str, Any], name: str, auto: Mapping[str, Any] | None = None) -> bool:
    """Returns whether a group around a name is switched off by `enabled`, its own or that of its `shared_parameters`.

    Args:
      content: the file's content.
      name: a dotted name in it.
      auto: values for keys that are "auto", by name.
    """
    node: Any = content
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, Mapping):
            break
        if node.get("enabled") == AUTO and is_true((auto or {}).get(".".join([*parts[:depth], "enabled"]))):
            node = {**node, "enabled": True}
        shared = node.get("shared_parameters")
        for switch in (node, shared if isinstance(shared, Mapping) else {}):
            if "enabled" in switch and not is_true(switch["enabled"]):
                return True
        node = node.get(part)
    return isinstance(node, Mapping) and not node


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Returns whether a value is among others; an empty group counts as None."""
    value = None if isinstance(value, Mapping) and not value else value
    return any(type(value) is type(other) and value == other for other in values) or (
        isinstance(value, (int, float)) and any(isinstance(o, (int, float)) and value == o for o in values)
    )


def _unknown(name: str, table: Mapping[str, keys_lib.Key]) -> tuple[str, str]:
    """Returns the verdict on a key without a row."""
    if name.startswith(("_", "comment")):
        return keys_lib.NO_EFFECT, "it is a comment"
    near = difflib.get_close_matches(name, [key for key in table if not key.endswith("*")], 1, 0.75)
    hint = f"; did you mean {near[0]}?" if near else ""
    return keys_lib.UNSUPPORTED, f"the format has no such key, and nothing reads it{hint}"
