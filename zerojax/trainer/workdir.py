"""Ties a folder to one run. This module locks it, saves the resolved config with the results, and refuses to resume with a different one.

The lock is WORKDIR/run.lock; see `checkpoint.lock`.
"""

import contextlib
import errno
import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax import bounded, files
from zerojax.checkpoint import files as step_files
from zerojax.checkpoint import lock as lock_lib
from zerojax.errors import UserError
from zerojax.launch import ending, processes, signals
from zerojax.trainer import metrics, setting_names, settings

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
OFFLOAD = "offload"  # where files of offloaded state take their space; they have no names
LOCK_FILE = "run.lock"
BEGAN_FILE = "began.txt"  # when examples were first written as text, in seconds since 1970; only where a chat template writes the date
IMPORTED_FILE = "imported.json"  # where the first checkpoint comes from, if another program trained it
WRITTEN = ("", "export", "profile", "tensorboard")  # folders in which files are written under fixed names
LOST = {  # file -> what follows if a run has checkpoints and lacks it
    CONFIG_FILE: "the settings are compared with those that the newest checkpoint holds, and it is written again",
    metrics.FILE: "the metrics up to the checkpoint are lost",
}

# Beside its default: the value that runs had in place of a setting that they lack.
EARLIER: Mapping[str, Any] = {"dpo.beta": 0.1, "grpo.clip": 0.2}

# Settings that may change when a run resumes: where and how it computes, but not what. `steps` may grow.
FREE = (
    *(
        "deterministic",
        "steps",
        "epochs",
        "log_every",
        "emulate_devices",
        "micro_batch_size",
        "grad_accum",
        "precision",
        "fp8",
    ),
    *("reduce_dtype", "accum_dtype", "loss_scale", "mesh", "pipeline", "experts", "zero", "offload", "wire"),
    *(
        f"model.{name}"
        for name in ("remat", "recompute", "by_columns", "programs", "ring", "tile_tokens", "long_texts", "offload")
    ),
    *("model.attention", "grpo.rollout_devices", "data.dir", "data.eval_split", "data.eval_file", "data.on_bad"),
    *("evaluate", "checkpoint", "sample", "export", "profile", "metrics"),
)


@contextlib.contextmanager
def held(workdir: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a folder for this run alone inside the block. Every process of the run must enter; the primary takes the lock.

    A run that ends with an error before it saves its config leaves no empty folder that it made.

    Raises:
      UserError: another run holds the folder, or the folder cannot be used.
    """
    refused = lock = None
    folder = pathlib.Path(workdir).absolute()
    is_new = not (folder / CONFIG_FILE).exists()
    before = {path for path in (folder, *folder.parents, *_folders_in(folder)) if path.exists()} if is_new else set()
    if processes.is_primary():
        try:
            place = f"--workdir {workdir}"
            lock = lock_lib.take(_open(workdir) / LOCK_FILE, place, "choose another --workdir", processes.run_id())
        except UserError as error:
            refused = error
    if signals.agreed(refused is not None):
        raise refused or UserError(f"--workdir {workdir}: cannot be used; process 0 says why")
    forget = ending.before_end(lambda *_: lock.release() if lock is not None else None)
    try:
        yield
    except BaseException:
        if lock is not None and is_new and not (folder / CONFIG_FILE).exists():
            lock.release()
            _remove_empty([*_folders_in(folder), folder, *folder.parents], before)
        raise
    finally:
        forget()
        if lock is not None:
            lock.release()


def _folders_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders below a folder, the deepest first; links are not followed."""
    return [pathlib.Path(path) for path, _, _ in os.walk(folder, topdown=False) if pathlib.Path(path) != folder]


def _remove_empty(folders: Iterable[pathlib.Path], before: set[pathlib.Path]) -> None:
    """Removes the folders that are empty, in this order, but for those of `before`."""
    for path in folders:
        if path not in before:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()


def check(workdir: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Compares `config`, as nested plain dicts, with the config of the folder's last run.

    Raises:
      UserError: the folder cannot be read or written, or its run has other settings. The line names the first difference.
    """
    folder = _open(workdir)
    try:
        for name in (step_files.CARD, metrics.FILE, CONFIG_FILE):
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (folder / CONFIG_FILE).exists():
            return
        saved = bounded.parse_json(bounded.read_bytes(folder / CONFIG_FILE))
    except OSError as error:
        where = f"--workdir {folder}: cannot be used ({error.strerror}, {name})"
        raise UserError(f"{where}; choose another folder") from error
    except ValueError as error:
        raise UserError(f"{folder / CONFIG_FILE}: is not JSON; restore it, or choose another --workdir") from error
    if not isinstance(saved, Mapping):
        raise UserError(f"{folder / CONFIG_FILE}: is not a saved config; restore it, or choose another --workdir")
    other = difference(saved, config)
    if other is not None:
        if other.name not in settings.table():
            raise UserError(
                f"--workdir {folder}: was started with config.{other.name}={other.before!r}, which is no setting of this version; resume "
                "with the version that has it, or use another --workdir"
            )
        raise UserError(
            f"--workdir {folder}: was started with config.{other.name}={other.before!r}, and this run has "
            f"{other.now!r}; use the same value to resume, or another --workdir"
        )


def is_older(workdir: str | os.PathLike[str], place: str) -> bool:
    """Returns whether the folder's run was started before there was a setting."""
    path = pathlib.Path(workdir) / CONFIG_FILE
    try:
        saved = bounded.parse_json(bounded.read_bytes(path))
    except (OSError, ValueError):
        return False  # `check` says why
    return isinstance(saved, Mapping) and place not in setting_names.flat(saved)


class Difference(NamedTuple):
    """A setting in which two configs differ, with both values."""

    name: str
    before: Any
    now: Any


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """Returns the first setting that differs and may not change when a run resumes, or None. Configs are nested dicts.

    A batch that one of them derives (0) is compared where it is known, with the position in the data (`resume.check`).
    """
    first, second = (setting_names.flat(json.loads(json.dumps(config))) for config in (before, now))
    # init_from decides others
    for place in sorted(first.keys() | second.keys(), key=lambda place: (place != "init_from", place)):
        is_free = any(place == free or place.startswith(free + ".") for free in FREE)
        is_new = place not in first and _is_as_before(place, second[place])
        is_free |= place == "global_batch_size" and 0 in (first.get(place), second.get(place))
        if not is_free and not is_new and first.get(place) != second.get(place):
            return Difference(place, first.get(place, _default(place)), second.get(place))
    return None


def _is_as_before(place: str, value: Any) -> bool:
    """Returns whether a value of JSON changes nothing for runs that lack its setting, which began before there was one."""
    return place in settings.table() and value in (_default(place), EARLIER.get(place, _default(place)))


def _default(place: str) -> Any:
    """Returns the default of a setting as a value of JSON; None for no setting."""
    declared = settings.table().get(place)
    return None if declared is None else json.loads(json.dumps(declared.default))


def lost(workdir: str | os.PathLike[str]) -> list[str]:
    """Returns a line for each file that the folder's run wrote and that is missing now."""
    folder = pathlib.Path(workdir)
    if not step_files.steps(folder / CHECKPOINTS) or (folder / IMPORTED_FILE).exists():
        return []
    missing = [name for name in LOST if not (folder / name).exists()]
    return [
        f"{folder / name}: is missing beside checkpoints: {LOST[name]}; restore it if there is a copy"
        for name in missing
    ]


def began(workdir: str | os.PathLike[str]) -> int:
    """Returns when the examples of a folder's run were first written as text, in seconds since 1970; of a new run, now.

    Chat templates may write the date. A run that resumes has the texts of its first start. All processes must call it.
    """
    found = int(time.time())
    path = pathlib.Path(workdir) / BEGAN_FILE
    if path.is_file():
        with files.reading(path, "fix that", "holds no time ({}); delete it"):
            found = int(bounded.read_text(path, 100))
    if jax.process_count() == 1:
        return found
    return 60 * int(multihost_utils.broadcast_one_to_all(np.int32(found // 60)))


def save_began(workdir: str | os.PathLike[str], seconds: int) -> None:
    """Writes when a run's examples were written as text, for `began`."""
    path = pathlib.Path(workdir) / BEGAN_FILE
    if not path.is_file():
        with files.writing(path, "make room, or choose another --workdir"):
            files.replace(path, f"{seconds}\n")


def save(workdir: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Writes the resolved config atomically.

    Raises:
      UserError: the folder cannot be written.
    """
    path = pathlib.Path(workdir) / CONFIG_FILE
    with files.writing(path, "make room, or choose another --workdir"):
        files.replace(path, json.dumps(config, indent=2) + "\n")


def _open(workdir: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the folder, which is made if it does not exist.

    Raises:
      UserError: it cannot be made, cannot hold checkpoints, or holds a symbolic link, through which a run would write elsewhere.
    """
    folder = pathlib.Path(workdir)
    step_files.check_path(folder.absolute())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / name for name in WRITTEN if (folder / name).is_dir()]
        links = [path for parent in written for path in sorted(parent.iterdir()) if path.is_symlink()]
    except OSError as error:
        raise UserError(f"--workdir {folder}: cannot be used ({error.strerror}); choose another folder") from error
    # A run writes no hidden files, and editors link some
    links = [path for path in links if not path.name.startswith(".")]
    if links:
        way_out = "a run writes only into its own folder: remove the link, or choose another --workdir"
        raise UserError(f"{links[0]}: is a symbolic link; {way_out}")
    return folder
