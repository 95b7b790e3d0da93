"""Recurrences and short convolutions of tokens that are sharded over a mesh axis, for use inside `jax.shard_map`. This module hands what a
text leaves behind from device to device.

A device has a part of every row, and parts are in the order of the row. The results of a part, and the state after it, are linear in the
state S before it,

    y = y_0 + R S    S after = A S + B

so a device computes y_0 and B, which are those of state 0, and R and A before it knows S. Then the pairs (A, B) of the parts before it are
combined, (A, B) after (A', B') being (A A', A B' + B), in about log2(devices) hops: a prefix sum over devices. No token is sent. Of
Mamba-2's scan, A is a number for each head, and R the decayed queries. Of the delta rule A is a matrix [K, K]: the states that begin as
the columns of the identity and are given no values, which `recurrence.scan` computes beside those of the values.

Shapes: B batch, T tokens of this device, H heads, G groups of heads with equal keys and queries, K width of keys, V of values, C channels,
W tokens of the window.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import roles, specs
from zerojax.ops import recurrence, short_convolution
from zerojax.ops.recurrence import Terms


class _Passage(NamedTuple):
    """What a part, or several in a row, makes of the state before it."""

    keeps: jax.Array  # float32[B, H, K, K] or [B, H, 1, 1], A
    adds: jax.Array  # float32[B, H, K, V], B


def scan(
    terms: Terms, *, axis: specs.Entry, mask_BT: jax.Array | None = None, segments_BT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the results of this device's tokens, float32[B, T, H, V], and the state after them, float32[B, H, K, V].

    Args:
      terms, mask_BT, segments_BT: of this device's tokens; see `recurrence.scan`.
      axis: the mesh axis over which tokens are sharded.
    """
    given: dict[str, Any] = {"mask_BT": mask_BT, "segments_BT": segments_BT}
    y_BTHV, reads, part = (_of_scan if terms.beta is None else _of_delta_rule)(terms, **given)
    with jax.named_scope(roles.CONTEXT_PARALLEL):
        if segments_BT is None:
            before_BHKV = _adds_before(part, axis)
        else:
            goes_on = (segments_BT[:, 0] == _from_before(segments_BT[:, -1], axis))[:, None, None, None]
            part = part._replace(keeps=jnp.where(goes_on, part.keeps, 0))
            before_BHKV = jnp.where(goes_on, _adds_before(part, axis), 0)
    return y_BTHV + reads(before_BHKV), _after(part, before_BHKV) + part.adds


def convolve(
    x_BTC: jax.Array, kernel_WC: jax.Array, *, axis: specs.Entry, segments_BT: jax.Array | None = None
) -> jax.Array:
    """Returns the results of this device's tokens, float[B, T, C]; see `short_convolution.convolve`. It receives the inputs just before."""
    past = len(kernel_WC) - 1

    def with_those_before(array: jax.Array) -> jax.Array:
        sent = array[:, -past:]
        with jax.named_scope(roles.CONTEXT_PARALLEL):  # of as many parts as the window reaches into
            before = [_from_before(sent, axis, places) for places in range(-(-past // sent.shape[1]), 0, -1)]
        return jnp.concatenate([jnp.concatenate(before, axis=1)[:, -past:], array], axis=1)

    if not past:
        return short_convolution.convolve(x_BTC, kernel_WC)[0]
    texts = None if segments_BT is None else with_those_before(segments_BT)
    return short_convolution.convolve(with_those_before(x_BTC), kernel_WC, segments_BT=texts)[0][:, past:]


def _of_scan(
    terms: Terms, *, mask_BT: jax.Array | None, segments_BT: jax.Array | None
) -> tuple[jax.Array, Any, _Passage]:
    """Returns y_0, S -> R S, and the part, of Mamba-2's scan."""
    y_BTHV, state_BHKV = recurrence.scan(terms, mask_BT=mask_BT, segments_BT=segments_BT)
    g_BTH = terms.log_decay.astype(jnp.float32)
    sums_BTH = jnp.cumsum(g_BTH if mask_BT is None else jnp.where(mask_BT[..., None], g_BTH, 0), axis=1)
    if segments_BT is not None:
        sums_BTH = jnp.where((segments_BT == segments_BT[:, :1])[..., None], sums_BTH, -jnp.inf)

    def reads(before_BHKV: jax.Array) -> jax.Array:
        q_BTGK = terms.q.astype(jnp.float32)
        before_BGRKV = before_BHKV.reshape(len(q_BTGK), q_BTGK.shape[2], -1, *before_BHKV.shape[2:])
        read_BTHV = jnp.einsum("btgk,bgrkv->btgrv", q_BTGK, before_BGRKV).reshape(y_BTHV.shape)
        return jnp.exp(sums_BTH)[..., None] * read_BTHV

    return y_BTHV, reads, _Passage(jnp.exp(sums_BTH[:, -1, :, None, None]), state_BHKV)


def _of_delta_rule(terms: Terms, **given: Any) -> tuple[jax.Array, Any, _Passage]:
    """Returns the same of the delta rule."""
    (batch, _, heads, width), keys = terms.v.shape, terms.q.shape[3]
    v_BTHX = jnp.pad(terms.v.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, keys)))
    first_KX = jnp.eye(keys, width + keys, width)
    found = recurrence.scan(
        terms._replace(v=v_BTHX), jnp.broadcast_to(first_KX, (batch, heads, *first_KX.shape)), **given
    )
    (y_BTHV, r_BTHK), (adds, keeps) = (jnp.split(each, [width], axis=-1) for each in found)
    return y_BTHV, lambda before_BHKV: jnp.einsum("bthk,bhkv->bthv", r_BTHK, before_BHKV), _Passage(keeps, adds)


def _adds_before(part: _Passage, axis: specs.Entry) -> jax.Array:
    """Returns B of all parts before this device's, of which the state is that before it."""
    before, count = _from_before(part, axis), 1
    while count < jax.lax.axis_size(axis) - 1:  # `before` is of so many parts, or of all; before the first there is 0
        earlier = _from_before(before, axis, count)
        before = _Passage(_after(before, earlier.keeps), _after(before, earlier.adds) + before.adds)
        count *= 2
    return before.adds


def _after(part: _Passage, state: jax.Array) -> jax.Array:
    """Returns A times a state, or another part's A."""
    return part.keeps * state if part.keeps.shape[-1] == 1 else part.keeps @ state


def _from_before(arrays: Any, axis: specs.Entry, places: int = 1) -> Any:
    """Returns the arrays of the device `places` before; 0 where there is none."""
    ways = jax.lax.axis_size(axis)
    return jax.lax.ppermute(arrays, axis, [(i, i + places) for i in range(ways - places)])
