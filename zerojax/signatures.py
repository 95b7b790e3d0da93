"""Compares the arguments of public functions with their annotations. This module refuses those of another type in one line.

`zerojax` puts it around the functions that it offers. Rooms call each other without it, and judge values (ranges, names, regexes) where
they read them.
"""

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax import errors
from zerojax.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
_BOOLS = (bool, np.bool_)
_DTYPES = frozenset(typing.get_args(DTypeLike))
_NO_DTYPES = (jax.Array, np.ndarray, np.generic, dict, list, tuple)  # although numpy makes one of these
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checked(function: F) -> F:
    """Returns a function that raises a UserError where an argument is not of its annotation, such as "stage: must be a whole number"."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    named = [name for name, one in signature.parameters.items() if one.kind not in _OPEN and name in hints]
    if not named:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # one lacks or is unknown, which Python says of the function itself
            given = {}
        _compare({name: given[name] for name in named if name in given}, hints)
        return function(*args, **kwargs)

    return typing.cast(F, call)


def check_fields(values: Any) -> None:
    """Raises a UserError if a field of a dataclass is not of its annotation."""
    hints = _hints_of(values.__class__)
    _compare({name: getattr(values, name) for name in hints}, hints)


V = TypeVar("V")


def with_fields(values: V, **fields: Any) -> V:
    """Returns a dataclass with some fields of other values.

    Raises:
      UserError: it says another value of one of them itself.
    """
    for field in dataclasses.fields(values):  # type: ignore[arg-type]
        own = getattr(values, field.name)
        if field.name in fields and own != field.default and own != fields[field.name]:
            kind, given = type(values).__name__, shown(fields[field.name])
            raise UserError(f"{field.name}: is {given}, and in {kind} {shown(own)}; pass it once")
    return dataclasses.replace(values, **fields)  # type: ignore[type-var]


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _compare(values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not is_of(value, hints[name]):
            raise UserError(f"{name}: must be {words(hints[name])}, and is {shown(value)}")


def is_of(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a type; of a type that says nothing, such as `Any`, every value is.

    Numbers of numpy and arrays of one number are numbers, and True is none. Whatever has a shape and a dtype is an array.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        is_dtype = set(inner) >= _DTYPES
        others = [one for one in inner if not (is_dtype and one in _DTYPES)]
        return any(is_of(value, one) for one in others) or (is_dtype and value is not None and _is_dtype(value))
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is tuple:
        hints = inner[:1] * len(value) if isinstance(value, (tuple, list)) and Ellipsis in inner else inner
        return isinstance(value, (tuple, list)) and _fits(value, hints)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all_are(value.keys(), inner[0]) and _all_are(value.values(), inner[1])
    if isinstance(origin, type) and issubclass(origin, Iterable):
        is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, jax.Array))
        return is_list and (not isinstance(value, Collection) or _all_are(value, inner[0]))
    if hint in (int, float):
        kind, of = (numbers.Real, jnp.number) if hint is float else (numbers.Integral, jnp.integer)
        is_scalar = getattr(value, "shape", None) == () and jnp.issubdtype(getattr(value, "dtype", bool), of)
        return is_scalar or (isinstance(value, kind) and not isinstance(value, _BOOLS))
    if hint is bool:
        return isinstance(value, _BOOLS)
    if hint in (jax.Array, np.ndarray):
        return hasattr(value, "shape") and hasattr(value, "dtype")
    if getattr(hint, "_is_protocol", False):
        return all(hasattr(value, name) for name in vars(hint) if not name.startswith("_"))
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) and kind is not Any else True


_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    jax.Array: "an array",
    np.ndarray: "an array",
    type(None): "None",
}


def words(hint: Any) -> str:
    """Returns a type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        is_dtype = set(inner) >= _DTYPES
        rest = [words(one) for one in inner if not (is_dtype and one in _DTYPES)]
        return " or ".join(dict.fromkeys((["a dtype"] if is_dtype else []) + rest))
    if origin is collections.abc.Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dict" if inner[1] is Any else f"a dict by name, of which each is {words(inner[1])}"
    if origin is tuple and Ellipsis in inner:
        return f"a list of which each is {words(inner[0])}"
    if origin is tuple:
        return f"({', '.join(map(words, inner))})"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list of which each is {words(inner[0])}"
    name = getattr(hint, "__name__", str(hint))
    return _WORDS.get(hint) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _fits(values: Collection[Any], hints: tuple) -> bool:
    return len(values) == len(hints) and all(map(is_of, values, hints))


def _all_are(values: Iterable[Any], hint: Any) -> bool:
    return all(is_of(value, hint) for value in values)


def _is_dtype(value: Any) -> bool:
    if isinstance(value, str):
        return True  # some functions know other names ("bf16")
    try:
        jnp.dtype(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, _NO_DTYPES)


def shown(value: Any) -> str:
    """Returns a value as errors show it; of arrays their type alone, as their numbers may be on many devices."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {value.dtype}{list(value.shape)}"
    return errors.shown(value)
