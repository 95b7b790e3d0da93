"""Decides which leaves of a train state are offloaded, and in which pieces. This module changes a partition accordingly.

Moments and master weights are offloaded, a weight's together. Counts, factored moments and the state of small weights stay on the device.
A `fraction` below 1 takes weights spread evenly over the model: walking the weights in their order, one is taken while less than that
fraction of the bytes so far is. So each part of the model has the same share of the traffic, and at least the fraction is offloaded.

A weight whose state is larger than a chunk is stored in pieces (`optim.pieces`) if its update is elementwise. Pieces are slices along the
first dim that the spec does not shard and that is long enough: the more major the dim, the longer the contiguous runs in memory.

Frozen params may be offloaded, and those whose optimizer state is. A trained weight whose optimizer state stays on the device (`fraction`)
stays with it, and so does one that `params_on_device` matches. `params_fraction` takes weights spread evenly over the rest of the model:
those that stay on the device are not sent twice in each pass.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from flax.training import train_state

from zerojax import roles, specs, tree
from zerojax.errors import UserError
from zerojax.optim import eight_bit, locality, pieces
from zerojax.train_state import State
from zerojax.tree import Leaf
from zerojax.zero.host import memory_kind, settings
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.weights import placement

FAR_MORE = 2  # times the fraction that was asked for


@dataclasses.dataclass(frozen=True)
class Cut:
    """Slices of a weight: their lengths along `dim`."""

    dim: int
    lengths: tuple[int, ...]


def place(partition: partition_lib.Partition, offload: settings.Offload, min_size: int) -> partition_lib.Partition:
    """Returns the partition with what is offloaded in host memory or on a disk.

    Args:
      partition: of a state on the device.
      offload: the settings, which fit the stage.
      min_size: weights of fewer elements stay on the device, and so does their optimizer state.

    Raises:
      UserError: the state's update cannot be run leaf by leaf, or the state has nothing to offload.
    """
    return _with_params(_with_opt_state(partition, offload, min_size), offload, min_size)


def _with_opt_state(
    partition: partition_lib.Partition, offload: settings.Offload, min_size: int
) -> partition_lib.Partition:
    """Returns the partition with its optimizer state in host memory."""
    if offload.optimizer == settings.NONE:
        return partition
    trained = _checked(partition)
    owned = leaves_of_weights(partition, min_size)
    if not owned and offload.params != settings.NONE:
        warnings.warn(
            f"offload.optimizer: the optimizer state stays on the device, since no trained weight has min_size={min_size} elements",
            stacklevel=4,
        )
        return partition
    if not owned:
        raise UserError(
            "offload.optimizer: no moment or master weight belongs to a weight of at least "
            f"min_size={min_size} elements; lower min_size, or omit offload"
        )
    local = locality.in_step(trained.tx, trained.params)
    if local.kind == locality.GLOBAL:
        raise UserError(
            f"offload.optimizer: the state is updated leaf by leaf, and with this optimizer {local.why}; "
            "where it clips by the global norm, remove that and pass make_train_step(clip_norm=...)"
        )
    may_cut = local.kind == locality.ELEMENTWISE
    known = dict(tree.flatten(partition.abstract_state))
    nbytes = {weight: sum(tree.shard_bytes(known[path]) for path in paths) for weight, paths in owned.items()}
    chosen = spread(nbytes, offload.fraction, "fraction")
    cuts = {
        weight: cut
        for weight in chosen
        if may_cut
        and (
            cut := _cut(
                partition.placements[weight], [known[p] for p in owned[weight]], nbytes[weight], offload.chunk_bytes
            )
        )
    }
    return _placed(partition, offload, {path: weight for weight in chosen for path in owned[weight]}, cuts)


def _with_params(
    partition: partition_lib.Partition, offload: settings.Offload, min_size: int
) -> partition_lib.Partition:
    """Returns the partition, whose optimizer state is placed, with its params in host memory."""
    if offload.params == settings.NONE:
        return partition
    is_trained = len(partition.leaves) > len(partition.placements)  # weights alone are no state of a step
    if is_trained and offload.optimizer == settings.NONE and all(f.trainable for f in partition.placements.values()):
        raise UserError(
            f"offload.params: is {offload.params!r}, and the optimizer state of trained weights stays on the device, where their update "
            "runs; set offload.optimizer too, or freeze some weights (trainable=)"
        )
    known, updated = dict(tree.flatten(partition.abstract_state)), set(offloaded_weights(partition))
    fitting = {
        path: tree.shard_bytes(known[path])
        for path, found in partition.placements.items()
        if math.prod(found.shape or ()) >= min_size and (not is_trained or not found.trainable or path in updated)
    }
    if not fitting:
        raise UserError(
            f"offload.params: no weight has min_size={min_size} elements and offloaded optimizer state; lower min_size, or omit it"
        )
    chosen = set(spread(_movable(fitting, offload.params_on_device), offload.params_fraction, "params_fraction"))
    abstract = tree.map_with_path(
        lambda path, leaf: memory_kind.as_on_host(leaf) if path in chosen else leaf, partition.abstract_state
    )
    on_host = partition.on_host | chosen
    return _stored_as(partition, abstract, offload=offload, resident=partition.on_device, on_host=on_host)


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


def leaves_of_weights(partition: partition_lib.Partition, min_size: int) -> dict[str, list[str]]:
    """Returns the paths of the moments and the master weight of each trained weight of at least `min_size` elements, by its path."""
    found: dict[str, list[str]] = {}
    weights = dict(tree.flatten(partition.abstract_state))
    for path, leaf in partition.leaves.items():
        if leaf.role == roles.OPT_STATE and leaf.weight and tree.size(weights[leaf.weight]) >= min_size:
            found.setdefault(leaf.weight, []).append(path)
    return {weight: found[weight] for weight in partition.placements if weight in found}


def _checked(partition: partition_lib.Partition) -> State:
    """Returns the abstract state with its trainable params only; refuses one whose update is unknown."""
    state = partition.abstract_state
    update = getattr(type(state), "apply_gradients", None)
    if update is not train_state.TrainState.apply_gradients or not all(
        hasattr(state, name) for name in ("tx", "params", "opt_state")
    ):
        raise UserError(
            f"offload.optimizer: needs a flax TrainState that applies gradients as flax does, and the state is {type(state).__name__}, "
            "whose own apply_gradients may read leaves together; use a TrainState without that method (averages of weights may be in the "
            "state of its optimizer, an optax transformation), or omit offload"
        )
    overwritten = [path for path, found in partition.placements.items() if found.overwritten]
    if overwritten:
        raise UserError(
            f"offload.optimizer: {overwritten[0]} is overwritten with its gradient (fp8 statistics), which the update of offloaded leaves "
            "does not do; omit offload, or the fp8 layers"
        )
    return state.replace(params=partition.trainable_part(state.params))


def spread(nbytes: Mapping[str, int], fraction: float, field: str) -> list[str]:
    """Returns weights with at least that fraction of the bytes, spread evenly, and less than one weight more.

    Warns if they have far more, since the weights are few or the fraction is tiny. `field` is the setting's name.
    """
    chosen, taken, seen = [], 0, 0
    for weight, count in nbytes.items():
        seen += count
        if taken < fraction * seen:
            chosen.append(weight)
            taken += count
    if taken > FAR_MORE * fraction * seen:
        warnings.warn(
            f"offload.{field}: is {fraction:g}, and {taken / seen:.2g} of the bytes are offloaded, since a weight is not divided: those of "
            f"{len(chosen)} of {len(nbytes)} weights, the first {chosen[0]}; set {field} to {taken / seen:.2g} or more, or omit offload",
            stacklevel=2,
        )
    return chosen


def _cut(weight: placement.Placement, leaves: list[Any], nbytes: int, chunk_bytes: int) -> Cut | None:
    """Returns the slices of a weight whose optimizer state, `leaves`, is larger than a chunk; None for none."""
    number = -(-nbytes // chunk_bytes)
    shape, spec = tuple(weight.shape or ()), weight.update.spec
    taken = [bool(specs.names(entry)) for entry in (*spec, *[None] * (len(shape) - len(spec)))]
    is_coded = any(leaf.shape != shape for leaf in leaves)  # 8-bit codes have scales of another shape
    steps = [eight_bit.BLOCK if is_coded and dim == len(shape) - 1 else 1 for dim in range(len(shape))]
    lengths = {dim: shape[dim] // steps[dim] for dim in range(len(shape)) if not taken[dim]}
    if number < 2 or not lengths or max(lengths.values()) < 2:
        return None
    dim = next((dim for dim, length in lengths.items() if length >= number), max(lengths, key=lambda d: lengths[d]))
    each = -(-shape[dim] // (number * steps[dim])) * steps[dim]
    whole, rest = divmod(shape[dim], each)
    cut = Cut(dim, (each,) * whole + ((rest,) if rest else ()))
    smallest = [(*shape[:dim], length, *shape[dim + 1 :]) for length in set(cut.lengths)]
    if len(cut.lengths) < 2 or (is_coded and not all(map(eight_bit.takes, smallest))):
        return None
    return cut


def _placed(
    partition: partition_lib.Partition, offload: settings.Offload, chosen: Mapping[str, str], cuts: Mapping[str, Cut]
) -> partition_lib.Partition:
    """Returns the partition with the leaves of `chosen` (path -> weight) in host memory, in the pieces that `cuts` says."""
    leaves: dict[str, partition_lib.Decision] = {}

    def parts_of(path: str, leaf: Leaf) -> Leaf:
        """Returns the abstract leaf as it is stored, and notes its decisions."""
        decision = partition.leaves[path]
        cut = cuts.get(chosen.get(path, ""))
        if path not in chosen:
            leaves[path] = decision
            return leaf
        if cut is None:
            leaves[path] = decision
            return memory_kind.as_on_host(leaf)
        weight_shape = partition.placements[chosen[path]].shape or ()
        lengths = cut.lengths
        if leaf.shape != weight_shape and cut.dim == len(weight_shape) - 1:
            lengths = tuple(-(-length // eight_bit.BLOCK) for length in lengths)
        parts = []
        for number, length in enumerate(lengths):
            piece = tuple(length if dim == cut.dim else n for dim, n in enumerate(leaf.shape))
            unpadded = tuple(length if dim == cut.dim else n for dim, n in enumerate(decision.shape))
            leaves[f"{path}/{number}"] = dataclasses.replace(decision, shape=unpadded)
            parts.append(jax.ShapeDtypeStruct(piece, leaf.dtype, sharding=memory_kind.on_host(leaf.sharding)))
        return pieces.Pieces(parts, cut.dim)

    abstract = tree.map_with_path(parts_of, partition.abstract_state)
    offloaded = set(chosen.values())
    placements = {
        path: dataclasses.replace(found, opt_state=memory_kind.on_host(found.opt_state)) if path in offloaded else found
        for path, found in partition.placements.items()
    }
    return _stored_as(
        partition,
        abstract,
        leaves=leaves,
        placements=placements,
        offload=offload,
        resident=partition,
        on_host=frozenset(path for path, leaf in leaves.items() if path in chosen or path.rpartition("/")[0] in chosen),
        cuts=cuts,
    )


def _stored_as(partition: partition_lib.Partition, abstract: State, **changes: Any) -> partition_lib.Partition:
    """Returns the partition with another abstract state, and other changes."""
    return dataclasses.replace(
        partition,
        abstract_state=abstract,
        specs=jax.tree.map(lambda leaf: leaf.sharding.spec, abstract),
        shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        **changes,
    )


def offloaded_weights(partition: partition_lib.Partition) -> list[str]:
    """Returns the paths of the weights whose optimizer state lives in host memory, in their order."""
    found = {
        partition.leaves[path].weight for path in partition.on_host if partition.leaves[path].role == roles.OPT_STATE
    }
    return [path for path in partition.placements if path in found]


def host_leaves(partition: partition_lib.Partition) -> dict[str, Any]:
    """Returns the abstract leaves in host memory, each piece by itself, by path."""
    return {path: leaf for path, leaf in tree.flatten(partition.abstract_state) if path in partition.on_host}


def are_params_on_host(partition: partition_lib.Partition) -> bool:
    """Returns whether any param is stored in host memory, or on a disk."""
    return any(path in partition.on_host for path in partition.placements)


def are_params_on_disk(partition: partition_lib.Partition) -> bool:
    """Returns whether offloaded params are stored on a disk."""
    return partition.offload is not None and partition.offload.params == settings.NVME
