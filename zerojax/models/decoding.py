"""What a decoder remembers of the tokens that it has read. This module holds caches of keys and values, and attention to them.

A cache has one slot for each token: first the prompt's, then the new ones. Prompts of unequal length begin in slot 0, so the slots between
the end of a short prompt and the end of the longest hold no text. New tokens of all rows have the same slot, but not the same position.

Shapes: B batch, T tokens of this call, S slots, H query heads, K key and value heads, N head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.ops import attention, context_attention, tokens


class Step(NamedTuple):
    """The tokens that one call adds, in every layer's cache.

    Attributes:
      slot: int32[], of the first token.
      positions_BT: int32[B, T], of the tokens in their rows.
      slot_positions_BS: int32[B, S], of the token in each slot.
      is_text_BS: bool[B, S], whether a slot holds text when the tokens are in.
    """

    slot: jax.Array
    positions_BT: jax.Array
    slot_positions_BS: jax.Array
    is_text_BS: jax.Array


class Past(NamedTuple):
    """One layer's keys and values float[B, S, K, N], and the step that adds to them."""

    keys: tuple[jax.Array, jax.Array]
    step: Step

    def add(self, k_BTKN: jax.Array, v_BTKN: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values with those of the step's tokens."""
        return tuple(  # type: ignore[return-value]
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), self.step.slot, axis=1)
            for old, new in zip(self.keys, (k_BTKN, v_BTKN))
        )


def first_step(batch: int, length: int, slots: int) -> Step:
    """Returns the step that fills empty caches with prompts of up to `length` tokens.

    Padding after a prompt needs no mask here: in causal attention no token of the prompt sees it.
    """
    positions_S = jnp.arange(slots, dtype=jnp.int32)
    slot_positions_BS = jnp.broadcast_to(positions_S, (batch, slots))
    is_text_BS = jnp.broadcast_to(positions_S < length, (batch, slots))
    return Step(jnp.int32(0), slot_positions_BS[:, :length], slot_positions_BS, is_text_BS)


def next_step(lengths_B: jax.Array, length: int, count: jax.Array, slots: int) -> Step:
    """Returns the step that adds new token number `count` (from 0) after prompts of `lengths_B` in slots 0 to `length` - 1."""
    slot_S = jnp.arange(slots, dtype=jnp.int32)
    is_prompt_BS = slot_S < lengths_B[:, None]
    is_new_S = (slot_S >= length) & (slot_S <= length + count)
    positions_BS = jnp.where(slot_S < length, slot_S, lengths_B[:, None] + slot_S - length)
    return Step(length + count, (lengths_B + count)[:, None], positions_BS, is_prompt_BS | is_new_S)


def empty(batch: int, slots: int, heads: int, head_dim: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns one layer's keys and values with nothing in them."""
    zeros = jnp.zeros((batch, slots, heads, head_dim), dtype)
    return zeros, zeros


def attend(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array,
    kernel: attention.Kernel,
    past: Past | None,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
    way: context_attention.Way | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Returns causal self-attention float[B, T, H, N] and, given a past, the keys and values with those of these tokens.

    Args:
      q_BTHN, k_BTKN, v_BTKN: of this call's tokens.
      kernel: the implementation of attention among this call's tokens.
      past: the layer's cache. A call of several tokens must be the first; see `first_step`.
      bias: float[H, T, T], or with a past and one token float[B, H, 1, S], added to the scores.
      mask: bool[B, T], False for tokens that no query sees. Without a past.
      segments_BT: int32[B, T], the number of the text that a token belongs to: it sees no other. Without a mask and a past.
      scale: multiplies the scores; None: 1 / sqrt(N).
      window: see `ops.attention.attend`.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
    """
    if past is None or q_BTHN.shape[1] > 1:
        y_BTHN = tokens.attend(
            q_BTHN,
            k_BTKN,
            v_BTKN,
            kernel,
            way=way,
            is_causal=True,
            bias=bias,
            mask=mask,
            segments_BT=segments_BT,
            scale=scale,
            window=window,
        )
        return y_BTHN, None if past is None else past.add(k_BTKN, v_BTKN)
    keys, step = past.add(k_BTKN, v_BTKN), past.step
    seen_BS = step.is_text_BS
    if window:
        seen_BS &= step.positions_BT - step.slot_positions_BS < window
    # One query reads the cache once, and its scores are small: no kernel does better than XLA's.
    y_B1HN = attention.attend(q_BTHN, *keys, "xla", is_causal=False, bias=bias, mask=seen_BS, scale=scale)
    return y_B1HN, keys
