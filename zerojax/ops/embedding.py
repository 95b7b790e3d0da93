"""Looks up rows of a table. This module accumulates their gradients in float32, for any dtype of the table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import roles, specs
from zerojax.ops import columns as columns_lib


def embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `table[tokens]`.

    JAX accumulates the rows' gradients in the table's dtype. A bfloat16 sum stops changing once it is 256 times as large as a term, and
    the most common tokens of a batch occur more often than that. This function accumulates in float32 and rounds once.

    Args:
      table: float[vocab, ...], or one that devices use by columns (`columns`): then the columns of all devices' tokens are looked up, and
        each device is sent those of its own.
      tokens: int[...]. As in `jnp.take`, negative numbers count from the table's end, and other numbers out of range give NaN.

    Returns:
      float[*tokens.shape, ...], in the table's dtype.
    """
    by_columns = columns_lib.take(table)
    if by_columns is not None:
        columns = by_columns.columns
        with columns_lib.scope():
            rows = _from_columns(by_columns.sink, columns.shard, tokens.reshape(-1), columns.axis, columns.ways)
        return rows.reshape(*tokens.shape, -1)
    if mesh_lib.rest() and table.shape[0] % mesh_lib.ways_of_rest() == 0:
        return _from_rows(table, tokens)
    return _taken(table, tokens)


def _taken(table: jax.Array, tokens: jax.Array) -> jax.Array:
    if tokens.size == 1:  # XLA would slice the table, and for a slice it gathers a table of which devices have rows
        return _taken(table, jnp.concatenate([tokens.reshape(1)] * 2))[:1].reshape(*tokens.shape, *table.shape[1:])
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.dtype.itemsize >= 4:
        return jnp.take(table, tokens, axis=0)
    # XLA casts only the rows that are read. The transpose of the cast makes the gradient sum float32.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)


def _from_rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `table[tokens]` where each device along the axes that the compiler shards has its rows of the table.

    The result is sharded over the examples or the tokens of a text (`mesh.dim_of_rest`).
    """
    axis, rows = specs.entry(mesh_lib.rest()), table.shape[0]
    dim = mesh_lib.dim_of_rest(tokens.shape) if tokens.ndim > 1 else None

    def of_own(shard: jax.Array, tokens: jax.Array) -> jax.Array:
        own = jnp.where(tokens < 0, tokens + rows, tokens) - jax.lax.axis_index(axis) * shard.shape[0]
        is_own = ((own >= 0) & (own < shard.shape[0])).reshape(*tokens.shape, *[1] * (shard.ndim - 1))
        found = jnp.where(is_own, _taken(shard, jnp.clip(own, 0, shard.shape[0] - 1)), 0)
        # All terms of a sum but one are 0, so it is exact in any dtype.
        if dim is not None:
            return jax.lax.psum_scatter(found, axis, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(found, axis)

    with jax.named_scope(roles.TENSOR_PARALLEL):
        spec = P() if dim is None else P(*[None] * dim, axis)
        found = mesh_lib.manual_over_rest(of_own, (P(axis), P()), spec)(table, tokens)
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        return found
    is_row = ((tokens >= -rows) & (tokens < rows)).reshape(*tokens.shape, *[1] * (table.ndim - 1))
    return jnp.where(is_row, found, jnp.nan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _from_columns(sink: jax.Array, shard: jax.Array, tokens: jax.Array, axis: specs.Entry, ways: int) -> jax.Array:
    return _forward(sink, shard, tokens, axis, ways)[0]


def _forward(
    sink: jax.Array, shard: jax.Array, tokens: jax.Array, axis: specs.Entry, ways: int
) -> tuple[jax.Array, Any]:
    all_tokens = columns_lib.sent_to_all(tokens, axis, ways).reshape(-1)
    rows = jnp.take(shard, all_tokens, axis=0)
    counted = jnp.zeros((shard.shape[0], 0), jnp.float32)  # a sink as a residual might live through the whole step
    return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True), (counted, all_tokens)


def _backward(
    axis: specs.Entry, ways: int, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[Any, None, None]:
    counted, all_tokens = residuals
    grad = jax.lax.all_to_all(grad, axis, split_axis=1, concat_axis=0, tiled=True).astype(jnp.float32)
    return jnp.zeros((counted.shape[0], grad.shape[1])).at[all_tokens].add(grad), None, None


_from_columns.defvjp(_forward, _backward)
