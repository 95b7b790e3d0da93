"""Lets processes wait for each other in one's own script. This module holds `main_process_first` and `wait_for_everyone`.

Both names are those of Hugging Face's Accelerate. Processes that JAX joined (`jax.distributed.initialize`, a scheduler, or
`launch.processes.initialize`) take part; with one process neither waits.
"""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax import errors

_BYTES = 400  # of a text that the other processes read


def wait_for_everyone() -> None:
    """Waits until every process has called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zerojax.wait_for_everyone")


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Runs the block on process 0, then on all others at once. Every process leaves the block when all are done with it.

    If the block raises on one process, the error goes on there, and the others end with a line that quotes it and status 1.

    >>> with main_process_first():
    ...     dataset = download_and_cache()  # the others find it in the cache
    """
    if jax.process_count() == 1:
        yield
        return
    is_main = jax.process_index() == 0
    if not is_main:
        _agree("")  # that the main process is done
    try:
        yield
    except BaseException as error:
        allgathered(errors.kind_and_line(error))
        raise
    if is_main:
        _agree("")
    _agree("")  # that all others are done


def _agree(error: str) -> None:
    """Waits for all processes, and ends this one if another has an error.

    Raises:
      SystemExit: it has.
    """
    for number, found in enumerate(allgathered(error)):
        if found:
            raise SystemExit(f"zerojax: process {number} failed in main_process_first: {found}")


def allgathered(text: str) -> list[str]:
    """Returns the texts of all processes, in their order, each cut to its first 400 bytes. All processes must call it."""
    own = np.frombuffer(text.encode()[:_BYTES].ljust(_BYTES), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(own))
    return [bytes(row).decode(errors="ignore").strip() for row in every]
