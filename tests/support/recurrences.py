"""Recurrences to compare. This module draws their tokens, takes their gradients, and compares those of chunks with token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.ops import recurrence
from zerojax.ops.recurrence import Terms

ROUNDING = 1e-5  # float32 sums in another order, of the largest value
DELTA, SCAN = "delta rule", "Mamba-2"


def drawn(kind, batch, length, groups, heads, keys, values):
    """Returns tokens whose keys have length 1 and whose decays are between 1 and a few hundredths, a state, and gradients of results."""
    random = np.random.default_rng(length)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    q, k = normal(batch, length, groups, keys), normal(batch, length, groups, keys)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -np.exp(normal(batch, length, heads) - 1)
    beta = 1 / (1 + np.exp(-normal(batch, length, heads))) if kind == DELTA else None
    tokens = Terms(q, k, normal(batch, length, heads, values), decay, beta)
    state = normal(batch, heads, keys, values)
    return tokens, state, (normal(batch, length, heads, values), normal(*state.shape))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, tokens, state, grads):
    found, pull = jax.vjp(function, tokens, state)
    return found, pull(grads)


def assert_alike(found, wanted):
    for own, true in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert own.dtype == jnp.float32
        np.testing.assert_allclose(own, true, rtol=0, atol=ROUNDING * max(1, np.abs(true).max()))


def compare(by_token, kind, batch, length, sizes, mask=None, segments=None):
    """Compares results, states and gradients of `recurrence.scan` with those of f(tokens, state, mask, segments)."""
    tokens, state, grads = drawn(kind, batch, length, *sizes)
    seen = np.ones((batch, length), bool) if mask is None else mask
    numbers = np.zeros((batch, length), np.int32) if segments is None else segments

    def chunked(tokens, state):
        y, after = recurrence.scan(tokens, state, mask_BT=mask, segments_BT=segments)
        return jnp.where(seen[..., None, None], y, 0), after

    found = with_gradients(chunked, tokens, state, grads)
    assert_alike(found, with_gradients(lambda *given: by_token(*given, seen, numbers), tokens, state, grads))
