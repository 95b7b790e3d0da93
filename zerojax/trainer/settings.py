"""Reads nested mappings into dataclasses. This module checks keys and types; what the values mean is for others to say."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any

from zerojax.errors import UserError


def read(cls: type, raw: Mapping[str, Any], place: str) -> Any:
    """Builds dataclass `cls`, whose fields may be dataclasses, from nested mappings.

    Args:
      cls: the dataclass.
      raw: a value for every field; whole numbers serve as floats and lists as tuples.
      place: what the mapping is called in errors.

    Raises:
      UserError: an unknown or missing key, or a value of another type; the line names it.
    """
    hints = typing.get_type_hints(cls)
    if not isinstance(raw, Mapping) and not hasattr(raw, "items"):
        raise UserError(f"{place}: must be a group of settings ({', '.join(hints)}), and is {raw!r}")
    given = dict(raw.items())
    for key in given:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(hints)}"
            raise UserError(f"{place}.{key}: unknown config key; {hint}")
    missing = [key for key in hints if key not in given]
    if missing:
        raise UserError(f"{place}.{missing[0]}: missing; start from configs/base.py, which holds every key")
    return cls(**{key: _value(hint, given[key], f"{place}.{key}") for key, hint in hints.items()})


def _value(hint: type, value: Any, place: str) -> Any:
    """Checks one value against its declared type."""
    if dataclasses.is_dataclass(hint):
        return read(hint, value, place)
    if hint is tuple and isinstance(value, (list, tuple)):
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    is_number = isinstance(value, float) and math.isfinite(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)) or (hint is float and not is_number):
        raise UserError(f"{place}: must be {hint.__name__}, and is {value!r}")
    return value
