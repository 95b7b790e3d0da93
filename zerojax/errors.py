"""The one exception that means "the input is wrong". This module holds it, and functions that read other exceptions."""

import errno
from collections.abc import Iterator

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# The messages of Python, TensorStore and array_record, and that of tensorflow-datasets, which checks for space first.
_NO_SPACE_WORDS = ("No space left", "quota exceeded", "Not enough disk space")


class UserError(ValueError):
    """Names in one line the broken rule, the value, the place and the way out.

    The command lines print it without a traceback and exit with status 2.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one that caused it, and so on to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_disk_full(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, means that the disk or the user's quota is full."""
    return any(
        getattr(cause, "errno", None) in _NO_SPACE or any(words in str(cause) for words in _NO_SPACE_WORDS)
        for cause in causes(error)
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text that is not blank, or the error's type if it has no text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


def one_line(error: BaseException, most: int = 300) -> str:
    """Returns all lines of an error's text as one, cut to `most` characters."""
    return " ".join(str(error).split())[:most]
