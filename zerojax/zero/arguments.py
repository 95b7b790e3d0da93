"""Checks the arguments of a train step. This module refuses, in one line, what JAX would refuse in its own words or accept in silence.

XLA aborts the interpreter where a step on several devices gets a state whose buffers an earlier step has reused, so each call is checked
before it starts.
"""

import math
import numbers
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import errors, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero import partition as partition_lib


def checked(partition: partition_lib.Partition, limit: Any) -> float:
    """Returns the limit of the gradients' norm, after checking it and the partition's weights; see `clip_norm` and `weights`."""
    weights(partition)
    return clip_norm(limit)


def clip_norm(value: object) -> float:
    """Returns a limit of the gradients' global norm.

    Raises:
      UserError: it is no number, negative or not a number. A negative limit would turn the gradients round.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or math.isnan(value) or value < 0:
        raise UserError(f"clip_norm: must be above 0, or 0 for no limit, and is {errors.shown(value)}")
    return 0.0 if math.isinf(value) else float(value)


def grad_accum(value: object) -> None:
    """Raises a UserError if a number of passes is not a whole number above 0."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise UserError(f"grad_accum: must be a whole number, and is {errors.shown(value)}")
    if value < 1:
        raise UserError(f"grad_accum: must be at least 1, and is {value}")


def weights(partition: partition_lib.Partition) -> None:
    """Raises a UserError if a trained weight has a dtype without gradients."""
    for path, leaf in tree.flatten(partition.abstract_state):
        placement = partition.placements.get(path)
        if placement is not None and placement.trainable and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise UserError(
                f"{path}: is {leaf.dtype} and a weight, and only floating weights have gradients; keep it in another field of the state, "
                "or freeze it with trainable="
            )


def of_call(partition: partition_lib.Partition) -> dict[str, Any]:
    """Returns the checks of a step's calls, as arguments of `xla_options.jit`."""
    return {
        "before": lambda state, batch: is_usable(state),
        "explained": lambda state, batch: explained(partition, state) or elsewhere(partition, batch),
    }


def is_usable(state: State) -> None:
    """Raises a UserError if a buffer of a state was deleted, as a step that donates deletes those of its input."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            path = next(path for path, other in tree.flatten(state) if other is leaf)
            raise UserError(
                f"state: {path} was deleted, since the step that took this state reused its memory; use the state that the step "
                "returned, or build the step with donate=False"
            )


def explained(partition: partition_lib.Partition, state: State) -> UserError | None:
    """Returns the error for a state that is not one of this partition, or None if it is."""
    for problem in _problems(partition, state):
        return UserError(
            f"state: {problem}; shard it with this partition's mesh, or build the step with the state's own partition"
        )
    return None


def elsewhere(partition: partition_lib.Partition, batch: PyTree) -> UserError | None:
    """Returns the error for a batch that is committed to other devices than the partition's, or None if it is not."""
    for path, leaf in tree.flatten(batch):
        if (
            isinstance(leaf, jax.Array)
            and leaf.committed
            and leaf.sharding.device_set != set(partition.mesh.devices.flat)
        ):
            return UserError(
                f"batch/{path}: is committed to {len(leaf.sharding.device_set)} device(s), and the state is on {partition.mesh.size}; call "
                "jax.device_put(batch, partition.batch_sharding), or numpy arrays"
            )
    return None


def _problems(partition: partition_lib.Partition, state: State) -> Iterator[str]:
    own = dict(tree.flatten(state))
    wanted = dict(tree.flatten(partition.abstract_state))
    for path in [*wanted, *own]:
        if path not in own or path not in wanted:
            yield f"{path} is {'not in it' if path in wanted else 'no leaf'} of the state that the partition was made from"
    for path, leaf in own.items():
        if jnp.shape(leaf) != wanted[path].shape:
            yield f"{path} has shape {jnp.shape(leaf)}, and the partition stores {wanted[path].shape}"
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and list(mesh.devices.flat) != list(partition.mesh.devices.flat):
            yield f"{path} is sharded over the mesh {_described(mesh)}, and the partition over {_described(partition.mesh)}"
    for path, leaf in own.items():
        sharding, stored = getattr(leaf, "sharding", None), wanted[path].sharding
        if sharding is not None and not sharding.is_equivalent_to(stored, len(wanted[path].shape)):
            yield f"{path} has the sharding {sharding}, and the partition stores {stored.spec}"
    structures: list[Any] = [jax.tree.structure(one) for one in (state, partition.abstract_state)]
    if structures[0] != structures[1]:
        yield "its static fields (tx, apply_fn) are not those of the state that the partition was made from"


def _described(mesh: Mesh) -> str:
    sizes = " x ".join(f"{name} {size}" for name, size in mesh_lib.sizes(mesh).items())
    return f"{sizes} of devices {[device.id for device in mesh.devices.flat][:8]}"
