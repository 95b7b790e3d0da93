"""Writes numbers for TensorBoard. This module imports tensorboardX beside the first steps.

tensorboardX brings PyTorch in where that is installed, which takes seconds that a run would otherwise start later. Until it is there,
numbers wait in memory.
"""

import concurrent.futures
import logging
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

FLUSH_SECONDS = 10  # between flushes, which wait for the disk


class Events:
    """A file of events in a folder. Written by the caller, not by a thread: a full disk is noticed and never hangs the run.

    Args:
      folder: where to; made if need be.
      first_step: of this part of a resumed run: TensorBoard hides what an earlier part logged from there on. None for no such part.
    """

    def __init__(self, folder: pathlib.Path, first_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._first_step = first_step
        self._waiting: list[tuple[float, int, dict[str, float]]] = []
        self._file: Any = None
        self._next_flush = 0.0
        importer = concurrent.futures.ThreadPoolExecutor(1)
        self._library = importer.submit(_import)
        importer.shutdown(wait=False)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Writes a step's numbers, now or as soon as that can be.

        Raises:
          OSError: the disk is full, or cannot be written.
        """
        self._waiting.append((time.time(), step, {name: float(value) for name, value in values.items()}))
        if self._library.done():
            self._write_waiting()
        if self._file is not None and time.monotonic() > self._next_flush:
            self._file.flush()
            self._next_flush = time.monotonic() + FLUSH_SECONDS

    def flush(self) -> None:
        """Brings what is written to the disk. Raises OSError where it is full."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Writes what waits, and closes the file. Raises OSError where the disk is full."""
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
                put(when, step, summary=summary.scalar(name, value))


def _import() -> tuple[Any, Any, Any]:
    from tensorboardX import record_writer, summary
    from tensorboardX.proto import event_pb2

    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns of NaN, which is logged on purpose
    return event_pb2, summary, record_writer
