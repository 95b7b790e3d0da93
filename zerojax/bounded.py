"""Files and texts that others wrote. This module opens regular files alone, and reads texts and JSON within bounds.

The name of a pipe or a device in place of a file would let a program wait forever, or read forever. A small text can ask for much memory: a
JSON text of brackets takes thirty times its own bytes.
"""

import errno
import itertools
import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from zerojax.errors import UserError

MOST_BYTES = 64 * 2**20  # of a file of settings
MOST_VALUES = 2**21  # of a JSON text; each takes some 100 bytes of memory, and up to 250
_MOST_DIGITS = 308  # of a whole number that a float can hold


def open_file(path: str | os.PathLike[str], most: int | None = None) -> BinaryIO:
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


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises OSError as `open_file` does."""
    with open_file(path, most) as file:
        content = file.read(most + 1)  # a file of the kernel has more than it says
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str], most: int = MOST_BYTES) -> str:
    """Returns the text of a regular file in UTF-8. Raises OSError as `open_file` does, and UnicodeDecodeError, which is a ValueError."""
    return read_bytes(path, most).decode("utf-8-sig")


def parse_json(text: str | bytes, *, is_strict: bool = False) -> Any:
    """Returns the values of a JSON text.

    Args:
      text: the text, or its bytes.
      is_strict: refuse NaN, and numbers beyond the range of a float, which Python reads as infinity or as whole numbers that become no
        float.

    Raises:
      ValueError: it is no JSON, is nested too deeply, holds too many values or digits, or has a key twice in a table, of which Python takes
        the last.
    """
    count = sum(map(text.count, (b",", b"[", b"{"))) if isinstance(text, bytes) else sum(map(text.count, ",[{"))
    if count > MOST_VALUES:
        raise ValueError(f"it holds more than {MOST_VALUES} values")
    how: dict[str, Any] = {"object_pairs_hook": once}
    if is_strict:
        how |= {"parse_float": _finite, "parse_int": _whole, "parse_constant": _not_finite}
    try:
        return json.loads(text, **how)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def decoded(data: bytes) -> str:
    """Returns the text of bytes in UTF-8.

    Raises:
      UserError: they are no UTF-8; a model would learn other letters in place of what is there.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        near = data[max(error.start - 16, 0) : error.start + 16]
        raise UserError(
            f"is not UTF-8 at its byte {error.start} (near {near!r}); save the text as UTF-8, or remove it"
        ) from error


def half_letter(value: Any) -> str:
    """Returns the place of a half of a surrogate pair, which is no letter, in a value of JSON; "" if its texts have none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return ascii(error.object[max(error.start - 16, 0) : error.start + 1])
    return ""


def _check(status: os.stat_result, path: str | os.PathLike[str], most: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and no file", os.fspath(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, and at most {most} are read", os.fspath(path))


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _not_finite(text)


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:40]}... has {len(text)} digits, and a float has at most {_MOST_DIGITS}")
    return int(text)


def once(pairs: list[tuple[str, Any]], refusal: Callable[[str], ValueError] | None = None) -> dict[str, Any]:
    """Returns the table of pairs. For a key that comes twice it raises what `refusal` makes of it, by default a ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):  # in the order of first places, so the first that differs is there again
        key = next(key for (key, _), own in itertools.zip_longest(pairs, found) if key != own)
        raise refusal(key) if refusal else ValueError(f"the key {key[:40]!r} comes twice")
    return found


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no finite number")
