"""Ties a folder to one run. This module locks it, saves the resolved config with the results, and refuses to resume with a different one.

The lock is WORKDIR/run.lock. The kernel holds it (flock) until the process ends, however it ends. Hosts that share a file system do not
always see each other's locks, so the file also names its process, and its time of change tells when that process was last alive.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from zerojax import files
from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError
from zerojax.launch import processes, signals
from zerojax.trainer import metrics

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
LOCK_FILE = "run.lock"
BEAT_SECONDS = 60  # between two touches of the lock
SILENT_SECONDS = 15 * 60  # after which the process of another host counts as dead
WRITTEN = ("", "export", "profile", "tensorboard")  # folders in which files are written under fixed names
LOST = {  # file -> what follows if a run has checkpoints and lacks it
    CONFIG_FILE: "nothing shows whether the settings are those of the checkpoints",
    metrics.FILE: "the metrics up to the checkpoint are lost",
}

# Settings that may change when a run resumes: where and how it computes, but not what. `steps` may grow.
FREE = (
    "steps",
    "log_every",
    "emulate_devices",
    "micro_batch_size",
    "grad_accum",
    "precision",
    "reduce_dtype",
    "loss_scale",
    "mesh",
    "zero",
    "model.remat",
    "model.recompute",
    "model.offload",
    "model.attention",
    "data.dir",
    "data.eval_split",
    "evaluate",
    "checkpoint",
    "sample",
    "export",
    "profile",
)

# Settings that the config.json of an older run may lack, and the values it ran with.
BEFORE = {"optimizer.warmup": "linear", "optimizer.initial_fraction": 0.0, "optimizer.weight_decay_on": "matrices"}


@contextlib.contextmanager
def held(workdir: str | os.PathLike) -> Iterator[None]:
    """Holds a folder for this run alone inside the block. Every process of the run must enter; the primary takes the lock.

    The lock of a dead process is taken over. A process of another host counts as dead after `SILENT_SECONDS` without a touch.

    Raises:
      UserError: another run holds the folder, or the folder cannot be used.
    """
    refused = descriptor = None
    if processes.is_primary():
        try:
            descriptor = _lock(_open(workdir) / LOCK_FILE)
        except UserError as error:
            refused = error
    if signals.agreed(refused is not None):
        raise refused or UserError(f"--workdir {workdir}: cannot be used; process 0 says why")
    if descriptor is None:
        yield
        return
    is_over = threading.Event()
    beats = threading.Thread(target=_beat, args=(descriptor, is_over), name="run.lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        is_over.set()
        beats.join()
        _unlock(pathlib.Path(workdir) / LOCK_FILE, descriptor)


def check(workdir: str | os.PathLike, config: Mapping[str, Any]) -> None:
    """Compares `config`, as nested plain dicts, with the config of the folder's last run.

    Raises:
      UserError: the folder cannot be read or written, or its run has other settings. The line names the first difference.
    """
    folder = _open(workdir)
    try:
        if not (folder / CONFIG_FILE).exists():
            return
        saved = json.loads((folder / CONFIG_FILE).read_text())
    except OSError as error:
        raise UserError(f"--workdir {folder}: cannot be used ({error.strerror}); choose another folder") from error
    except ValueError as error:
        raise UserError(f"{folder / CONFIG_FILE}: is not JSON; restore it, or choose another --workdir") from error
    if not isinstance(saved, Mapping):
        raise UserError(f"{folder / CONFIG_FILE}: is not a saved config; restore it, or choose another --workdir")
    before, now = {**BEFORE, **_flat(saved)}, _flat(json.loads(json.dumps(config)))
    for place in sorted(before.keys() | now.keys()):
        is_free = any(place == free or place.startswith(free + ".") for free in FREE)
        if not is_free and before.get(place) != now.get(place):
            raise UserError(
                f"--workdir {folder}: was started with config.{place}={before.get(place)!r}, and this run has "
                f"{now.get(place)!r}; use the same value to resume, or another --workdir"
            )


def lost(workdir: str | os.PathLike) -> list[str]:
    """Returns a line for each file that the folder's run wrote and that is missing now."""
    folder = pathlib.Path(workdir)
    if not step_files.steps(folder / CHECKPOINTS):
        return []
    missing = [name for name in LOST if not (folder / name).exists()]
    return [
        f"{folder / name}: is missing beside checkpoints: {LOST[name]}; restore it if there is a copy"
        for name in missing
    ]


def save(workdir: str | os.PathLike, config: Mapping[str, Any]) -> None:
    """Writes the resolved config atomically.

    Raises:
      UserError: the folder cannot be written.
    """
    path = pathlib.Path(workdir) / CONFIG_FILE
    with files.writing(path, "make room, or choose another --workdir"):
        files.replace(path, json.dumps(config, indent=2) + "\n")


def _open(workdir: str | os.PathLike) -> pathlib.Path:
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
    links = [
        path for path in links if not path.name.startswith(".")
    ]  # a run writes no hidden files, and editors link some
    if links:
        way_out = "a run writes only into its own folder: remove the link, or choose another --workdir"
        raise UserError(f"{links[0]}: is a symbolic link; {way_out}")
    return folder


def _lock(path: pathlib.Path) -> int:
    """Takes the lock, and returns the open file that holds it.

    Raises:
      UserError: another run holds it.
    """
    with files.writing(path, "choose another --workdir"):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                is_taken = _flock(descriptor)
                if not _is_open_at(path, descriptor):  # a run that ended removed it
                    os.close(descriptor)
                    continue
                silence = time.time() - os.fstat(descriptor).st_mtime
                _check_holder(path, os.read(descriptor, 1 << 16), is_taken, silence)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode() + b"\n", 0)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor


def _beat(descriptor: int, is_over: threading.Event) -> None:
    """Touches the lock until the run is over."""
    while not is_over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _unlock(path: pathlib.Path, descriptor: int) -> None:
    """Removes the lock, unless it was removed by hand and another run has its own."""
    with contextlib.suppress(OSError):
        if _is_open_at(path, descriptor):
            path.unlink()
    os.close(descriptor)


def _flock(descriptor: int) -> bool | None:
    """Returns whether this process got the kernel's lock, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_open_at(path: pathlib.Path, descriptor: int) -> bool:
    """Returns whether an open file is still the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _check_holder(path: pathlib.Path, content: bytes, is_taken: bool | None, silence: float) -> None:
    """Raises a UserError if the process that wrote the lock may be alive. It touched the lock `silence` seconds ago."""
    try:
        holder = json.loads(content)
        host, pid, since, began = holder["host"], int(holder["pid"]), holder["since"], holder["began"]
    except (ValueError, KeyError, TypeError):  # empty, or cut by a kill
        host, pid, since, began = None, 0, "", None
    who = (
        f"--workdir {path.parent}: process {pid} on {host} has held it since {since}" if host else f"{path}: is locked"
    )
    if is_taken is False:
        raise UserError(f"{who}; wait for the end of that run, or choose another --workdir")
    if host == socket.gethostname():
        is_dead = is_taken or (began is not None and _began(pid) != began)
    else:
        is_dead = host is None or silence > SILENT_SECONDS
    if not is_dead:
        raise UserError(
            f"{who}; if that run is over, delete {path} or wait until it has been silent for {SILENT_SECONDS // 60} minutes, "
            "else choose another --workdir"
        )


def _this_process() -> dict[str, Any]:
    """Returns the content of the lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "began": _began(os.getpid())}


def _began(pid: int) -> str | None:
    """Returns when a process of this host began, in the kernel's ticks since it booted, or None if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"mesh.data": -1, ...}."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
