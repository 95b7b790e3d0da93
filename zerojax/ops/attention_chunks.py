"""Causal attention in chunks: a token sees the tokens before it in its chunk, and none of another. This module computes it.

The chunks of a text are so many tokens each, from its first one on. So a text that begins with a chunk is a batch of shorter
texts, one a chunk, and the scores of others are never made. Where texts begin amid rows, a mask says what a token sees.

Shapes: B batch, T length, H query heads, K key and value heads, N head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zerojax.ops import attention, tokens


def attend(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    kernel: attention.Kernel,
    chunk: int,
    *,
    mask_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    **given: Any,
) -> jax.Array:
    """Returns attention among the tokens of a call: float[B, T, H, N].

    Args:
      q_BTHN, k_BTKN, v_BTKN, kernel: see `attention.attend`.
      chunk: the tokens of a chunk.
      mask_BT: False for padding. A text begins with its first token that is none.
      segments_BT: the number of the text that a token belongs to, where a row holds several. Without a mask.
      **given: `scale` and `cap` of `attention.attend`.
    """
    length, seen = q_BTHN.shape[1], None if mask_BT is None else mask_BT[:, None]
    if length > chunk and mask_BT is None and segments_BT is None:
        return _of_begun(q_BTHN, k_BTKN, v_BTKN, kernel, chunk, **given)
    if segments_BT is not None:
        seen = segments_BT[:, :, None] == segments_BT[:, None]
    if length > chunk:
        at_BT = tokens.in_texts(segments_BT) if segments_BT is not None else _since_first(mask_BT)
        number_BT = at_BT // chunk
        is_near_BTT = number_BT[:, :, None] == number_BT[:, None]
        seen = is_near_BTT if seen is None else is_near_BTT & seen
    seen = None if seen is None else jnp.broadcast_to(seen, (len(seen), length, length))
    return tokens.attend(q_BTHN, k_BTKN, v_BTKN, kernel, way=None, is_causal=True, mask=seen, **given)


def _of_begun(
    q_BTHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, kernel: attention.Kernel, chunk: int, **given: Any
) -> jax.Array:
    """Returns attention of rows that begin with a chunk each."""
    batch, length = q_BTHN.shape[:2]
    padding = ((0, 0), (0, -length % chunk), (0, 0), (0, 0))
    q, k, v = (jnp.pad(array, padding).reshape(-1, chunk, *array.shape[2:]) for array in (q_BTHN, k_BTKN, v_BTKN))
    y = tokens.attend(q, k, v, kernel, way=None, is_causal=True, **given)
    return y.reshape(batch, -1, *y.shape[2:])[:, :length]


def _since_first(mask_BT: jax.Array | None) -> jax.Array:
    assert mask_BT is not None
    return jnp.arange(mask_BT.shape[1]) - jnp.argmax(mask_BT, axis=1)[:, None]
