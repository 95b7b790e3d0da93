"""Reads fields of a config.json that others wrote. This module checks their types, and names a wrong one in one line."""

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

from zerojax import errors
from zerojax.errors import UserError
from zerojax.models import layers

MOST = 2**30  # JAX counts a dim in 31 bits, and a gate and its values are one of twice the size
MOST_LAYERS = 100_000  # in a config.json; each takes Python objects before its tensors are looked for


class Fields:
    """The fields of a config.json.

    Args:
      raw: its contents.
      place: its name.
      way_out: from a wrong value.
      names: {the name of a field here: its name in the file, where that is another}. The latter is read, and else the former.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        place: str = "config.json",
        way_out: str = "choose a folder whose model has that",
        names: Mapping[str, str] | None = None,
    ):
        self._names = names or {}
        self.raw = {**raw, **{ours: raw[theirs] for ours, theirs in self._names.items() if theirs in raw}}
        self.place, self._way_out = place, way_out

    def refuse(self, name: str, must: str) -> UserError:
        """Returns the error for a field's value."""
        is_known = name in self.raw
        value = f"is {errors.shown(self.raw[name])}" if is_known else "is missing"
        return UserError(f"{self.place}: {self._names.get(name, name)}: must be {must}, and {value}; {self._way_out}")

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a whole number above 0. A missing or null field has the default; None refuses it."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.refuse(name, "a whole number above 0")
        if value > MOST:
            raise self.refuse(name, f"at most {MOST}")
        return value

    def depth(self, name: str, default: int | None = None) -> int:
        """Returns a number of layers, as `count` does."""
        if (found := self.count(name, default)) > MOST_LAYERS:
            raise self.refuse(name, f"at most {MOST_LAYERS}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a number above 0. A missing or null field has the default; None refuses it."""
        value = self._value(name, default)
        if not _is_positive(value):
            raise self.refuse(name, "a number above 0")
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Returns a list of so many numbers above 0."""
        found = self.raw.get(name)
        if not isinstance(found, list) or len(found) != length or not all(map(_is_positive, found)):
            raise self.refuse(name, f"{length} numbers above 0")
        return tuple(map(float, found))

    def bounds(self, name: str) -> tuple[float, float]:
        """Returns the least and the largest of what a field bounds, by default 0 and infinity."""
        value = self._value(name, [0.0, math.inf])
        if isinstance(value, list):  # as JSON has no infinity, newer files name it
            value = [math.inf if part == {"__float__": "Infinity"} else part for part in value]
        is_of_numbers = isinstance(value, list) and all(type(part) in (int, float) for part in value)
        if not is_of_numbers or len(value) != 2 or not 0 <= value[0] <= value[1]:
            raise self.refuse(name, "two numbers, at least 0, of which the second is the larger")
        return float(value[0]), float(value[1])

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false. A missing or null field has the default."""
        return errors.truth(f"{self.place}: {name}", self._value(name, default), self._way_out)

    def group(self, name: str) -> "Fields":
        """Returns the fields of a nested group. A missing or null group is empty."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, "a group of fields")
        return Fields(value, f"{self.place}: {name}", self._way_out)

    def choice(self, name: str, known: Collection[str], default: str) -> str:
        """Returns a text that is one of `known`. A missing or null field has the default."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(name, f"one of {', '.join(known)}")
        return value

    def kinds(
        self, name: str, known: Mapping[str, Any], layers: int, older: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Returns what `known` says of the kind of each of so many layers, which a field names; `older` names are read as newer ones."""
        told = self.raw.get(name)
        named = [(older or {}).get(str(kind), str(kind)) for kind in told] if isinstance(told, list) else []
        if len(named) != layers or not {*named} <= {*known}:
            raise self.refuse(name, f"{layers} of {' or '.join(known)}")
        return [known[kind] for kind in named]

    def activation(self, name: str, default: str) -> str:
        """Returns the name of an activation in `layers.ACTIVATIONS`."""
        return self.choice(name, layers.ACTIVATIONS, default)

    def heads(self, width: str, heads: str) -> int:
        """Returns the dims of a head: those of field `width` divided by the number in field `heads`."""
        dims, ways = self.count(width), self.count(heads)
        if dims % ways:
            raise self.refuse(width, f"a multiple of {heads}={ways}")
        return dims // ways

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
