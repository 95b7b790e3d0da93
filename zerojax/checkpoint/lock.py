"""Lets one process write a folder. This module takes a lock file, and tells who holds it.

The kernel holds the lock (flock) until the process ends, however it ends. Hosts that share a file system do not always see each other's
locks, so the file also names its process, and its time of change tells when that process was last alive. A launcher that restarts a run
on other hosts has ended its processes before: they share a run id, by which the next one takes the lock over.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import weakref
from typing import Any

from zerojax import files
from zerojax.errors import UserError

BEAT_SECONDS = 60  # between two touches of the lock
SILENT_SECONDS = 15 * 60  # after which the process of another host counts as dead
LINGER_SECONDS = 120.0  # for which a file server may keep the lock of a process of this run that is dead


class Lock:
    """A lock that this process holds, until `release`, its end, or the end of this object."""

    def __init__(self, path: pathlib.Path, descriptor: int):
        is_over = threading.Event()
        beats = threading.Thread(target=_beat, args=(descriptor, is_over), name=path.name, daemon=True)
        beats.start()
        self._end = weakref.finalize(self, _release, path, descriptor, is_over, beats)

    def release(self) -> None:
        """Removes the lock file. Does nothing the second time."""
        self._end()


def take(path: pathlib.Path, place: str, way_out: str, run_id: str = "") -> Lock:
    """Takes the lock at `path`. The lock of a dead process is taken over, and that of an earlier process of the same run.

    A process of another host counts as dead after `SILENT_SECONDS` without a touch.

    Args:
      path: the lock file, which need not exist.
      place: what is locked, in the words of an error.
      way_out: what else the user can do, in the words of an error.
      run_id: names the run if its former processes are known to have ended.

    Raises:
      UserError: another process holds it, or the file cannot be written.
    """
    return Lock(path, _lock(path, place, way_out, run_id))


def _release(path: pathlib.Path, descriptor: int, is_over: threading.Event, beats: threading.Thread) -> None:
    is_over.set()
    beats.join()
    _unlock(path, descriptor)


def _lock(path: pathlib.Path, place: str, way_out: str, run_id: str) -> int:
    """Returns the open file that holds the lock."""
    deadline = time.monotonic() + LINGER_SECONDS
    with files.writing(path, way_out):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            try:
                is_taken = _flock(descriptor)
                if not _is_open_at(path, descriptor):  # a process that ended removed it
                    os.close(descriptor)
                    continue
                silence = _silence(descriptor)
                content = os.read(descriptor, 1 << 16)
                is_own = bool(run_id) and f'"{run_id}"'.encode() in content
                if is_own and is_taken is False and time.monotonic() < deadline:
                    os.close(descriptor)
                    time.sleep(0.5)
                    continue
                if not is_own or is_taken is False:
                    _check_holder(path, content, is_taken, silence, place, way_out)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process() | {"run": run_id}).encode() + b"\n", 0)
            except BaseException as error:
                os.close(descriptor)
                if getattr(error, "errno", None) == errno.ESTALE and time.monotonic() < deadline:
                    time.sleep(0.5)  # another host removed the file, and the file server has forgotten it
                    continue
                raise
            return descriptor


def _beat(descriptor: int, is_over: threading.Event) -> None:
    """Touches the lock until its process lets it go."""
    while not is_over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _unlock(path: pathlib.Path, descriptor: int) -> None:
    """Removes the lock, unless it was removed by hand and another process has its own."""
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


def _silence(descriptor: int) -> float:
    """Returns the seconds since a lock was touched.

    A lock that seems to be dated in the future, or to have been silent for long, is measured by the clock of its file system, which may be
    another host's. One that is in the future there too was touched when that clock was wrong, nobody knows when: it is dated anew, and its
    silence counts from now.
    """
    touched = os.fstat(descriptor).st_mtime
    silence = time.time() - touched
    if -BEAT_SECONDS <= silence <= SILENT_SECONDS:
        return silence
    os.utime(descriptor)
    silence = os.fstat(descriptor).st_mtime - touched
    if silence >= -BEAT_SECONDS:
        os.utime(descriptor, (touched, touched))
    return max(0.0, silence)


def _is_open_at(path: pathlib.Path, descriptor: int) -> bool:
    """Returns whether an open file is still the one at `path`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _check_holder(
    path: pathlib.Path, content: bytes, is_taken: bool | None, silence: float, place: str, way_out: str
) -> None:
    """Raises a UserError if the process that wrote the lock may be alive. It touched the lock `silence` seconds ago."""
    try:
        holder = json.loads(content)
        host, pid, since, began = holder["host"], int(holder["pid"]), holder["since"], holder["began"]
    except (ValueError, KeyError, TypeError):  # empty, or cut by a kill
        host, pid, since, began = None, 0, "", None
    who = f"{place}: process {pid} on {host} has held it since {since}" if host else f"{path}: is locked"
    if is_taken is False:
        raise UserError(f"{who}; wait for the end of that run, or {way_out}")
    if host == socket.gethostname():
        is_dead = is_taken or (began is not None and _began(pid) != began)
    else:
        is_dead = host is None or silence > SILENT_SECONDS
    if not is_dead:
        raise UserError(
            f"{who}; if that run is over, delete {path} or wait until it has been silent for {SILENT_SECONDS // 60} minutes, "
            f"else {way_out}"
        )


def _this_process() -> dict[str, Any]:
    """Returns the content of the lock."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "began": _began(os.getpid())}


def _began(pid: int) -> str | None:
    """Returns when a process of this host began, in the kernel's ticks since it booted, or None if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None
