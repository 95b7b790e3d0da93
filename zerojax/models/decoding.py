"""What a decoder remembers of the tokens that it has read. This module holds caches of keys and values, and attention to them.

A cache has one slot for each token: first the prompt's, then the new ones. Prompts of unequal length begin in slot 0, so the slots between
the end of a short prompt and the end of the longest hold no text. New tokens of all rows have the same slot, but not the same position.

In `row_step` each row is where its own text ends, and a token's slot is its position.

Shapes: B batch, T tokens of this call, S slots, H query heads, K key and value heads, N head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.ops import attention, attention_chunks, context_attention, sinks, tokens
from zerojax.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Held:
    """One array of what a decoder remembers, [rows, positions, *shape] or [rows, *shape]. A family declares a tree of them, with a node
    for each layer (`Family.caches`).

    Attributes:
      shape: of a position, or of a row.
      positions: it has a slot for each of the "tokens" or of the encoder's "inputs". None: it is recurrent, of one size for texts of any
        length, and holds the text up to the last token alone, so it is no beginning of another text.
      has_heads: whether the first dim of `shape` counts heads, which devices may share.
      dtype: None: that of the model's states.
    """

    shape: tuple[int, ...]
    positions: Literal["tokens", "inputs"] | None = "tokens"
    has_heads: bool = True
    dtype: DTypeLike | None = None

    def heads_dim(self, ways: int) -> int | None:
        """Returns the array's dim of heads if `ways` devices can share them."""
        is_shared = self.has_heads and ways > 1 and self.shape[0] % ways == 0
        return (1 if self.positions is None else 2) if is_shared else None


class Step(NamedTuple):
    """The tokens that one call adds, in every layer's cache."""

    slot: jax.Array  # int32[], of the first token; int32[B] where rows differ. Tokens beyond the last slot are dropped.
    positions_BT: jax.Array  # int32[B, T], of the tokens in their rows
    slot_positions_BS: jax.Array  # int32[B, S], of the token in each slot
    is_text_BS: jax.Array  # bool[B, S], whether a slot holds text when the tokens are in
    counts_B: jax.Array | None = None  # int32[B], how many of a call's tokens are text, where rows differ; None: all
    ends_B: jax.Array | None = None  # int32[B], the slots from 0 that hold text, of `row_step`
    reader: attention.TokenReader | None = None  # of a kernel that reads no other slots; None: all slots are read

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the state of the last token of each row: float[B, 1, D]."""
        return x_BTD[:, -1:] if self.counts_B is None else at_last(x_BTD, self.counts_B)

    def is_new_BT(self, length: int) -> jax.Array | None:
        """Returns which of a call's `length` tokens are text, bool[B, T], as recurrent arrays have to know; None: all."""
        if self.counts_B is not None:
            return jnp.arange(length) < self.counts_B[:, None]
        return (self.slot < self.is_text_BS.shape[1])[:, None] if self.slot.ndim else None


def at_last(x_BTD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns each row's state at its last token: float[B, 1, D]."""
    return jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)


class Past(NamedTuple):
    """One layer's keys and values float[B, S, K, N], or one array that is both, and the step that adds to them."""

    keys: tuple[jax.Array, ...]
    step: Step

    def add(self, *new: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the keys and values with those of the step's tokens, float[B, T, K, N]."""
        batch, length = new[0].shape[:2]
        if self.step.slot.ndim:
            rows, slots = jnp.arange(batch)[:, None], self.step.slot[:, None] + jnp.arange(length)
            return tuple(
                old.at[rows, slots].set(own.astype(old.dtype), mode="drop", unique_indices=True)
                for old, own in zip(self.keys, new)
            )
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(old, own.astype(old.dtype), self.step.slot, axis=1)
            for old, own in zip(self.keys, new)
        )


def is_first(past: Past, length: int) -> bool:
    """Returns whether a call of `length` tokens is one of `first_step`, whose tokens see no others."""
    return length > 1 and not past.step.slot.ndim


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


def row_step(
    positions_B: jax.Array, counts_B: jax.Array, length: int, slots: int, reader: attention.TokenReader | None = None
) -> Step:
    """Returns the step that adds up to `length` tokens to each row, from a position of its own.

    Args:
      positions_B: int32[B], of the first token.
      counts_B: int32[B], the tokens of each row; a row with 0 adds nothing, and its scores mean nothing.
      length: the tokens of the call.
      slots: of the caches.
      reader: of the kernel by which attention of one token may read caches; None for none.
    """
    positions_BT = positions_B[:, None] + jnp.arange(length, dtype=jnp.int32)
    slot_positions_BS = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (positions_B.shape[0], slots))
    ends_B = jnp.where(counts_B > 0, positions_B + counts_B, 0)
    return Step(
        jnp.where(counts_B > 0, positions_B, slots),
        positions_BT,
        slot_positions_BS,
        slot_positions_BS < ends_B[:, None],
        counts_B if length > 1 else None,
        ends_B,
        reader,
    )


def empty(caches: PyTree, batch: int, slots: int, dtype: DTypeLike) -> Any:
    """Returns arrays with nothing in them, for a tree of `Held` whose positions, if any, are tokens."""

    @functools.cache
    def zeros(held: Held) -> jax.Array:
        positions = () if held.positions is None else (slots,)
        return jnp.zeros((batch, *positions, *held.shape), held.dtype or dtype)

    return jax.tree.map(zeros, caches)


def recurrent(
    past: Past | None, mask_BT: jax.Array | None, length: int
) -> tuple[tuple[Any, ...], jax.Array | None, jax.Array | None]:
    """Returns what a recurrent layer goes on from: two arrays or None, the texts' tokens in a call of `length`, int32[B], and its mask.

    Without a past a text is a call, which may be padded on either side.
    """
    if past is None:
        return (None, None), None, mask_BT
    mask_BT = past.step.is_new_BT(length)
    return past.keys, None if mask_BT is None else jnp.sum(mask_BT, axis=1), mask_BT


def is_recurrent(caches: PyTree) -> bool:
    """Returns whether any array of a tree of `Held` is recurrent."""
    return any(held.positions is None for held in jax.tree.leaves(caches))


def attend(
    q_BTHN: jax.Array,
    k_BTKN: jax.Array,
    v_BTKN: jax.Array | None,
    kernel: attention.Kernel,
    past: Past,
    *,
    bias: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
    way: context_attention.Way | None = None,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
    chunk: int = 0,
    adds: bool = True,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns causal self-attention float[B, T, H, N], and the keys and values with those of these tokens.

    Args:
      q_BTHN, k_BTKN, v_BTKN: of this call's tokens. Without values the keys are the values too.
      kernel: the implementation of attention among this call's tokens.
      past: the layer's cache. A call of several tokens must be the first (`first_step`), or have a slot for each row (`row_step`).
      bias: float[H, T, T], or of one token float[B, H, 1, S], added to the scores.
      scale: multiplies the scores; None: 1 / sqrt(N).
      window, cap: see `ops.attention.attend`.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
      sinks_H: of the heads (`ops.sinks`), without a bias and a cap; None for none.
      chunk: tokens see those of their chunk alone (`ops.attention_chunks`), without a bias, a window, a way and sinks; 0: all.
      adds: the cache has no keys and values of these tokens yet; else it has, and those given are read in a first call alone.
    """
    new = (k_BTKN,) if v_BTKN is None else (k_BTKN, v_BTKN)
    if chunk and is_first(past, q_BTHN.shape[1]):
        y_BTHN = attention_chunks.attend(q_BTHN, k_BTKN, new[-1], kernel, chunk, scale=scale, cap=cap)
        return y_BTHN, past.add(*new) if adds else past.keys
    if is_first(past, q_BTHN.shape[1]):
        y_BTHN = tokens.attend(
            q_BTHN,
            k_BTKN,
            new[-1],
            kernel,
            way=way,
            is_causal=True,
            bias=bias,
            scale=scale,
            window=window,
            cap=cap,
            sinks_H=sinks_H,
        )
        return y_BTHN, past.add(*new) if adds else past.keys
    keys, step = past.add(*new) if adds else past.keys, past.step
    attend_masked = functools.partial(attention.attend, is_causal=False, bias=bias, scale=scale, cap=cap)
    if sinks_H is not None:
        attend_masked = functools.partial(sinks.attend, sinks_H=sinks_H, is_causal=False, scale=scale)
    seen_keys = keys[0], keys[-1]
    near_BTS: Any = None
    if chunk:
        near_BTS = step.positions_BT[:, :, None] // chunk == step.slot_positions_BS[:, None] // chunk
    if q_BTHN.shape[1] > 1:
        distance_BTS = step.positions_BT[:, :, None] - step.slot_positions_BS[:, None]
        seen = (distance_BTS >= 0) & (distance_BTS < (window or distance_BTS.shape[2]))
        seen = seen if near_BTS is None else seen & near_BTS
        y_BTHN = attend_masked(q_BTHN, *seen_keys, "xla", mask=seen)
        return y_BTHN, keys
    if (
        step.reader is not None
        and bias is None
        and not cap
        and sinks_H is None
        and not chunk
        and attention.token_kernel_can_run(q_BTHN, keys[0], step.reader)
    ):
        assert step.ends_B is not None, "a reader is one of `row_step`"
        return attention.attend_token(q_BTHN, *seen_keys, step.ends_B, step.reader, scale=scale, window=window), keys
    seen_BS = step.is_text_BS if near_BTS is None else step.is_text_BS & near_BTS[:, 0]
    if window:
        seen_BS &= step.positions_BT - step.slot_positions_BS < window
    y_BTHN = attend_masked(q_BTHN, *seen_keys, "xla", mask=seen_BS)
    return y_BTHN, keys


def logits(
    module: Callable[[Any], nn.Module], config: Any, params: PyTree, inputs: Mapping[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    """Returns a decoder's logits after each token, float32[B, T, V]; `inputs` may have a mask."""
    return cast(jax.Array, module(config).apply({"params": params}, tokens, inputs.get("mask")))


def start(
    module: Callable[[Any], nn.Module],
    config: Any,
    params: PyTree,
    inputs: Mapping[str, jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    slots: int,
) -> PyTree:
    """Returns what a decoder's own `start` does."""
    assert not inputs, "a decoder's prompt has no other arrays than its tokens"
    return module(config).apply({"params": params}, tokens, lengths, slots, method="start")


def extend(
    module: Callable[[Any], nn.Module], config: Any, params: PyTree, caches: PyTree, step: Step, tokens: jax.Array
) -> PyTree:
    """Returns the scores after one more token, and the caches: what the model's own `extend` does."""
    return module(config).apply({"params": params}, caches, step, tokens, method="extend")
