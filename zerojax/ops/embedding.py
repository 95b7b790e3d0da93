"""Looks up rows of a table. This module accumulates their gradients in float32, for any dtype of the table."""

import jax
import jax.numpy as jnp


def embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns `table[tokens]`.

    JAX accumulates the rows' gradients in the table's dtype. A bfloat16 sum stops changing once it is 256 times as large as a term, and
    the most common tokens of a batch occur more often than that. This function accumulates in float32 and rounds once.

    Args:
      table: float[vocab, ...].
      tokens: int[...]. As in `jnp.take`, negative numbers count from the table's end, and other numbers out of range give NaN.

    Returns:
      float[*tokens.shape, ...], in the table's dtype.
    """
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.dtype.itemsize >= 4:
        return jnp.take(table, tokens, axis=0)
    # XLA casts only the rows that are read. The transpose of the cast makes the gradient sum float32.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)
