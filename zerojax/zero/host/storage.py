"""Puts an offloaded leaf where it lives: pinned memory, or a file on a local disk. This module makes the file's store for a partition.

Either way a leaf comes in through pinned memory. A leaf on the disk is a `disk.store.DiskArray` in the state.
"""

import os
from collections.abc import Callable
from typing import Any

import jax

from zerojax import display, roles, tree
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree
from zerojax.zero.host import memory_kind, settings
from zerojax.zero.host.disk import folder as folder_lib
from zerojax.zero.host.disk import scratch, store
from zerojax.zero.weights import partition as partition_lib

Keep = Callable[[jax.Array, Any], Any]
Loading = list[Any]  # arrays, or `store.Arriving`


def on_disk(partition: partition_lib.Partition) -> dict[str, Any]:
    """Returns the abstract leaves, or pieces, that live in a file, by path."""
    return {path: leaf for part in parts_on_disk(partition) for path, leaf in part.items()}


def parts_on_disk(partition: partition_lib.Partition) -> list[dict[str, Any]]:
    """Returns the same for the optimizer state and for the params, those that are there, of each group of a pipeline; each has a file."""
    if partition.offload is None or settings.NVME not in (partition.offload.optimizer, partition.offload.params):
        return []
    kinds = {True: partition.offload.optimizer, False: partition.offload.params}
    parts: dict[Any, dict[str, Any]] = {}
    for path, leaf in tree.flatten(partition.abstract_state):
        is_opt_state = partition.leaves[path].role == roles.OPT_STATE
        if path in partition.on_host and kinds[is_opt_state] == settings.NVME:
            parts.setdefault((not is_opt_state, leaf.sharding.mesh), {})[path] = leaf
    return [parts[key] for key in sorted(parts, key=lambda key: key[0])]


def disk_bytes(partition: partition_lib.Partition) -> int:
    """Returns the bytes of this process's files."""
    return _size(on_disk(partition))


def _size(part: dict[str, Any]) -> int:
    return sum(map(store.bytes_of, part.values()))


def line(partition: partition_lib.Partition) -> str:
    """Returns a line that says where this process's file will be, or "" if nothing lives on a disk."""
    if not on_disk(partition):
        return ""
    size, buffers, where = disk_bytes(partition), buffer_bytes(partition), _folder(partition.offload)
    kind = folder_lib.file_system(where) or "a disk"
    return (
        f"offload: {display.human(size)} of {_named(partition.offload)} on a disk, in {where} ({kind}), read through "
        f"{display.human(buffers)} of host memory; zerojax disk {where} measures that disk"
    )


def buffer_bytes(partition: partition_lib.Partition) -> int:
    """Returns the host memory of the buffers that this process reads its files into."""
    parts, chosen = parts_on_disk(partition), partition.offload
    return sum(chosen.buffers(len(part)) * _buffer_bytes(partition, part) for part in parts)


def _buffer_bytes(partition: partition_lib.Partition, part: dict[str, Any]) -> int:
    """Returns the bytes of one buffer: a chunk, or the largest leaf, of each device; or the whole part, if that is less."""
    largest = max(map(tree.shard_bytes, part.values()))
    mesh = next(iter(part.values())).sharding.mesh
    most = scratch.aligned(max(partition.offload.chunk_bytes, largest)) * len(mesh.local_devices)
    return min(most, _size(part))


def check_space(partition: partition_lib.Partition, processes: int) -> None:
    """Checks that the disk has room for the files of a host's processes.

    Raises:
      UserError: it has not, or the settings name no folder.
    """
    if on_disk(partition):
        folder_lib.check_space(_folder(partition.offload), disk_bytes(partition) * processes)


def keeper(partition: partition_lib.Partition) -> Keep:
    """Returns f(array, like) that brings an array to where the abstract leaf `like` of `partition.abstract_state` lives.

    Where leaves live on a disk, a file for those of each part is made now. It is freed when nothing refers to its leaves any more.

    Args:
      partition: the state's.

    Raises:
      UserError: the folder cannot be used, or its disk has no room.
    """
    chosen = partition.offload
    stores: dict[int, store.Store] = {}
    for part in filter(_size, parts_on_disk(partition)):
        how = store.Settings(_folder(chosen), chosen.buffers(len(part)), _buffer_bytes(partition, part))
        stores |= dict.fromkeys(map(id, part.values()), store.Store(how, list(part.values())))

    def keep(array: jax.Array, like: PyTree) -> Leaf:
        host = to_host(array, like)
        return stores[id(like)].put(host) if id(like) in stores else host

    return keep


def to_host(array: jax.Array, like: PyTree) -> jax.Array:
    """Sends an array to where an abstract leaf is in host memory."""
    return memory_kind.moved([array], [like.sharding])[0]


def load(leaves: list[Any], shardings: list[Any]) -> Loading:
    """Begins to bring leaves to the device. Those of a disk may not have been read yet; see `arrived`."""
    if leaves and is_on_disk(leaves[0]):
        return leaves[0].store.load(leaves, shardings)
    return memory_kind.moved(leaves, shardings)


def arrived(loaded: Loading) -> list[jax.Array]:
    """Returns the arrays that `load` began to bring, and waits where they come from a disk."""
    return [array.result() if isinstance(array, store.Arriving) else array for array in loaded]


def leave(leaving: list[jax.Array], old: list[Any], shardings: list[Any]) -> list[Any]:
    """Begins to bring new leaves to where the old ones live. Those of a disk are written over the old ones, which become invalid."""
    host = memory_kind.moved(leaving, shardings)
    return old[0].store.replace(old, host) if old and is_on_disk(old[0]) else host


def to_device(params: PyTree) -> PyTree:
    """Returns params with copies on the device of those that live elsewhere, for a program that reads all of them at once."""
    leaves, structure = jax.tree.flatten(params)
    stored = [leaf for leaf in leaves if memory_kind.is_on_host(leaf)]
    copies = iter(arrived(load(stored, [memory_kind.on_device(leaf.sharding) for leaf in stored])))
    return jax.tree.unflatten(structure, [next(copies) if memory_kind.is_on_host(leaf) else leaf for leaf in leaves])


def prefetch(groups: list[list[Any]]) -> None:
    """Begins to read groups of leaves that live on a disk, in this order, as far as its buffers reach."""
    for group in groups:
        if group and is_on_disk(group[0]):
            group[0].store.prefetch(group)


def is_on_disk(leaf: Leaf) -> bool:
    """Returns whether a leaf of a state lives in a file."""
    return isinstance(leaf, store.DiskArray)


def _named(chosen: settings.Offload) -> str:
    """Returns the words for what lives on a disk."""
    words = {"optimizer": "optimizer state", "params": "params"}
    return " and ".join(word for part, word in words.items() if getattr(chosen, part) == settings.NVME)


def _folder(chosen: settings.Offload) -> str:
    if not chosen.nvme_path:
        part = "optimizer" if chosen.optimizer == settings.NVME else "params"
        raise UserError(f"offload.nvme_path: is missing, and offload.{part} is 'nvme'; name a folder on a local disk")
    return os.fspath(chosen.nvme_path)
