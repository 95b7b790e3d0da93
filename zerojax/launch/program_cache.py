"""Keeps compiled programs for later starts. This module chooses and bounds the folder of JAX's persistent cache.

The commands that train, generate and serve call `begin`. A program that imports zerojax has JAX's own settings, and so have the commands
that read how XLA assigns buffers (`zerojax plan`), which it does not do for a program of the cache, or that measure this machine.
"""

import contextlib
import dataclasses
import glob
import hashlib
import os
import pathlib
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from zerojax import display, errors
from zerojax.launch import start_up

MOST_BYTES = 8 * 2**30  # of the user's folder, when a command starts
FOLDER, SWITCH = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"
_MOST = "jax_compilation_cache_max_size"  # JAX's own bound, by default -1: none
_CHANGES = f"{FOLDER.upper()} moves it, {SWITCH.upper()}=0 turns it off"
# JAX's warnings. A process that is killed while it writes, or a full disk, leaves a part of a program, over which JAX never writes.
_FAILED = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.DOTALL)


def begin(*, is_one_host: bool = True) -> str:
    """Turns JAX's persistent cache on, in the user's cache folder, unless the user has named a folder or turned it off.

    Processes of several hosts need a folder that all of them read, which the user has to name: XLA divides the tuning of kernels among the
    processes, and one that finds its program in the cache would let the others wait for its part.

    Must run before the first program is compiled. If the user's cache folder has more than MOST_BYTES, files that were not used for longest
    are removed; a folder that the user has named is not bounded. Programs that compile in less than a second are kept too: a run makes its
    state with a dozen of them, which together take seconds. JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS takes precedence.

    Args:
      is_one_host: whether all processes of the run are on this host.

    Returns:
      The line to show: the folder, its size and how to change it, or why there is none; "" if the user has turned the cache off.
    """
    if is_off():
        return ""
    named = jax.config.values[FOLDER]
    if _SHORTEST.upper() not in os.environ:
        jax.config.update(_SHORTEST, 0.0)
    if named:
        return f"compiled programs: {named} ({_CHANGES})" if "://" in named else _begin_in(pathlib.Path(named))
    if not is_one_host:
        return f"compiled programs are not kept: name a folder that all hosts share by {FOLDER.upper()}"
    try:
        root = users_folder()
        for folder in (root, root / _of_cpu()):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)  # whoever writes there could let this user run a program
        jax.config.update(FOLDER, str(folder))
        return _begin_in(root, is_ours=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return _refused(f"{errors.first_line(error)}", is_read=False)


def is_off() -> bool:
    """Returns whether the user has turned the cache off, or named the folder ""."""
    return not jax.config.values[SWITCH] or jax.config.values[FOLDER] == ""


def users_folder() -> pathlib.Path:
    """Returns the folder of a user who has named none."""
    return start_up.cache_folder() / "xla"


def size(root: pathlib.Path) -> int:
    """Returns the bytes of all files below a folder."""
    return sum(nbytes for _, nbytes, _ in _files(root))


@dataclasses.dataclass
class Compiled:
    """What was compiled: seconds of XLA, programs that were looked for in the cache, and those that were there."""

    xla_seconds: float = 0.0
    sought: int = 0
    kept: int = 0

    def __str__(self) -> str:
        kept = f"; {self.kept} of {self.sought} programs kept from before" if self.kept else ""
        return f"{self.xla_seconds:.1f} s of it XLA{kept}"


@contextlib.contextmanager
def counted() -> Iterator[Compiled]:
    """Gives what is compiled in the block, in all threads."""
    found = Compiled()

    def count(event: str, **_: Any) -> None:
        found.sought += event == "/jax/compilation_cache/compile_requests_use_cache"
        found.kept += event == "/jax/compilation_cache/cache_hits"

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.xla_seconds += duration_secs

    jax.monitoring.register_event_listener(count)
    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(count)
        jax.monitoring.unregister_event_duration_listener(add)


def _begin_in(root: pathlib.Path, *, is_ours: bool = False) -> str:
    """Bounds the folder if it is ours, lets failures be told in one line, and returns the line to show."""
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    is_read, is_written = (root.is_dir() and os.access(root, way | os.X_OK) for way in (os.R_OK, os.W_OK))
    nbytes = _bound(root) if is_ours and jax.config.values[_MOST] == -1 else size(root)
    _explain_failures(root, removes=is_ours, is_written=is_written)
    if not is_written:
        return _refused(f"{root} cannot be written", is_read=is_read)
    return f"compiled programs: {root} ({display.human(nbytes)}; {_CHANGES})"


def _refused(why: str, *, is_read: bool) -> str:
    """Returns the warning of a folder that takes no programs, and turns off a cache that has none."""
    if not is_read:
        jax.config.update(SWITCH, False)
    what = "are read, and no others are kept" if is_read else "are not kept"
    return f"warning: compiled programs {what}: {why}; name another folder by {FOLDER.upper()}"


def _of_cpu() -> str:
    """Returns the name of the folder for hosts with this one's CPU. Hosts of several kinds may share a user's files, and by JAX's keys
    programs of the CPU are the same whatever its instructions are."""
    told = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        told += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def _files(root: pathlib.Path) -> list[tuple[float, int, pathlib.Path]]:
    """Returns (time of the last use, bytes, path) of all files. Other processes may remove some meanwhile."""
    found = []
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                stat = path.stat()
                found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    return found


def _bound(root: pathlib.Path) -> int:
    """Removes files that were not used for longest until the others have no more than MOST_BYTES. Returns the bytes of the others.

    JAX's own bound needs another library, a lock around each read, and a second file for each program: once a process was killed between
    the two, no program is written any more.
    """
    files = sorted(_files(root))
    total = sum(nbytes for _, nbytes, _ in files)
    for _, nbytes, path in files:
        if total <= MOST_BYTES:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total -= nbytes
    return total


def _explain_failures(root: pathlib.Path, *, removes: bool, is_written: bool) -> None:
    """Lets Python print JAX's warnings of a program that cannot be read or written in one line. It is removed if it may be.

    A warning has the program's name alone, which others may have; those that were written since stay. Of a folder that is not written the
    line to show says so, and no program is told to be missing there.
    """
    show, began = warnings.showwarning, time.time()

    def shown(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        failed = _FAILED.match(str(message))
        if failed is None:
            return show(message, category, *place, **more)
        way, name, why = failed.groups()
        if way == "writing" and not is_written:
            return
        for path in root.rglob(f"{glob.escape(name)}-*-cache") if removes else ():
            with contextlib.suppress(OSError):
                if way == "writing" or path.stat().st_mtime < began:
                    path.unlink()
        what = "cannot be read, and is compiled again" if way == "reading" else "cannot be kept"
        why = " ".join(why.split())[:120]
        print(f"zerojax: {root}: the compiled program {name} {what} ({why})", file=sys.stderr, flush=True)

    warnings.showwarning = shown
