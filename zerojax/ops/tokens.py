"""What a model calls whose tokens may be sharded over devices. This module knows the mesh axis; `context_attention` has the exchange.

Shapes: B batch, T queries and S keys of this device, H query heads, K key and value heads, N head dim; of recurrences as in
`recurrence`.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import specs, traces
from zerojax.errors import UserError
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention, recurrence, recurrence_context, short_convolution, sinks

_WHOLE_ROWS: contextvars.ContextVar[bool] = contextvars.ContextVar("whole_rows", default=False)


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: attention_lib.Kernel,
    *,
    way: context_attention.Way | None,
    is_causal: bool,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Returns attention of this device's queries over all keys of their rows: float[B, T, H, N].

    Args:
      q_BTHN, k_BSKN, v_BSKN, kernel, is_causal, scale, window, cap: see `attention.attend`.
      way: how devices attend that each hold a part of every row, in the order of its tokens; None: a device has all tokens.
      bias: float[H, T, L] or float[B, H, T, L], added to the scores; L keys of all devices.
      mask: bool[B, S], False for this device's keys that no query sees.
      segments_BT: int32[B, T], the number of the text that a token belongs to: it sees no other. Without a mask.
      sinks_H: of the heads (`sinks`), without a way and a bias; None for none.
    """
    if way is not None and sinks_H is not None:
        raise UserError(
            "way: attention with sinks needs all tokens of a row on one device; use a mesh without `context`"
        )
    if way is not None:
        return context_attention.attend(
            q_BTHN,
            k_BSKN,
            v_BSKN,
            kernel,
            axis=_axis(),
            way=way,
            order=way.order,
            is_causal=is_causal,
            window=window,
            segments_BT=segments_BT,
            mask_BT=mask,
            scale=scale,
            bias=bias,
            cap=cap,
        )
    _check_rows("attention", "counts positions and attends")
    seen = mask if segments_BT is None else segments_BT[:, :, None] == segments_BT[:, None, :]
    is_wide = kernel == "cudnn" and q_BTHN.shape[3] > attention_lib.NARROW
    is_for_absent = is_wide and bias is None and not cap and not attention_lib.jax_takes_wide_heads()
    given: dict[str, Any] = {"is_causal": is_causal, "mask": seen, "scale": scale, "window": window, "cap": cap}
    is_capped = cap and is_causal and bias is None and mask is None  # by parts, so that not all scores are in memory
    if sinks_H is not None or is_for_absent or is_capped:
        return sinks.attend(q_BTHN, k_BSKN, v_BSKN, kernel, sinks_H=sinks_H, **given)
    return attention_lib.attend(q_BTHN, k_BSKN, v_BSKN, kernel, bias=bias, **given)


def recur(
    terms: recurrence.Terms,
    state_BHKV: jax.Array | None,
    *,
    way: context_attention.Way | None,
    mask_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of a recurrence, float32[B, T, H, V], and the state after the tokens: float32[B, H, K, V].

    Args:
      terms, state_BHKV, mask_BT, segments_BT: of this device's tokens; see `recurrence.scan`.
      way: as of `attend`, without a state, and of tokens in the order of their row.
    """
    heads, groups, ways = terms.v.shape[2], terms.q.shape[2], mesh_lib.ways_of_rest()
    of_heads = specs.entry(mesh_lib.rest()) if heads % ways == 0 else None
    of_groups = of_heads if groups % ways == 0 else None
    if way is None:
        _check_rows("recurrence", "computes states")
    assert way is None or (state_BHKV is None and way.order == "contiguous"), "a part of a row"

    def of_own(q: jax.Array, k: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
        *others, state, mask, segments = rest
        if of_groups != of_heads:  # a device takes the keys that its heads read
            own, group = heads // ways, heads // groups
            read = 1 if group % own == 0 else own
            index = (jax.lax.axis_index(of_heads) * own + jnp.arange(read)) // group
            q, k = (jnp.take(each, index, axis=2) for each in (q, k))
        own_terms, given = recurrence.Terms(q, k, *others), {"mask_BT": mask, "segments_BT": segments}
        if way is None:
            return recurrence.go_on(own_terms, state, **given)
        return recurrence_context.scan(own_terms, axis=_axis(), **given)

    tokens, keys, states = P(None, None, of_heads), P(None, None, of_groups), P(None, of_heads)
    run = mesh_lib.manual_over_rest(of_own, (keys, keys, tokens, tokens, tokens, states, P(), P()), (tokens, states))
    return run(*terms, state_BHKV, mask_BT, segments_BT)


def convolve(
    parts: Sequence[jax.Array],
    kernel_WC: jax.Array,
    bias_C: jax.Array | None = None,
    before_BWC: jax.Array | None = None,
    *,
    way: context_attention.Way | None,
    segments_BT: jax.Array | None = None,
    counts_B: jax.Array | None = None,
) -> tuple[list[jax.Array], Any]:
    """Returns what `short_convolution.convolve` does of parts of the channels, with a bias, and the last inputs of all.

    Where the compiler shards channels, each part is sharded alone, so none is computed of all parts together.

    Args:
      parts: of the inputs of this device's tokens, each float[B, T, its channels].
      kernel_WC, before_BWC, segments_BT, counts_B: of all channels; see `short_convolution.convolve`.
      bias_C: is added; None for none.
      way: as of `recur`. With one there are no last inputs.
    """
    if way is None:
        _check_rows("convolution", "reads tokens")
    assert way is None or (before_BWC is None and way.order == "contiguous"), "a part of a row"
    ends = list(itertools.accumulate(part.shape[-1] for part in parts))[:-1]

    def of_some(x: jax.Array, kernel: jax.Array, bias: Any, before: Any) -> tuple[jax.Array, Any]:
        if way is None:
            y, last = short_convolution.convolve(x, kernel, before, segments_BT=segments_BT, counts_B=counts_B)
        else:
            y, last = recurrence_context.convolve(x, kernel, axis=_axis(), segments_BT=segments_BT), None
        return (y if bias is None else y + bias), last

    if not mesh_lib.rest() or not ends:
        x_BTC = jnp.concatenate(parts, axis=-1) if ends else parts[0]
        y_BTC, last = of_some(x_BTC, kernel_WC, bias_C, before_BWC)
        return jnp.split(y_BTC, ends, axis=-1), last
    cut = [
        [None] * len(parts) if array is None else jnp.split(array, ends, axis=-1)
        for array in (kernel_WC, bias_C, before_BWC)
    ]
    found, last_parts = zip(*map(of_some, parts, *cut))
    return list(found), None if way is not None else jnp.concatenate(last_parts, axis=-1)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    **others: Any,
) -> jax.Array:
    """Returns `jax.nn.dot_product_attention`; where tokens are sharded over the mesh axis `context`, of this device's queries over the keys
    of all devices.

    Put it in the place of `jax.nn.dot_product_attention` for attention over the tokens of a sequence, or hand it to a Flax module:
    `nn.MultiHeadDotProductAttention(attention_fn=functools.partial(zerojax.attention, is_causal=True))`. It exchanges keys inside
    `make_train_step(reduce_dtype=...)` on a mesh with `context`, whose devices have parts of each sequence in its order. Anywhere else
    nothing is exchanged.

    Args:
      query, key, value: float[batch, tokens, heads, width].
      bias: added to the scores; over sharded tokens [batch or 1, heads, queries, keys of all devices].
      mask: False for keys that are not seen; over sharded tokens [batch or 1, 1, 1, keys of this device].
      scale, is_causal, local_window_size, implementation: as of `jax.nn.dot_product_attention`. Over sharded tokens a window is
        causal: (left, 0).
      **others: its other arguments, or those that Flax hands to such a function. Over sharded tokens none may have an effect.

    Raises:
      UserError: something cannot run over sharded tokens, or the tokens do not divide.
    """
    is_sharded = _is_sharded() and not _WHOLE_ROWS.get()
    if others.pop("dropout_rate", 0.0) and not others.get("deterministic", False):
        raise UserError("attention: takes no dropout of its weights; set `dropout_rate=0`, or pass deterministic=True")
    dtype = others.pop("dtype", None)
    for name in ("broadcast_dropout", "dropout_rng", "deterministic", "module", "force_fp32_for_softmax"):
        others.pop(name, None)  # Flax's, for dropout or for what this always does
    others = {name: given for name, given in others.items() if given is not None}
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    if not is_sharded:
        others |= {"local_window_size": local_window_size, "implementation": implementation}
        return jax.nn.dot_product_attention(query, key, value, bias, mask, scale=scale, is_causal=is_causal, **others)
    where = "where tokens are sharded over `context`"
    if others:
        raise UserError(f"attention: {min(others)} cannot run {where}; omit it")
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    if local_window_size is not None and (right or not is_causal):
        raise UserError(f"attention: a window of {local_window_size} cannot run {where}; it must be causal: (left, 0)")
    if mask is not None and (mask.ndim != 4 or mask.shape[1:3] != (1, 1)):
        raise UserError(
            f"attention: a mask of shape {mask.shape} cannot run {where}, since it says nothing of the keys of other devices; pass "
            "is_causal=True for a causal one, and a mask [batch, 1, 1, keys] for padding"
        )
    length = of_all(key.shape[1])
    if bias is not None and bias.shape[-1] != length:
        raise UserError(
            f"attention: a bias of shape {bias.shape} cannot run {where}; its last dim must count the {length} keys of all devices"
        )
    way = context_attention.choose(
        heads=query.shape[2],
        kv_heads=key.shape[2],
        head_dim=query.shape[3],
        batch=len(query),
        ways=of_all(1),
        length=length,
        is_causal=is_causal,
        window=0 if left is None else left + 1,
        has_bias=bias is not None,
        model=mesh_lib.ways_of_rest(),
        order="contiguous",
    )
    if traces.is_read():
        return _exchange(query, key, value, bias, mask)
    return attend(
        query,
        key,
        value,
        "cudnn" if implementation == "cudnn" else "xla",
        way=way,
        is_causal=is_causal,
        bias=bias,
        mask=None if mask is None else jnp.broadcast_to(mask[:, 0, 0], key.shape[:2]),
        scale=scale,
        window=0 if left is None else left + 1,
    )


def _exchange(query: jax.Array, *_: Any) -> jax.Array:
    """Stands for attention where a loss is only read."""

    def exchange(query: jax.Array, *_: Any) -> jax.Array:
        return query

    exchange.__name__ = traces.EXCHANGE
    return jax.jit(exchange)(query, *_)


def whole_rows() -> contextlib.AbstractContextManager[None]:
    """Says that in its body a device has all tokens of its rows, also on a mesh with `context`."""
    return traces.held(_WHOLE_ROWS, True)


def _check_rows(what: str, does: str) -> None:
    """Refuses a model without a way where a device has a part of its rows."""
    if _is_sharded() and not _WHOLE_ROWS.get():
        raise UserError(
            f"{what}: tokens are sharded over `context`, and the model {does} as if a device had all tokens; train it with "
            "python -m zerojax.train, which sets `way`, or use a mesh without `context`"
        )


def _is_sharded() -> bool:
    """Returns whether this runs on each device along the axis by itself."""
    if traces.is_read():
        return True
    return mesh_lib.size(jax.sharding.get_abstract_mesh(), mesh_lib.around(mesh_lib.TOKENS)) > 1


def _axis() -> specs.Entry:
    """Returns the axis over which tokens are sharded, as collectives name it."""
    if traces.is_read():
        return mesh_lib.TOKENS
    return specs.entry(mesh_lib.sharded(jax.sharding.get_abstract_mesh(), mesh_lib.around(mesh_lib.TOKENS)))


def lengths(is_text_BT: jax.Array) -> jax.Array:
    """Returns the tokens of each row up to the last that is text, or learned, 0 where none is: int32[B, 1]."""
    numbers_T = jnp.arange(1, is_text_BT.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(is_text_BT, numbers_T, 0), axis=1, keepdims=True)


def in_texts(segments_BT: jax.Array) -> jax.Array:
    """Returns the positions of tokens in their texts, int32[B, T], of rows that hold several, one after the other (`segments_BT`)."""
    index_T = jnp.arange(segments_BT.shape[1])
    is_first = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    return index_T - jax.lax.cummax(jnp.where(is_first, index_T, 0), axis=1)


def gathered(array_BT: jax.Array) -> jax.Array:
    """Returns the tokens of all devices beside each other, [B, L], inside `jax.shard_map`."""
    return jax.lax.all_gather(array_BT, _axis(), axis=1, tiled=True)


def of_all(local: int) -> int:
    """Returns the number of tokens of all devices where each has `local` of them, inside `jax.shard_map`."""
    return local * jax.lax.axis_size(_axis())
