"""Reads a directory of checkpoints. This module tells complete steps from damaged and foreign ones.

A complete step is DIRECTORY/STEP with the items state, data and meta, and sizes.json. That file holds the step, and the bytes and the
checksum of every file, so damage is found before anything else is read. An incomplete step has a temporary name.
"""

import errno
import glob
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from etils.epath import gpath

from zerojax.checkpoint import checksums
from zerojax.errors import UserError

ITEMS = ("state", "data", "meta")
SIZES = "sizes.json"
CARD = "run.json"  # what the run was when it saved the step, for people; see `Checkpointer.save`
BATCH = "batch.npz"  # the next batch, where `data` does not tell it
LATE = ("_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes these last, when it completes a step
WRITTEN = {*ITEMS, SIZES, f"{SIZES}.new", CARD, BATCH, *LATE}  # a kill may leave the .new, the next text of the record
# Without these nothing can be restored.
NEEDED = ("state/_METADATA", "state/manifest.ocdbt", "data/metadata", "meta/metadata")
ALL, NONE = slice(None), slice(0)  # of a step's files: those to read
UNFINISHED = "orbax-checkpoint-tmp"  # in the temporary name of a step
SHOWN = 3  # names listed in an error before "and N more"


def open_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a directory that can hold checkpoints. Creates it if it does not exist, for this user alone.

    Raises:
      UserError: it cannot be created or written, or holds other files and no checkpoint.
    """
    if "://" in str(directory):
        raise UserError(f"{directory}: checkpoints need a mounted file system; give a directory's path")
    path = pathlib.Path(directory).absolute()
    if "\0" in str(path):
        raise UserError(f"{str(path)!r}: cannot hold checkpoints (it has a null byte); choose another directory")
    check_path(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        why = error.strerror
        raise UserError(f"{path}: cannot hold checkpoints ({why}); choose another directory") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"{path}: not writable; give this user write access or choose another directory")
    others = [name for name in names if not name.isdigit() and UNFINISHED not in name]
    if others and not steps(path):
        raise UserError(f"{path}: holds {listed(others)} and no checkpoint; choose an empty or new directory")
    return path


class Literal(gpath.PosixGPath):
    """A path for Orbax, in which every character stands for itself. A plain `epath.Path` takes its own text for a pattern in `glob`."""

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields the files below this folder whose names match the pattern."""
        for found in glob.glob(os.path.join(glob.escape(os.fspath(self)), pattern)):
            yield type(self)(found)


def check_path(path: pathlib.Path) -> None:
    """Checks that checkpoints below a path can be written and found again.

    Raises:
      UserError: the path holds a character that tensorstore takes for another, or is not UTF-8.
    """
    unfit = [char for char in "\\" if char in str(path)]
    if unfit or any(0xD800 <= ord(char) < 0xE000 for char in str(path)):
        what = f"holds {' '.join(unfit)}" if unfit else "is not UTF-8"
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise UserError(f"{shown}: {what}, and checkpoints under such a name would be lost; choose a path without it")


def steps(directory: pathlib.Path) -> list[int]:
    """Lists the complete steps, ascending. A directory that was removed has none."""
    if not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def losses(directory: pathlib.Path) -> dict[int, float]:
    """Returns the evaluation loss of each step that holds only files of a save, and so may be deleted.

    A step without a loss, or with a damaged one, has an infinite loss.
    """
    held = {step: {entry.name for entry in (directory / str(step)).iterdir()} for step in steps(directory)}
    return {step: _loss(directory / str(step)) for step in held if held[step] <= WRITTEN}


def intact(
    directory: pathlib.Path, step: int, part: slice = ALL, agree: Callable[[str | None], str | None] = lambda flaw: flaw
) -> pathlib.Path:
    """Returns the path of a step whose files are all as saved.

    Args:
      directory: of checkpoints.
      step: its number.
      part: the files whose contents this process reads; see `checksums.flaw`.
      agree: (flaw that this process found, or None) -> the flaw that any process found.

    Raises:
      UserError: the step is missing, foreign or damaged.
    """
    path = find(directory, step)
    flaw = agree(find_flaw(path, part))
    if flaw is not None:
        raise damaged(directory, step, flaw)
    return path


def find(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of a step, which may be damaged.

    Raises:
      UserError: the step is missing or foreign.
    """
    path, there = directory / str(step), steps(directory)
    if not os.path.lexists(path):
        choice = f"choose one of steps {', '.join(map(str, there))}" if there else "it holds no checkpoint at all"
        raise UserError(f"{directory}: no checkpoint of step {step}; {choice}")
    if not any((path / name).exists() for name in (*ITEMS, SIZES)):
        raise UserError(f"{path}: not a checkpoint of zerojax; move it away or choose another directory")
    return path


def find_flaw(path: pathlib.Path, part: slice = ALL) -> str | None:
    """Returns the first flaw of a step's files, or None if all are as saved.

    Args:
      path: the step's folder.
      part: the files whose contents are read; see `checksums.flaw`.
    """
    try:
        record = checksums.read(path / SIZES)
    except OSError as error:
        return f"{SIZES}: {error.strerror}"
    except ValueError as error:
        return f"{SIZES} {error}"
    if record.has_checksums:
        if str(record.step) != path.name:
            return f"the folder holds step {record.step} under another number"
        extra = [name for name in _names(path) if name not in record.files]
        if extra:
            return f"{extra[0]} is not a file of this step"
    return checksums.flaw(path, record.files, part=part)


def has_checksums(directory: pathlib.Path, step: int) -> bool:
    """Returns whether an intact step was saved with checksums. Older code recorded sizes alone."""
    return checksums.read(directory / str(step) / SIZES).has_checksums


def damaged(directory: pathlib.Path, step: int, flaw: str) -> UserError:
    """Returns the error for a damaged step. It names the newest intact step before it, whose files it reads."""
    path = directory / str(step)
    earlier = (number for number in reversed(steps(directory)) if number < step)
    safe = next((number for number in earlier if find_flaw(directory / str(number)) is None), None)
    way_out = (
        f"step {safe} is intact: delete or move {path} out of {directory} to resume from step {safe}"
        if safe is not None
        else "no earlier step is intact: choose another directory to start over"
    )
    return UserError(f"{path}: checkpoint is damaged ({flaw}); {way_out}")


def read_back(directory: pathlib.Path, step: int, beside: Mapping[str, bytes] | None = None) -> None:
    """Writes the files beside the items of a step that is written but not complete, reads all its files, and writes their sizes and
    checksums.

    Raises:
      OSError: a file is missing or cannot be read, or the disk is full.
    """
    (path,) = (entry for entry in directory.iterdir() if entry.name.startswith(f"{step}.{UNFINISHED}"))
    names = _names(path)
    for name in NEEDED:
        if name not in names:
            raise FileNotFoundError(errno.ENOENT, "was not written", name)
    for name, text in (beside or {}).items():
        (path / name).write_bytes(text)
        names.append(name)
    checksums.write(path / SIZES, checksums.Record(step, checksums.of(path, names)))


def seal(directory: pathlib.Path, step: int) -> None:
    """Adds the files that Orbax writes last to the record of a complete step. Without them, a kill before this call leaves it intact too.

    Raises:
      OSError: the step is not there, or the disk is full.
    """
    path = directory / str(step)
    record = checksums.read(path / SIZES)
    late = checksums.of(path, [name for name in LATE if (path / name).exists()])
    checksums.write(path / SIZES, checksums.Record(step, {**record.files, **late}))


def read_json(path: pathlib.Path, item: str) -> dict:
    """Reads a JSON item of a step."""
    return json.loads((path / item / "metadata").read_text())


def listed(names: Sequence[str]) -> str:
    """Joins the first few names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _names(path: pathlib.Path) -> list[str]:
    """Lists the files of a step's items. Other files in its folder are not read, and may be the user's."""
    return [f"{item}/{name}" for item in ITEMS for name in checksums.names(path / item)]


def _loss(path: pathlib.Path) -> float:
    """Returns a step's evaluation loss."""
    try:
        saved = {name: file for name, file in checksums.read(path / SIZES).files.items() if name == "meta/metadata"}
        loss = None if checksums.flaw(path, saved, part=ALL) else read_json(path, "meta")["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        loss = None
    return loss if isinstance(loss, float) else math.inf
