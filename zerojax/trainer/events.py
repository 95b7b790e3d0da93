"""Writes numbers for TensorBoard. This module imports tensorboardX in a thread while the first steps run.

tensorboardX imports PyTorch where that is installed, which takes seconds. Until the import is done, numbers wait in memory.
"""

import concurrent.futures
import logging
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

FLUSH_SECONDS = 10  # between flushes; a flush waits for the disk


class Events:
    """A file of events in a folder. The caller writes it, not a thread, so a full disk raises an error and never hangs the run.

    Args:
      folder: of the file; created if it does not exist.
      first_step: the first step of this part of a resumed run; TensorBoard hides what earlier parts logged from that step on. None for a
        run that is not resumed.
    """

    def __init__(self, folder: pathlib.Path, first_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._first_step = first_step
        self._waiting: list[tuple[float, int, dict[str, float | str]]] = []
        self._file: Any = None
        self._next_flush = 0.0
        importer = concurrent.futures.ThreadPoolExecutor(1)
        self._library = importer.submit(_import)
        importer.shutdown(wait=False)

    def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
        """Writes a step's numbers and texts, or keeps them in memory until tensorboardX is imported.

        Raises:
          OSError: the disk is full or cannot be written.
        """
        shown = {name: value if isinstance(value, str) else float(value) for name, value in values.items()}
        self._waiting.append((time.time(), step, shown))
        if self._library.done():
            self._write_waiting()
        if self._file is not None and time.monotonic() > self._next_flush:
            self._file.flush()
            self._next_flush = time.monotonic() + FLUSH_SECONDS

    def flush(self) -> None:
        """Flushes the file to disk. Raises OSError if the disk is full."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Writes all waiting numbers and closes the file. Raises OSError if the disk is full."""
        try:
            if self._waiting:
                self._write_waiting()
        finally:
            if self._file is not None:
                self._file.close()

    def _write_waiting(self) -> None:
        protocol, summary, record_writer = self._library.result()

        def put(when: float, step: int, **what: Any) -> None:
            self._file.write(protocol.Event(wall_time=when, step=step, **what).SerializeToString())

        if self._file is None:
            self._file = record_writer.RecordWriter(str(self._path))
            put(time.time(), 0, file_version="brain.Event:2")
            if self._first_step is not None:
                start = protocol.SessionLog(status=protocol.SessionLog.START)
                put(time.time(), self._first_step, session_log=start)
        waiting, self._waiting = self._waiting, []
        for when, step, values in waiting:
            for name, value in values.items():
                kind = summary.text if isinstance(value, str) else summary.scalar
                put(when, step, summary=kind(name, value))


def _import() -> tuple[Any, Any, Any]:
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2

    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns about NaN, which is logged on purpose
    return event_pb2, summary, record_writer
