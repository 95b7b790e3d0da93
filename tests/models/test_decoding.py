"""Checks caches against attention without one. This module tests zerojax.models.decoding."""

import functools

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models import decoding
from zerojax.ops import tokens

attend = jax.jit(decoding.attend, static_argnums=3, static_argnames=("window",))
attend_all = jax.jit(
    functools.partial(tokens.attend, way=None, is_causal=True), static_argnums=3, static_argnames=("window",)
)
ROUNDING = 1e-6  # float32 sums in another order


def normal(seed, *shape):
    return arrays.normal(seed, shape)


def test_steps_give_each_token_its_slot_and_its_position():
    first = decoding.first_step(2, 4, 7)
    assert int(first.slot) == 0 and first.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    step = decoding.next_step(jnp.array([4, 2]), 4, jnp.int32(1), 7)
    assert int(step.slot) == 5 and step.positions_BT.tolist() == [[5], [3]]
    assert step.slot_positions_BS.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 2, 3, 4]]
    assert step.is_text_BS.tolist() == [[True] * 6 + [False], [True, True, False, False, True, True, False]]


@pytest.mark.parametrize("window", [0, 3])
def test_a_token_added_to_a_cache_sees_what_it_sees_without_one(window):
    """Row 0 has 4 prompt tokens, row 1 has 2; both get 3 more."""
    batch, length, new, heads, kv_heads, dim = 2, 4, 3, 4, 2, 8
    q, k, v = (normal(seed, batch, 7, h, dim) for seed, h in ((0, heads), (1, kv_heads), (2, kv_heads)))
    full = attend_all(q, k, v, "xla", window=window)
    lengths = np.array([4, 2])

    def at(array, positions):
        return jnp.stack([row[position] for row, position in zip(array, positions)])

    prompt = [np.arange(length)] * batch
    empty = decoding.empty((decoding.Held((kv_heads, dim)),) * 2, batch, length + new, jnp.float32)
    past = decoding.Past(empty, decoding.first_step(batch, length, length + new))
    found, keys = attend(*(at(x, prompt) for x in (q, k, v)), "xla", past, window=window)
    for row in range(batch):
        np.testing.assert_allclose(found[row, : lengths[row]], full[row, : lengths[row]], atol=ROUNDING)
    for count in range(new):
        here = [np.array([own + count]) for own in lengths]
        step = decoding.next_step(jnp.asarray(lengths), length, jnp.int32(count), length + new)
        found, keys = attend(*(at(x, here) for x in (q, k, v)), "xla", decoding.Past(keys, step), window=window)
        np.testing.assert_allclose(found, at(full, here), atol=ROUNDING)


def test_masked_tokens_are_not_seen():
    q, k, v = (normal(seed, 1, 5, 2, 4) for seed in range(3))
    mask = jnp.array([[True, False, True, True, True]])
    found = attend_all(q, k, v, "xla", mask=mask)
    other = attend_all(q, k.at[:, 1].set(9.0), v.at[:, 1].set(9.0), "xla", mask=mask)
    np.testing.assert_array_equal(found, other)


def test_devices_share_the_heads_of_arrays_that_have_heads_which_divide():
    dims = [
        held.heads_dim(ways)
        for held, ways in [
            (decoding.Held((4, 8)), 2),
            (decoding.Held((4, 8)), 1),
            (decoding.Held((1, 8)), 2),
            (decoding.Held((4, 8, 8), None), 2),
            (decoding.Held((4, 8), None, has_heads=False), 2),
            (decoding.Held((), "inputs", has_heads=False, dtype=bool), 2),
        ]
    ]
    assert dims == [2, None, None, 1, None, None]


def test_a_step_tells_which_of_its_tokens_are_text():
    """As recurrent arrays have to know: of padded prompts, of parts of prompts, of rows with a token or none."""
    positions, counts = jnp.array([3, 0, 5]), jnp.array([1, 0, 1])
    steps = functools.partial(decoding.row_step, positions, slots=8)
    assert decoding.first_step(3, 2, 8).is_new_BT(2) is None
    assert decoding.next_step(positions, 6, jnp.int32(0), 8).is_new_BT(1) is None
    assert steps(counts, 1).is_new_BT(1).tolist() == [[True], [False], [True]]
    assert steps(counts + 1, 3).is_new_BT(3).tolist() == [
        [True, True, False],
        [True, False, False],
        [True, True, False],
    ]
