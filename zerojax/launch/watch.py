"""Tells the launcher how far this process is. This module writes a heartbeat every second: step, phase, and the main thread's stack.

`zerojax launch` names the file in ZEROJAX_HEARTBEAT. Without that variable nothing is written. A thread writes, and uses no JAX, so the
heartbeat goes on while the main thread waits for devices, and ends when the process is stopped or killed.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

BEAT_SECONDS = 1.0
BEAT_BYTES = 4096  # of the file, which is written once and then overwritten, so that a full disk does not matter
FRAMES = 12  # of the stack, the innermost first
# A process with a thread in one of these files waits for other processes.
WAITS = ("jax/experimental/multihost_utils.py", "multihost/multihost.py", "launch/processes.py")
VARIABLE = "ZEROJAX_HEARTBEAT"
STACK_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 7  # `agent.STACK_SIGNAL`; the agent imports nothing of ours

# Phases in which the main thread does not come by for long have limits of their own: `verdict.LIMITS`.
START, DATA, COMPILE, RESTORE, STEP, EVALUATE, CHECKPOINT, RESULTS, ANSWER, IDLE = (
    "start",
    "data",
    "compile",
    "restore",
    "step",
    "evaluation",
    "checkpoint",
    "results",
    "answer",  # a step of a server's engine
    "idle",  # a server that was asked nothing
)

# What the thread reads. `at` replaces it at once, so the three belong together.
_position: tuple[int, str, int] | None = None  # (advances, phase, step)
_end: dict[str, bool] = {}
_file, _count, _writing = -1, 0, threading.Lock()


def begin() -> None:
    """Starts the heartbeat if the launcher asked for one. Children of this process do not inherit it."""
    global _file
    path = os.environ.pop(VARIABLE, None)
    if path is None:
        return
    with contextlib.suppress(OSError, ValueError):
        dumps = open(path + ".stack", "w")  # noqa: SIM115  open until the process ends
        faulthandler.register(STACK_SIGNAL, dumps, all_threads=True)
        _file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        threading.Thread(target=_beat, name="heartbeat", daemon=True).start()


def at(phase: str, step: int | None = None) -> None:
    """Says that the main thread begins a phase, of the given step if there is one. Costs less than a microsecond."""
    global _position
    advances, _, before = _position or (0, "", 0)
    _position = (advances + 1, phase, before if step is None else step)


def stopped(step: int, *, is_cause: bool) -> None:
    """Says that a signal stopped the run after `step`, which is saved; `is_cause` if it came to this process."""
    global _end
    at(RESULTS, step)
    _end = {"stopped": True, "cause": is_cause}
    _write()


def _beat() -> None:
    """Writes the heartbeat until the process ends."""
    over = threading.Event()
    while True:
        _write()
        over.wait(BEAT_SECONDS)


def _write() -> None:
    """Writes one heartbeat."""
    global _count
    if _file < 0:
        return
    with _writing:
        _count += 1
        frames = sys._current_frames()
        said: dict[str, Any] = {"count": _count, "pid": os.getpid(), "dumps": True, **_end}
        said["waits"] = any(map(_waits, frames.values()))
        said["stack"] = _stack(frames.get(threading.main_thread().ident or 0))
        if _position is not None:
            said["advances"], said["phase"], said["step"] = _position
        line = json.dumps(said).encode()
        with contextlib.suppress(OSError):
            os.pwrite(_file, line[: BEAT_BYTES - 1].ljust(BEAT_BYTES - 1) + b"\n", 0)


def _waits(frame: FrameType | None) -> bool:
    """Returns whether a thread is in a function that waits for other processes."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(WAITS):
            return True
        frame = frame.f_back
    return False


def _stack(frame: FrameType | None) -> list[str]:
    """Returns the innermost frames, as "file:line in function"."""
    found: list[str] = []
    while frame is not None and len(found) < FRAMES:
        folder, name = os.path.split(frame.f_code.co_filename)
        found.append(f"{os.path.basename(folder)}/{name}:{frame.f_lineno} in {frame.f_code.co_name}"[:200])
        frame = frame.f_back
    return found
