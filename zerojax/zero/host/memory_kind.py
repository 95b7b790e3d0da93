"""Names the kind of memory that an array lives in: a device's, or pinned host memory. This module copies arrays from one to the other.

Where an array is of several processes, `jax.device_put` compiles and runs a program for it, though a copy needs no other process. Many such
programs in flight beside a step's collectives made two processes wait for each other for ever on emulated devices.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from zerojax.tree import Leaf

MEMORY_KIND = "pinned_host"


def is_on_host(leaf: Leaf) -> bool:
    """Returns whether an array, or a leaf in pieces, lives in host memory."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == MEMORY_KIND


def on_device(sharding: Any) -> NamedSharding:
    """Returns a sharding in device memory."""
    return NamedSharding(sharding.mesh, sharding.spec)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in host memory."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=MEMORY_KIND)


def of_value(mesh: Mesh, spec: P, *, is_on_host: bool) -> NamedSharding:
    """Returns the sharding of what a program takes or returns. Absent devices name no host memory, so there the mesh is abstract."""
    return on_host(NamedSharding(mesh.abstract_mesh, spec)) if is_on_host else NamedSharding(mesh, spec)


def as_on_device(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns an abstract leaf with its sharding in device memory."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_device(leaf.sharding))


def as_on_host(leaf: Leaf) -> jax.ShapeDtypeStruct:
    """Returns an abstract leaf with its sharding in host memory."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))


def moved(arrays: Sequence[jax.Array], shardings: Sequence[Any]) -> list[jax.Array]:
    """Begins to copy arrays, and returns the copies.

    Args:
      arrays: arrays, of this process alone or of several.
      shardings: where each copy shall be; its shards are those of the array, in another memory.
    """
    if all(array.is_fully_addressable for array in arrays):
        return jax.device_put(list(arrays), list(shardings))  # one call for all: each costs the sender time
    return by_shard(arrays, shardings)


def by_shard(arrays: Sequence[jax.Array], shardings: Sequence[Any]) -> list[jax.Array]:
    """As `moved`, each of this process's shards on its own."""
    shards = [array.addressable_shards for array in arrays]
    there = [
        [SingleDeviceSharding(shard.device, memory_kind=sharding.memory_kind) for shard in own]
        for own, sharding in zip(shards, shardings)
    ]
    placed = jax.device_put([[shard.data for shard in own] for own in shards], there)
    return [
        jax.make_array_from_single_device_arrays(array.shape, sharding, own)
        for array, sharding, own in zip(arrays, shardings, placed)
    ]
