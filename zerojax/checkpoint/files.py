"""Reads a directory of checkpoints. This module tells complete steps from damaged and foreign ones.

A complete step is DIRECTORY/STEP with the items state, data and meta, and sizes.json. That file lists the bytes of every
file, so a truncated or missing file is found before anything is read. An incomplete step has a temporary name.
"""

import json
import math
import os
import pathlib
from collections.abc import Sequence

from zerojax.errors import UserError

ITEMS = ("state", "data", "meta")
SIZES = "sizes.json"
WRITTEN = {*ITEMS, SIZES, "_CHECKPOINT_METADATA", "commit_success.txt"}
UNFINISHED = "orbax-checkpoint-tmp"  # in the temporary name of a step
SHOWN = 3  # names listed in an error before "and N more"


def open_directory(directory: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path of a directory that can hold checkpoints. Creates it if it does not exist.

    Raises:
      UserError: it cannot be created or written, or holds other files and no checkpoint.
    """
    if "://" in str(directory):
        raise UserError(f"{directory}: checkpoints need a mounted file system; give a directory's path")
    path = pathlib.Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
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


def steps(directory: pathlib.Path) -> list[int]:
    """Lists the complete steps, ascending."""
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal() and entry.is_dir()]
    return sorted(int(name) for name in names if name == str(int(name)))


def losses(directory: pathlib.Path) -> dict[int, float]:
    """Returns the evaluation loss of each step that holds only files of a save, and so may be deleted.

    A step without a loss, or with a damaged one, has an infinite loss.
    """
    held = {step: {entry.name for entry in (directory / str(step)).iterdir()} for step in steps(directory)}
    return {step: _loss(directory / str(step)) for step in held if held[step] <= WRITTEN}


def intact(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of a step whose files are all complete.

    Raises:
      UserError: the step is missing, foreign or damaged.
    """
    path, there = directory / str(step), steps(directory)
    if step not in there:
        choice = f"choose one of steps {', '.join(map(str, there))}" if there else "it holds no checkpoint at all"
        raise UserError(f"{directory}: no checkpoint of step {step}; {choice}")
    if not any((path / item).exists() for item in ITEMS):
        raise UserError(f"{path}: not a checkpoint of zerojax; move it away or choose another directory")
    flaw = _flaw(path)
    if flaw is not None:
        raise damaged(directory, step, flaw)
    return path


def damaged(directory: pathlib.Path, step: int, flaw: str) -> UserError:
    """Returns the error for a damaged step. It names the newest intact step before it."""
    path = directory / str(step)
    earlier = (number for number in reversed(steps(directory)) if number < step)
    safe = next((number for number in earlier if _flaw(directory / str(number)) is None), None)
    way_out = (
        f"step {safe} is intact: delete or move {path} out of {directory} to resume from step {safe}"
        if safe is not None
        else "no earlier step is intact: choose another directory to start over"
    )
    return UserError(f"{path}: checkpoint is damaged ({flaw}); {way_out}")


def write_sizes(directory: pathlib.Path, step: int) -> None:
    """Writes the sizes of a step's files, once all are written and before the step is complete."""
    (path,) = directory.glob(f"{step}.{UNFINISHED}*")
    (path / SIZES).write_text(json.dumps(_sizes(path)))


def read_json(path: pathlib.Path, item: str) -> dict:
    """Reads a JSON item of a step."""
    return json.loads((path / item / "metadata").read_text())


def listed(names: Sequence[str]) -> str:
    """Joins the first few names."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _loss(path: pathlib.Path) -> float:
    """Returns a step's evaluation loss."""
    try:
        loss = read_json(path, "meta")["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        loss = None
    return math.inf if loss is None else loss


def _flaw(path: pathlib.Path) -> str | None:
    """Returns the first flaw of a step's files, or None if all are complete."""
    try:
        saved, found = json.loads((path / SIZES).read_text()), _sizes(path)
    except OSError as error:
        return f"{SIZES}: {error.strerror}"
    except ValueError:
        return f"{SIZES} is cut"
    if not isinstance(saved, dict):
        return f"{SIZES} is not a table"
    for name, size in saved.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} bytes of {size}"
    return None


def _sizes(path: pathlib.Path) -> dict[str, int]:
    """Returns the bytes of each file of a step's items, by its path in the step."""
    files = [file for item in ITEMS for file in (path / item).rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
