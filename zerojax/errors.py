"""The one exception that means "the input is wrong". This module holds it, and functions that read other exceptions."""

import contextlib
import difflib
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# The messages of Python, TensorStore and array_record, and that of tensorflow-datasets, which checks for space first.
_NO_SPACE_WORDS = ("No space left", "quota exceeded", "Not enough disk space")
# XLA's allocator of host memory says "allocating", that of a device "while trying to allocate". CUDA's of pinned memory names the host.
_NO_HOST_MEMORY = re.compile(r"Out of memory allocating|host memory|bad_alloc|Cannot allocate memory|MemoryError")
# A file server that has forgotten an open file, or a disk that fails.
_LOST = tuple(getattr(errno, name) for name in ("ESTALE", "EIO", "EREMOTEIO") if hasattr(errno, name))
# Where this user may not write or read.
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_LONGEST = 2000  # characters of an error line
_LIBRARY = os.path.dirname(os.path.abspath(__file__)) + os.sep
_python_form = warnings.formatwarning


class UserError(ValueError):
    """Names in one line the broken rule, the value, the place and the way out.

    The command lines print it without a traceback and exit with status 2. Characters that would break the line are escaped.
    """

    def __str__(self) -> str:
        text = super().__str__()
        text = (
            text if text.isprintable() else "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
        )
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def warn_in_one_line(named: Callable[[str], str] = str) -> None:
    """Lets Python print a warning of this library as a command line prints an error: one line, without its place in the source.

    Options of Python (`PYTHONWARNINGS`, `-W`) hold for other warnings alone: these lines tell what a command does with its settings.

    Args:
      named: gives a line the names that the command line uses.
    """

    def form(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        if category is UserWarning and filename.startswith(_LIBRARY):
            return f"zerojax: {named(str(message))}\n"
        return _python_form(message, category, filename, lineno, line)

    warnings.formatwarning = form
    if sys.warnoptions:
        warnings.filterwarnings("default", category=UserWarning, module="zerojax")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that caused it, and so on to the first. Each comes once: an error may come to cause itself."""
    known: set[int] = set()
    while error is not None and id(error) not in known:
        yield error
        known.add(id(error))
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def below(place: str) -> Iterator[None]:
    """Puts a place ("config.") in front of the UserErrors of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}{error}") from error


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, means that the disk or the user's quota is full."""
    return any(
        getattr(cause, "errno", None) in _NO_SPACE or any(words in str(cause) for words in _NO_SPACE_WORDS)
        for cause in causes(error)
    )


def lost_file(error: BaseException) -> str:
    """Returns the file, if it is known, and the reason if an error means that its file system or disk fails; else ""."""
    found = next((cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno in _LOST), None)
    return (
        ""
        if found is None
        else f"{found.filename or 'a file'}: its file system fails ({os.strerror(found.errno or 0)})"
    )


def denied(error: BaseException) -> str:
    """Returns the file, the reason and the way out if an error means that this user may not use a file; else ""."""
    found = next((cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno in _DENIED), None)
    if found is None or found.filename is None:
        return ""
    return f"{found.filename}: cannot be used ({os.strerror(found.errno or 0)}); give this user access or choose another path"


def is_host_memory_full(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, means that the host's memory is full."""
    return any(
        isinstance(cause, MemoryError)  # numpy's too
        or getattr(cause, "errno", None) == errno.ENOMEM
        or (isinstance(cause, RuntimeError) and _NO_HOST_MEMORY.search(str(cause)) is not None)
        for cause in causes(error)
    )


def shown(value: object, most: int = 120) -> str:
    """Returns a value as it is written in Python, cut to `most` characters. Python refuses to write integers of 4300 digits or more."""
    try:
        text = repr(value)
    except Exception:  # a value's own code may raise anything
        text = (
            f"{type(value).__name__} of {value.bit_length()} bits" if isinstance(value, int) else object.__repr__(value)
        )
    return text if len(text) <= most else f"{text[: most - 20]}...{text[-17:]}"


def choose(value: object, known: Iterable[Any]) -> str:
    """Returns the way out of a name that is not known: the nearest of `known`, or all of them.

    >>> choose("tinny", ["test", "tiny"])
    "did you mean 'tiny'?"
    """
    names = {str(name): name for name in known}
    near = difflib.get_close_matches(value, names, 1) if isinstance(value, str) else []
    return f"did you mean {names[near[0]]!r}?" if near else f"known: {', '.join(names)}"


def one_of(place: str, value: Any, known: Collection[Any]) -> None:
    """Raises a UserError for a value that is not among those known, which are texts or whole numbers."""
    if not isinstance(value, str | int) or value not in known:
        near = choose(value, known)
        way_out = f"; {near}" if near.startswith("did") else ""
        raise UserError(f"{place}: must be one of {', '.join(map(str, known))}, and is {shown(value)}{way_out}")


def truth(place: str, value: Any, way_out: str) -> bool:
    """Returns a value of a file that must be true or false. Raises a UserError for others, of which Python would take most as true."""
    if not isinstance(value, bool):
        raise UserError(f"{place}: must be true or false, and is {shown(value)}; {way_out}")
    return value


def regex(place: str, pattern: Any, way_out: str = "") -> re.Pattern[str]:
    """Returns a compiled regex over texts. Raises a UserError for what is none, or is too large for Python."""
    try:
        found = re.compile(pattern)
        found.search("")  # not a regex over bytes
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        why = first_line(error) + (f"; {way_out}" if way_out else "")
        raise UserError(f"{place}: {shown(pattern)} is not a regex: {why}") from error
    return found


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that is not blank, or the error's type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """Returns an error's type and the first line of its text, without an end of a sentence."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}".rstrip(". ")


def one_line(error: BaseException, most: int = 300) -> str:
    """Returns all lines of an error's text as one, cut to `most` characters."""
    return " ".join(str(error).split())[:most]
