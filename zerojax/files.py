"""Small files that a crash must not leave half written. This module replaces them, and reports disk errors in one line."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from zerojax.errors import UserError


def replace(path: str | os.PathLike, text: str) -> None:
    """Writes `text` beside `path` and renames it to `path`: a reader finds the old text or the new one, never a part.

    Raises:
      OSError: the disk is full, or the folder cannot be written; the old file is unchanged.
    """
    path = pathlib.Path(path)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


@contextlib.contextmanager
def writing(path: str | os.PathLike, way_out: str = "make room, then run again to resume") -> Iterator[None]:
    """Turns an OSError of the block, which writes `path`, into a UserError that names the path, the reason and the way out."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); {way_out}") from error
