"""Decides which params are stored in host memory, or on a disk, between their uses. This module changes a partition accordingly.

Frozen weights and weights whose optimizer state is offloaded are stored there, if they have at least `min_size` elements. A trained weight
whose optimizer state stays on the device (`fraction`) stays with it, and so does one that `params_on_device` matches. `params_fraction`
takes weights spread evenly over the rest of the model, as `layout` does: those that stay on the device are not sent twice in each pass.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import placement
from zerojax.zero.offload import kept, layout
from zerojax.zero.offload import settings as settings_lib


def place(partition: placement.Partition, offload: settings_lib.Offload, min_size: int) -> placement.Partition:
    """Returns the partition with params in host memory or on a disk.

    Args:
      partition: with its optimizer state placed (`layout.place`).
      offload: the settings, which fit the stage.
      min_size: weights of fewer elements stay on the device.

    Raises:
      UserError: nothing is frozen, and the optimizer state stays on the device; or no param is large enough.
    """
    if offload.params == settings_lib.NONE:
        return partition
    if offload.optimizer == settings_lib.NONE and all(found.trainable for found in partition.placements.values()):
        raise UserError(
            f"offload.params: is {offload.params!r}, and the optimizer state of trained weights stays on the device, where their update "
            "runs; set offload.optimizer too, or freeze some weights (trainable=)"
        )
    known, updated = dict(tree.flatten(partition.abstract_state)), set(layout.offloaded_weights(partition))
    fitting = {
        path: layout.shard_bytes(known[path])
        for path, found in partition.placements.items()
        if _elements(found) >= min_size and (not found.trainable or path in updated)
    }
    if not fitting:
        raise UserError(
            f"offload.params: no weight has min_size={min_size} elements and offloaded optimizer state; lower min_size, or omit it"
        )
    chosen = set(layout.spread(_movable(fitting, offload.params_on_device), offload.params_fraction, "params_fraction"))

    def move(path: str, leaf: Any) -> Any:
        if path not in chosen:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.on_host(leaf.sharding))

    abstract = tree.map_with_path(move, partition.abstract_state)
    return dataclasses.replace(
        partition,
        abstract_state=abstract,
        specs=jax.tree.map(lambda leaf: leaf.sharding.spec, abstract),
        shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        offload=offload,
        resident=partition.on_device,
        on_host=partition.on_host | chosen,
    )


def _movable(nbytes: dict[str, int], stays: str) -> dict[str, int]:
    """Returns the weights, by path, whose path the regex `stays` does not match.

    Raises:
      UserError: it matches none or all of them.
    """
    left = {path: count for path, count in nbytes.items() if not stays or not re.search(stays, path)}
    if stays and len(left) in (0, len(nbytes)):
        which = "all" if not left else "none"
        raise UserError(
            f"offload.params_on_device: {stays!r} matches {which} of the {len(nbytes)} weights that may be in host memory, such as "
            f"{next(iter(nbytes))}; correct or omit it"
        )
    return left


def are_on_host(partition: placement.Partition) -> bool:
    """Returns whether any param is stored in host memory."""
    return any(path in partition.on_host for path in partition.placements)


def are_on_disk(partition: placement.Partition) -> bool:
    """Returns whether offloaded params are stored on a disk."""
    return partition.offload is not None and partition.offload.params == settings_lib.NVME


def to_device(params: Any) -> Any:
    """Returns params with copies on the device of those that live elsewhere, for a program that reads all of them at once."""
    leaves, structure = jax.tree.flatten(params)
    stored = [leaf for leaf in leaves if layout.is_on_host(leaf)]
    copies = iter(kept.arrived(kept.load(stored, [layout.on_device(leaf.sharding) for leaf in stored])))
    return jax.tree.unflatten(structure, [next(copies) if layout.is_on_host(leaf) else leaf for leaf in leaves])


def _elements(found: placement.Placement) -> int:
    return math.prod(found.shape or ())
