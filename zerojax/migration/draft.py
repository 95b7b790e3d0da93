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
from zerojax.migration import keys as keys_lib

AUTO = "auto"
SCRIPT = "the training script's; transformers' default is taken"


@dataclasses.dataclass(frozen=True)
class Line:
    """The account of one key."""

    key: str  # the dotted name in the file; an absent key that matters has one too
    value: Any  # the value in the file; None if the key is absent
    verdict: str  # one of `keys.VERDICTS`
    text: str  # what becomes of it, and why
    # Of a key that the format lacks: the nearest known one, or ""
    nearest: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Translation:
    """What a foreign config becomes."""

    settings: dict[str, Any]  # {place in a config: value}, such as {"zero.stage": 2}
    sources: dict[str, tuple[str, ...]]  # {place: the keys that decided it}
    lines: tuple[Line, ...]  # the account of every key of the file, in its order, and of absent keys that matter
    devices: int | None = None  # the number of devices that the file speaks of; None if it does not say
    # the places whose values the file leaves to a training script. Lines with the verdict `keys.ASSUMED` name them.
    assumed: frozenset[str] = frozenset()

    @property
    def decided(self) -> dict[str, Any]:
        """Returns the settings that the file decides, without those that are assumed."""
        return {place: value for place, value in self.settings.items() if place not in self.assumed}

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
      switches: groups that are off unless a key of theirs is true -> that key.

    Raises:
      UserError: a value is no number (NaN).
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        table: Mapping[str, keys_lib.Key],
        *,
        canonical: Callable[[str], str] = lambda name: name,
        auto: Mapping[str, Any] | None = None,
        switches: Mapping[str, str] | None = None,
    ):
        self._content, self._table = content, table
        self._names = {name: canonical(name) for name, _ in leaves(content)}
        self._given = dict(leaves(content))
        self._auto, self._switches = dict(auto or {}), dict(switches or {})
        for name, value in self._given.items():
            if any(
                isinstance(one, float) and math.isnan(one) for one in (value if isinstance(value, list) else [value])
            ):
                raise UserError(f"{name}: must be a number, and is {errors.shown(value)}; correct it in the file")
        self.settings: dict[str, Any] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        self._said: dict[str, tuple[str, str]] = {}
        self._absent: list[Line] = []
        self.assumed: set[str] = set()

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

    def holds(self, group: str) -> bool:
        """Returns whether the file holds a key of a group."""
        return any(own.startswith(f"{group}.") for own in self._names.values())

    def is_auto(self, name: str, *, filled: bool = False) -> bool:
        """Returns whether the file leaves a value to the training script; with `filled`, also one that is known."""
        return any(self._names[own] == name and value == AUTO for own, value in self._given.items()) and (
            filled or name not in self._auto
        )

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value; texts as YAML and shells write them are read.

        Raises:
          UserError: it is another text.
        """
        value = self.get(name, default)
        if isinstance(value, str) and value.strip().lower() not in (*_FALSE, *_TRUE):
            raise UserError(f"{name}: must be true or false, and is {errors.shown(value)}; correct it in the file")
        return is_true(value)

    def number(self, name: str, default: Any = None, *, infinite: bool = False) -> Any:
        """Returns a float.

        Args:
          name: canonical.
          default: the value if there is none.
          infinite: whether it may be infinite.

        Raises:
          UserError: the value is not a number.
        """
        value = self.get(name, default)
        if value is None:
            return None
        try:
            found = math.nan if isinstance(value, bool) else float(value)
            if math.isnan(found) or (math.isinf(found) and not infinite):
                raise ValueError(value)
            return found
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
        if value is None or value == int(value):
            return None if value is None else int(value)
        raise UserError(f"{name}: must be a whole number, and is {self.get(name)!r}; correct it in the file")

    def put(self, place: str, value: object, *names: str) -> None:
        """Sets a setting, decided by these canonical names."""
        known = () if place in self.assumed else self.sources.get(place, ())
        self.assumed.discard(place)
        self.settings[place] = value
        self.sources[place] = tuple(name for name in names if self.has(name)) or known

    def assume(self, name: str, settings: Mapping[str, Any], why: str = SCRIPT) -> None:
        """Sets settings that the file leaves to a training script, under a canonical name that it lacks or that is "auto"."""
        self.settings |= settings
        self.sources |= dict.fromkeys(settings, (f"assumed for {name}",))
        self.assumed |= settings.keys()
        text = f"{why}: {shown(settings)}"
        self.say(name, keys_lib.ASSUMED, text) if self.has(name) else self.absent(name, keys_lib.ASSUMED, text)

    def say(self, name: str, verdict: str, text: str) -> None:
        """Overrides the table for one canonical name."""
        self._said[name] = (verdict, text)

    @property
    def told(self) -> frozenset[str]:
        """Returns the canonical names that the table does not account for."""
        return frozenset(self._said)

    def absent(self, name: str, verdict: str, text: str) -> None:
        """Reports a key that the file lacks."""
        self._absent.append(Line(name, None, verdict, text))

    def finish(self, devices: int | None = None) -> Translation:
        """Returns the translation, with a line for every key."""
        lines = [self._line(own, canonical, self._given[own]) for own, canonical in self._names.items()]
        return Translation(self.settings, self.sources, (*lines, *self._absent), devices, frozenset(self.assumed))

    def _line(self, own: str, name: str, value: object) -> Line:
        verdict, text, *nearest = self._account(own, name, value)
        now = f" (now {name})" if name != own else ""
        return Line(own, value, verdict, text + now, *nearest)

    def _account(self, own: str, name: str, value: object) -> tuple[str, ...]:
        """Returns the verdict on a key and its reason, and of a key that the format lacks `Line.nearest`."""
        if name in self._said:
            return self._said[name]
        if isinstance(value, Mapping):
            return keys_lib.NO_EFFECT, "it is empty"
        row = keys_lib.find(name, self._table)
        if row is None:
            return _unknown(own, self._table)
        found = {place: self.settings[place] for place in self.settings if name in self.sources[place]}
        if value == AUTO and row.verdict == keys_lib.TAKEN and name not in self._auto:
            where = ", ".join(f"config.{place}" for place in row.into)
            return keys_lib.ASSUMED, f"the training script's; {f'{shown(found)} is taken' if found else f'set {where}'}"
        if _is_one_of(value, row.off):
            return keys_lib.NO_EFFECT, "it is off" if _is_one_of(value, keys_lib.OFF) else "it asks for nothing else"
        if row.verdict in (keys_lib.TAKEN, keys_lib.UNSUPPORTED) and self._is_off(own, name):
            return keys_lib.NO_EFFECT, "it is off"
        if row.verdict != keys_lib.TAKEN:
            return row.verdict, row.why
        if not found:
            return keys_lib.NO_EFFECT, row.why or ("it is null" if value is None else "other keys decide it")
        return keys_lib.TAKEN, "; ".join(filter(None, (shown(found), row.why)))

    def _is_off(self, own: str, name: str) -> bool:
        """Returns whether a group around a key is switched off, or off since nothing switches it on."""
        around = (group for group in self._switches if name == group or name.startswith(f"{group}."))
        return is_off(self._content, own, self._auto) or not all(self.has(self._switches[group]) for group in around)


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


_FALSE, _TRUE = ("", "no", "n", "false", "f", "off", "none", "0", AUTO), ("yes", "y", "true", "t", "on", "1")


def is_true(value: object) -> bool:
    """Returns the truth of a value; "no", "false", "off", "none" and "0" are false."""
    if isinstance(value, str):
        return value.strip().lower() not in _FALSE
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


def _is_one_of(value: object, values: tuple[Any, ...]) -> bool:
    """Returns whether a value is among others: texts in any case, an empty group or list as None, a truth value never as a number."""
    if isinstance(value, str):
        return value.strip().lower() in (str(other).lower() for other in values)
    value = None if isinstance(value, (Mapping, list)) and not value else value
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)


def _unknown(name: str, table: Mapping[str, keys_lib.Key]) -> tuple[str, ...]:
    """Returns the verdict on a key without a row."""
    if name.startswith(("_", "comment")):
        return keys_lib.NO_EFFECT, "it is a comment"
    near = next(iter(difflib.get_close_matches(name, [key for key in table if not key.endswith("*")], 1, 0.75)), "")
    hint = f"; did you mean {near}?" if near else ""
    return keys_lib.UNSUPPORTED, f"the format has no such key, and nothing reads it{hint}", near
