"""Looks rows up in a table. This module adds their gradients up in float32, whatever the table's dtype."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of a table that tokens number.

    JAX adds the rows' gradients up in the table's dtype. In bfloat16 a sum no longer changes once it is 256 times what is added, and a
    batch of text holds its commonest tokens more often than that. Here they add up in float32, and are rounded once.

    Args:
      table: float[vocab, embed].
      tokens: int[...]; rows of numbers outside the table are NaN, as `jnp.take` has it.

    Returns:
      float[..., embed], in the table's dtype.
    """
    return jnp.take(table, tokens, axis=0)


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    return embedding_lookup(table, tokens), (tokens, jnp.zeros((table.shape[0], 0), table.dtype))


def _backward(kept: Any, grad: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = kept
    total = jnp.zeros((like.shape[0], grad.shape[-1]), jnp.promote_types(jnp.float32, like.dtype))
    total = total.at[tokens].add(grad.astype(total.dtype), mode="drop")
    return total.astype(like.dtype), None


embedding_lookup.defvjp(_forward, _backward)
