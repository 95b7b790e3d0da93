"""Vectors of texts, and the loss by which those that belong together come near. This module gathers the texts of all devices.

With the cosine s of a query and a text, and the temperature t, a query's loss is (InfoNCE, arXiv:1807.03748, equation 4)

    -log exp(s_own / t) / sum over all texts of exp(s / t)

where the texts are those of all queries of a pass on all devices, also their negatives.
"""

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax.ops import tokens

OF_DECODERS = ("last", "mean")  # the first token of a decoder sees no other
POOLING = (*OF_DECODERS, "cls")


def pooled(states: jax.Array, is_text: jax.Array, pooling: str) -> jax.Array:
    """Returns the vector of each text, of length 1: float32[texts, embed].

    Args:
      states: of tokens, float[texts, length, embed].
      is_text: bool[texts, length], False for padding, at either end.
      pooling: one of POOLING.
    """
    counts = is_text.astype(jnp.float32)
    if pooling != "mean":
        chosen = tokens.lengths(is_text) - 1 if pooling == "last" else jnp.argmax(is_text, axis=1, keepdims=True)
        counts = (jnp.arange(is_text.shape[1]) == chosen).astype(jnp.float32)
    total = jnp.sum(states.astype(jnp.float32) * counts[..., None], axis=1)
    return total * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(total), axis=-1, keepdims=True), 1e-24))


def info_nce(
    queries: jax.Array, texts: jax.Array, counts: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each of this device's queries, and 1 where no text is nearer than its own, float32[queries] both.

    Call it on all devices, inside `jax.shard_map` or on one. A step must add the losses of devices up, so that a text gets the gradients of
    all queries: then they are those of one device with all queries.

    Args:
      queries: vectors of length 1, float32[queries, embed].
      texts: likewise of each query's own text, and after it those that are none: float32[queries, texts, embed].
      counts: 0 for queries that only fill a batch, whose texts no other is compared with; float32[queries].
      temperature: t.
    """
    axes, (count, beside, width) = mesh_lib.around(mesh_lib.SUMMED), texts.shape
    flat, known = texts.reshape(count * beside, width), jnp.repeat(counts, beside)
    first: jax.Array | int = 0
    if axes:
        flat, known = (jax.lax.all_gather(array, axes, tiled=True) for array in (flat, known))
        first = jax.lax.axis_index(axes) * count * beside
    scores = jnp.where(known > 0, queries @ flat.T / temperature, -jnp.inf)
    own = jnp.sum(queries * texts[:, 0], axis=-1) / temperature
    place = first + jnp.arange(count) * beside
    others = jnp.where(jnp.arange(len(known)) == place[:, None], -jnp.inf, scores)
    # The own one is taken apart: for a query that does not count, all others may be masked.
    everything = jnp.concatenate([own[:, None], others], axis=1)
    nearest = (own >= jnp.max(others, axis=1)).astype(jnp.float32)
    return jax.nn.logsumexp(everything, axis=1) - own, jax.lax.stop_gradient(nearest)
