"""Attention over tokens that are sharded over a mesh axis, for use inside `jax.shard_map`. This module chooses what the devices exchange.

    gather    every device receives all keys and values, and attends with its own queries
    ulysses   every device sends tokens and receives heads, attends over whole sequences with its heads, and sends the result back
              (DeepSpeed-Ulysses, arXiv:2309.14509)
    ring      keys and values move from device to device beside attention (`ring_attention`)
    halo      of a sliding window, each chunk of tokens receives the keys and values just before it

Shapes: B batch, T queries and S keys of this device, H query heads, K key and value heads, N head dim.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from zerojax import errors, roles, specs
from zerojax.errors import UserError
from zerojax.ops import attention, attention_blocks, residuals, ring_attention, token_order

Masks = tuple[jax.Array | None, jax.Array | None]  # the numbers of tokens' texts, and the keys that queries see

_TILE = 128  # tokens that kernels take at a time
_GATHERED = 2**30  # bytes of a layer's keys, values and their gradients, above which they are not gathered
_MASK = 2**32  # bytes of a mask in the form that cuDNN takes, above which attention is by blocks
_MEANING = {
    "gather": "each device receives all keys and values",
    "ring": "keys and values move from device to device",
    "ulysses": "each device receives all tokens of some heads",
}
_INDIVISIBLE = (
    "way: ulysses gives each of {ways} devices some of {heads} heads, which do not divide; set "
    '`way="auto"`, or choose a number of devices that divides them'
)
_BIASED = 'way: ring takes no bias of the scores; set `way="gather"`, or "auto"'


@dataclasses.dataclass(frozen=True)
class Way:
    """What devices exchange."""

    name: str  # one of WAYS
    order: token_order.Order  # of the tokens, as `token_order` names it
    text: str  # why, for a person
    # whether causal attention with a window that is not longer than a chunk of tokens is by a halo instead
    halo: bool = False


def choose(
    *,
    heads: int,
    kv_heads: int,
    ways: int,
    length: int,
    is_causal: bool,
    window: int = 0,
    has_bias: bool = False,
    packed: bool = False,
    head_dim: int = 128,
    batch: int = 1,
    model: int = 1,
    order: token_order.Order | None = None,
    way: str = "auto",
) -> Way:
    """Returns how tokens that are sharded over `ways` devices attend.

    Args:
      heads, kv_heads: of queries, and of keys and values.
      length: tokens of a sequence, on all devices.
      is_causal: a query sees no later key.
      window: a query sees its own token and the `window` - 1 before it; 0 for no limit. Of layers that differ, the longest.
      has_bias: something is added to the scores.
      packed: sequences hold several texts, so that a kernel reads a mask of queries by keys.
      head_dim: of a head.
      batch: sequences of a device and its neighbours along the axis.
      model: the number of devices over which heads are sharded.
      order: of the tokens; None: the one that suits.
      way: "auto", or one of WAYS.

    Raises:
      UserError: the length does not divide, or the way cannot run.
    """
    errors.one_of("way", way, ("auto", *WAYS))
    token_order.check(length, ways, order or "contiguous")
    own = heads // model if heads % model == 0 else heads
    own_kv = max(1, own * kv_heads // heads)
    divides, copies = own % ways == 0, _copies(own_kv, ways)
    if way == "ulysses" and not divides:
        raise UserError(_INDIVISIBLE.format(ways=ways, heads=own))
    if way == "ring" and has_bias:
        raise UserError(_BIASED)
    gathered, mask = 2 * (2 + 4) * batch * length * own_kv * head_dim, 2 * batch * length * length if packed else 0
    if way != "auto":
        name, reason = way, "as asked"
    elif has_bias:
        name, reason = "gather", "because of a bias"
    elif divides and mask <= _MASK:
        name, reason = "ulysses", f"{own // ways} of {own}"
        reason += f", and each of {own_kv} heads of keys and values is sent {copies} times" if copies > 1 else ""
    else:
        name = "ring" if gathered > _GATHERED else "gather"
        reason = f"because {own} heads do not divide by {ways}"
        if divides:
            reason = f"because a mask of packed rows would take {mask / 2**30:.1f} GiB by ulysses"
        reason += f"; gathered keys, values and their gradients take {gathered / 2**30:.2f} GiB a layer"
    is_zigzag = name != "ulysses" and is_causal and not has_bias and length % (2 * ways) == 0
    order = order or ("zigzag" if is_zigzag else "contiguous")
    chunk, halo = length // ways // token_order.CHUNKS[order], way == "auto"
    is_near = halo and window < length and _is_near(window, chunk, is_causal, has_bias)
    near = "; a sliding window from the tokens just before (halo)" if is_near else ""
    return Way(name, order, f"{name}: {_MEANING[name]}, {reason}{near}", halo)


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: attention.Kernel,
    *,
    axis: specs.Entry,
    way: Way,
    order: token_order.Order,
    is_causal: bool,
    window: int = 0,
    segments_BT: jax.Array | None = None,
    mask_BT: jax.Array | None = None,
    scale: float | None = None,
    bias: jax.Array | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Returns attention of this device's queries over the keys of all devices: float[B, T, H, N]. Call it on all, inside `jax.shard_map`.

    Under a mask, a causal query that sees no key has 0.

    Args:
      q_BTHN, k_BSKN, v_BSKN: of this device's tokens; as of `attention.attend`. T = S if causal.
      kernel: the implementation, as of `attention.attend`.
      axis: the mesh axis over which tokens are sharded.
      way: as `choose` returns it.
      order: of the tokens on the devices, as the feed has put them.
      is_causal, window, scale, cap: as of `attention.attend`; before and later are meant in the sequence.
      segments_BT: int32[B, T], the text of a packed sequence that each of this device's tokens belongs to; a query sees keys of its own
        text. None: one text. Only of attention from tokens to themselves.
      mask_BT: bool[B, S], False for this device's keys that no query sees; None for none.
      bias: float[H, T, L] or float[B, H, T, L], added to the scores of this device's queries and all L keys in the order of the sequence.

    Raises:
      UserError: heads, or tokens, do not divide; or the way takes no bias.
    """
    heads, ways = q_BTHN.shape[2], jax.lax.axis_size(axis)
    for local in {q_BTHN.shape[1], k_BSKN.shape[1]}:
        token_order.check(local * ways, ways, order)
    window = window if window < k_BSKN.shape[1] * ways else 0
    call = _Call("xla" if cap else kernel, axis, ways, order, is_causal, window, scale, cap)
    own = k_BSKN.shape[1] // token_order.CHUNKS[order]
    is_near = way.halo and _is_near(window, own, is_causal, bias is not None)
    run = functools.partial(_halo if is_near else WAYS[way.name], call)
    with jax.named_scope(roles.CONTEXT_PARALLEL):
        return attention.of_heads(run, heads, k_BSKN.shape[2])(
            q_BTHN, k_BSKN, v_BSKN, bias[None] if bias is not None and bias.ndim == 3 else bias, (segments_BT, mask_BT)
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What does not depend on arrays: arguments of `attend`, and the number of devices."""

    kernel: attention.Kernel
    axis: specs.Entry
    ways: int
    order: token_order.Order
    is_causal: bool
    window: int
    scale: float | None
    cap: float

    def all_tokens(self, x: jax.Array | None, dim: int = 1) -> jax.Array | None:
        """Returns all devices' tokens in the order of the sequence. Is not differentiated."""
        if x is None:
            return None
        return token_order.in_sequence(
            jax.lax.all_gather(x, self.axis, axis=dim, tiled=True), dim, self.ways, self.order
        )


def _gather(
    call: _Call, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, bias: jax.Array | None, masks: Masks
) -> jax.Array:
    if call.is_causal and bias is None:
        return _ring(call, q_BTHN, k_BSKN, v_BSKN, None, masks, gathers=True)
    segments_BT, mask_BT = masks
    kv_2BLKN = _gathered(jnp.stack([k_BSKN, v_BSKN]), call.axis)
    k_BLKN, v_BLKN = token_order.in_sequence(kv_2BLKN, 2, call.ways, call.order)
    mask = call.all_tokens(mask_BT)
    if call.is_causal or segments_BT is not None:
        queries = token_order.positions(q_BTHN.shape[1], call.axis, call.order)[None]
        keys = jnp.arange(k_BLKN.shape[1], dtype=jnp.int32)[None]
        mask = _seen(call, (queries, segments_BT), (keys, call.all_tokens(segments_BT), mask))
    y_BTHN = attention.attend(
        q_BTHN, k_BLKN, v_BLKN, call.kernel, is_causal=False, bias=bias, mask=mask, scale=call.scale, cap=call.cap
    )
    if call.is_causal and mask is not None and mask_BT is not None:
        y_BTHN = jnp.where(jnp.any(mask, axis=-1)[:, :, None, None], y_BTHN, 0)
    return y_BTHN


def _seen(call: _Call, queries: tuple, keys: tuple) -> jax.Array:
    """Returns bool[B or 1, T, S]: which keys each query sees.

    Args:
      queries: their positions int32[B or 1, T], and segments or None.
      keys: their positions int32[B or 1, S], segments or None, and mask or None.
    """
    (queries_BT, texts_BT), (keys_BS, key_texts_BS, mask_BS) = queries, keys
    distance = queries_BT[:, :, None] - keys_BS[:, None]
    seen = distance >= 0 if call.is_causal else jnp.ones(distance.shape, bool)
    if call.window:
        seen &= distance < call.window
    if texts_BT is not None:
        seen &= texts_BT[:, :, None] == key_texts_BS[:, None]
    return seen if mask_BS is None else seen & mask_BS[:, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(x_2BSKN: jax.Array, axis: specs.Entry) -> jax.Array:
    """Returns all devices' keys and values in their own dtype, as fed; their gradients are summed over devices in float32."""
    return jax.lax.all_gather(x_2BSKN, axis, axis=2, tiled=True)


def _summed(axis: specs.Entry, _: None, grad: jax.Array) -> tuple[jax.Array]:
    total = jax.lax.psum_scatter(grad.astype(jnp.float32), axis, scatter_dimension=2, tiled=True)
    return (total.astype(grad.dtype),)


_gathered.defvjp(lambda x, axis: (_gathered(x, axis), None), _summed)


def _ulysses(
    call: _Call, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, bias: jax.Array | None, masks: Masks
) -> jax.Array:
    segments_BT, mask_BT = masks
    heads, kv_heads = q_BTHN.shape[2], k_BSKN.shape[2]
    if heads % call.ways:
        raise UserError(_INDIVISIBLE.format(ways=call.ways, heads=heads))
    kv_2BSKN = jnp.repeat(jnp.stack([k_BSKN, v_BSKN]), _copies(kv_heads, call.ways), axis=3)
    q_BLHN, kv_2BLKN = (residuals.in_place(_tokens_for_heads(call, x, x.ndim - 3)) for x in (q_BTHN, kv_2BSKN))
    if bias is not None:
        bias = jnp.swapaxes(_tokens_for_heads(call, jnp.swapaxes(bias, 1, 2), 1), 1, 2)
    mask, segments_BL = call.all_tokens(mask_BT), call.all_tokens(segments_BT)
    if segments_BL is not None:
        same = segments_BL[:, :, None] == segments_BL[:, None]
        mask = same if mask is None else same & mask[:, None]
    k_BLKN, v_BLKN = kv_2BLKN
    y_BLHN = attention.attend(
        q_BLHN,
        k_BLKN,
        v_BLKN,
        call.kernel,
        is_causal=call.is_causal,
        bias=bias,
        mask=mask,
        scale=call.scale,
        window=call.window,
        cap=call.cap,
    )
    fed = token_order.as_fed(y_BLHN, 1, call.ways, call.order)
    return jax.lax.all_to_all(fed, call.axis, split_axis=1, concat_axis=2, tiled=True)


def _tokens_for_heads(call: _Call, x: jax.Array, dim: int) -> jax.Array:
    """Returns this device's heads, dim `dim` + 1, of all tokens, dim `dim`, of an array of its tokens of all heads."""
    own = jax.lax.all_to_all(x, call.axis, split_axis=dim + 1, concat_axis=dim, tiled=True)
    return token_order.in_sequence(own, dim, call.ways, call.order)


def _is_near(window: int, chunk: int, is_causal: bool, has_bias: bool) -> bool:
    """Returns whether what a query sees is in its chunk of tokens and the one before."""
    return is_causal and 1 < window <= chunk + 1 and not has_bias


def _before(window: int, chunk: int) -> int:
    """Returns the number of tokens before a chunk that its halo has."""
    return min(chunk, -((1 - window) // _TILE) * _TILE)


def _halo(call: _Call, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, _: None, masks: Masks) -> jax.Array:
    """Attends in each chunk of tokens, as rows of a batch, to it and to what precedes it.

    The row of a chunk is the tokens before it, then its own. Of the first chunk, which has none before it, it is its own, then tokens that
    causal queries do not see. So all rows are plain windowed attention.
    """
    chunks = token_order.CHUNKS[call.order]
    own = q_BTHN.shape[1] // chunks
    before = _before(call.window, own)
    device, last = jax.lax.axis_index(call.axis), call.ways - 1
    is_first = jnp.repeat(jnp.arange(chunks) + device == 0, len(q_BTHN))

    def rows(x: jax.Array, *, is_sent: bool = True) -> jax.Array:
        cut = jnp.split(x, chunks, axis=1)
        tails = [chunk[:, own - before :] for chunk in cut]
        if is_sent:
            received = [jax.lax.ppermute(tails[0], call.axis, [(i, (i + 1) % call.ways) for i in range(call.ways)])]
            # Chunk 2n - 1 - i follows that of device i + 1, or on the last device its own other one
            for tail in tails[1:]:
                sent = jax.lax.ppermute(tail, call.axis, [((i + 1) % call.ways, i) for i in range(call.ways)])
                received.append(jnp.where(device == last, tails[0], sent))
        else:
            received = [jnp.zeros_like(tail) for tail in tails]
        x, other = jnp.concatenate(cut), jnp.concatenate(received)
        first = is_first.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(first, jnp.concatenate([x, other], axis=1), jnp.concatenate([other, x], axis=1))

    segments_BT, mask_BT = masks
    kv = rows(jnp.concatenate([k_BSKN, v_BSKN], axis=2))
    k, v = jnp.split(kv, 2, axis=2)
    mask = None if mask_BT is None else rows(mask_BT)
    if segments_BT is not None:
        texts = rows(segments_BT)
        same = texts[:, :, None] == texts[:, None]
        mask = same if mask is None else same & mask[:, None]
    y = attention.attend(
        rows(q_BTHN, is_sent=False),
        k,
        v,
        call.kernel,
        is_causal=True,
        mask=mask,
        scale=call.scale,
        window=call.window,
        cap=call.cap,
    )
    y = jnp.where(is_first[:, None, None, None], y[:, :own], y[:, before:])
    return jnp.concatenate(jnp.split(y, chunks), axis=1)


def _copies(kv_heads: int, ways: int) -> int:
    """Returns how often each key and value head is sent, so that devices share the copies equally."""
    return ways // math.gcd(kv_heads, ways)


def _ring(
    call: _Call,
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    bias: jax.Array | None,
    masks: Masks,
    gathers: bool = False,
) -> jax.Array:
    if bias is not None:
        raise UserError(_BIASED)
    scale = q_BTHN.shape[3] ** -0.5 if call.scale is None else call.scale
    form = attention_blocks.BlockForm(call.kernel, scale, call.is_causal, call.window, call.cap)
    return ring_attention.attend(
        ring_attention.Ring(call.axis, call.ways, call.order, form, gathers), q_BTHN, k_BSKN, v_BSKN, *masks
    )


WAYS: Mapping[str, Callable[..., jax.Array]] = {"gather": _gather, "ulysses": _ulysses, "ring": _ring}
