"""Cuts files into blocks of documents that are read when they are needed. This module opens JSON lines, tables and parquet files so.

A block is some bytes of a JSON lines file, some rows of a table, or a part of a row group of a parquet file. A document belongs to the
block in which it begins, so that the blocks together have each document once. A file of JSON lines is not read to open it, of a parquet
file the footer is. To find the rows of a table it is read once, and where they begin is kept on the disk.
"""

import array
import concurrent.futures
import contextlib
import csv
import functools
import io
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from zerojax.data import kept, locations
from zerojax.data import source as source_lib
from zerojax.data.locations import Location
from zerojax.data.pairs import records
from zerojax.errors import UserError

GROUP = 8  # blocks, at most, that a row reads at once, whose documents it mixes
HELD = 2**26  # bytes of text that all rows of a batch together hold of a source
# Bytes of a block. A small block of a file elsewhere takes as long as a larger one.
_LEAST, _LEAST_REMOTE, _MOST = 2**6, 2**16, 2**20
_TAIL = 2**14  # bytes after a block in which its last line may end
_GRAIN = 2**14  # bytes of a table between two rows of which it is known where they begin
_FINE = 2**20  # bytes of a table below which that is known of each row
_ROWS = 1024  # of a parquet file that are unpacked at once
_MOST_PART = 2**16  # rows of a part of a row group
_MOST_UNPACKED = 2**28  # bytes of _ROWS rows
_AT_ONCE = 16  # parts of files that are read at the same time
_FINGERPRINTED = 64  # files of which bytes are compared

Example = Mapping[str, Any]


class DocumentBlocks:
    """The blocks of a source, each a source of its documents (`source.Source`).

    Attributes:
      group: the blocks that a row reads at once.
    """

    def __init__(
        self,
        counts: Sequence[int],
        read: Callable[[int, int], source_lib.Source],
        fingerprint: Callable[[], str],
        *,
        group: int = GROUP,
        is_remote: bool = False,
    ):
        """Takes the number of blocks of each file, and (file, block) -> the documents of one."""
        self._starts = np.cumsum([0, *counts])
        self._read, self.group, self._fingerprint = read, group, fingerprint
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "blocks") if is_remote else None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> source_lib.Source:
        """Returns the documents of a block, which may be none.

        Raises:
          UserError: the file cannot be read. A document that is damaged raises it when it is read.
        """
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._read(file, index - int(self._starts[file]))

    def several(self, indices: Sequence[int]) -> "list[source_lib.Source | UserError]":
        """Returns the documents of blocks, or why they cannot be read; those of files elsewhere are read at the same time."""

        def read(index: int) -> source_lib.Source | UserError:
            try:
                return self[index]
            except UserError as error:
                return error

        return list((map if self._pool is None else self._pool.map)(read, indices))

    def fingerprint(self) -> str:
        """Returns what tells these files apart from others, in hexadecimal."""
        return self._fingerprint()


class _How(NamedTuple):
    """How files are cut."""

    nbytes: int  # of a block whose begin is found at once
    held: int  # bytes that a row of a batch holds
    columns: tuple[str, ...]  # of a parquet file that are read; () for all
    cache: pathlib.Path | None


class _CutFile(NamedTuple):
    """A file that is cut into blocks."""

    number: int  # of its blocks
    read: Callable[[int], source_lib.Source]  # the documents of a block
    nbytes: int  # of its largest block, about


def of_source(source: source_lib.Source, name: str, fingerprint: Callable[[], str]) -> DocumentBlocks:
    """Returns the documents of a source that is read by index, as blocks of one document each; `name` is that of the source in errors."""
    return DocumentBlocks([len(source)], lambda _, index: _One(source, name, index), fingerprint, group=1)


def is_known(path: str) -> bool:
    """Returns whether a file, by its name, can be cut into blocks."""
    return _suffix(path) in _OPENERS


def open_files(
    pattern: str, key: str, num_rows: int, *, columns: Sequence[str] = (), cache: pathlib.Path | None = None
) -> DocumentBlocks:
    """Opens the files that a path, a URL or a pattern names.

    Args:
      pattern: see `locations.matching`.
      key: the argument that names it, for errors.
      num_rows: the rows of a batch, each of which holds a group of blocks.
      columns: the fields that are read of a parquet file; () for all.
      cache: a folder to keep where rows of tables begin; None for none.

    Raises:
      UserError: there is no such file, it is empty or damaged, or cannot be cut into blocks. A document that is damaged raises it when it
        is read.
    """
    found = locations.matching(pattern, key)
    for location in found:
        if not is_known(location.path):
            raise UserError(f"{key}: {location.path} {_why_not(location.path)}")
    total = sum(location.size for location in found)
    least = _LEAST_REMOTE if locations.is_remote(found[0].path) else _LEAST
    held = max(least, min(HELD, total) // num_rows)
    how = _How(max(least, min(_MOST, held // GROUP)), held, tuple(columns), cache)

    def opened(location: Location) -> _CutFile:
        return _OPENERS[_suffix(location.path)](location, how)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        files = list(pool.map(opened, found))
    counts = [file.number for file in files]
    if not sum(counts):
        raise UserError(f"{key}: {pattern!r} has no examples; name a file that has some")
    return DocumentBlocks(
        counts,
        lambda file, block: files[file].read(block),
        lambda: fingerprint(found),
        # A row of a small source would begin with more than its part, and one of large blocks hold too much
        group=max(1, min(GROUP, sum(counts) // num_rows, held // max(file.nbytes for file in files))),
        is_remote=locations.is_remote(found[0].path),
    )


def fingerprint(found: Sequence[Location]) -> str:
    """Returns what tells files apart from others, in hexadecimal: a hash of their sizes and of bytes of some."""
    code = zlib.crc32(repr([location.size for location in found]).encode())
    step = -(-len(found) // _FINGERPRINTED)
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for part in pool.map(locations.fingerprint, found[::step]):
            code = zlib.crc32(part.to_bytes(4, "little"), code)
    return f"{code:08x}"


def _suffix(path: str) -> str:
    return pathlib.PurePosixPath(path).suffix.lower()


def _why_not(path: str) -> str:
    if _suffix(path) in records.COMPRESSED:
        return f"is compressed, and has no place where a part of it begins; decompress it, or write it as {_PARQUET}"
    return f"is not one of {', '.join(_OPENERS)}; convert it to JSON lines"


class _One:
    """One document of a source."""

    def __init__(self, source: source_lib.Source, name: str, index: int):
        self._source, self._name, self._index = source, name, index

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Example:
        return self._source[self._index]

    def place(self, index: int) -> str:
        return source_lib.place_of(self._source, self._index, f"{self._name}, example")


# ---- JSON lines


class _Lines:
    """Documents of JSON lines: each a line that is not blank, parsed when it is read."""

    def __init__(self, path: str, start: int, data: bytes):
        self._path, self._start, self._data = path, start, data
        self._starts, self._ends, at = array.array("q"), array.array("q"), 0
        for end in [*np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).tolist(), len(data)]:
            if data[at:end].strip():
                self._starts.append(at)
                self._ends.append(end)
            at = end + 1

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Example:
        found = records.parse(self._data[self._starts[index] : self._ends[index]], lambda: self.place(index))
        if not isinstance(found, Mapping):
            raise records.not_named(self.place(index), found)
        return found

    def place(self, index: int) -> str:
        return locations.place(self._path, self._start + self._starts[index])


def _open_lines(location: Location, how: _How) -> _CutFile:
    (path, size), nbytes = location, how.nbytes

    def read(block: int) -> _Lines:
        start, stop = block * nbytes, min(size, (block + 1) * nbytes)
        begin = max(0, start - 1)  # with the byte before, which tells whether a line begins at the first one
        data = locations.read(path, begin, min(size, stop + _TAIL))
        first = 0 if not start else data.find(b"\n", 0, stop - 1 - begin) + 1
        if start and not first:
            return _Lines(path, start, b"")  # all of the block is inside of a line
        tail = _TAIL
        while (end := data.find(b"\n", stop - 1 - begin)) < 0 and stop + tail < size:
            if stop + tail - begin > records.MOST_LINE:
                place = locations.place(path, begin + data.rfind(b"\n") + 1)
                raise UserError(f"{place}: has more than {records.MOST_LINE} bytes; write one object a line")
            data += locations.read(path, stop + tail, min(size, stop + 2 * tail))
            tail *= 2
        return _Lines(path, begin + first, data[first : len(data) if end < 0 else end])

    return _CutFile(-(-size // nbytes), read, nbytes)


# ---- tables


class _TableRows:
    """Documents of a table: rows, whose values are compared with the names of the fields when they are read."""

    def __init__(self, path: str, names: Sequence[str], rows: Sequence[tuple[int, list[str]]]):
        self._path, self._names, self._rows = path, names, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        _, row = self._rows[index]
        records.check_values(row, self._names, self.place(index))
        return dict(zip(self._names, row))

    def place(self, index: int) -> str:
        return f"{self._path}:{self._rows[index][0]}"


def _open_table(location: Location, how: _How, delimiter: str) -> _CutFile:
    (path, size), nbytes = location, how.nbytes
    dialect: dict[str, Any] = {"delimiter": delimiter, "strict": True}

    def indexed() -> dict[str, np.ndarray]:
        starts, numbers = array.array("q"), array.array("q")
        with locations.opened(path) as file:
            lines = _Counted(file, path)
            reader = csv.reader(iter(lines), **dialect)
            _, names = next(records.table_rows(reader, path), (1, [""]))
            records.checked_names(names, path)
            following, at = 0, lines.offset
            for number, _ in records.table_rows(reader, path):
                if at >= following:
                    starts.append(at)
                    numbers.append(number)
                    following = 0 if size < _FINE else at - at % _GRAIN + _GRAIN
                at = lines.offset
        header = np.frombuffer("\0".join(names).encode(), np.uint8)
        return {"names": header, "starts": np.array(starts), "numbers": np.array(numbers)}

    key = kept.key("rows of a table", path, size, locations.version(path), locations.fingerprint(location))
    index = kept.arrays(how.cache if size >= _FINE else None, key, indexed)
    names = index["names"].tobytes().decode().split("\0")
    starts, numbers = index["starts"].tolist(), index["numbers"].tolist()
    # The rows at which blocks begin: each the first after so many bytes
    firsts = [at for at, start in enumerate(starts) if not at or start // nbytes > starts[at - 1] // nbytes]
    ends = [*(starts[at] for at in firsts[1:]), size]

    def read(block: int) -> _TableRows:
        start, first = starts[firsts[block]], numbers[firsts[block]]
        text = io.StringIO(_decoded(locations.read(path, start, ends[block]), path, first), newline="")
        rows = records.table_rows(csv.reader(text, **dialect), path, first)
        return _TableRows(path, names, [(number, row) for number, row in rows if row])

    return _CutFile(len(firsts), read, nbytes)


class _Counted:
    """Yields the lines of a table as texts, and counts their bytes in `offset`."""

    def __init__(self, file: Any, path: str):
        self._file, self._path, self.offset = file, path, 0

    def __iter__(self) -> Iterator[str]:
        for number in itertools.count(1):
            line = self._file.readline(records.MOST_LINE)
            if not line:
                return
            self.offset += len(line)
            yield _decoded(line, self._path, number)


def _decoded(data: bytes, path: str, line: int) -> str:
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        number = line + data.count(b"\n", 0, error.start)
        raise UserError(f"{path}:{number}: is not UTF-8 text; save the file as UTF-8") from error


# ---- parquet


def _open_parquet(location: Location, how: _How) -> _CutFile:
    """Opens a parquet file, of which a block is a row group.

    Of a larger one than a row holds it is a part, and to read that, all before it in the row group is unpacked.
    """
    path, _ = location
    with _parquet(path) as table:
        names, about = table.schema_arrow.names, table.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        rows = [group.num_rows for group in groups]
        sizes = [group.total_byte_size for group in groups]
    known = [name for name in how.columns if name in names]
    wanted = known if len(known) == len(how.columns) and known else None
    before = np.cumsum([0, *rows])
    # (row group, its first row, the row after its last) of each block
    blocks = [
        (number, count * part // parts, count * (part + 1) // parts)
        for number, (count, size) in enumerate(zip(rows, sizes))
        for parts in [min(count, max(-(-size // how.held), -(-count // _MOST_PART)))]
        for part in range(parts)
    ]

    def read(block: int) -> records.ParquetRows:
        number, start, stop = blocks[block]
        found, at = [], 0
        with _parquet(path) as table:
            for batch in table.iter_batches(_ROWS, row_groups=[number], columns=wanted, use_threads=False):
                if batch.nbytes > _MOST_UNPACKED:
                    raise UserError(
                        f"{path}: {_ROWS} rows unpack to more than {_MOST_UNPACKED} bytes; write it as JSON lines"
                    )
                chosen = np.arange(max(0, start - at), min(stop - at, batch.num_rows))
                if len(chosen):
                    found.append(batch.take(pyarrow.array(chosen)))  # a slice would hold the whole batch
                at += batch.num_rows
                if at >= stop:
                    break
        return records.ParquetRows(path, int(before[number]) + start, found)

    return _CutFile(len(blocks), read, min(how.held, max(sizes, default=1)))


def _parquet(path: str) -> contextlib.AbstractContextManager[pyarrow.parquet.ParquetFile]:
    return records.parquet(path, lambda: locations.opened(path), pre_buffer=False, buffer_size=2**16)


_PARQUET = ".parquet"
_OPENERS: dict[str, Callable[[Location, _How], _CutFile]] = {
    ".jsonl": _open_lines,
    ".csv": functools.partial(_open_table, delimiter=","),
    ".tsv": functools.partial(_open_table, delimiter="\t"),
    _PARQUET: _open_parquet,
}
