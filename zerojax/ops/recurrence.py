"""Recurrences whose state is a matrix a head: the gated delta rule, and Mamba-2's scan. This module computes them for texts and tokens.

With the keys k and queries q of a token, its value v, and its decay exp(g), g <= 0, a head's state S [K, V] and result are

    S = exp(g) S + k u'    y = S' q

where Mamba-2's scan (SSD, arXiv:2405.21060, section 6) has u = v, and the gated delta rule (arXiv:2412.06464, equation 10) the difference
from what the decayed state has of the key, u = beta (v - exp(g) S' k). In a chunk of C tokens, with a the sums of g from its beginning, the
u are the solution of a triangular system, linear in the state S before it (section 3.3; arXiv:2406.06484, section 3.2):

    u = U - W S    y = exp(a) q S + (exp(a_i - a_j) q_i k_j)_{j <= i} u    S after = exp(a_C) S + (exp(a_C - a_j) k_j)' u

So chunks are matmuls side by side, and only their states follow each other. The backward pass keeps the arguments and the states before
chunks, and computes the rest anew. Arrays are float32; matmuls have JAX's default precision, which on some GPUs is less (TF32).

On the shards of Hopper GPUs, inside `jax.shard_map`, kernels do the same (`pallas_kernels.chunk_scan`), by default with operands of matmuls
that are rounded to TF32, as XLA's are there. JAX's default precision of matmuls says otherwise: "bfloat16" rounds them to bfloat16, which
is faster, and with "float32" or "highest" XLA computes chunks.

Shapes: B batch, T tokens, H heads, G groups of R heads with equal keys and queries, K width of keys, V of values, N chunks of C
tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import chunk_scan, grouped
from zerojax import mesh as mesh_lib
from zerojax.tree import PyTree

CHUNK = chunk_scan.CHUNK
# By JAX's default precision of matmuls, the operands of those in kernels; others are left to XLA.
_OPERANDS = {None: jnp.float32, "default": jnp.float32, "tensorfloat32": jnp.float32, "bfloat16": jnp.bfloat16}


class Terms(NamedTuple):
    """The arguments of a recurrence.

    Attributes:
      q, k: float[B, T, G, K].
      v: float[B, T, H, V].
      log_decay: float[B, T, H], g, at most 0.
      beta: float[B, T, H], of the delta rule; None: Mamba-2's scan.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None = None


class _Chunks(NamedTuple):
    """What a chunk does with the state before it, each float32[N, B, G, R, ...], or with 1 in place of R."""

    reads: jax.Array  # [C, K], the queries of that state
    scores: jax.Array  # [C, C], of queries and keys
    u: jax.Array  # [C, V], U
    w: jax.Array | None  # [C, K], W; None: 0
    writes: jax.Array  # [C, K], the keys in the state after it
    keeps: jax.Array  # [1, 1], what multiplies the state


def go_on(terms: Terms, state_BHKV: jax.Array | None, **given: Any) -> tuple[jax.Array, jax.Array]:
    """Returns what `scan` does of a text, by `step` if it goes on with one token."""
    if state_BHKV is None or terms.q.shape[1] > 1:
        return scan(terms, state_BHKV, **given)
    assert given.pop("segments_BT") is None, "a row has one text"
    return step(terms, state_BHKV, **given)


def flops(groups: int, heads: int, width: int, value_width: int, *, is_delta: bool) -> float:
    """Returns the operations of a token's chunks: those of their matmuls and systems, in a forward pass."""
    scores, results, states = CHUNK * groups * width, CHUNK * heads * value_width, heads * width * value_width
    solved = scores + states + CHUNK * heads * (width + value_width) / 2 if is_delta else 0
    return 2.0 * (scores + results + 2 * states + solved)


def scan(
    terms: Terms,
    state_BHKV: jax.Array | None = None,
    *,
    mask_BT: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results float32[B, T, H, V], and the state after the tokens: float32[B, H, K, V].

    Args:
      terms: the arguments.
      state_BHKV: before them, of the same text; None: 0.
      mask_BT: False for padding, which leaves the state as it is, and whose results mean nothing.
      segments_BT: the number of the text that a token belongs to, where a row holds several, one after the other: each begins with state 0.
      chunk: tokens that are computed side by side.
    """
    (batch, length, groups, width), (heads, value_width) = terms.q.shape, terms.v.shape[2:]
    if state_BHKV is None:
        state_BHKV = jnp.zeros((batch, heads, width, value_width))
    terms = _masked(terms, mask_BT)
    if chunk == CHUNK and (form := _form(terms)):
        return _by_kernels(form, terms, state_BHKV.astype(jnp.float32), segments_BT)
    terms = _in_float32(terms)
    chunk = min(chunk, length)
    padding = -length % chunk

    def in_chunks(array: jax.Array) -> jax.Array:
        """Returns [N, B, G, R, C, X] of [B, T, G or H, X]."""
        array = jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0)))
        array = array.reshape(batch, -1, chunk, groups, array.shape[2] // groups, array.shape[3])
        return array.transpose(1, 0, 3, 4, 2, 5)

    scalars = (None if array is None else in_chunks(array[..., None]) for array in terms[3:])
    chunks = Terms(*map(in_chunks, terms[:3]), *scalars)
    numbers = None
    if segments_BT is not None:
        numbers = jnp.pad(segments_BT, ((0, 0), (0, padding)), mode="edge").reshape(batch, -1, chunk)
        numbers = numbers.transpose(1, 0, 2)[:, :, None, None]
    state = state_BHKV.astype(jnp.float32).reshape(batch, groups, heads // groups, width, value_width)
    y, state = _over_chunks(state, chunks, numbers)
    y_BTHV = y.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, value_width)[:, :length]
    return y_BTHV, state.reshape(batch, heads, width, value_width)


def step(terms: Terms, state_BHKV: jax.Array, *, mask_BT: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns what `scan` does of one token a row."""
    heads = terms.v.shape[2]
    q, k, v, g, beta = _in_float32(_masked(terms, mask_BT))
    q_BHK, k_BHK = (jnp.repeat(array[:, 0], heads // array.shape[2], axis=1) for array in (q, k))
    state_BHKV = jnp.exp(g[:, 0, :, None, None]) * state_BHKV.astype(jnp.float32)
    u_BHV = v[:, 0]
    if beta is not None:
        u_BHV = beta[:, 0, :, None] * (u_BHV - jnp.sum(state_BHKV * k_BHK[..., None], axis=2))
    state_BHKV += k_BHK[..., None] * u_BHV[:, :, None]
    return jnp.sum(state_BHKV * q_BHK[..., None], axis=2)[:, None], state_BHKV


def _masked(terms: Terms, mask_BT: jax.Array | None) -> Terms:
    """Returns the arguments with those of padding such that the state stays as it is."""
    if mask_BT is None:
        return terms
    seen = mask_BT[..., None]
    beta = None if terms.beta is None else jnp.where(seen, terms.beta, 0)
    v, log_decay = jnp.where(seen[..., None], terms.v, 0), jnp.where(seen, terms.log_decay, 0)
    return Terms(terms.q, terms.k, v, log_decay, beta)


def _in_float32(terms: Terms) -> Terms:
    return jax.tree.map(lambda array: array.astype(jnp.float32), terms)


def _form(terms: Terms) -> chunk_scan.ScanForm | None:
    """Returns how kernels compute these arguments; None if they do not."""
    if not grouped.hopper_processors() or mesh_lib.rest():
        return None
    dtype = _OPERANDS.get(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
    return dtype and chunk_scan.form_of(terms.q.shape, terms.v.shape, dtype=dtype, is_delta=terms.beta is not None)


def _by_kernels(
    form: chunk_scan.ScanForm, terms: Terms, state_BHKV: jax.Array, segments_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns what `scan` does."""
    length = terms.q.shape[1]
    padding = (0, -length % CHUNK)
    if segments_BT is not None:
        segments_BT = jnp.pad(segments_BT, ((0, 0), padding), mode="edge")
    q, k, v, g, beta = (
        None if array is None else jnp.pad(array, ((0, 0), padding, *((0, 0),) * (array.ndim - 2))) for array in terms
    )
    g, beta = (None if array is None else array.astype(jnp.float32).swapaxes(1, 2) for array in (g, beta))
    y_BTHV, state_BHKV = chunk_scan.scan(form, chunk_scan.ScanInputs(q, k, v, g, beta, segments_BT), state_BHKV)
    return y_BTHV[:, :length], state_BHKV


@jax.custom_vjp
def _over_chunks(state: jax.Array, terms: Terms, segments: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    return _forward(state, terms, segments)[0]


def _forward(state: jax.Array, terms: Terms, segments: jax.Array | None) -> tuple[Any, Any]:
    chunks = _chunks(terms, segments)
    last, before = jax.lax.scan(lambda state, chunk: (_after(state, chunk), state), state, chunks)
    return (_results(before, chunks), last), (before, terms, segments)


def _backward(kept: PyTree, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Terms, None]:
    before, terms, segments = kept
    chunks, of_terms = jax.vjp(lambda terms: _chunks(terms, segments), terms)
    d_read, d_chunks = jax.vjp(_results, before, chunks)[1](grads[0])

    def earlier(d_after: jax.Array, given: tuple[jax.Array, _Chunks]) -> tuple[jax.Array, jax.Array]:
        (d_before,) = jax.linear_transpose(lambda state: _kept(state, given[1]), d_after)(d_after)
        return d_before + given[0], d_after

    d_state, d_after = jax.lax.scan(earlier, grads[1], (d_read, chunks), reverse=True)
    d_moved = jax.vjp(lambda chunks: _after(before, chunks), chunks)[1](d_after)[0]
    return d_state, of_terms(jax.tree.map(jnp.add, d_chunks, d_moved))[0], None


_over_chunks.defvjp(_forward, _backward)


def _chunks(terms: Terms, segments: jax.Array | None) -> _Chunks:
    """Returns what chunks do. `terms` are [N, B, G, R, C, ...], and `segments` int32[N, B, 1, 1, C]."""
    q, k, v, g, beta = terms
    size = g.shape[-2]
    sums = jnp.cumsum(g[..., 0], axis=-1)
    is_seen = jnp.tril(jnp.ones((size, size), bool)).reshape(*(1,) * (sums.ndim - 1), size, size)
    is_of_before = is_of_last = jnp.ones(sums.shape, bool)
    if segments is not None:
        last = segments[..., -1:]
        before = jnp.concatenate([segments[:1, ..., :1], last[:-1]])
        is_seen = is_seen & (segments[..., :, None] == segments[..., None, :])
        is_of_before, is_of_last = segments == before, segments == last

    def decay(sums: jax.Array, is_of_text: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(is_of_text, sums, -jnp.inf))

    among = decay(sums[..., :, None] - sums[..., None, :], is_seen)
    since = decay(sums, is_of_before)[..., None]
    until = decay(sums[..., -1:] - sums, is_of_last)[..., None]
    u, w = v, None
    if beta is not None:
        system = jnp.tril(beta * among * (k @ k.mT), -1)  # its diagonal is 1
        both = jnp.concatenate([beta * v, beta * since * k], axis=-1)
        solved = jax.lax.linalg.triangular_solve(system, both, left_side=True, lower=True, unit_diagonal=True)
        u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    return _Chunks(since * q, among * (q @ k.mT), u, w, until * k, since[..., -1:, :])


def _kept(state: jax.Array, chunks: _Chunks) -> jax.Array:
    """Returns the part of the states after chunks that is linear in those before them."""
    kept = chunks.keeps * state
    return kept if chunks.w is None else kept - chunks.writes.mT @ (chunks.w @ state)


def _after(state: jax.Array, chunks: _Chunks) -> jax.Array:
    """Returns the states after chunks."""
    return _kept(state, chunks) + chunks.writes.mT @ chunks.u


def _results(state: jax.Array, chunks: _Chunks) -> jax.Array:
    """Returns the results of chunks, of the states before them."""
    u = chunks.u if chunks.w is None else chunks.u - chunks.w @ state
    return chunks.reads @ state + chunks.scores @ u
