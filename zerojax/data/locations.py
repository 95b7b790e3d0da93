"""Finds files and reads parts of them, on this host or by URL. This module asks fsspec about URLs, which is imported when one is named.

A URL is one that fsspec knows, such as gs://bucket/web-*.jsonl, s3://..., or hf://datasets/USER/DATASET/*.parquet.
"""

import functools
import os
import re
import time
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple, TypeVar

from zerojax import bounded, errors, files
from zerojax.data.pairs import records
from zerojax.errors import UserError

_URL = re.compile(r"[a-zA-Z][\w+.-]*(?=://)")
_ATTEMPTS, _PAUSE = 3, 0.5  # of a read from elsewhere, and the seconds after the first that fails
_WAY_OUT = "make it readable for this host"
_COUNTED = 2**20  # bytes of which lines are counted at a time
_MOST_COUNTED = 2**30  # bytes of a file elsewhere of which lines are counted, for an error line
_ENDS = 64 << 10  # bytes at either end of a file that tell it apart from others

Found = TypeVar("Found")


class Location(NamedTuple):
    """A file."""

    path: str  # or its URL
    size: int  # bytes


def is_remote(path: str) -> bool:
    """Returns whether a path is a URL."""
    return _URL.match(path) is not None


def matching(pattern: str, key: str) -> list[Location]:
    """Returns the files that a path, a URL or a pattern of them names, by name.

    Args:
      pattern: with *, ? or [...], or without.
      key: the argument that names it, for errors.

    Raises:
      UserError: there is none, one cannot be read, or the package that reads such URLs is missing.
    """
    paths = _matching_urls(pattern, key) if is_remote(pattern) else records.matching(pattern)
    if not paths:
        raise UserError(f"{key}: there is no file {pattern!r}; name a file, or several with * in the name")
    return [Location(path, size(path)) for path in paths]


def size(path: str) -> int:
    """Returns the bytes of a file.

    Raises:
      UserError: it cannot be read.
    """
    if is_remote(path):
        return int(_of_url(path, lambda system, inner: system.size(inner)))
    with files.reading(path, _WAY_OUT), bounded.open_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read(path: str, start: int, stop: int) -> bytes:
    """Returns the bytes `start` to `stop` of a file, as far as it has them.

    Raises:
      UserError: it cannot be read.
    """
    if is_remote(path):
        found: bytes = _of_url(path, lambda system, inner: system.cat_file(inner, start=start, end=stop))
        return found
    with files.reading(path, _WAY_OUT), bounded.open_file(path) as file:
        file.seek(start)
        return file.read(stop - start)


def opened(path: str) -> BinaryIO:
    """Opens a file for reading at any place.

    Raises:
      UserError: it cannot be read.
    """
    if is_remote(path):
        found: BinaryIO = _of_url(path, lambda system, inner: system.open(inner, "rb"))
        return found
    with files.reading(path, _WAY_OUT):
        return bounded.open_file(path)


def place(path: str, offset: int) -> str:
    """Returns the file and the line of a byte, for an error line.

    Far inside of a file elsewhere it is the number of the byte: to count lines takes a read.
    """
    if is_remote(path) and offset > _MOST_COUNTED:
        return f"{path}, byte {offset}"
    line = 1
    with opened(path) as file:
        while offset > 0 and (part := file.read(min(offset, _COUNTED))):
            line += part.count(b"\n")
            offset -= len(part)
    return f"{path}:{line}"


def version(path: str) -> str:
    """Returns what changes when a file is written again."""
    if is_remote(path):
        return str(_of_url(path, lambda system, inner: system.ukey(inner)))
    with files.reading(path, _WAY_OUT):
        return str(os.stat(path).st_mtime_ns)


def fingerprint(location: Location) -> int:
    """Returns the CRC-32 of a file's size and of its first and last bytes. The time does not depend on its size."""
    found = zlib.crc32(str(location.size).encode())
    found = zlib.crc32(read(location.path, 0, _ENDS), found)
    return zlib.crc32(read(location.path, max(0, location.size - _ENDS), location.size), found)


def _matching_urls(pattern: str, key: str) -> list[str]:
    scheme = _URL.match(pattern)
    assert scheme is not None
    try:
        import fsspec
    except ImportError as error:
        raise UserError(f'{key}: {pattern!r} is a URL, which fsspec reads; pip install "zerojax[remote]"') from error
    try:
        system, inner = fsspec.core.url_to_fs(pattern)
    except ImportError as error:  # fsspec names the package: "Install s3fs to access S3"
        why = errors.first_line(error)
        raise UserError(f"{key}: {scheme[0]}:// needs a package that is not installed ({why}); install it") from error
    except ValueError as error:
        known = ", ".join(sorted(name for name in fsspec.available_protocols() if name in ("gs", "hf", "https", "s3")))
        raise UserError(f"{key}: fsspec knows no {scheme[0]}:// ({known} and others); correct the URL") from error
    has_pattern = any(mark in inner for mark in "*?[")
    names = _tried(pattern, lambda: system.glob(inner) if has_pattern else [inner] if system.exists(inner) else [])
    return sorted(system.unstrip_protocol(name) for name in names)


def _of_url(url: str, ask: Callable[[Any, str], Found]) -> Found:
    """Returns what a file system answers about a file."""
    return _tried(url, lambda: ask(*_system(url)))


@functools.lru_cache(maxsize=1024)
def _system(url: str) -> tuple[Any, str]:
    import fsspec

    system, inner = fsspec.core.url_to_fs(url)
    return system, inner


def _tried(url: str, ask: Callable[[], Found]) -> Found:
    """Returns what `ask` returns, which may fail a few times: a network does.

    Raises:
      UserError: it fails again and again, or the file is not there.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return ask()
        except Exception as error:  # each file system raises its own
            if attempt == _ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError):
                why = errors.kind_and_line(error)
                raise UserError(f"{url}: cannot be read ({why}); {_WAY_OUT}") from error
            time.sleep(_PAUSE * attempt)
    raise AssertionError
