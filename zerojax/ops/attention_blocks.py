"""Attention of some queries over some of their keys, with what it takes to add the rest. This module knows no mesh.

With scores s = scale q k^T over all keys, l = log sum exp(s), and blocks of keys j,

    l = log sum_j exp(l_j)    y = sum_j exp(l_j - l) y_j    p_j = exp(s_j - l)    ds_j = p_j (dy v_j^T - sum(dy y))

so that a block's gradients follow from l and y of all keys (FlashAttention-2, arXiv:2307.08691, section 3.1).

`jax.nn.dot_product_attention` returns l rounded to the dtype of y. In bfloat16 an l of 10 is off by up to 0.03, and a block's weight by 3%.
cuDNN's kernels are therefore called by `cudnn_attention`, as JAX calls them.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, G = H / K, N head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.ops import attention, cudnn_attention, softcap

QUERIES, PARTS = 1024, 8  # of which XLA holds the scores at once, unless there would be more parts
_TILE = 128  # a part's first key is a multiple of it
NONE = -1e30  # the log-sum-exp of no keys: finite, so that differences are numbers
_NO_KEY = -1e4  # a log-sum-exp below it is that of masked keys alone


@dataclasses.dataclass(frozen=True)
class BlockForm:
    """What does not depend on arrays."""

    kernel: attention.Kernel  # "cudnn", or another for XLA's
    scale: float  # multiplies the scores
    is_causal: bool = False  # query t sees keys 0 to t
    window: int = 0  # if causal: query t sees no keys before t - window + 1; 0 for no limit
    cap: float = 0.0  # bounds the scores (`softcap`); 0 for no bound. XLA's alone

    def of_cudnn(self) -> dict[str, Any]:
        """Returns the part of the form that cuDNN's kernels take."""
        return {"scale": self.scale, "is_causal": self.is_causal, "window": self.window}


def forward(
    form: BlockForm, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns attention float[B, T, H, N], by XLA in float32, and the log-sum-exp of its scores float32[B, H, T].

    `seen` is bool[B or 1, T, S], whether a query sees a key; None: all do.
    """
    if _runs_cudnn(form, q_BTHN, k_BSKN, seen):
        return cudnn_attention.forward(q_BTHN, k_BSKN, v_BSKN, seen, **form.of_cudnn())
    parts = _parts(form, q_BTHN.shape[1], k_BSKN.shape[1])
    ys, ls = zip(*(_forward(form, part, *part.of(q_BTHN, k_BSKN, v_BSKN), part.of_both(seen)) for part in parts))
    return jnp.concatenate(ys, axis=1), jnp.concatenate(ls, axis=2)


def backward(
    form: BlockForm,
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    seen: jax.Array | None,
    y_BTHN: jax.Array,
    l_BHT: jax.Array,
    dy_BTHN: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what a block adds to the gradients of q, k and v, in float32 or, by cuDNN, in their dtype.

    Its arguments are those of `forward`; y and l, attention over the keys of all blocks and its log-sum-exp, from `finished`; and y's
    gradient.
    """
    if _runs_cudnn(form, q_BTHN, k_BSKN, seen):
        arrays = (q_BTHN, k_BSKN, v_BSKN, l_BHT, dy_BTHN.astype(q_BTHN.dtype), y_BTHN.astype(q_BTHN.dtype))
        return cudnn_attention.backward(*arrays, seen, **form.of_cudnn())
    dq, dk, dv = [], jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for part in _parts(form, q_BTHN.shape[1], k_BSKN.shape[1]):
        y, dy = (x[:, part.begin : part.end] for x in (y_BTHN, dy_BTHN))
        l = l_BHT[:, :, part.begin : part.end]
        own, *others = _backward(form, part, *part.of(q_BTHN, k_BSKN, v_BSKN), part.of_both(seen), y, dy, l)
        dq.append(own)
        around = ((0, 0), (part.first, k_BSKN.shape[1] - part.last), (0, 0), (0, 0))
        dk, dv = (total + jnp.pad(other, around) for total, other in zip((dk, dv), others))
    return jnp.concatenate(dq, axis=1), dk, dv


def merged(
    sum_: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array], is_seen: Any = True
) -> tuple[jax.Array, jax.Array]:
    """Returns attention over the keys of two results of `forward`, in float32; over those of the first where not `is_seen`, bool[]."""
    (y_BTHN, l_BHT), (other_BTHN, m_BHT) = sum_, block
    m_BHT = jnp.where(is_seen, m_BHT, NONE)
    total_BHT = jnp.logaddexp(l_BHT, m_BHT)
    own, new = (jnp.swapaxes(jnp.exp(part - total_BHT), 1, 2)[..., None] for part in (l_BHT, m_BHT))
    return own * y_BTHN + new * other_BTHN, total_BHT


def finished(sum_: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns a result after its last block: a query that sees no key has 0, and a log-sum-exp that gives it no gradient."""
    y_BTHN, l_BHT = sum_
    sees_BHT = l_BHT > _NO_KEY
    return jnp.where(jnp.swapaxes(sees_BHT, 1, 2)[..., None], y_BTHN, 0), jnp.where(sees_BHT, l_BHT, -NONE)


def _runs_cudnn(form: BlockForm, q_BTHN: jax.Array, k_BSKN: jax.Array, seen: jax.Array | None) -> bool:
    """Returns whether cuDNN runs a block: with a mask it takes even numbers of queries and keys alone."""
    return form.kernel == "cudnn" and (seen is None or q_BTHN.shape[1] % 2 == k_BSKN.shape[1] % 2 == 0)


@dataclasses.dataclass(frozen=True)
class _Span:
    """Some queries, from `begin` to before `end`, and all keys that they see, from `first` to before `last`."""

    begin: int
    end: int
    first: int
    last: int

    def of(self, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = slice(self.first, self.last)
        return q_BTHN[:, self.begin : self.end], k_BSKN[:, keys], v_BSKN[:, keys]

    def of_both(self, seen: jax.Array | None) -> jax.Array | None:
        return None if seen is None else seen[:, self.begin : self.end, self.first : self.last]


def _parts(form: BlockForm, queries: int, keys: int) -> list[_Span]:
    """Returns the parts of a block by XLA: so fewer scores are in memory at once, and those that no causal query sees are not computed."""
    size, found = max(QUERIES, -(-queries // PARTS)), []
    for begin in range(0, queries, size):
        end, first = min(begin + size, queries), max(0, begin - form.window + 1) if form.window else 0
        sees = (first // _TILE * _TILE, min(end, keys)) if form.is_causal and first < keys else (0, keys)
        found.append(_Span(begin, end, *sees))
    return found


def _forward(
    form: BlockForm, part: _Span, q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    scores_BKTGS, seen = _scores(form, part, q_BTHN, k_BSKN, seen)
    scores_BKTGS = _masked(scores_BKTGS, seen)
    total_BKTG = jax.nn.logsumexp(scores_BKTGS, axis=-1)
    weights = jnp.exp(scores_BKTGS - total_BKTG[..., None]).astype(v_BSKN.dtype)
    out = _einsum("bktgs,bskn->btkgn", weights, v_BSKN)
    return out.reshape(q_BTHN.shape), jnp.swapaxes(total_BKTG, 2, 3).reshape(len(q_BTHN), q_BTHN.shape[2], -1)


def _backward(
    form: BlockForm,
    part: _Span,
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    seen: jax.Array | None,
    y_BTHN: jax.Array,
    dy_BTHN: jax.Array,
    l_BHT: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape, heads = q_BTHN.shape, k_BSKN.shape[2]
    grouped = *shape[:2], heads, shape[2] // heads, shape[3]
    dtype = q_BTHN.dtype
    scores_BKTGS, seen = _scores(form, part, q_BTHN, k_BSKN, seen)
    l_BKTG = jnp.swapaxes(l_BHT.reshape(len(l_BHT), *grouped[2:4], -1), 2, 3)
    p_BKTGS = jnp.exp(_masked(scores_BKTGS, seen) - l_BKTG[..., None])
    dy_BTKGN = dy_BTHN.astype(dtype).reshape(grouped)
    sums_BTH = jnp.sum(dy_BTHN.astype(jnp.float32) * y_BTHN.astype(jnp.float32), axis=-1)
    sums_BKTG = jnp.swapaxes(sums_BTH.reshape(grouped[:-1]), 1, 2)
    dp_BKTGS = _einsum("btkgn,bskn->bktgs", dy_BTKGN, v_BSKN)
    slope = softcap.slope(scores_BKTGS, form.cap) * form.scale
    ds_BKTGS = (p_BKTGS * (dp_BKTGS - sums_BKTG[..., None]) * slope).astype(dtype)
    dq = _einsum("bktgs,bskn->btkgn", ds_BKTGS, k_BSKN).reshape(shape)
    dk = _einsum("bktgs,btkgn->bskn", ds_BKTGS, q_BTHN.reshape(grouped))
    return dq, dk, _einsum("bktgs,btkgn->bskn", p_BKTGS.astype(dtype), dy_BTKGN)


def _scores(
    form: BlockForm, part: _Span, q_BTHN: jax.Array, k_BSKN: jax.Array, seen: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores, bounded and not masked, and which keys a query sees."""
    batch, queries, _, width = q_BTHN.shape
    q_BTKGN = q_BTHN.reshape(batch, queries, k_BSKN.shape[2], -1, width)
    scores_BKTGS = softcap.softcap(_einsum("btkgn,bskn->bktgs", q_BTKGN, k_BSKN) * form.scale, form.cap)
    if form.is_causal:
        before = part.begin - part.first
        earlier = jnp.tri(queries, k_BSKN.shape[1], before, dtype=bool)[None]
        if form.window:
            earlier &= ~jnp.tri(queries, k_BSKN.shape[1], before - form.window, dtype=bool)
        seen = earlier if seen is None else seen & earlier
    return scores_BKTGS, seen


def _masked(scores_BKTGS: jax.Array, seen: jax.Array | None) -> jax.Array:
    return scores_BKTGS if seen is None else jnp.where(seen[:, None, :, None], scores_BKTGS, NONE)


def _einsum(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    if left.dtype == jnp.float16:  # JAX's CPU backend has no such matmul
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
