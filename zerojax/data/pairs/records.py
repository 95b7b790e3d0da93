"""Reads examples from files. This module opens JSON lines, JSON, CSV, TSV and parquet files as sources whose errors name file and line."""

import array
import codecs
import contextlib
import csv
import glob
import io
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from zerojax import bounded, errors
from zerojax.errors import UserError


class Files:
    """The examples of one or several files, in the order of their names. A source; see `data.source.Source`.

    Args:
      pattern: a path, or a pattern with *, ? or [...].
      key: the argument that names it, for errors.
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
                f"{part.place(inner)}: has no text in field {self._needs!r}, which `text_key` names; its fields: "
                f"{', '.join(map(str, found))}"
            )
        return found

    def place(self, index: int) -> str:
        """Returns the file and the line of an example."""
        part, inner = self._find(index)
        return part.place(inner)

    def _find(self, index: int) -> tuple["_File | ParquetRows", int]:
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
            raise not_named(self.place(index), found)
        return found

    def place(self, index: int) -> str:
        return f"{self._path}:{self._line(index)}"


def not_named(place: str, found: Any) -> UserError:
    """Returns the error for an example that is no table of fields."""
    way_out = 'write one object a line, as in {"text": "...", "label": "..."}'
    return UserError(f"{place}: is {errors.shown(found)}, and an example has named fields; {way_out}")


def _open(path: pathlib.Path, key: str) -> "_File | ParquetRows":
    # As save_to_disk of datasets writes them
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        write = f'python -c "import datasets; datasets.load_from_disk({str(path)!r}).to_parquet(...)"'
        raise UserError(f"{key}: {path} is a folder of datasets, and files are read; write each split as one: {write}")
    if path.is_dir():
        raise UserError(f"{key}: {path} is a folder; name its files, as in {path / '*.jsonl'}")
    suffix = path.suffix.lower()
    if suffix not in _OPENERS:
        way_out = "decompress it" if suffix in COMPRESSED else "convert it to JSON lines"
        raise UserError(f"{key}: {path} is not one of {', '.join(_OPENERS)}; {way_out}")
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
    starts, ends, numbers, at, number = array.array("q"), array.array("q"), array.array("q"), 0, 0
    with bounded.open_file(path) as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise UserError(f"{path}:{number}: has more than {MOST_LINE} bytes; write one object a line")
            if line.strip():
                starts.append(at)
                ends.append(at + len(line))
                numbers.append(number)
            at += len(line)

    def read(index: int) -> Any:
        with bounded.open_file(path) as file:
            file.seek(starts[index])
            return parse(file.read(ends[index] - starts[index]), lambda: f"{path}:{numbers[index]}")

    return _File(path, len(starts), read, lambda index: str(numbers[index]))


def _open_json(path: pathlib.Path) -> _File:
    """Opens a JSON file of a list of objects, which are parsed when they are read; a file with an object a line is read too."""
    data = bounded.read_bytes(path, _MOST_LIST)
    if not data.lstrip().startswith((b"[", codecs.BOM_UTF8 + b"[")):
        return _open_lines(path)
    text, decoder = data.decode("utf-8-sig"), json.JSONDecoder(object_pairs_hook=bounded.once)
    del data
    starts, ends = array.array("q"), array.array("q")

    def place(index: int) -> str:
        return f"example {index + 1}"

    try:
        at = _BLANKS.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
        while text[at : at + 1] != "]" or starts:
            found, end = decoder.raw_decode(text, at)
            if not isinstance(found, Mapping):
                raise not_named(f"{path}:{place(len(starts))}", found)
            if len(starts) == _MOST_EXAMPLES:
                raise UserError(f"{path}: is a list of more than {_MOST_EXAMPLES} examples; write it as JSON lines")
            starts.append(at)
            ends.append(end)
            at = _BLANKS.match(text, end).end()  # type: ignore[union-attr]
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                raise ValueError(f"no comma at character {at}")
            at = _BLANKS.match(text, at + 1).end()  # type: ignore[union-attr]
        if text[at + 1 :].strip():
            raise ValueError(f"more after the list, at character {at + 1}")
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}:{place(len(starts))}: is not JSON ({errors.first_line(error)}); mend the file"
        ) from error

    def read(index: int) -> Any:
        own = text[starts[index] : ends[index]]
        return _lettered(decoder.decode(own), own, lambda: f"{path}:{place(index)}")

    return _File(path, len(starts), read, place)


def parse(data: bytes, place: Callable[[], str]) -> Any:
    """Returns the value of a line of JSON.

    Args:
      data: the line.
      place: () -> its file and number, for errors.

    Raises:
      UserError: it is no JSON.
    """
    try:
        text = data.decode("utf-8-sig")
        return _lettered(bounded.parse_json(text), text, place)
    except UnicodeDecodeError as error:
        raise UserError(f"{place()}: is not UTF-8 text; save the file as UTF-8") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place()}: is not JSON ({errors.first_line(error)}); mend or remove that line") from error


def _lettered(found: Any, text: str, place: Callable[[], str]) -> Any:
    """Returns the values of a JSON text. Raises UserError if one of their texts has half of a letter."""
    if _HALF.search(text) and (near := bounded.half_letter(found)):
        raise UserError(
            f"{place()}: holds half of a surrogate pair, which is no letter, near {near}; mend or remove it"
        )
    return found


def _open_table(path: pathlib.Path, delimiter: str) -> _File:
    """Opens a CSV or TSV file, whose first row names the fields."""
    names: list[str] = []
    held: list[list[str]] = []
    batches: list[list[pyarrow.Array]] = []  # of _ROWS rows each: far smaller than Python's texts
    lines = array.array("q")

    def pack() -> None:
        batches.append([pyarrow.array(column, pyarrow.large_string()) for column in zip(*held)])
        held.clear()

    with io.TextIOWrapper(bounded.open_file(path), encoding="utf-8-sig", newline="") as file:
        lines_of = iter(lambda: file.readline(MOST_LINE), "")
        for number, row in table_rows(csv.reader(lines_of, delimiter=delimiter, strict=True), path):
            if not names:
                names = checked_names(row, path)
            elif row:
                check_values(row, names, f"{path}:{number}")
                held.append(row)
                lines.append(number)
                if len(held) == _ROWS:
                    pack()
    pack()

    def read(index: int) -> dict[str, str]:
        return {name: column[index % _ROWS].as_py() for name, column in zip(names, batches[index // _ROWS])}

    return _File(path, len(lines), read, lambda index: str(lines[index]))


def checked_names(names: list[str], path: str | os.PathLike[str]) -> list[str]:
    """Returns the fields' names of a table. Raises UserError if one is empty, or there twice."""
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"{path}:1: names the fields, and is {errors.shown(names)}; give each a name of its own")
    return names


def check_values(row: Sequence[str], names: Sequence[str], place: str) -> None:
    """Raises UserError if a row of a table has more values than there are names, or fewer."""
    if len(row) != len(names):
        raise UserError(f"{place}: has {len(row)} values, and line 1 names {len(names)} fields; mend it")


def table_rows(reader: Any, path: str | os.PathLike[str], first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Yields each row with the number of its first line; that of the reader's first line is `first`.

    Raises:
      UserError: a row is none of a table.
    """
    while True:
        number = reader.line_num + first
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}:{number}: is no row of a table ({error}); mend or remove it") from error
        yield number, row


def _is_parquet(path: pathlib.Path) -> bool:
    """Returns whether a file begins as parquet files do."""
    with bounded.open_file(path) as file:
        return file.read(4) == b"PAR1"


@contextlib.contextmanager
def parquet(path: str, opened: Callable[[], Any], **how: Any) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opens a parquet file, and turns errors of the block into a UserError.

    Args:
      path: for errors.
      opened: () -> the file, as a context manager.
      how: options of pyarrow's reader.
    """
    try:
        with opened() as file, pyarrow.parquet.ParquetFile(file, page_checksum_verification=True, **how) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise UserError(f"{path}: has two columns of one name; give each a name of its own")
            yield table
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or errors.first_line(error)
        raise UserError(f"{path}: cannot be read as parquet ({why}); write it again") from error


class ParquetRows:
    """Rows of a parquet file, from number `first`. A source; see `data.source.Source`."""

    def __init__(self, path: str, first: int, batches: Sequence[pyarrow.RecordBatch]):
        self._path, self._first, self._batches = path, first, batches
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        at = int(np.searchsorted(self._starts, index, side="right")) - 1
        try:
            row = self._batches[at].slice(index - int(self._starts[at]), 1)
            found = {name: _written(value, row.schema.field(name).type) for name, value in row.to_pylist()[0].items()}
        # A text that is no UTF-8, a date beyond Python's
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            why = errors.first_line(error)
            raise UserError(f"{self.place(index)}: cannot be read ({why}); write it again") from error
        return found

    def place(self, index: int) -> str:
        """Returns the file and the row."""
        return f"{self._path}:row {self._first + index + 1}"


def _written(value: Any, kind: pyarrow.DataType) -> Any:
    """Returns a value of a column of a type as its row was written: JSON as what it holds, and without the fields of groups that are null.

    All groups of a column have the fields that any of them has.
    """
    if value is None:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType):
        return bounded.parse_json(value) if kind.extension_name == "arrow.json" else value
    if pyarrow.types.is_struct(kind):
        return {own.name: _written(value[own.name], own.type) for own in kind if value[own.name] is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_written(entry, kind.value_type) for entry in value]
    return value


def _open_parquet(path: pathlib.Path) -> ParquetRows:
    """Opens a parquet file. Some kilobytes can name one text a billion times, so what they unpack to is bounded."""
    batches: list[pyarrow.RecordBatch] = []
    nbytes, most = 0, max(_MOST_UNPACKED, _MOST_RATIO * path.stat().st_size)
    with parquet(str(path), lambda: bounded.open_file(path)) as table:
        for batch in table.iter_batches(_ROWS):
            nbytes += batch.nbytes
            if nbytes > most:
                raise UserError(
                    f"{path}: unpacks to more than {most} bytes, {_MOST_RATIO} times its own; write it as JSON lines"
                )
            batches.append(batch)
    return ParquetRows(str(path), 0, batches)


_BLANKS = re.compile(r"[ \t\n\r]*")
MOST_LINE = 2**27  # bytes of a line; JSON takes several times as much
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a letter beyond the first 65,536, as JSON may write it
_MOST_LIST = 2**30  # bytes of a JSON file of one list, which is held in memory
_MOST_EXAMPLES = 2**21  # of such a list, whose places take a microsecond each
_ROWS = 1024  # of a table that are read at a time
_MOST_UNPACKED, _MOST_RATIO = 2**28, 100  # bytes of a parquet file when unpacked, and as a multiple of the file
_PARQUET = ".parquet"
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_OPENERS: dict[str, Callable[[pathlib.Path], "_File | ParquetRows"]] = {
    ".jsonl": _open_lines,
    ".json": _open_json,
    ".csv": lambda path: _open_table(path, ","),
    ".tsv": lambda path: _open_table(path, "\t"),
    _PARQUET: _open_parquet,
}
