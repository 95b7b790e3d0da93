"""Exact attention block by block over a mesh axis: the keys of one device after the other. This module has both passes, with their
collectives, for use inside `jax.shard_map`.

    ring     keys and values move from device to device, one hop beside each block (Ring Attention, arXiv:2310.01889). In the backward pass
             their gradients travel behind them.
    gather   all are gathered before the first block, and gradients are reduce-scattered after the last

In zigzag order each causal block but a device's own is made of two pairs of half its tokens: its later queries and the other's earlier
keys, and whichever halves else see each other (arXiv:2311.09431). So all devices do the same work.

Shapes: B batch, T queries and S keys of this device, H query heads, K key and value heads, N head dim.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import specs
from zerojax.ops import attention_blocks, residuals, token_order
from zerojax.tree import PyTree

# The halves of a device's tokens that a row of a stack may be, each with the condition under which it is.
Choice = Mapping[int, Any]


@dataclasses.dataclass(frozen=True)
class Ring:
    """What does not depend on arrays.

    Attributes:
      axis, ways: the mesh axis over which tokens are sharded, and its size.
      order: of the tokens.
      form: of the sequence, not of a block.
      gathers: all keys and values are gathered.
    """

    axis: specs.Entry
    ways: int
    order: token_order.Order
    form: attention_blocks.BlockForm
    gathers: bool

    def blocks(self, keys: int) -> int:
        """Returns the number of devices whose keys this device's queries may see."""
        window = self.form.window if self.form.is_causal else 0
        is_near = window and self.order == "contiguous" and not self.gathers
        return min(self.ways, 1 - (1 - window) // keys) if is_near else self.ways

    def block(self, step: int) -> attention_blocks.BlockForm:
        """Returns the form of block `step`, whose window `_seen` has."""
        return dataclasses.replace(self.form, is_causal=self.form.is_causal and step == 0, window=0)

    def pairs(self, step: int) -> tuple[int, list[Choice], list[Choice]]:
        """Returns the number of parts of a device's tokens, and of which queries and keys the pairs of block `step` are.

        Block `step` has the keys of the device `step` places before.
        """
        is_before = jax.lax.axis_index(self.axis) >= step
        if not self.form.is_causal or step == 0:
            return 1, [{0: True}], [{0: True}]
        if self.order == "contiguous":
            return 1, [{0: is_before}], [{0: is_before}]
        either = {0: is_before, 1: jnp.logical_not(is_before)}
        return 2, [{1: True}, either], [{0: True}, either]

    def hop(self, x: Any, places: int = 1) -> PyTree:
        """Returns the arrays of the device `places` before."""
        return jax.lax.ppermute(x, self.axis, [(i, (i + places) % self.ways) for i in range(self.ways)])


def attend(
    ring: Ring,
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    segments_BT: jax.Array | None,
    mask_BS: jax.Array | None,
) -> jax.Array:
    """Returns attention of this device's queries over all devices' keys, float[B, T, H, N]. A query that sees no key has 0."""
    queries = {} if segments_BT is None else {"segments": segments_BT}
    keys = queries if mask_BS is None else queries | {"mask": mask_BS}
    everywhere = jax.tree.map(lambda x: jax.lax.all_gather(x, ring.axis), keys)
    return _attend(ring, q_BTHN, k_BSKN, v_BSKN, (queries, everywhere))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, about: Any) -> jax.Array:
    return _forward(ring, q, k, v, about)[0]


def _forward(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, about: Any) -> tuple[jax.Array, Any]:
    count, kv = ring.blocks(k.shape[1]), jnp.stack([k, v])
    everywhere = jax.lax.all_gather(kv, ring.axis) if ring.gathers else None
    following: Any = kv
    total: Any = None
    for step in range(count):
        kv = following if everywhere is None else _of_source(ring, everywhere, step)
        if everywhere is None:
            # XLA would start all hops before the first block. A hop that waits for the block before this one runs beside this one.
            kv, total = jax.lax.optimization_barrier((kv, total))
            following = ring.hop(kv) if step + 1 < count else None
        parts, queries, keys = ring.pairs(step)
        keys_here, values_here = (_taken(x, parts, keys) for x in kv)
        arrays = _taken(q, parts, queries), keys_here, values_here, _seen(ring, about, step, q.shape, k.shape)
        found = attention_blocks.forward(ring.block(step), *arrays)
        if total is None:
            total = found[0].astype(jnp.float32), found[1]
            continue
        sums = [*zip(jnp.split(total[0], parts, 1), jnp.split(total[1], parts, 2))]
        for row, choice in zip(zip(*(jnp.split(x, len(queries)) for x in found)), queries):
            for part, is_it in choice.items():
                sums[part] = attention_blocks.merged(sums[part], row, is_it)
        ys, ls = zip(*sums)
        total = jnp.concatenate(ys, 1), jnp.concatenate(ls, 2)
    y, l = attention_blocks.finished(total)
    y, l = residuals.of_attention(y.astype(q.dtype)), residuals.of_attention(l)
    return y, (q, k, v, about, y, l)


def _backward(ring: Ring, kept: PyTree, dy: jax.Array) -> tuple:
    q, k, v, about, y, l = kept
    # XLA would start the first hop in the forward pass, or keep all gathered keys from there.
    k, v, dy = jax.lax.optimization_barrier((k, v, dy))
    count, kv = ring.blocks(k.shape[1]), jnp.stack([k, v])
    everywhere = jax.lax.all_gather(kv, ring.axis) if ring.gathers else None
    following, dq, travelling = kv, jnp.zeros(q.shape, jnp.float32), None
    own: list[jax.Array] = []
    for step in range(count):
        kv = following if everywhere is None else _of_source(ring, everywhere, step)
        if everywhere is None:
            kv, dq, travelling = jax.lax.optimization_barrier((kv, dq, travelling))
            following, travelling = _hop_of_two(ring, kv if step + 1 < count else None, travelling)
        parts, queries, keys = ring.pairs(step)
        keys_here, values_here = (_taken(x, parts, keys) for x in kv)
        arrays = _taken(q, parts, queries), keys_here, values_here, _seen(ring, about, step, q.shape, k.shape)
        made = _taken(y, parts, queries), _taken(l, parts, queries, dim=2), _taken(dy, parts, queries)
        found = attention_blocks.backward(ring.block(step), *arrays, *made)
        found_q, found_k, found_v = (x.astype(jnp.float32) for x in found)
        dq += _given(found_q, parts, queries)
        d_kv = jnp.stack([_given(x, parts, keys) for x in (found_k, found_v)])
        own.append(d_kv)
        travelling = d_kv if travelling is None else travelling + d_kv
    if ring.gathers:
        back = (jax.lax.axis_index(ring.axis) - jnp.arange(ring.ways)) % ring.ways
        d_kv = jax.lax.psum_scatter(jnp.take(jnp.stack(own), back, axis=0), ring.axis)
    else:
        d_kv = ring.hop(travelling, 1 - count)
    dk, dv = d_kv.astype(k.dtype)
    return dq.astype(q.dtype), dk, dv, None


_attend.defvjp(_forward, _backward)


def _hop_of_two(ring: Ring, kv: jax.Array | None, d_kv: jax.Array | None) -> tuple[Any, Any]:
    """Returns `ring.hop` of keys and values, and of gradients in float32, as one array: of two hops XLA waits for one."""
    if kv is None or d_kv is None:
        return jax.tree.map(ring.hop, (kv, d_kv))
    bits = jnp.uint16 if kv.dtype.itemsize == 2 else jnp.uint32
    parts = [jax.lax.bitcast_convert_type(x, bits).reshape(*kv.shape[:-1], -1) for x in (kv, d_kv)]
    kv_bits, d_bits = jnp.split(ring.hop(jnp.concatenate(parts, axis=-1)), [kv.shape[-1]], axis=-1)
    if bits == jnp.uint16:
        d_bits = d_bits.reshape(*kv.shape, 2)
    return jax.lax.bitcast_convert_type(kv_bits, kv.dtype), jax.lax.bitcast_convert_type(d_bits, jnp.float32)


def _of_source(ring: Ring, everywhere: PyTree, step: int) -> PyTree:
    """Returns the arrays of the device `step` places before, of those of all devices."""
    source = (jax.lax.axis_index(ring.axis) - step) % ring.ways
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, source, keepdims=False), everywhere)


def _seen(ring: Ring, about: Any, step: int, queries: Sequence[int], keys: Sequence[int]) -> jax.Array | None:
    """Returns bool[pairs of block `step` x B, T, S]: whether windows, segments and masks let a query see a key; None if there are none."""
    own, everywhere = about
    source = (jax.lax.axis_index(ring.axis) - step) % ring.ways
    parts, of_queries, of_keys = ring.pairs(step)
    of_source = _of_source(ring, everywhere, step)
    seen = []
    if ring.form.window:
        places = [
            jnp.broadcast_to(token_order.positions(shape[1], ring.axis, ring.order, device), shape[:2])
            for shape, device in ((queries, None), (keys, source))
        ]
        rows, columns = (_taken(x, parts, choices) for x, choices in zip(places, (of_queries, of_keys)))
        seen.append(rows[:, :, None] - columns[:, None] < ring.form.window)
    if "segments" in own:
        rows = _taken(own["segments"], parts, of_queries)
        seen.append(rows[:, :, None] == _taken(of_source["segments"], parts, of_keys)[:, None])
    if "mask" in of_source:
        mask = _taken(of_source["mask"], parts, of_keys)[:, None]
        seen.append(jnp.broadcast_to(mask, (len(mask), queries[1] // parts, keys[1] // parts)))
    return functools.reduce(jnp.logical_and, seen) if seen else None


def _taken(x: jax.Array, parts: int, choices: list[Choice], dim: int = 1) -> jax.Array:
    """Returns the chosen parts of an array's tokens, stacked along its first dim."""
    cut, rows = jnp.split(x, parts, axis=dim), []
    for choice in choices:
        (first, is_first), *others = choice.items()
        rows.append(jnp.where(is_first, cut[first], cut[others[0][0]]) if others else cut[first])
    return jnp.concatenate(rows)


def _given(x: jax.Array, parts: int, choices: list[Choice]) -> jax.Array:
    """Returns the sum of a stack's rows, each at its place: the transpose of `_taken`."""
    rows, sums = jnp.split(x, len(choices)), [jnp.zeros(())] * parts
    for row, choice in zip(rows, choices):
        for part, is_it in choice.items():
            sums[part] = sums[part] + jnp.where(is_it, row, 0)  # rows that no query sees may be no numbers
    return jnp.concatenate(sums, axis=1)
