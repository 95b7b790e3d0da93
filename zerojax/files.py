"""Small files that a crash must not leave half written. This module replaces them, and reports unusable paths, damaged files and
disk errors in one line."""

import contextlib
import os
import pathlib
import re
import stat
import warnings
from collections.abc import Iterator

from zerojax import bounded, errors
from zerojax.errors import UserError

_LONGEST_KEY = 2**16  # bytes
_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def check_path(path: str | os.PathLike[str], place: str) -> None:
    """Checks that a path can name a file or folder of a mounted file system, which need not exist.

    Args:
      path: the path.
      place: the flag or the config key that holds it.

    Raises:
      UserError: the path is empty, a URL, too long, a loop of symbolic links, below a file, or holds characters that no path can hold.
    """
    text = os.fspath(path)
    if not text:
        raise UserError(f"{place}: is empty; name a path")
    if _URL.match(text):
        raise UserError(
            f"{place}: {errors.shown(text)} is a URL, and files need a mounted file system; mount it and give its path"
        )
    try:
        os.stat(text)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # ValueError: a null byte, or a character that is no UTF-8
        why = getattr(error, "strerror", None) or errors.first_line(error)
        raise UserError(f"{place}: {errors.shown(text)} cannot be used ({why}); choose another path") from error


def folder_bytes(path: str | os.PathLike[str]) -> int:
    """Returns the bytes of a folder's own files."""
    return sum(entry.stat().st_size for entry in pathlib.Path(path).iterdir() if entry.is_file())


def nearest(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns a path, or its nearest parent that exists: its file system is that of what will be made there."""
    found = pathlib.Path(path).absolute()
    while not os.path.exists(found) and found != found.parent:  # what cannot be looked into counts as not there
        found = found.parent
    return found


def replace(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` beside `path` and renames it to `path`: a reader finds the old text or the new one, never a part.

    Raises:
      OSError: the disk is full, or the folder cannot be written; the old file is unchanged.
    """
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Gives a new, empty file beside `path`, which gets its name at the end of the block, and is removed if the block fails.

    A symbolic link at either path is replaced and never followed: in a folder that others write, it could lead to a file of this user's.
    The file has the permissions of the one that it replaces, and this user may write it.
    """
    path = pathlib.Path(path)
    new = _beside(path)
    try:
        yield new
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _beside(path: pathlib.Path) -> pathlib.Path:
    """Makes an empty file beside `path`, in place of what an earlier process left there, and returns its path."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError), contextlib.closing(os.fdopen(descriptor, "wb")):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode):
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & 0o777 | 0o200)
    return new


def read_key(path: str | os.PathLike[str], place: str) -> str:
    """Returns the text of a file with a key or a secret, without white space around it. Warns if others can read the file.

    Args:
      path: the file.
      place: the flag or the variable that names it.

    Raises:
      UserError: it cannot be read, or is no text.
    """
    way_out = "name a file with the key"
    with reading(f"{place} {path}", way_out, f"is no text ({{}}); {way_out}"):
        found = bounded.read_text(path, _LONGEST_KEY).strip()
        if os.stat(path).st_mode & 0o077:
            warnings.warn(f"{place} {path}: others can read it; chmod 600 it", stacklevel=3)
    return found


def check_file(path: str | os.PathLike[str], place: str) -> None:
    """Checks that a path is free, or that of a file, which another may replace.

    Raises:
      UserError: it is a folder, a device or a pipe, or can be no path.
    """
    check_path(path, place)
    if os.path.isdir(path):
        raise UserError(f"{place} {path}: is a folder; name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{place} {path}: is a device or a pipe, which a file would replace; choose another path")


def check_replaceable(path: str | os.PathLike[str], place: str) -> None:
    """Checks, before long work, that `replace` can write a file, whose folder is made.

    Raises:
      UserError: it cannot.
    """
    check_file(path, place)
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _beside(path).unlink()
    except OSError as error:
        raise UserError(f"{place} {path}: cannot be written ({error.strerror}); choose another path") from error


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], way_out: str = "") -> Iterator[None]:
    """Turns an OSError of the block, which writes `path`, into a UserError that names the path, the reason and the way out: by default to
    run again."""
    try:
        yield
    except OSError as error:
        again = f"{'make room' if errors.is_disk_full(error) else 'fix that'}, then run again to resume"
        raise UserError(f"{path}: cannot be written ({error.strerror}); {way_out or again}") from error


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], way_out: str, damaged: str = "") -> Iterator[None]:
    """Turns an OSError of the block, which reads `path`, into a UserError that names the path, the reason and the way out.

    With `damaged` it does so to a ValueError, as of JSON or UTF-8; "{}" in this line becomes its text.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {way_out}") from error
    except ValueError as error:
        if not damaged:
            raise
        raise UserError(f"{path}: {damaged.replace('{}', errors.one_line(error, 120))}") from error
