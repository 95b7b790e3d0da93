"""Keeps encoded examples on a disk. This module finds them again by all that they are made of, so that a second start encodes nothing.

That is the content of the examples, the tokenizer, the files beside it, the task, the form of the rows and the code that encodes.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax.data import kept
from zerojax.data import tokenizer as tokenizer_lib
from zerojax.data.pairs import tasks, templates

LEAST = 2**20  # bytes of files, below which examples are encoded at each start
_MOST_BESIDE = 2**24  # bytes of a file beside a tokenizer; larger ones hold weights
_REST = "rest"  # the array of all that is no array

Encode = Callable[..., tasks.Encoded]


def cached(encode: Encode, folder: pathlib.Path | None, paths: Sequence[str]) -> Encode:
    """Returns `tasks.encode`, or a part of it, that keeps what it returns.

    Args:
      encode: a `functools.partial` of `tasks.encode`, or itself.
      folder: where it is kept; None keeps nothing.
      paths: the files that hold the examples.
    """
    if folder is None or sum(os.path.getsize(path) for path in paths) < LEAST:
        return encode

    def found(examples: Any, **how: Any) -> tasks.Encoded:
        made = lambda: _arrays(encode(examples, **how))  # noqa: E731
        return _encoded(kept.arrays(folder, _key(encode, paths, how), made))

    return found


def _key(encode: Encode, paths: Sequence[str], how: Mapping[str, Any]) -> str:
    given = {**(encode.keywords if isinstance(encode, functools.partial) else {}), **how}
    tokenizer: tokenizer_lib.Tokenizer = given.pop("tokenizer")
    folder = given.pop("folder", None)
    beside = [
        path
        for path in _beside(folder)
        if path.suffix in (".json", ".jinja") and path.is_file() and path.stat().st_size < _MOST_BESIDE
    ]
    code = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    plain = {name: vars(value) if dataclasses.is_dataclass(value) else value for name, value in given.items()}
    return kept.key(
        kept.hash_of_files([str(path) for path in code]),
        kept.hash_of_files(paths),
        kept.hash_of_files([str(path) for path in beside]),
        [path.name for path in beside],
        tokenizer.file(begins=False),
        tokenizer.vocab_size,
        plain,
    )


def _beside(folder: pathlib.Path | None) -> list[pathlib.Path]:
    """Returns the files of a tokenizer's folder, with its further chat templates."""
    if folder is None:
        return []
    return [*sorted(folder.iterdir()), *sorted((folder / templates.MORE_TEMPLATES).glob("*.jinja"))]


def _arrays(encoded: tasks.Encoded) -> dict[str, np.ndarray]:
    """Returns encoded examples as few arrays: each field of all examples, one after the other, and the lengths."""
    found: dict[str, np.ndarray] = {}
    rest: dict[str, Any] = {"texts": [], "kinds": {}}  # kinds: the dtypes, where they differ
    for field, values in zip(tasks.Example._fields, zip(*encoded.examples)):
        if isinstance(values[0], np.ndarray):
            found[field], found[f"{field}_lengths"] = np.concatenate(values), np.array([len(value) for value in values])
            kinds = [value.dtype.str for value in values]
            rest["kinds"][field] = kinds if len(set(kinds)) > 1 else []
        elif isinstance(values[0], str):
            rest["texts"].append(field)
            data = [value.encode("utf-8", "surrogatepass") for value in values]
            found[field], found[f"{field}_lengths"] = (
                np.frombuffer(b"".join(data), np.uint8),
                np.array([*map(len, data)]),
            )
        else:
            found[field] = np.array(values)
    others = {
        field.name: getattr(encoded, field.name) for field in dataclasses.fields(encoded) if field.name != "examples"
    }
    rest |= {"others": others, "tuples": [name for name, value in others.items() if isinstance(value, tuple)]}
    return {**found, _REST: np.frombuffer(json.dumps(rest).encode(), np.uint8)}


def _encoded(arrays: kept.Arrays) -> tasks.Encoded:
    """Returns the examples of arrays."""
    rest = json.loads(arrays[_REST].tobytes())
    columns: list[Any] = []
    for field in tasks.Example._fields:
        values: Any = arrays.get(field)
        if values is None:
            continue
        if f"{field}_lengths" in arrays:
            values = np.split(values, np.cumsum(arrays[f"{field}_lengths"])[:-1])
            if kinds := rest["kinds"].get(field):
                values = [value.astype(kind) for value, kind in zip(values, kinds)]
            if field in rest["texts"]:
                values = [value.tobytes().decode("utf-8", "surrogatepass") for value in values]
        else:
            values = values.tolist()
        columns.append(values)
    others: dict[str, Any] = {
        name: tuple(value) if name in rest["tuples"] else value for name, value in rest["others"].items()
    }
    return tasks.Encoded(examples=[tasks.Example(*row) for row in zip(*columns)], **others)
