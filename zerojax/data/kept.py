"""Keeps on a disk what takes long to make of data, by its content. This module makes it once on a host, also for several processes.

A file is named by a hash of all that its arrays are made of. A damaged file is made again; one that cannot be written is not kept.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zerojax import errors, files

MOST_BYTES = 2**35  # of a folder: those that were not read for longest are removed
_SUFFIX = ".npz"

Arrays = Mapping[str, np.ndarray]


def key(*parts: Any) -> str:
    """Returns a hash of values: numbers, texts, bytes, and lists and tables of JSON."""
    found = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()


def hash_of_files(paths: Sequence[str]) -> str:
    """Returns a hash of the contents of files, in this order."""
    found = hashlib.blake2b(digest_size=20)
    for path in paths:
        with open(path, "rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def arrays(folder: str | os.PathLike[str] | None, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns what is kept under a key, or makes and keeps it.

    Args:
      folder: where it is kept; None keeps nothing.
      key: see `key`.
      make: makes it. While one process does so, others that ask for the same wait, and then read it.
    """
    if folder is None:
        return make()
    path = pathlib.Path(folder) / f"{key}{_SUFFIX}"
    with _alone(path):
        found = _read(path)
        if found is None:
            found = make()
            with contextlib.suppress(OSError):  # without room it is made again another time
                with files.replacing(path) as new, open(new, "wb") as file:
                    named: dict[str, Any] = dict(found)
                    np.savez(file, **named)
                _trim(path.parent)
    return found


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock beside a file inside the block, as far as the file system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "wb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: pathlib.Path) -> Arrays | None:
    """Returns the arrays of a file, None if there is none or it is damaged."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
            found = {name: kept[name] for name in kept.files}
        os.utime(path)
        return found
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive may raise anything
        if errors.is_host_memory_full(error):
            raise
        return None


def _trim(folder: pathlib.Path) -> None:
    """Removes the files that were not read for longest, until the rest have at most MOST_BYTES."""
    known = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: -path.stat().st_mtime)
    total = 0
    for path in known:
        total += path.stat().st_size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
