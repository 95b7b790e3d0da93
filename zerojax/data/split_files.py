"""Tells which file of a prepared dataset is which. This module keeps a fingerprint of each beside them.

Files of two splits that were swapped have the right format, and may have the right number of examples. Only their contents tell.
"""

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Iterable

from zerojax import files
from zerojax.errors import UserError

FILE = "fingerprints.json"  # {name of a file: its fingerprint}
ENDS = 64 << 10  # bytes


def record(folder: str | os.PathLike[str]) -> None:
    """Writes the fingerprints of a dataset's files into its folder.

    Raises:
      OSError: a file cannot be read, or the folder cannot be written.
    """
    found = {path.name: fingerprint(path) for path in sorted(pathlib.Path(folder).glob("*.array_record*"))}
    files.replace(pathlib.Path(folder) / FILE, json.dumps(found, indent=2) + "\n")


def check(folder: str | os.PathLike[str], paths: Iterable[str | os.PathLike[str]]) -> None:
    """Checks that files of a dataset are those that were prepared under their names, as far as the folder has fingerprints.

    Raises:
      UserError: one is not, or the fingerprints cannot be read.
      OSError: a file cannot be read.
    """
    written = pathlib.Path(folder) / FILE
    if not os.path.lexists(written):
        return
    try:
        known = json.loads(written.read_text())
        assert isinstance(known, dict)
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise UserError(
            f"data_dir: {os.fspath(written)!r} is damaged: it holds no table of fingerprints; delete {os.fspath(folder)!r} "
            "and run again"
        ) from error
    names = [pathlib.Path(path) for path in paths]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for path, found in zip(names, pool.map(fingerprint, names)):
            expected = known.get(path.name, found)
            if found == expected:
                continue
            others = [repr(name) for name, value in known.items() if value == found]
            held = f"what {others[0]} held" if others else "something else"
            raise UserError(
                f"data_dir: {os.fspath(path)!r} holds {held}, and not what was prepared under its name (fingerprint "
                f"{expected}, now {found}): files were swapped or damaged; delete {os.fspath(folder)!r} and run again"
            )


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Returns the CRC-32 of a file's size and of its first and last bytes, in hexadecimal. The time does not depend on its size."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        found = zlib.crc32(file.read(ENDS), zlib.crc32(str(size).encode()))
        file.seek(max(0, size - ENDS))
        return f"{zlib.crc32(file.read(ENDS), found):08x}"
