"""Compares the host memory that offloaded state will pin with what the machine has. This module refuses a state before it is made.

The machine has what its control group allows, or MemTotal if that is less. Some machines grow their memory as it is used: where the control
group allows more than MemTotal, MemTotal is a floor, and a state that needs more is made with a warning. On GPUs pinned memory comes
from a pool of XLA's, whose size is set before the first device is used. The pool doubles when it is full, up to that size: 65 GiB in a pool
of 118 pin 118.

A free place of the pool is given whole to an array that is more than half as long, unless 128 MiB of it would be left (XLA's BFCAllocator).
Each step stores new leaves in the places of old ones. Leaves of several sizes so waste some of each place, more with each step at first:
14B in 16 bits holds 62.5 GiB, wastes 10 GiB after one step and 12 to 15 GiB after some more (simulated). In a pool of 77 GiB it ended for
want of memory in its third or fourth step. So the pool is larger than what is pinned, by as much as the host can give.
"""

import dataclasses
import math
import os
import pathlib
import socket
import warnings
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax import display, tree, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero.host import selection, settings, storage
from zerojax.zero.host.disk import folder as folder_lib
from zerojax.zero.host.disk import store
from zerojax.zero.weights import partition as partition_lib

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for no limit
_FIRST_REGION = 2 << 20  # of XLA's pool; each later one is twice as large
# Params that are written while the old ones are still read. Those that go on to a disk leave several at once, and one waits.
NEW_PARAMS = {settings.HOST: 2, settings.NVME: store.WRITES + 1}
_PROCESS_BYTES = 8 << 30  # of a process's memory beside what it pins
_WASTED = 0.3  # of the pinned bytes, at most, in the pool's places
_TIGHT = 1.15  # of the pinned bytes: a pool that is smaller may be full after some steps
_LEFT = 18 << 30  # of a host's memory, beside its pools; a run of 8B took 13 GB of it


@dataclasses.dataclass(frozen=True)
class Host:
    """The memory of a host in bytes: `total` is MemTotal, `allowed` the limit of this process's control group; None if unknown."""

    total: int | None
    allowed: int | None

    @property
    def least(self) -> int | None:
        """Returns what a process may use: the less of the two; None if both are unknown."""
        return min((size for size in (self.total, self.allowed) if size is not None), default=None)


def pinned_bytes(partition: partition_lib.Partition) -> int:
    """Returns the bytes that this process will pin: those of XLA's pool, and the buffers that a disk is read into."""
    return pool_bytes(partition) + storage.buffer_bytes(partition)


def pool_bytes(partition: partition_lib.Partition) -> int:
    """Returns the bytes that this process takes from XLA's pool: its devices' shards of leaves in host memory, and what is in flight.

    Frozen weights are in host memory once: nothing writes new ones.
    """
    return sum(map(_pool_bytes, partition.offloaded))


def _pool_bytes(partition: partition_lib.Partition) -> int:
    counts = {path: tree.shard_bytes(leaf) for path, leaf in selection.host_leaves(partition).items()}
    if not counts:
        return 0
    on_disk = storage.on_disk(partition)
    stays = sum(count for path, count in counts.items() if path not in on_disk)
    # New leaves are stored while the old ones are still read: as many as are in flight, or all.
    of_opt_state = [count for path, count in counts.items() if path not in partition.placements]
    new = partition.offload.chunks_at_once * max(partition.offload.chunk_bytes, *of_opt_state, 0)
    new = min(new, sum(of_opt_state))
    trained = [
        count for path, count in counts.items() if path in partition.placements and partition.placements[path].trainable
    ]
    new += NEW_PARAMS.get(partition.offload.params, 0) * max(trained, default=0)
    return len(partition.mesh.local_devices) * (stays + new)


def grown_bytes(pooled: float, pool_gb: float) -> float:
    """Returns the bytes that XLA's pool pins to hold `pooled` bytes, if its size is `pool_gb` GiB."""
    total, region = 0, _FIRST_REGION
    while total < pooled:
        total, region = total + region, 2 * region
    return max(pooled, min(total, pool_gb * 2**30))


def check(partition: partition_lib.Partition, *, host: Host | None = None) -> None:
    """Checks that this host can hold what the partition offloads.

    Args:
      partition: with offloaded leaves or not.
      host: the machine's memory; None reads it.

    Raises:
      UserError: it cannot. The line names the way out.
    """
    if not pinned_bytes(partition):
        return
    _check_disk(partition)
    pooled, buffers = pool_bytes(partition), storage.buffer_bytes(partition)
    is_pooled = mesh_lib.platform(partition.mesh) == "gpu"
    pool_gb = xla_flags.pinned_pool_gb()
    host = read_host() if host is None else host
    count = processes_here()
    size = pool_size_gb(pooled, host, count)
    if is_pooled and pooled > pool_gb * 2**30:
        raise UserError(
            f"offload.optimizer: this process pins {display.human(pooled)}, and XLA's pool of pinned memory has {pool_gb:g} GiB; set the "
            f"environment variable {xla_flags.PINNED_POOL}={size} before JAX starts"
        )
    if is_pooled and pool_gb * 2**30 < _TIGHT * pooled and pooled > 2**30:
        warnings.warn(
            f"offload.optimizer: this process pins {display.human(pooled)} of the {pool_gb:g} GiB of XLA's pool of pinned memory, "
            "whose places waste some more with each step at first; it may be full later. Offload less (offload.fraction), or set "
            f"{xla_flags.PINNED_POOL} to more if this host has more",
            stacklevel=2,
        )
    needed = count * (pooled + buffers)
    if is_pooled and pool_gb > size:
        _check_growth(pooled, pool_gb, size, host, needed + _PROCESS_BYTES * count, count)
    own = pooled + buffers
    what = (
        f"offload.optimizer: pins {display.human(needed)} of host memory on this host ({display.human(own)} a process)"
    )
    way_out = "offload less (offload.fraction), keep fewer bytes (16-bit or 8-bit moments), or use more hosts"
    if host.allowed is not None and needed > host.allowed:
        raise UserError(f"{what}, and its control group allows {display.human(host.allowed)}; {way_out}")
    if host.total is not None and needed > host.total:
        if host.allowed is None:
            raise UserError(f"{what}, which has {display.human(host.total)}; {way_out}")
        warnings.warn(
            f"{what}, which shows {display.human(host.total)} now and is allowed {display.human(host.allowed)}: it must grow",
            stacklevel=2,
        )


def _check_growth(pooled: int, pool_gb: float, size: int, host: Host, needed: int, count: int) -> None:
    """Refuses a pool that would pin more than the host has, where a smaller one would do.

    Args:
      pooled: bytes that this process takes from it.
      pool_gb: its size.
      size: one that would do, in GiB.
      host: the machine's memory.
      needed: bytes that the processes of this host need, with the rest of their memory.
      count: processes of this host.
    """
    least, taken = host.least, grown_bytes(pooled, pool_gb)
    if least is not None and needed <= least < needed + count * (taken - pooled):
        raise UserError(
            f"offload.optimizer: this process pins {display.human(pooled)}, for which XLA's pool of pinned memory grows "
            f"to {display.human(taken)}, and this host has {display.human(least)}; set the environment variable "
            f"{xla_flags.PINNED_POOL}={size} before "
            "JAX starts, where the pool ends"
        )


def _check_disk(partition: partition_lib.Partition) -> None:
    """Checks the folder of what lives on a disk; warns if it is not on a local disk."""
    if not storage.on_disk(partition):
        return
    storage.check_space(partition, processes_here())
    if line := folder_lib.warning(partition.offload.nvme_path):
        warnings.warn(f"offload.nvme_path: {line}", stacklevel=3)


def pool_size_gb(pinned: float, host: Host, processes: int = 1) -> int:
    """Returns the size in GiB of XLA's pool for a process that pins so many bytes, with what its places waste if the host has as much.

    Args:
      pinned: bytes of state and of what is in flight, of one process.
      host: its machine's memory.
      processes: those that share the host's memory, or all of a run.
    """
    sizes = [size for size in (host.total, host.allowed) if size is not None and size > processes * pinned]
    room = (min(sizes) - _LEFT) / processes if sizes else 1.1 * pinned + 2**30
    return math.ceil(max(pinned + 2**30, min((1 + _WASTED) * pinned + 2**30, room)) / 2**30)


def read_host(root: str | os.PathLike[str] = "/") -> Host:
    """Reads the memory of this machine, from Linux's files below `root`. What cannot be read is None."""
    return Host(_mem_total(pathlib.Path(root)), _allowed(pathlib.Path(root)))


def _mem_total(root: pathlib.Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, StopIteration):
        return None


def _allowed(root: pathlib.Path) -> int | None:
    """Returns the least limit of the control groups that hold this process, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = pathlib.PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, which is not there; the folder itself then is the process's own.
        for folder in (inside, *inside.parents):
            limits.append(_limit(base / folder / file))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(path: pathlib.Path) -> int | None:
    try:
        limit = int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None
    return limit if limit < _UNLIMITED else None


def processes_here() -> int:
    """Returns the number of this run's processes on this host. All processes must call it."""
    if jax.process_count() == 1:
        return 1
    name = zlib.crc32(socket.gethostname().encode())
    names = multihost_utils.process_allgather(np.array(name, np.uint32))
    return int((names == name).sum())
