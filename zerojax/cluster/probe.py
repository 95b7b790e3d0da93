"""Measures one process of a preflight. This module computes on each device, exchanges data with every other host, and writes to the disk.

Each finding is printed as one line of JSON after MARK, so that what was found before a failure is known.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import files
from zerojax.launch import devices as devices_lib
from zerojax.launch import processes, watch

MARK = "zerojax-doctor: "
SIZES = {"cpu": 512, "gpu": 8192}  # of a matmul; others as on a GPU
EXCHANGED_BYTES = {"cpu": 4 << 20, "gpu": 64 << 20}  # each way between two hosts
REPEATS = 5
DRIVER = "/proc/driver/nvidia/version"


def run(leaders: Sequence[int], workdir: str, emulated: int) -> None:
    """Measures, as one process of a run.

    Args:
      leaders: the processes that exchange data: the first one of each host, or all those of a single host.
      workdir: a folder of the run, "" for none.
      emulated: CPU devices to emulate without an accelerator.
    """
    _tell("machine", _machine(workdir))
    devices_lib.emulate_cpu_devices(emulated)
    watch.at(watch.START)
    processes.initialize()
    watch.at(watch.DATA)
    kind = "cpu" if jax.default_backend() == "cpu" else "gpu"
    _tell("compute", [_compute(device, SIZES[kind]) for device in jax.local_devices()])
    _tell("sum", _sum())
    _tell("exchange", {str(peer): rate for peer, rate in exchange(leaders, EXCHANGED_BYTES[kind]).items()})
    if workdir:
        _tell("disk", _disk(pathlib.Path(workdir), leaders))
    processes.barrier("the end of the preflight")


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns the pairs of 0 to count - 1 in rounds in which each occurs at most once: the circle method of tournaments.

    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    circle = [*range(count), *([-1] if count % 2 else [])]
    size = len(circle)
    found = []
    for _ in range(size - 1):
        pairs = [tuple(sorted((circle[at], circle[size - 1 - at]))) for at in range(size // 2)]
        found.append(sorted(pair for pair in pairs if pair[0] >= 0))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def exchange(leaders: Sequence[int], nbytes: int) -> dict[int, float]:
    """Exchanges `nbytes` with each other leader. Returns {their process: bytes a second, each way}; {} for other processes.

    Raises:
      RuntimeError: other data came than were sent.
    """
    if jax.process_index() not in leaders or len(leaders) < 2:
        return {}
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = jax.sharding.Mesh(np.array([first[process] for process in leaders]), ("host",))
    sharding = jax.NamedSharding(mesh, jax.P("host"))
    shape = (len(leaders), nbytes // 4)
    numbers = np.arange(len(leaders), dtype=np.int32)
    sent = jax.make_array_from_callback(shape, sharding, lambda at: np.broadcast_to(numbers[:, None], shape)[at])
    mine, found = leaders.index(jax.process_index()), {}
    for pairs in rounds(len(leaders)):
        swap = _swap(mesh, [*pairs, *((b, a) for a, b in pairs)])
        seconds = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            came = jax.block_until_ready(swap(sent))
            seconds.append(time.perf_counter() - began)
        peer = next((b if a == mine else a for a, b in pairs if mine in (a, b)), None)
        if peer is not None:
            if not (np.asarray(came.addressable_shards[0].data) == peer).all():
                raise RuntimeError(f"process {leaders[peer]} sent other data than came here")
            found[leaders[peer]] = nbytes / min(seconds[1:])
    return found


def _swap(mesh: jax.sharding.Mesh, pairs: list[tuple[int, int]]) -> Callable[[jax.Array], jax.Array]:
    """Returns a program that sends each host's shard to another host: (from, to)."""
    spec = jax.P("host")
    return jax.jit(
        jax.shard_map(lambda x: jax.lax.ppermute(x, "host", pairs), mesh=mesh, in_specs=spec, out_specs=spec)
    )


def _tell(name: str, value: object) -> None:
    print(MARK + json.dumps({"rank": processes.rank(), name: value}), flush=True)


def _machine(workdir: str) -> dict[str, Any]:
    """Returns versions, memory and disk. Starts no backend."""
    known = memory()
    driver = pathlib.Path(DRIVER).read_text().split("\n")[0].split("  ")[1:2] if os.path.exists(DRIVER) else []
    versions = {"python": platform.python_version(), "driver": driver[0] if driver else "none"}
    for name in ("jax", "jaxlib", "flax", "optax", "zerojax"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "a checkout" if name == "zerojax" else "missing"
    return {
        "hostname": socket.gethostname(),
        "versions": versions,
        "executable": sys.executable,
        "memory": known["MemTotal"],
        "available": known["MemAvailable"],
        "free": shutil.disk_usage(files.nearest(workdir or ".")).free,
    }


def memory() -> dict[str, int]:
    """Returns /proc/meminfo in bytes, or {}."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:]}
        return found if {"MemTotal", "MemAvailable"} <= found.keys() else {}
    except (OSError, ValueError):
        return {}


def _compute(device: jax.Device, size: int) -> dict[str, Any]:
    """Multiplies matrices of small whole numbers, whose product is exact, and checks it (Freivalds, 1977).

    Returns:
      The device's kind and memory, whether the product was right, and its floating-point operations a second.
    """
    row, column = np.arange(size)[:, None], np.arange(size)[None]
    left, right = ((row + 3 * column) % 7 - 3).astype(np.float32), ((row * column) % 5 - 2).astype(np.float32)
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    a, b = (jax.device_put(jnp.asarray(part, dtype), device) for part in (left, right))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        product = jax.block_until_ready(multiply(a, b))
        seconds.append(time.perf_counter() - began)
    probe = np.arange(size) % 11 + 1.0  # no zeros, which would hide columns
    is_right = bool(
        (np.asarray(product, np.float64) @ probe == left.astype(np.float64) @ (right.astype(np.float64) @ probe)).all()
    )
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "device": device.id,
        "kind": device.device_kind,
        "memory": memory,
        "right": is_right,
        "flops": 2 * size**3 / min(seconds[1:]),
    }


def _sum() -> bool:
    """Returns whether the sum over all devices is right."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    values = jax.make_array_from_callback(
        (mesh.size,), jax.NamedSharding(mesh, jax.P("all")), lambda at: np.arange(mesh.size, dtype=np.int32)[at]
    )
    total = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))(values)
    return int(total) == mesh.size * (mesh.size - 1) // 2


def _disk(folder: pathlib.Path, leaders: Sequence[int]) -> dict[str, Any]:
    """Writes a file and looks for those of the other hosts. Returns the processes whose files were not seen, or the error."""
    me, name = jax.process_index(), ".doctor-{}-{}".format(processes.run_id() or "alone", "{}")
    error = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if me in leaders:
            (folder / name.format(me)).write_text("written by zerojax doctor")
    except OSError as caught:
        error = caught.strerror or str(caught)
    processes.barrier("written")
    unseen = [other for other in leaders if not os.path.exists(folder / name.format(other))]
    processes.barrier("seen")
    if me in leaders and not error:
        (folder / name.format(me)).unlink(missing_ok=True)
    return {"error": error, "unseen": unseen}
