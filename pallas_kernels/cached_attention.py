"""Attention of one new token a row to a cache of keys and values. This module holds the kernel and its twin.

    o = sum_s p_s v_s,   p = softmax(scale * q k^T) over the row's own slots

A program reads a range of one row's slots for one key head, with all query heads that share it, and keeps a running maximum and sum
(arXiv:2205.14135, section 3.1). The ranges of a row are joined afterwards, by their maxima and sums: by the last program of them to arrive
where the caller has counters (`one_token`), else by the compiler. Slots that hold no text are not read.

Shapes: B batch, S slots, H query heads, K key and value heads, G = H / K, N head dim, R ranges of a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

BLOCK = 64  # slots that are read at a time
PROGRAMS = 512  # about as many keep the memory of an H200 busy
LEAST_ROWS = 16  # of a matmul in a kernel
JOINED = 128  # ranges times heads that are read at a time when ranges are joined
NOTHING = -1e30  # a score that has no weight


def takes(heads: int, k_BSKN: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether the kernel takes such a cache: 16 bits, a head dim that is a power of 2, and offsets that fit 32 bits."""
    kv_heads, head_dim = k_BSKN.shape[2:]
    is_power = head_dim >= 16 and head_dim & (head_dim - 1) == 0
    return is_power and k_BSKN.dtype.itemsize == 2 and k_BSKN.size < 2**31 and heads % kv_heads == 0


def attend(
    q_BHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    ends_B: jax.Array,
    *,
    scale: float,
    window: int = 0,
    implementation: str = "jnp",
) -> jax.Array:
    """Returns float32[B, H, N].

    Args:
      q_BHN: the tokens' queries.
      k_BSKN, v_BSKN: the cache, with the tokens' own keys and values.
      ends_B: int32[B], the slots of each row that hold text; a row of 0 has 0.
      scale: multiplies the scores.
      window: the last slots that a token sees; 0 for all.
      implementation: "pallas", "interpret" or "jnp".
    """
    return _attend(q_BHN, k_BSKN, v_BSKN, ends_B, None, scale, window, implementation)[0]


def attend_counted(
    q_BHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    ends_B: jax.Array,
    counts: jax.Array,
    *,
    scale: float,
    implementation: str = "jnp",
) -> tuple[jax.Array, jax.Array]:
    """Returns what `attend` does, rounded to q's dtype, by one kernel, and the counters.

    Args:
      counts: int32, at least B K of 0, which they are again afterwards.
      q_BHN, k_BSKN, v_BSKN, ends_B, scale, implementation: see `attend`.
    """
    o_BHN, counts = _attend(q_BHN, k_BSKN, v_BSKN, ends_B, counts, scale, 0, implementation)
    return o_BHN.astype(q_BHN.dtype), counts


def _attend(
    q_BHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    ends_B: jax.Array,
    counts: Any,
    scale: float,
    window: int,
    implementation: str,
) -> tuple[jax.Array, Any]:
    firsts_B = jnp.maximum(ends_B - window, 0) if window else jnp.zeros_like(ends_B)
    if implementation == "jnp":
        return attend_ref(q_BHN, k_BSKN, v_BSKN, firsts_B, ends_B, scale=scale), counts
    batch, slots, kv_heads, _ = k_BSKN.shape
    ranges = max(1, min(pl.cdiv(slots, BLOCK), PROGRAMS // (batch * kv_heads)))
    found = _ranges(
        q_BHN,
        k_BSKN,
        v_BSKN,
        firsts_B,
        ends_B,
        counts,
        scale=scale,
        ranges=ranges,
        interpret=implementation == "interpret",
    )
    if counts is not None:
        return found[3].reshape(q_BHN.shape), found[4]
    o_BKRGN, most_BKRG, sum_BKRG = found
    weight_BKRG = jnp.exp(most_BKRG - jnp.max(most_BKRG, axis=2, keepdims=True)) * (sum_BKRG > 0)
    total_BKG = jnp.sum(weight_BKRG * sum_BKRG, axis=2)
    o_BKGN = jnp.sum(weight_BKRG[..., None] * o_BKRGN, axis=2) / jnp.where(total_BKG > 0, total_BKG, 1)[..., None]
    return o_BKGN.reshape(q_BHN.shape), None


def attend_ref(
    q_BHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, firsts_B: jax.Array, ends_B: jax.Array, *, scale: float
) -> jax.Array:
    """Returns the same in plain jnp: the kernel's twin."""
    (batch, heads, head_dim), kv_heads = q_BHN.shape, k_BSKN.shape[2]
    q_BKGN = q_BHN.reshape(batch, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32)
    slot_S = jnp.arange(k_BSKN.shape[1])
    is_seen_BS = (slot_S >= firsts_B[:, None]) & (slot_S < ends_B[:, None])
    scores_BKGS = scale * jnp.einsum("bkgn,bskn->bkgs", q_BKGN, k_BSKN.astype(jnp.float32))
    p_BKGS = jax.nn.softmax(jnp.where(is_seen_BS[:, None, None], scores_BKGS, NOTHING), axis=-1)
    p_BKGS = jnp.where(is_seen_BS[:, None, None], p_BKGS, 0)
    return jnp.einsum("bkgs,bskn->bkgn", p_BKGS, v_BSKN.astype(jnp.float32)).reshape(q_BHN.shape)


@functools.partial(jax.jit, static_argnames=("scale", "ranges", "interpret"))
def _ranges(
    q_BHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    firsts_B: jax.Array,
    ends_B: jax.Array,
    counts: Any,
    *,
    scale: float,
    ranges: int,
    interpret: bool,
) -> list[jax.Array]:
    """Returns the sums of each range, float32[B, K, R, G, N], with its maximum and its weights' sum, float32[B, K, R, G]; given counters
    also the joined result, of q's dtype, and the counters."""
    batch, slots, kv_heads, head_dim = k_BSKN.shape
    group = q_BHN.shape[1] // kv_heads
    sums = (batch, kv_heads, ranges, group)
    kernel = functools.partial(_kernel, slots, kv_heads, group, head_dim, ranges, scale, interpret)
    shapes = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (_size(sums) * head_dim, _size(sums), _size(sums))]
    counted = [] if counts is None else [counts]
    if counted:
        assert batch * kv_heads <= counts.shape[0], (batch, kv_heads, counts.shape)
        shapes += [jax.ShapeDtypeStruct((q_BHN.size,), q_BHN.dtype), jax.ShapeDtypeStruct(counts.shape, counts.dtype)]
    done = pl.pallas_call(
        kernel,
        out_shape=shapes,
        grid=(batch, kv_heads, ranges),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        input_output_aliases={5: 4} if counted else {},
        interpret=interpret,
        name="cached_attention",
    )(*(x.reshape(-1) for x in (q_BHN, k_BSKN, v_BSKN)), firsts_B, ends_B, *counted)
    return [done[0].reshape(*sums, head_dim), done[1].reshape(sums), done[2].reshape(sums), *done[3:]]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _kernel(
    slots: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    ranges: int,
    scale: float,
    interpret: bool,
    q_ref: jax.Ref,
    k_ref: jax.Ref,
    v_ref: jax.Ref,
    firsts_ref: jax.Ref,
    ends_ref: jax.Ref,
    *others: Any,
) -> None:
    o_ref, most_ref, sum_ref, *joined = others[1:] if len(others) > 3 else others
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    rows_G = jnp.arange(max(LEAST_ROWS, pl.next_power_of_2(group)))
    dims_N = jnp.arange(head_dim)
    is_own_G = rows_G < group
    # A read past the group's heads stays inside of the array: its mask stops it.
    q_at = ((row * kv_heads + head) * group + rows_G)[:, None] * head_dim + dims_N[None, :]
    q_GN = pltriton.load(q_ref.at[q_at], mask=is_own_G[:, None] & (dims_N >= 0)[None, :], other=0.0)
    first, end = firsts_ref[row], ends_ref[row]
    blocks = pl.cdiv(pl.cdiv(end - first, BLOCK), ranges)  # of a range
    begin = first + part * blocks * BLOCK
    last = jnp.minimum(begin + blocks * BLOCK, end)

    def add(number: jax.Array, carry: tuple) -> tuple:
        o_GN, most_G, sum_G = carry
        at_S = begin + number * BLOCK + jnp.arange(BLOCK)
        is_seen_S = at_S < last
        where = ((row * slots + at_S) * kv_heads + head)[:, None] * head_dim + dims_N[None, :]
        mask = is_seen_S[:, None] & (dims_N >= 0)[None, :]
        k_SN = pltriton.load(k_ref.at[where], mask=mask, other=0.0)
        v_SN = pltriton.load(v_ref.at[where], mask=mask, other=0.0)
        scores_GS = scale * jax.lax.dot_general(
            q_GN, k_SN, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores_GS = jnp.where(is_seen_S[None, :], scores_GS, NOTHING)
        most = jnp.maximum(most_G, jnp.max(scores_GS, axis=1))
        kept_G = jnp.exp(most_G - most)
        p_GS = jnp.where(is_seen_S[None, :], jnp.exp(scores_GS - most[:, None]), 0.0)
        o_GN = o_GN * kept_G[:, None] + jnp.dot(p_GS.astype(v_SN.dtype), v_SN, preferred_element_type=jnp.float32)
        return o_GN, most, sum_G * kept_G + jnp.sum(p_GS, axis=1)

    zeros_GN = jnp.zeros((rows_G.shape[0], head_dim), jnp.float32)
    start = zeros_GN, jnp.full(rows_G.shape, NOTHING, jnp.float32), jnp.zeros(rows_G.shape, jnp.float32)
    count = pl.cdiv(jnp.maximum(last - begin, 0), BLOCK)
    o_GN, most_G, sum_G = jax.lax.fori_loop(0, count, add, start)
    at_G = ((row * kv_heads + head) * ranges + part) * group + rows_G
    pltriton.store(
        o_ref.at[at_G[:, None] * head_dim + dims_N[None, :]], o_GN, mask=is_own_G[:, None] & (dims_N >= 0)[None, :]
    )
    pltriton.store(most_ref.at[at_G], most_G, mask=is_own_G)
    pltriton.store(sum_ref.at[at_G], sum_G, mask=is_own_G)
    if joined:
        _join(
            row * kv_heads + head,
            (group, head_dim, ranges, pl.next_power_of_2(group)),
            (o_ref, most_ref, sum_ref),
            (joined[0], joined[1]),
            interpret,
        )


def _join(
    number: Any, sizes: tuple[int, int, int, int], refs: tuple[Any, Any, Any], outs: tuple[Any, Any], interpret: bool
) -> None:
    """Joins the ranges of a row's key head, if this program is the last of them to arrive."""
    (group, head_dim, ranges, rows), (o_ref, most_ref, sum_ref), (joined_ref, counts_ref) = sizes, refs, outs
    at_a_time = max(1, JOINED // rows)

    def finish() -> None:
        counts_ref[number] = 0
        row_G, dim_N = jnp.arange(rows), jnp.arange(head_dim)
        is_own_G = row_G < group

        def stored(ref: jax.Ref, part_P: jax.Array) -> jax.Array:
            at_PG = (number * ranges + part_P[:, None]) * group + row_G[None, :]
            mask = (part_P < ranges)[:, None] & is_own_G[None, :]
            # Not from this multiprocessor's own cache.
            return pltriton.load(ref.at[at_PG], mask=mask, other=NOTHING, volatile=True)

        most_G = jnp.max(stored(most_ref, jnp.arange(pl.next_power_of_2(ranges))), axis=0)

        def add(number_of: jax.Array, carry: tuple) -> tuple:
            o_GN, sum_G = carry
            part_P = number_of * at_a_time + jnp.arange(at_a_time)
            total_PG = stored(sum_ref, part_P)
            share_PG = jnp.where(total_PG > 0, jnp.exp(stored(most_ref, part_P) - most_G[None, :]), 0.0)
            at_PG = (number * ranges + part_P[:, None]) * group + row_G[None, :]
            mask = ((part_P < ranges)[:, None] & is_own_G[None, :])[:, :, None] & (dim_N >= 0)[None, None, :]
            own_PGN = pltriton.load(
                o_ref.at[at_PG[:, :, None] * head_dim + dim_N[None, None, :]], mask=mask, other=0.0, volatile=True
            )
            return o_GN + jnp.sum(own_PGN * share_PG[:, :, None], axis=0), sum_G + jnp.sum(
                jnp.maximum(total_PG, 0.0) * share_PG, axis=0
            )

        start = jnp.zeros((rows, head_dim), jnp.float32), jnp.zeros((rows,), jnp.float32)
        o_GN, sum_G = jax.lax.fori_loop(0, pl.cdiv(ranges, at_a_time), add, start)
        o_GN = o_GN / jnp.where(sum_G > 0, sum_G, 1.0)[:, None]
        at = (number * group + row_G)[:, None] * head_dim + dim_N[None, :]
        pltriton.store(joined_ref.at[at], o_GN.astype(joined_ref.dtype), mask=is_own_G[:, None] & (dim_N >= 0)[None, :])

    pl.when(arrived(counts_ref, number, interpret) == ranges - 1)(finish)


def arrived(counts_ref: Any, number: jax.Array, interpret: bool) -> jax.Array:
    """Counts a program that has written its part, and returns how many of its group did before: int32[]."""
    if interpret:  # programs run one after the other
        before = counts_ref[number]
        counts_ref[number] = before + 1
        return before
    pltriton.debug_barrier()  # all threads have written before one counts
    return pltriton.atomic_add(counts_ref, (number,), 1)
