"""Files and texts that others wrote. This module opens regular files alone, and reads texts and JSON within bounds.

The name of a pipe or a device in place of a file would let a program wait forever, or read forever. A small text can ask for much memory: a
JSON text of brackets takes thirty times its own bytes.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

MOST_BYTES = 64 * 2**20  # of a file of settings
MOST_VALUES = 2**21  # of a JSON text; each takes some 100 bytes of memory, and up to 250


def open_file(path: str | os.PathLike, most: int | None = None) -> BinaryIO:
    """Opens a regular file to read its bytes.

    Args:
      path: the file, or a link to it.
      most: the most bytes that it may have; None for any number.

    Raises:
      OSError: it cannot be opened, is a folder, a pipe, a socket or a device, or is larger. `strerror` says why.
    """
    _check(os.stat(path), path, most)  # a device may act when it is opened
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(descriptor), path, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike, most: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises OSError as `open_file` does."""
    with open_file(path, most) as file:
        content = file.read(most + 1)  # a file of the kernel has more than it says
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return content


def read_text(path: str | os.PathLike, most: int = MOST_BYTES) -> str:
    """Returns the text of a regular file in UTF-8. Raises OSError as `open_file` does, and UnicodeDecodeError, which is a ValueError."""
    return read_bytes(path, most).decode("utf-8-sig")


def parse_json(text: str | bytes, *, is_strict: bool = False) -> Any:
    """Returns the values of a JSON text.

    Args:
      text: the text, or its bytes.
      is_strict: refuse a key that comes twice in a table, of which Python takes the last, NaN, and numbers beyond the range of a float,
        which Python reads as infinity.

    Raises:
      ValueError: it is no JSON, is nested too deeply, or holds too many values or digits.
    """
    count = sum(map(text.count, (b",", b"[", b"{"))) if isinstance(text, bytes) else sum(map(text.count, ",[{"))
    if count > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")
    how: dict[str, Any] = {}
    if is_strict:
        how = {"parse_float": _finite, "parse_constant": _not_finite, "object_pairs_hook": once}
    try:
        return json.loads(text, **how)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _check(status: os.stat_result, path: str | os.PathLike, most: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and no file", os.fspath(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, and at most {most} are read", os.fspath(path))


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def once(pairs: list[tuple[str, Any]], refusal: Callable[[str], ValueError] | None = None) -> dict[str, Any]:
    """Returns the table of pairs. For a key that comes twice it raises what `refusal` makes of it, by default a ValueError."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise refusal(key) if refusal else ValueError(f"the key {key[:40]!r} comes twice")
        found[key] = value
    return found


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no finite number")
