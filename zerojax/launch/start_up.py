"""Makes a run start faster. This module overlaps or avoids work that the first step does not need."""

import contextlib
import gc
import os
import pathlib
import threading
from collections.abc import Iterator

import jax

from zerojax import xla_flags


def cache_folder() -> pathlib.Path:
    """Returns the folder for what this user's runs may share and make again: XDG_CACHE_HOME/zerojax, by default ~/.cache/zerojax."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "zerojax")


def size_pinned_pool(gb: int) -> None:
    """Sets the size in GiB of XLA's pool of pinned host memory, unless the user has set it. Must run before the first use of a device."""
    os.environ.setdefault(xla_flags.PINNED_POOL, str(gb))


def take_memory(share: float, *, mapped: bool) -> None:
    """Lets JAX take a share of a GPU's memory, unless the user has set it. Must run before the first use of a device.

    Args:
      share: of the memory; JAX's own choice is 0.75.
      mapped: whether CUDA maps memory as it is needed (`cuda_async`). A run that allocates and frees large arrays all the time leaves
        holes otherwise, and ends for want of one piece.
    """
    if not os.environ.keys() & set(xla_flags.MEMORY_FRACTIONS):
        os.environ[xla_flags.MEMORY_FRACTIONS[0]] = str(share)
    if mapped:
        os.environ.setdefault(xla_flags.ALLOCATOR, "cuda_async")


def settle_environment() -> None:
    """Sets the variable that tensorboardX sets when it is imported, in a thread while the first step runs.

    The C library moves the environment when a variable is added, and a thread of XLA that reads one then crashes. Must run before the
    first use of a device.
    """
    os.environ.setdefault("CRC32C_SW_MODE", "auto")


def wake_devices() -> None:
    """Initializes this process's devices in a background thread. A GPU takes seconds.

    The next computation waits for the devices and raises their errors. A process that ends in the meantime waits too: it would be aborted
    if the thread were still inside JAX's client.
    """

    def wake() -> None:
        with contextlib.suppress(Exception):
            jax.block_until_ready([jax.device_put(0.0, device) for device in jax.local_devices()])

    threading.Thread(target=wake, name="wake devices").start()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turns off Python's garbage collector. It repeatedly walks all objects of a trace and frees almost nothing.

    It takes a third of the time to trace a step of an 8B model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_collector() -> None:
    """Exempts all objects that there are from Python's garbage collector until `collector_restored` ends.

    The traces of a model are some 500,000 objects. To walk them takes 0.2 to 0.6 s, in which no step is sent to the devices, and finds
    nothing to free. Python walks all objects when those that are new since the last time are a fourth of them. Afterwards a fourth of
    what was made since is enough, so what is in cycles is freed soon.
    """
    gc.freeze()
    gc.collect()  # finds nothing, and counts how much there is


@contextlib.contextmanager
def collector_restored() -> Iterator[None]:
    """Gives back to the collector, at the end of the block, what it was spared in it."""
    was_spared = gc.get_freeze_count() > 0
    try:
        yield
    finally:
        if not was_spared:
            gc.unfreeze()
