"""How long the texts of a row are. This module counts their tokens, for rotations that depend on it.

Shapes: B batch, T tokens of this device, L tokens of all devices along `context`.
"""

import jax
import jax.numpy as jnp

from zerojax.ops import context_attention, token_order
from zerojax.ops import tokens as tokens_lib


def of_rows(
    is_learned_BT: jax.Array,
    segments_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    way: context_attention.Way | None = None,
) -> jax.Array:
    """Returns the number of tokens of the text that each token is of: int32[B, T], or int32[B, 1] where a row is one text.

    Args:
      is_learned_BT: bool, whether a token's label is learned. A text ends with the last of these tokens: no loss depends on later ones. A
        text without any has the length 0.
      segments_BT: the number of the text that a token belongs to, in rows of several; see `model.Layer`.
      positions_BT: of the tokens in their rows, where devices hold parts of rows.
      way: of these devices; None: a device has all tokens.
    """
    if way is not None:
        assert positions_BT is not None

        def in_order(array_BT: jax.Array) -> jax.Array:
            return token_order.in_sequence(tokens_lib.gathered(array_BT), 1, tokens_lib.of_all(1), way.order)

        if segments_BT is None:
            return of_rows(in_order(is_learned_BT))
        return jnp.take_along_axis(of_rows(in_order(is_learned_BT), in_order(segments_BT)), positions_BT, axis=1)
    if segments_BT is None:
        return tokens_lib.lengths(is_learned_BT)
    index_L = jnp.arange(is_learned_BT.shape[1], dtype=jnp.int32)
    last_BL = jnp.where(is_learned_BT, index_L, -1)
    changes_BL = segments_BT[:, 1:] != segments_BT[:, :-1]
    is_first_BL = jnp.pad(changes_BL, ((0, 0), (1, 0)), constant_values=True)
    is_end_BL = jnp.pad(changes_BL, ((0, 0), (0, 1)), constant_values=True)
    first_BL = jax.lax.cummax(jnp.where(is_first_BL, index_L, 0), axis=1)
    # What ends before a text is no end of it.
    ends_BL = jnp.where(is_end_BL, jnp.maximum(jax.lax.cummax(last_BL, axis=1), first_BL - 1), index_L[-1])
    return 1 + jax.lax.cummin(ends_BL, axis=1, reverse=True) - first_BL
