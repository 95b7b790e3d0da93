"""Makes a run start sooner. This module overlaps, and leaves out, what the first step need not wait for."""

import contextlib
import gc
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

_ROW = jax.ShapeDtypeStruct((1, 2**16), jnp.uint8)


def wake_devices() -> None:
    """Has this process's devices get ready, which takes a GPU seconds, while Python goes on.

    Whoever computes next waits for them, and is told what is wrong with them. A process that ends meanwhile waits too: one that left
    the thread inside JAX's client would be aborted.
    """

    def wake() -> None:
        with contextlib.suppress(Exception):
            jax.block_until_ready([jax.device_put(0.0, device) for device in jax.local_devices()])

    threading.Thread(target=wake, name="wake devices").start()


def reserve_on_host(nbytes: int) -> None:
    """Has the driver pin that much of the host's memory for each of this process's GPUs, while Python goes on; a step then finds it.

    A driver pins some 2 GB/s, and other work on its GPU waits meanwhile: nothing is to be timed before it has ended. A reservation
    that fails is not told: the step tells, should the memory be short.
    """
    gpus = [device for device in jax.local_devices() if device.platform in ("gpu", "cuda")]

    def reserve() -> None:
        with contextlib.suppress(Exception):
            held = []  # together: GPUs of one process may share a pool
            for gpu in gpus:
                make = unwritten_on_host(nbytes, gpu)
                if make.memory_analysis().temp_size_in_bytes < nbytes:  # else XLA copies it from the device after all
                    held.append(make(jax.device_put(jnp.zeros(_ROW.shape, _ROW.dtype), gpu)))
            jax.block_until_ready(held)

    if nbytes and gpus:
        threading.Thread(target=reserve, name="reserve on host").start()


def unwritten_on_host(nbytes: int, gpu: jax.Device) -> jax.stages.Compiled:
    """Returns a program that makes an array of at least so many bytes in pinned memory, and writes its argument there, and no more."""
    on_host, placed = jax.memory.Space.Host, SingleDeviceSharding(gpu)

    def make(row: jax.Array) -> jax.Array:
        rows = jax.device_put(jnp.zeros((-(-nbytes // row.size), row.size), row.dtype), on_host)
        return jax.lax.dynamic_update_slice(rows, jax.device_put(row, on_host), (0, 0))

    jitted = jax.jit(make, out_shardings=placed.with_memory_kind("pinned_host"))
    return jitted.lower(jax.ShapeDtypeStruct(_ROW.shape, _ROW.dtype, sharding=placed)).compile()


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
