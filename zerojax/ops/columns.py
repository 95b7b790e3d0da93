"""Matrices that stay sharded while they are used. This module names the columns that each device has, and finds them again.

A train step gives the model an array of the whole matrix's shape that nothing may compute with. An operation that can do with columns, the
one-pass loss (`sharded_losses`) or a look-up (`embedding`), recognises it by its identity and takes this device's columns instead.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import roles
from zerojax.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """A device's columns of a matrix.

    Attributes:
      shard: float[rows, columns / ways], in the order of the devices.
      axis, ways: the mesh axis that the columns are sharded over, and its size.
    """

    shard: jax.Array
    axis: str = dataclasses.field(metadata={"static": True})
    ways: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass
class Known:
    """A matrix of which a device uses columns.

    Attributes:
      path: the weight's.
      seen: what the model has in its place.
      columns: the columns.
      sink: zeros, float32, of the shape of the columns, which gets their gradient.
      is_taken: whether an operation has taken the columns.
    """

    path: str
    seen: jax.Array
    columns: Columns
    sink: jax.Array
    is_taken: bool = False


# The user's model calls the operation, and hands it the array alone.
_KNOWN: contextvars.ContextVar[list[Known] | None] = contextvars.ContextVar("matrices_by_columns", default=None)


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Collects the matrices that are added while a model is traced in its body.

    Raises:
      UserError: at its end, no operation has taken the columns of one.
    """
    matrices: list[Known] = []
    token = _KNOWN.set(matrices)
    try:
        yield
    finally:
        _KNOWN.reset(token)
    left = {one.path for one in matrices} - {one.path for one in matrices if one.is_taken}
    if left:
        raise UserError(
            f"by_columns: {min(left)} is read by no operation that can use columns, such as "
            "zerojax.ops.losses.one_pass_cross_entropy(hidden, kernel, labels) or zerojax.embedding_lookup(table, tokens), called with the "
            "weight itself; omit it from by_columns"
        )


def add(path: str, columns: Columns, sink: jax.Array) -> jax.Array:
    """Returns what a model sees in place of a matrix, and makes it known.

    A model that computes with it gets NaN. In the backward pass of one that does both that and a look-up or a loss, as with a tied head, it
    raises UserError, since the gradient of what was computed would be lost.
    """
    rows, size = columns.shard.shape
    seen = _in_place_of(path, (rows, size * columns.ways), columns.shard.dtype, sink)
    matrices = _KNOWN.get()
    assert matrices is not None, "outside of used()"
    matrices.append(Known(path, seen, columns, sink))
    return seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_place_of(path: str, shape: tuple[int, int], dtype: DTypeLike, sink: jax.Array) -> jax.Array:
    return jnp.full(shape, jnp.nan, dtype)


def _forward(path: str, shape: tuple[int, int], dtype: DTypeLike, sink: jax.Array) -> tuple[jax.Array, None]:
    return _in_place_of(path, shape, dtype, sink), None


def _backward(path: str, *_: Any) -> Any:
    """Is traced if a gradient arrives, so if something has been computed with the matrix."""
    raise UserError(
        f"by_columns: {path} is also computed with, beside an operation that uses its columns; a tied head, or a penalty on the weight, "
        "needs the gathered matrix; omit it from by_columns"
    )


_in_place_of.defvjp(_forward, _backward)


def take(matrix: jax.Array) -> Known | None:
    """Returns the columns of a matrix that a model passes to an operation, or None if it has all of them."""
    for one in _KNOWN.get() or ():
        if one.seen is matrix:
            one.is_taken = True
            return one
    return None


def scope() -> Any:
    """Returns the scope by which a plan knows collectives of activations from those of weights."""
    return jax.named_scope(roles.BY_COLUMNS)


def sent_to_all(array: jax.Array, axis: str, ways: int) -> jax.Array:
    """Returns all devices' arrays, stacked. XLA would merge a gather with that of a block's weights, and wait for both."""
    return jax.lax.all_to_all(jnp.broadcast_to(array, (ways, *array.shape)), axis, split_axis=0, concat_axis=0)
