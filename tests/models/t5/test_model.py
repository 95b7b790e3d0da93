"""Checks the model against transformers and its equations. This module tests zerojax.models.t5.model."""

import dataclasses
import functools

import encoder_decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax import tree
from zerojax.models import family
from zerojax.models.t5 import model as t5
from zerojax.ops import losses

LOGITS_TOLERANCE = 2e-5  # float32 rounding in two implementations
CONFIG = encoder_decoders.T5
# A config of T5 before v1.1, with ReLU and tied embeddings.
FIRST = t5.T5Config(
    384, 2, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=128, mlp="relu", tie_embeddings=True, norm_eps=1e-6
)


@functools.partial(jax.jit, static_argnames="config")
def logits(params, *arrays, config=CONFIG):
    return t5.T5(config).apply({"params": params}, *arrays)


@runs.LONG
@pytest.mark.parametrize("tied", runs.cases([False, True], long=[True]))
def test_the_loss_is_the_cross_entropy_of_the_next_targets(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = encoder_decoders.make_params(t5.parts, config)
    inputs, targets = encoder_decoders.make_batch()
    loss = jax.jit(functools.partial(t5.T5(config).apply, method="loss"))
    found = loss({"params": params}, inputs, targets)
    expected = losses.cross_entropy(logits(params, inputs, targets[:, :-1], config=config), targets[:, 1:])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_parts_make_up_the_models_own_tree():
    for config in (CONFIG, FIRST):
        tokens = jnp.zeros((1, 2), jnp.int32)
        own = jax.eval_shape(t5.T5(config).init, jax.random.key(0), tokens, tokens)["params"]
        found = family.abstract_params(t5.parts, config)
        assert jax.tree.map(lambda leaf: leaf.shape, own) == jax.tree.map(lambda leaf: leaf.shape, found)


def test_equal_layers_are_equal_modules():
    parts = t5.parts(CONFIG)
    assert parts["encoder_0"] == parts["encoder_1"] and parts["decoder_0"] == parts["decoder_1"]


@pytest.mark.parametrize("is_causal", [True, False])
def test_small_distances_have_a_bucket_each_and_large_ones_share_wider_buckets(is_causal):
    distances = -np.arange(200)
    buckets = np.asarray(t5.bucket_of(jnp.asarray(distances), 32, 128, is_causal=is_causal))
    exact, last = (16, 31) if is_causal else (8, 15)
    np.testing.assert_array_equal(buckets[:exact], np.arange(exact))
    assert (np.diff(buckets) >= 0).all() and (buckets[128:] == last).all() and set(buckets) == set(range(last + 1))
    widths = np.bincount(buckets)[exact:last]
    assert widths[0] < widths[-1]
    behind = np.asarray(t5.bucket_of(jnp.asarray(-distances), 32, 128, is_causal=is_causal))
    np.testing.assert_array_equal(behind[1:], np.zeros(199) if is_causal else buckets[1:] + 16)


@runs.LONG
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=runs.LONG)])
def test_16_bit_weights_compute_in_16_bits_and_logits_are_float32(dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), encoder_decoders.make_params(t5.parts, CONFIG))
    batch = encoder_decoders.make_batch()
    shape = jax.eval_shape(lambda p: t5.T5(CONFIG).apply({"params": p}, *batch, method="hidden"), params)
    assert shape.dtype == dtype
    found, exact = logits(params, *batch), logits(encoder_decoders.make_params(t5.parts, CONFIG), *batch)
    assert found.dtype == jnp.float32
    rounding = 8 * float(jnp.finfo(dtype).eps)  # several successive roundings to 16 bits
    np.testing.assert_allclose(found, exact, atol=rounding * float(abs(exact).max()))


def test_flops_are_six_for_each_weight_and_token_and_twelve_for_each_pair():
    c, inputs, targets = CONFIG, 10, 4
    sizes = {path: leaf.size for path, leaf in tree.flatten(family.abstract_params(t5.parts, c))}

    def tokens_of(path):
        if path.startswith("embed") or "bias" in path:
            return 0
        reads_inputs = path.startswith("encoder") or "cross/k" in path or "cross/v" in path
        return inputs if reads_inputs else targets

    pairs = inputs**2 + targets**2 / 2 + inputs * targets
    attention = 12 * c.num_layers * c.num_heads * c.head_dim * pairs
    expected = attention + 6 * sum(size * tokens_of(path) for path, size in sizes.items())
    assert t5.flops_per_row(c, inputs, targets) == expected
