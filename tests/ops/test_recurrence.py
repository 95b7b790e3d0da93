"""Compares recurrences over chunks with the same token by token. This module tests zerojax.ops.recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrences
from recurrences import DELTA, ROUNDING, SCAN, drawn

from zerojax.ops import recurrence

BATCH, GROUPS, HEADS, KEYS, VALUES = 2, 2, 4, 3, 5
SIZES = GROUPS, HEADS, KEYS, VALUES


def plain(tokens, state, mask, segments):
    """The equations, token by token."""
    q, k = (jnp.repeat(array, HEADS // GROUPS, axis=2) for array in tokens[:2])
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))

    def add(state, at):
        q, k, v, g, beta, is_text, begins = at
        decayed = jnp.where(begins[:, None, None, None], 0, jnp.exp(g)[..., None, None] * state)
        u = v if beta is None else beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", decayed, k))
        state = jnp.where(is_text[:, None, None, None], decayed + jnp.einsum("bhk,bhv->bhkv", k, u), state)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    turned = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (q, k, *tokens[2:], mask, is_first))
    state, y = jax.lax.scan(add, state, turned)
    return jnp.where(mask[..., None, None], jnp.moveaxis(y, 0, 1), 0), state


def compare(kind, length, mask=None, segments=None):
    recurrences.compare(plain, kind, BATCH, length, SIZES, mask, segments)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
@pytest.mark.parametrize("length", [1, 7, 64, 65, 300, 4097])
def test_results_states_and_gradients_are_those_of_the_recurrence(kind, length):
    compare(kind, length)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_texts_of_a_row_begin_with_state_0(kind):
    """Texts of one token, of several chunks, and that end where a chunk does; padding has a number of its own."""
    sizes = [[1, 63, 130, 6], [100, 28, 2, 70]]
    compare(kind, 200, segments=np.stack([np.repeat([1, 2, 3, 0], size) for size in sizes]).astype(np.int32))


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_padding_leaves_no_trace(kind):
    compare(kind, 70, mask=np.arange(70) < np.array([[66], [0]]))
    tokens, state, _ = drawn(kind, BATCH, 70, *SIZES)
    mask = np.arange(70) < np.array([[66], [5]])
    other = tokens._replace(
        v=np.where(mask[..., None, None], tokens.v, 9), k=np.where(mask[..., None, None], tokens.k, 9)
    )
    found, wanted = (jax.jit(recurrence.scan)(one, state, mask_BT=mask)[1] for one in (other, tokens))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [DELTA, SCAN])
def test_steps_and_parts_of_a_text_are_its_scan(kind):
    tokens, state, _ = drawn(kind, BATCH, 70, *SIZES)
    y, after = recurrence.scan(tokens, state)
    first, held = recurrence.scan(jax.tree.map(lambda array: array[:, :67], tokens), state)
    step = jax.jit(recurrence.step)
    for at in range(67, 70):
        one = jax.tree.map(lambda array, at=at: array[:, at : at + 1], tokens)
        held_by_others = step(one, held, mask_BT=jnp.zeros((BATCH, 1), bool))[1]
        np.testing.assert_array_equal(held_by_others, held)
        own, held = step(one, held)
        np.testing.assert_allclose(own, y[:, at : at + 1], rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(first, y[:, :67], rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(held, after, rtol=0, atol=ROUNDING)


def test_the_backward_pass_keeps_the_states_before_chunks_alone():
    """Of 1,024 tokens in 16 chunks: beside the arguments nothing has as many numbers as a chunk's scores."""
    tokens, state, _ = drawn(DELTA, BATCH, 1024, *SIZES)
    _, pull = jax.vjp(recurrence.scan, tokens, state)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.size > tokens.v.size]
    assert not kept
