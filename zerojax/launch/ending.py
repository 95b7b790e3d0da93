"""Ends a process, whatever failed. This module is the one way out: it prints a line, runs the last actions, and never waits long for them.

A normal end of the interpreter joins every thread, and waits up to 300 s for the other processes of a run. A thread that saves, or a
process that died, would hold the machine. So a run ends by `leave`.
"""

import io
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

FAREWELL_SECONDS = 5.0  # for the line, the last actions and the flushing of all output
STREAMS = {0: "stdin", 1: "stdout", 2: "stderr"}

Action = Callable[[int, str], None]  # (exit status, line): runs just before the end

_actions: list[Action] = []
_leaving = threading.Lock()


def before_end(action: Action) -> Callable[[], None]:
    """Runs `action` just before this process ends by `leave`. Returns a function that takes it back."""
    _actions.append(action)
    return lambda: _actions.remove(action) if action in _actions else None


def leave(status: int, line: str = "") -> NoReturn:
    """Ends this process with `status` within FAREWELL_SECONDS, after printing `line` to stderr. Any thread may call it.

    Threads are not joined, and functions of `atexit` do not run. If two threads call it, the first call counts.
    """
    if _leaving.acquire(blocking=False):
        farewell = threading.Thread(target=_farewell, args=(status, line), daemon=True)
        farewell.start()
        farewell.join(FAREWELL_SECONDS)
        os._exit(status)
    while True:
        threading.Event().wait()


def guard_streams(lost: Callable[[OSError], None]) -> None:
    """Makes writes to stdout and stderr never fail. What cannot be written is dropped.

    Args:
      lost: is called once with the error if stdout cannot be written, for instance because its reader ended.
    """
    for number in STREAMS:
        try:
            os.fstat(number)
        except OSError:  # closed by the parent: a file of the run must not get its number
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _writer(1, lost)
    sys.stderr = _writer(2, lambda error: None)


def _farewell(status: int, line: str) -> None:
    """Prints the line and runs the last actions. A failure of one does not keep the others from running."""
    for action in (lambda *_: line and print(line, file=sys.stderr, flush=True), *_actions, _flush):
        try:
            action(status, line)
        except Exception:
            continue


def _flush(status: int, line: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _writer(number: int, lost: Callable[[OSError], None]) -> io.TextIOWrapper:
    """Returns a text stream to file descriptor `number` that flushes each line."""
    former = getattr(sys, STREAMS[number])
    encoding = getattr(former, "encoding", None) or "utf-8"
    raw: Any = _Lossy(number, lost)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)


class _Lossy(io.RawIOBase):
    """Writes to a file descriptor, and drops everything after the first write that failed."""

    def __init__(self, number: int, lost: Callable[[OSError], None]):
        self._number, self._lost, self._is_lost = number, lost, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if not self._is_lost:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # the other end made the pipe non-blocking
                select.select([], [self._number], [])
                return 0
            except OSError as error:
                self._is_lost = True
                self._lost(error)
        return len(data)
