"""Looks up rows of a table. This module accumulates their gradients in float32, for any dtype of the table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

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
        rows = _from_columns(by_columns.sink, columns.shard, tokens.reshape(-1), columns.axis)
        return rows.reshape(*tokens.shape, -1)
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.dtype.itemsize >= 4:
        return jnp.take(table, tokens, axis=0)
    # XLA casts only the rows that are read. The transpose of the cast makes the gradient sum float32.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _from_columns(sink: jax.Array, shard: jax.Array, tokens: jax.Array, axis: str) -> jax.Array:
    return _forward(sink, shard, tokens, axis)[0]


def _forward(sink: jax.Array, shard: jax.Array, tokens: jax.Array, axis: str) -> tuple[jax.Array, Any]:
    all_tokens = jax.lax.all_gather(tokens, axis, tiled=True)
    rows = jnp.take(shard, all_tokens, axis=0)
    return jax.lax.all_to_all(rows, axis, split_axis=0, concat_axis=1, tiled=True), (sink, all_tokens)


def _backward(axis: str, residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, None, None]:
    sink, all_tokens = residuals
    rows = jax.lax.all_to_all(grad, axis, split_axis=1, concat_axis=0, tiled=True)
    return sink.at[all_tokens].add(rows.astype(jnp.float32)), None, None


_from_columns.defvjp(_forward, _backward)
