"""Compares the host memory that offloaded state will pin with what the machine has. This module refuses a state before it is made.

The machine has what its control group allows, or MemTotal if that is less. Some machines grow their memory as it is used: where the control
group allows more than MemTotal, MemTotal is a floor, and a state that needs more is made with a warning. On GPUs pinned memory comes
from a pool of XLA's, whose size is set before the first device is used.
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

from zerojax import display, xla_flags
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero import placement
from zerojax.zero.offload import kept, layout
from zerojax.zero.offload.disk import folder as folder_lib

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for no limit


@dataclasses.dataclass(frozen=True)
class Host:
    """The memory of a host in bytes: `total` is MemTotal, `allowed` the limit of this process's control group; None if unknown."""

    total: int | None
    allowed: int | None


def pinned_bytes(partition: placement.Partition) -> int:
    """Returns the bytes that this process will pin: those of XLA's pool, and the buffers that a disk is read into."""
    return pool_bytes(partition) + kept.buffer_bytes(partition)


def pool_bytes(partition: placement.Partition) -> int:
    """Returns the bytes that this process takes from XLA's pool: its devices' shards of leaves in host memory, and the chunks in flight."""
    here = partition.mesh.local_devices
    counts = [layout.shard_bytes(leaf) for leaf in layout.host_leaves(partition)]
    if not counts:
        return 0
    # New leaves are stored while the old ones are still read.
    stays = sum(counts) - sum(map(layout.shard_bytes, kept.on_disk(partition).values()))
    return len(here) * (stays + partition.offload.in_flight * max(partition.offload.chunk_bytes, max(counts)))


def check(partition: placement.Partition, *, host: Host | None = None, pool_gb: float | None = None) -> None:
    """Checks that this host can hold what the partition offloads.

    Args:
      partition: with offloaded leaves or not.
      host: the machine's memory; None reads it.
      pool_gb: the size of XLA's pool of pinned memory in GiB; None reads it. Only on GPUs.

    Raises:
      UserError: it cannot. The line names the way out.
    """
    own = pinned_bytes(partition)
    if not own:
        return
    _check_disk(partition)
    pooled = pool_bytes(partition)
    platform = mesh_lib.platform(partition.mesh)
    pool_gb = xla_flags.pinned_pool_gb() if pool_gb is None else pool_gb
    if platform == "gpu" and pooled > pool_gb * 2**30:
        raise UserError(
            f"offload: this process pins {display.human(pooled)}, and XLA's pool of pinned memory has {pool_gb:g} GiB; set the environment "
            f"variable {xla_flags.PINNED_POOL}={pool_size_gb(pooled)} before JAX starts"
        )
    host = read_host() if host is None else host
    needed = own * _processes_here()
    what = f"offload: pins {display.human(needed)} of host memory on this host ({display.human(own)} a process)"
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


def _check_disk(partition: placement.Partition) -> None:
    """Checks the folder of what lives on a disk; warns if it is none of a local disk."""
    if not kept.on_disk(partition):
        return
    kept.check_space(partition, _processes_here())
    if line := folder_lib.warning(partition.offload.nvme_path):
        warnings.warn(f"offload.nvme_path: {line}", stacklevel=3)


def pool_size_gb(pinned: float) -> int:
    """Returns the size in GiB of XLA's pool for a process that pins so many bytes. The pool doubles as it grows, up to its size."""
    return math.ceil(1.1 * pinned / 2**30) + 1


def read_host(root: str | os.PathLike = "/") -> Host:
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


def _processes_here() -> int:
    """Returns the number of this run's processes on this host. All processes must call it."""
    if jax.process_count() == 1:
        return 1
    name = zlib.crc32(socket.gethostname().encode())
    names = multihost_utils.process_allgather(np.array(name, np.uint32))
    return int((names == name).sum())
