"""Cuts the tokens of a loss into equal chunks. This module pads them with tokens that have no label."""

import math

import jax
import jax.numpy as jnp

NO_LABEL = -1  # of a token that a loss leaves out


def cut(hidden: jax.Array, labels: jax.Array, *counts: int) -> tuple[jax.Array, jax.Array]:
    """Returns hidden[*counts, tokens of a chunk, embed] and labels[*counts, tokens of a chunk].

    Args:
      hidden: float[..., embed].
      labels: int32[...].
      counts: the numbers of chunks, of parts of a chunk, and so on. Equal sizes give the body of a loop one shape.
    """
    embed, extra = hidden.shape[-1], -labels.size % math.prod(counts)
    hidden, labels = hidden.reshape(-1, embed), labels.reshape(-1)
    if extra:
        hidden, labels = jnp.pad(hidden, ((0, extra), (0, 0))), jnp.pad(labels, (0, extra), constant_values=NO_LABEL)
    return hidden.reshape(*counts, -1, embed), labels.reshape(*counts, -1)
