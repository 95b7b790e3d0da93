"""Compares attention with sinks with a softmax over one score more. This module tests zerojax.ops.sinks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.ops import attention, context_attention, sinks, tokens

ROUNDING = 2e-6  # float32 sums in another order
QUERIES, HEADS, KV_HEADS = 9, 4, 2


def drawn(keys=QUERIES):
    random = np.random.default_rng(0)
    shapes = (2, QUERIES, HEADS, 8), (2, keys, KV_HEADS, 8), (2, keys, KV_HEADS, 8), (HEADS,)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(q, k, v, sinks_H, seen, scale):
    """A softmax over all keys and the sink, by numpy's rules."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bthn,bshn->bhts", q, k, precision="highest") * scale
    scores = jnp.where(seen, scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks_H[None, :, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshn->bthn", weights, v, precision="highest")


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, dy, *args):
    y, pull = jax.vjp(function, *args)
    return y, *pull(dy)


DISTANCE = np.arange(QUERIES)[:, None] - np.arange(QUERIES)
PADDING = np.arange(QUERIES) < np.array([[9], [4]])
TEXTS = np.broadcast_to(np.arange(QUERIES) // 5 == (np.arange(QUERIES) // 5)[:, None], (2, QUERIES, QUERIES))
CASES = {
    "causal": ({"is_causal": True}, DISTANCE >= 0),
    "window": ({"is_causal": True, "window": 3, "scale": 0.2}, (DISTANCE >= 0) & (DISTANCE < 3)),
    "a window of all": ({"is_causal": True, "window": 9}, DISTANCE >= 0),
    "padding": ({"is_causal": True, "mask": PADDING}, (DISTANCE >= 0) & PADDING[:, None, None]),
    "texts": ({"is_causal": True, "mask": TEXTS}, (DISTANCE >= 0) & TEXTS[:, None]),
    "no key": ({"is_causal": False, "mask": np.zeros((2, QUERIES), bool)}, np.zeros((QUERIES, QUERIES), bool)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sink_is_one_score_more_without_a_value_and_so_are_its_gradients(name):
    given, seen = CASES[name]
    q, k, v, sinks_H = drawn()
    dy = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def own(q, k, v, sinks_H):
        return sinks.attend(q, k, v, "splash", sinks_H=sinks_H, **given)

    y, *gradients = with_gradients(own, dy, q, k, v, sinks_H)
    expected, *theirs = with_gradients(
        lambda *args: plain(*args, seen, given.get("scale", 8**-0.5)), dy, q, k, v, sinks_H
    )
    np.testing.assert_allclose(y, expected, atol=ROUNDING)
    for found, wanted in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=5 * ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_without_sinks_it_is_attention(name):
    given, _ = CASES[name]
    q, k, v, _ = drawn()
    dy = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)
    found = with_gradients(lambda *qkv: sinks.attend(*qkv, "xla", sinks_H=None, **given), dy, q, k, v)
    wanted = with_gradients(lambda *qkv: attention.attend(*qkv, "xla", **given), dy, q, k, v)
    if name == "no key":  # which JAX's attention gives the mean of all values, and nothing defines
        assert all(not np.asarray(array).any() for array in found)
        return
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(array, expected, atol=5 * ROUNDING)


def test_wide_heads_for_an_absent_gpu_call_its_kernels_in_both_passes():
    shape = jax.ShapeDtypeStruct((2, 64, 2, 192), jnp.bfloat16)
    segments = np.zeros((2, 64), np.int32)

    def loss(q, k, v):
        return tokens.attend(q, k, v, "cudnn", way=None, is_causal=True, segments_BT=segments).astype(jnp.float32).sum()

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(shape, shape, shape))
    assert text.count("target_name=__cudnn$fmhaScaleBiasSoftmax") == 2


def test_each_device_has_the_sinks_of_its_heads():
    q, k, v, sinks_H = drawn()
    mesh = zerojax.make_mesh(data=1, model=2, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *args: sinks.attend(*args[:3], "xla", sinks_H=args[3], is_causal=True))(q, k, v, sinks_H)
    np.testing.assert_allclose(y, plain(q, k, v, sinks_H, DISTANCE >= 0, 8**-0.5), atol=ROUNDING)


def test_tokens_that_are_sharded_are_refused():
    q, k, v, sinks_H = drawn()
    way = context_attention.choose(heads=4, kv_heads=2, ways=1, length=9, is_causal=True)
    with pytest.raises(zerojax.UserError, match="sinks needs all tokens of a row on one device"):
        tokens.attend(q, k, v, "xla", way=way, is_causal=True, sinks_H=sinks_H)
