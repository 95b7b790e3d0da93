"""Checks attention of blocks of keys against attention of all. This module tests zerojax.ops.attention_blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.ops import attention_blocks as blocks

ROUNDING = 1e-5  # float32 sums of some terms in another order


def arrays():
    draw = np.random.default_rng(0).normal
    q, k, v, dy = (
        jnp.asarray(draw(size=(2, length, heads, 8)), jnp.float32)
        for length, heads in ((5, 4), (12, 2), (12, 2), (5, 4))
    )
    seen = np.random.default_rng(1).random((2, 5, 12)) < 0.6
    seen[:, :3, :4], seen[0, 4] = False, False  # queries that see no key of a block, and one that sees none at all
    return q, k, v, dy, jnp.asarray(seen)


@pytest.mark.long
def test_merged_blocks_and_their_gradients_are_those_of_all_keys():
    q, k, v, dy, seen = arrays()

    def whole(q, k, v):
        y = jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=0.3)
        return jnp.where(jnp.any(seen, -1)[:, :, None, None], y, 0)

    expected, gradients = jax.vjp(whole, q, k, v)
    cut = [(k[:, i : i + 4], v[:, i : i + 4], seen[:, :, i : i + 4]) for i in (0, 4, 8)]
    form = blocks.BlockForm("xla", 0.3)
    first, *others = (blocks.forward(form, q, *block) for block in cut)
    for other in others:
        first = blocks.merged(first, other)
    y, l = blocks.finished(blocks.merged(first, others[0], is_seen=False))
    np.testing.assert_allclose(y, expected, atol=ROUNDING)
    dq, dk, dv = zip(*(blocks.backward(form, q, *block, y, l, dy) for block in cut))
    found = sum(dq), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)
    for one, other in zip(found, gradients(dy)):
        np.testing.assert_allclose(one, other, atol=ROUNDING)


@pytest.mark.parametrize("is_causal, window, is_masked", [(True, 0, False), (True, 4, True), (False, 0, True)])
def test_parts_of_the_queries_give_what_all_at_once_give(is_causal, window, is_masked, monkeypatch):
    draw = np.random.default_rng(2).normal
    q, dy, k, v = (jnp.asarray(draw(size=(2, 11, heads, 8)), jnp.float32) for heads in (4, 4, 2, 2))
    seen = jnp.asarray(np.random.default_rng(3).random((2, 11, 11)) < 0.7) if is_masked else None
    form, cut = blocks.BlockForm("xla", 0.3, is_causal, window, 5.0), []

    def both(q, k, v):
        cut.append(blocks._parts(form, 11, 11))
        y, l = blocks.finished(blocks.forward(form, q, k, v, seen))
        return y, l, blocks.backward(form, q, k, v, seen, y, l, dy)

    expected = jax.jit(both)(q, k, v)
    for name, size in (("QUERIES", 2), ("PARTS", 4), ("_TILE", 2)):
        monkeypatch.setattr(blocks, name, size)
    found = jax.jit(lambda *given: both(*given))(q, k, v)
    assert [len(parts) for parts in cut] == [1, 4]
    assert sum(part.last - part.first for part in cut[1]) < (44 if is_causal else 45), (
        "keys that no query sees are read"
    )
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, atol=ROUNDING), found, expected)
