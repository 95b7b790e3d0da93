"""Measures when a step's metrics arrive, and how long the host works on it. This module never makes a device wait for the host."""

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

from zerojax.tree import PyTree


class Reading(NamedTuple):
    """A step's metrics and their arrival time, in seconds of `time.perf_counter`."""

    step: int
    numbers: dict[str, float]
    arrived: float


class LateReader:
    """Reads a step's metrics one step late, so that no device waits for the host.

    A thread waits for them, so the arrival time does not depend on when the caller asks.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._pending: concurrent.futures.Future[Reading] | None = None

    def push(self, step: int, metrics: PyTree) -> Reading | None:
        """Starts to copy `metrics`, a pytree of scalars, and returns the previously pushed step, or None.

        Names in nested trees are joined by "/": {"eval": {"loss": x}} is {"eval/loss": float}.
        """
        before = self._pending
        self._pending = self._thread.submit(_read, step, metrics)
        return before.result() if before else None

    def flush(self) -> Reading | None:
        """Waits for the last pushed step and returns it, or None if it was already returned."""
        last, self._pending = self._pending, None
        return last.result() if last else None


def _read(step: int, metrics: PyTree) -> Reading:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(metrics))
    arrived = time.perf_counter()
    return Reading(
        step, {jax.tree_util.keystr(path, simple=True, separator="/"): float(x) for path, x in leaves}, arrived
    )


class OwnTime:
    """Adds up this thread's wall time, without the time spent in `away` blocks, which call or wait for devices."""

    def __init__(self) -> None:
        self._began, self._away = time.perf_counter(), 0.0

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Excludes the time inside the block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._away += time.perf_counter() - began

    def lap(self) -> float:
        """Returns the seconds of this thread's own work since the last lap."""
        now = time.perf_counter()
        seconds = now - self._began - self._away
        self._began, self._away = now, 0.0
        return seconds
