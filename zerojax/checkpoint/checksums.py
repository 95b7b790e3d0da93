"""Records the bytes and the checksum of every file of a folder. This module reads files in parallel threads, and finds those that changed.

The checksum is a CRC-32. It finds every change of up to 32 neighbouring bits, and misses one in 4e9 of the others. It is no protection
against someone who changes a file on purpose.
"""

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from zerojax import bounded, files

CRC32 = "crc32"  # the key of a table's own checksum
THREADS = 16
BLOCK = 1 << 20  # bytes read at a time; zlib releases Python's lock while it reads one


class File(NamedTuple):
    """The bytes of a file and its checksum; None if it was recorded without one."""

    size: int
    crc32: int | None


class Record(NamedTuple):
    """The content of a record: the step of the files, None if unknown, and the files by their path in the folder."""

    step: int | None
    files: Mapping[str, File]

    @property
    def has_checksums(self) -> bool:
        """Returns whether the files were recorded with checksums."""
        return self.step is not None


def names(folder: pathlib.Path) -> list[str]:
    """Lists the files in a folder and below, by their path in it. Hidden files are left out."""
    found = []
    for parent, _, here in os.walk(folder):
        found += [pathlib.Path(parent, name).relative_to(folder).as_posix() for name in here if name[0] != "."]
    return sorted(found)


def of(folder: pathlib.Path, chosen: Iterable[str]) -> dict[str, File]:
    """Reads files of a folder, and returns the bytes and the checksum of each.

    Raises:
      OSError: a file cannot be read. `filename` names it.
    """
    chosen = list(chosen)
    with concurrent.futures.ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(chosen, pool.map(_of, [folder / name for name in chosen])))


def write(path: pathlib.Path, record: Record) -> None:
    """Writes a record atomically. Its first entry is the checksum of the others.

    Raises:
      OSError: the disk is full, or the folder cannot be written.
    """
    files.replace(path, _text(record))


def read(path: pathlib.Path) -> Record:
    """Reads a record, also one of sizes alone: older code wrote {name: bytes}.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not as written. The text says why.
    """
    try:
        text = bounded.read_text(path)
        saved = bounded.parse_json(text)
    except ValueError as error:
        raise ValueError("is cut or altered") from error
    if not isinstance(saved, dict):
        raise ValueError("is not a table")
    if CRC32 not in saved:
        if not all(isinstance(size, int) for size in saved.values()):
            raise ValueError("is altered")
        return Record(None, {name: File(size, None) for name, size in saved.items()})
    try:
        record = Record(saved["step"], {name: File(*pair) for name, pair in saved["files"].items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("is altered") from error
    if _text(record) != text:
        raise ValueError("is altered")
    return record


def of_values(values: Mapping[str, Any]) -> int:
    """Returns the checksum of a table of JSON, whatever the spaces in its file."""
    return zlib.crc32(json.dumps(values).encode())


def is_altered(saved: dict[str, Any]) -> bool:
    """Removes a table's own checksum, and returns whether it is another than that of the rest; older code wrote none."""
    return saved.pop(CRC32, None) not in (None, of_values(saved))


def flaw(folder: pathlib.Path, saved: Mapping[str, File], *, part: slice) -> str | None:
    """Returns the first difference between a folder's files and their record, or None if there is none.

    Args:
      folder: the folder.
      saved: the recorded files. A file beside them is a flaw, unless they were recorded without checksums.
      part: the files whose contents are read. Files in subfolders come first, the largest before the smaller ones. The sizes of all
        files are compared.
    """
    for name, file in saved.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != file.size:
            return f"{name} has {size} bytes of {file.size}"
    checked = sorted(
        (name for name in saved if saved[name].crc32 is not None), key=lambda name: (-saved[name].size, name)
    )
    try:
        found = of(folder, checked[part])
    except OSError as error:
        return f"{pathlib.Path(error.filename or folder).relative_to(folder)}: {error.strerror}"
    return next((f"{name} is altered" for name, file in found.items() if file != saved[name]), None)


def _of(path: pathlib.Path) -> File:
    """Reads a file."""
    size = crc32 = 0
    block = memoryview(bytearray(BLOCK))
    try:
        with bounded.open_file(path) as file:
            while count := file.readinto(block):  # type: ignore[attr-defined]
                size, crc32 = size + count, zlib.crc32(block[:count], crc32)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed read does not name its file
        raise
    return File(size, crc32)


def _text(record: Record) -> str:
    """Returns the one text of a record."""
    content = {"step": record.step, "files": {name: list(record.files[name]) for name in sorted(record.files)}}
    return json.dumps({CRC32: of_values(content), **content})
