"""Reads examples from files. This module opens JSON lines, JSON, CSV, TSV and parquet files as sources whose errors name file and line."""

import csv
import glob
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from zerojax import errors
from zerojax.errors import UserError


class Files:
    """The examples of one or several files, in the order of their names. A source; see `data.source.Source`.

    Args:
      pattern: a path, or a pattern with *, ? or [...].
      key: the config key that names it, for errors.
      needs: a field in which each example must have text; "" for none.

    Raises:
      UserError: there is no such file, it is empty or damaged, or its format is unknown. A line of a JSON lines file is parsed when it is
        read, and may raise it then.
    """

    def __init__(self, pattern: str, key: str, needs: str = ""):
        self._needs = needs
        paths = matching(pattern)
        if not paths:
            raise UserError(f"{key}: there is no file {pattern!r}; name a file, or several with * in the name")
        self._parts = [_open(pathlib.Path(path), key) for path in paths]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        if not len(self):
            raise UserError(f"{key}: {pattern!r} has no examples; name a file that has some")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        part, inner = self._find(index)
        found = part[inner]
        if self._needs and not isinstance(found.get(self._needs), str):
            raise UserError(
                f"{part.place(inner)}: has no text in field {self._needs!r}, which config.data.text_key names; its fields: "
                f"{', '.join(map(str, found))}"
            )
        return found

    def place(self, index: int) -> str:
        """Returns the file and the line of an example."""
        part, inner = self._find(index)
        return part.place(inner)

    def _find(self, index: int) -> tuple["_File", int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._parts[number], index - int(self._starts[number])


def matching(pattern: str) -> list[str]:
    """Returns the files that a path or a pattern names, by name. An existing path is no pattern, whatever characters it has."""
    path = os.path.expanduser(pattern)
    if os.path.lexists(path):
        return [path]
    known, rest = pathlib.Path(path).parent, [pathlib.Path(path).name]
    while not known.is_dir():  # the part that exists is no pattern either
        known, rest = known.parent, [known.name, *rest]
    return sorted(glob.glob(os.path.join(glob.escape(str(known)), *rest), recursive=True))


class _File:
    """The examples of one file."""

    def __init__(self, path: pathlib.Path, count: int, read: Callable[[int], Any], line: Callable[[int], str]):
        self._path, self._count, self._read, self._line = path, count, read, line

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        found = self._read(index)
        if not isinstance(found, Mapping):
            way_out = 'write one object a line, as in {"text": "...", "label": "..."}'
            raise UserError(
                f"{self.place(index)}: is {errors.shown(found)}, and an example has named fields; {way_out}"
            )
        return found

    def place(self, index: int) -> str:
        return f"{self._path}:{self._line(index)}"


def _open(path: pathlib.Path, key: str) -> _File:
    if path.is_dir():
        raise UserError(f"{key}: {path} is a folder; name its files, as in {path / '*.jsonl'}")
    suffix = path.suffix.lower()
    if suffix not in _OPENERS:
        raise UserError(f"{key}: {path} is not one of {', '.join(_OPENERS)}; convert it to JSON lines")
    try:
        if suffix != _PARQUET and _is_parquet(path):
            raise UserError(f"{key}: {path} is a parquet file under another name; rename it to {path.stem}{_PARQUET}")
        return _OPENERS[suffix](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or errors.first_line(error)})") from error


def _open_lines(path: pathlib.Path) -> _File:
    """Opens a file with one JSON object a line. Lines are found now and parsed when they are read; empty lines are skipped."""
    starts, ends, numbers, at = [], [], [], 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                starts.append(at)
                ends.append(at + len(line))
                numbers.append(number)
            at += len(line)

    def read(index: int) -> Any:
        with open(path, "rb") as file:
            file.seek(starts[index])
            return _parse(file.read(ends[index] - starts[index]), f"{path}:{numbers[index]}")

    return _File(path, len(starts), read, lambda index: str(numbers[index]))


def _open_json(path: pathlib.Path) -> _File:
    """Opens a JSON file of a list of objects; a file with an object a line under this name is read too."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"["):
        return _open_lines(path)
    found = _parse(data, str(path))
    return _File(path, len(found), found.__getitem__, lambda index: f"example {index + 1}")


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: is not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: is not JSON ({errors.first_line(error)}); mend or remove that line") from error


def _open_table(path: pathlib.Path, delimiter: str) -> _File:
    """Opens a CSV or TSV file, whose first row names the fields."""
    rows: list[dict[str, str]] = []
    lines: list[int] = []
    with open(path, encoding="utf-8-sig", newline="") as file:
        for number, row in _rows(csv.reader(file, delimiter=delimiter, strict=True), path):
            if not rows and not lines:
                names = row
                lines.append(0)
                if len(set(names)) < len(names) or not all(names):
                    raise UserError(
                        f"{path}:1: names the fields, and is {errors.shown(row)}; give each a name of its own"
                    )
            elif row:
                if len(row) != len(names):
                    raise UserError(
                        f"{path}:{number}: has {len(row)} values, and line 1 names {len(names)} fields; mend it"
                    )
                rows.append(dict(zip(names, row)))
                lines.append(number)
    return _File(path, len(rows), rows.__getitem__, lambda index: str(lines[index + 1]))


def _rows(reader: Any, path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with the number of its first line."""
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}:{number}: is no row of a table ({error}); mend or remove it") from error
        yield number, row


def _is_parquet(path: pathlib.Path) -> bool:
    """Returns whether a file begins as parquet files do."""
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _open_parquet(path: pathlib.Path) -> _File:
    try:
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({errors.first_line(error)}); write it again") from error
    return _File(
        path, table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0], lambda index: f"row {index + 1}"
    )


_PARQUET = ".parquet"
_OPENERS: dict[str, Callable[[pathlib.Path], _File]] = {
    ".jsonl": _open_lines,
    ".json": _open_json,
    ".csv": lambda path: _open_table(path, ","),
    ".tsv": lambda path: _open_table(path, "\t"),
    _PARQUET: _open_parquet,
}
