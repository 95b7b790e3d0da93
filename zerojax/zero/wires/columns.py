"""Sends no matrix: each device uses some columns of it. This module is the wire of such matrices (`ops.columns`).

An all-to-all makes a device's columns of its shard, so the state's sharding does not change. The gradient of the columns is complete but
for a sum over replicas, because an operation computes with them for the examples of all devices.
"""

import dataclasses
import functools
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.ops import columns
from zerojax.zero.blocks import block_settings
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True)
class ByColumns(gather.Plain):
    """The wire of a matrix of which each device uses its columns; see `placement.Wire`.

    In a row of `make_train_step(wires=)` the regex is over paths of modules whose matrix no device gathers: each computes with some of its
    columns for all devices' examples, and activations are sent instead. For an output projection of `ops.losses.one_pass_cross_entropy`,
    in a loss that is a mean, and a table of `zerojax.embedding_lookup`. No device holds their unsharded gradients either. Needs stage 3
    and reduce_dtype.
    """

    sends_rest: ClassVar[bool] = False

    def one_program(self, pattern: str) -> placement.OneProgram:
        return placement.OneProgram(
            "by_columns", f"{pattern!r} needs all devices of the mesh in one program", "omit it"
        )

    def marked(
        self, partition: partition_lib.Partition, pattern: str, blocks: str, reduce_dtype: DTypeLike | None
    ) -> partition_lib.Partition:
        if not pattern:
            raise UserError("wires: '' of a ByColumns names no module; pass a regex over module paths, such as 'head'")
        return marked(partition, pattern, blocks, reduce_dtype)

    def around(self) -> AbstractContextManager[None]:
        return columns.used()

    def read_as(self, first: str, path: str) -> bool:
        return False

    def send(
        self, shard: jax.Array, known: Any, placement: placement.Placement, dtype: DTypeLike | None
    ) -> columns.Columns:
        weight = gather.cast(shard, placement, dtype)
        if gather.data_dim(placement.stored) == 0:
            weight = jax.lax.all_to_all(weight, gather.STATE, split_axis=1, concat_axis=0, tiled=True)
        return columns.Columns(weight, gather.STATE, mesh_lib.size(placement.stored.mesh, mesh_lib.STATE))

    def differentiated(self, sent: columns.Columns, dtype: DTypeLike | None) -> jax.Array:
        return jnp.zeros(sent.shard.shape, jnp.float32)

    def used(self, path: str, sent: columns.Columns, differentiated: jax.Array) -> AbstractContextManager[jax.Array]:
        return nullcontext(columns.add(path, sent, differentiated))

    def home(
        self, grad: jax.Array, placement: placement.Placement, reduction: gather.Reduction, unsent: Any = None
    ) -> tuple[jax.Array, Any]:
        grad = grad.astype(reduction.dtype)
        if gather.data_dim(placement.update) == 0:
            grad = jax.lax.all_to_all(grad, gather.STATE, split_axis=0, concat_axis=1, tiled=True)
        return gather.sum_over_copies(grad, placement.update.mesh).astype(self.grad_dtype), unsent

    def outside(
        self,
        path: str,
        weight: gather.ShardAndSink,
        placement: placement.Placement,
        dtype: DTypeLike | None,
        reduction: gather.Reduction,
    ) -> jax.Array:
        sent = jax.lax.stop_gradient(self.send(weight.stored, None, placement, dtype))
        return columns.add(path, sent, _sink(weight.sink, sent.shard.shape, placement, reduction))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _sink(
    sink: jax.Array, shape: tuple[int, ...], placement: placement.Placement, reduction: gather.Reduction
) -> jax.Array:
    """Returns zeros of the shape of a device's columns; their gradient becomes that of the shard's sink."""
    return jnp.zeros(shape, jnp.float32)


_sink.defvjp(
    lambda sink, shape, placement, reduction: (_sink(sink, shape, placement, reduction), None),
    lambda shape, placement, reduction, _, grad: placement.wire.home(grad, placement, reduction)[:1],
)


def marked(
    partition: partition_lib.Partition, pattern: str, blocks: str, reduce_dtype: DTypeLike | None
) -> partition_lib.Partition:
    """Returns a partition in which devices use columns of the matrices of some modules, and none gathers them.

    One device has all columns, and nothing changes there but a warning.

    Args:
      partition: of the train state.
      pattern: a regex over module paths; "" for none.
      blocks, reduce_dtype: as of `make_train_step`.

    Raises:
      UserError: the regex matches no module with a matrix, the devices do not divide the columns of one, or one cannot be exchanged.
    """
    block_settings.check_regex("by_columns", pattern, "embed|head", blocks)
    if not pattern:
        return partition
    if reduce_dtype is None:
        raise UserError("by_columns: needs explicit collectives; pass reduce_dtype=jnp.float32, or omit by_columns")
    ways, matches, wires = mesh_lib.size(partition.mesh, mesh_lib.STATE), re.compile(pattern), {}
    sizes, rest = (mesh_lib.text(partition.mesh, axes) for axes in (mesh_lib.STATE, mesh_lib.COMPILER))
    for path, weight in partition.placements.items():
        if tree.block_of(path, matches) is None or len(weight.shape or ()) != 2:
            continue
        size, why = (weight.shape or (0, 0))[1], ""
        if size % ways or weight.padding:
            why = f"its {size} columns do not divide by {sizes}"
        elif mesh_lib.size(partition.mesh, mesh_lib.COMPILER) > 1:
            why = f"the mesh has {rest}"
        elif not weight.trainable:
            why = "it is frozen"
        elif ways > 1 and not gather.is_gathered(weight):
            why = "every device holds all of it: weights are sharded at stage 3 (zero.stage=3) alone"
        if why:
            raise UserError(f"by_columns: {path} cannot be used by columns, because {why}; omit it from by_columns")
        wires[path] = ByColumns() if gather.is_gathered(weight) else weight.wire
    if not wires:
        raise UserError(
            f"by_columns: {pattern!r} matches no module with a matrix; name an output projection or an embedding, such as 'head'"
        )
    if ways == 1:
        warnings.warn(
            f"by_columns: has no effect, because the mesh has {sizes} and a device has all columns; omit it",
            stacklevel=3,
        )
    return partition.with_wires(wires)
