"""Makes a run start sooner. This module overlaps, and leaves out, what the first step need not wait for."""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import jax

_SHORTEST = "jax_persistent_cache_min_compile_time_secs"


def keep_every_program() -> None:
    """Has JAX keep programs that compile in less than a second too, where it keeps any on disk, unless the environment sets how long.

    A run makes its state with a dozen of them, which together take a GPU's compiler seconds at every start.
    """
    if _SHORTEST.upper() not in os.environ:
        jax.config.update(_SHORTEST, 0.0)


def wake_devices() -> None:
    """Has this process's devices get ready, which takes a GPU seconds, while Python goes on.

    Whoever computes next waits for them, and is told what is wrong with them. A process that ends meanwhile waits too: one that left
    the thread inside JAX's client would be aborted.
    """

    def wake() -> None:
        with contextlib.suppress(Exception):
            jax.block_until_ready([jax.device_put(0.0, device) for device in jax.local_devices()])

    threading.Thread(target=wake, name="wake devices").start()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Puts Python's collector of cycles off: it walks all that a trace has made, over and over, and finds next to nothing.

    It takes a third of the time that it takes to trace a step of 8B parameters.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
