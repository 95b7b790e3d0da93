"""Recurrences to compare. This module draws their tokens and takes their gradients."""

import functools

import jax
import numpy as np

from zerojax.ops.recurrence import Terms

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
