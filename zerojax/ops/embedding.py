"""Looks rows up in a table. This module adds their gradients up in float32, whatever the table's dtype."""

import jax
import jax.numpy as jnp


def embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of a table that tokens number.

    JAX adds the rows' gradients up in the table's dtype. In bfloat16 a sum no longer changes once it is 256 times what is added, and a
    batch of text holds its commonest tokens more often than that. Here they add up in float32, and are rounded once.

    Args:
      table: float[vocab, ...].
      tokens: int[...]. As `jnp.take` has it, negative numbers count from the table's end, and rows of others outside it are NaN.

    Returns:
      float[*tokens.shape, ...], in the table's dtype.
    """
    if not jnp.issubdtype(table.dtype, jnp.floating) or table.dtype.itemsize >= 4:
        return jnp.take(table, tokens, axis=0)
    # XLA casts the rows that are read, not the table; the cast's transpose is what counts.
    return jnp.take(table.astype(jnp.float32), tokens, axis=0).astype(table.dtype)
