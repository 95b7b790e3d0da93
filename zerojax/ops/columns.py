"""Matrices that stay sharded while they are used. This module names the columns that each device has, and finds them again.

A train step gives the model an array of the whole matrix's shape that nothing may compute with (`stand_ins`). An operation that can do with
columns, the one-pass loss (`sharded_losses`) or a look-up (`embedding`), takes this device's columns instead.
"""

import contextlib
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zerojax import roles, specs
from zerojax.ops import stand_ins


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """A device's columns of a matrix.

    Attributes:
      shard: float[rows, columns / ways], in the order of the devices.
      axis, ways: the mesh axis that the columns are sharded over, and its size.
    """

    shard: jax.Array
    axis: specs.Entry = dataclasses.field(metadata={"static": True})
    ways: int = dataclasses.field(metadata={"static": True})


class Known(NamedTuple):
    """A matrix of which a device uses columns: its path, its columns, and zeros of their shape, float32, that get their gradient."""

    path: str
    columns: Columns
    sink: jax.Array


_MATRICES = stand_ins.StandIns[Known](
    "by_columns: {} is read by no operation that can use columns, such as "
    "zerojax.ops.losses.one_pass_cross_entropy(hidden, kernel, labels) or zerojax.embedding_lookup(table, tokens), called with the "
    "weight itself; omit it from by_columns",
    "by_columns: {} is also computed with, beside an operation that uses its columns; a tied head, or a penalty on the weight, "
    "needs the gathered matrix; omit it from by_columns",
)
used, take = _MATRICES.used, _MATRICES.take


def add(path: str, columns: Columns, sink: jax.Array) -> jax.Array:
    """Returns what a model sees in place of a matrix, and makes it known (`stand_ins`)."""
    rows, size = columns.shard.shape
    return _MATRICES.add(path, Known(path, columns, sink), sink, (rows, size * columns.ways), columns.shard.dtype)


def scope() -> contextlib.AbstractContextManager[None]:
    """Returns the scope by which a plan knows collectives of activations from those of weights."""
    return jax.named_scope(roles.BY_COLUMNS)


def sent_to_all(array: jax.Array, axis: specs.Entry, ways: int) -> jax.Array:
    """Returns all devices' arrays, stacked. XLA would merge a gather with that of a block's weights, and wait for both."""
    return jax.lax.all_to_all(jnp.broadcast_to(array, (ways, *array.shape)), axis, split_axis=0, concat_axis=0)
