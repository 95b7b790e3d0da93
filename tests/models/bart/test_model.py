"""Checks the model's properties. This module tests zerojax.models.bart.model.

tests/interop/test_pretrained.py compares the model with transformers.
"""

import dataclasses
import functools

import encoder_decoders
import jax
import jax.numpy as jnp
import numpy as np
import runs

from zerojax import tree
from zerojax.models import family
from zerojax.models.bart import model as bart
from zerojax.ops import losses

CONFIG = encoder_decoders.BART


@functools.partial(jax.jit, static_argnames="config")
def logits(params, *arrays, config=CONFIG):
    return bart.Bart(config).apply({"params": params}, *arrays)


SHORT = dataclasses.replace(CONFIG, decoder_layers=1)


def loss(params, config):
    return bart.Bart(config).apply({"params": params}, *encoder_decoders.make_batch(), method="loss")


@functools.partial(jax.jit, static_argnums=1)
def expected_loss(params, config):
    inputs, targets = encoder_decoders.make_batch()
    return losses.cross_entropy(logits(params, inputs, targets[:, :-1], config=config), targets[:, 1:])


@runs.LONG  # tests/interop/test_pretrained.py compares it with that of transformers
def test_the_loss_is_the_cross_entropy_of_the_next_targets():
    config = dataclasses.replace(SHORT, tie_embeddings=False)
    params = encoder_decoders.make_params(bart.parts, config)
    found = jax.jit(loss, static_argnums=1)(params, config)
    np.testing.assert_allclose(found, expected_loss(params, config), rtol=1e-5)


def test_the_loss_of_tied_embeddings_trains_all_but_the_bias_of_the_logits():
    params = encoder_decoders.make_params(bart.parts, SHORT)
    found, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, SHORT)
    np.testing.assert_allclose(found, expected_loss(params, SHORT), rtol=1e-5)
    assert not grads["logits_bias"]["bias"].any()
    trained = [path for path, leaf in tree.flatten(grads) if leaf.any()]
    assert len(trained) == len(jax.tree.leaves(params)) - 1


def test_parts_make_up_the_models_own_tree():
    for config in (CONFIG, dataclasses.replace(CONFIG, tie_embeddings=False)):
        tokens = jnp.zeros((1, 2), jnp.int32)
        own = jax.eval_shape(bart.Bart(config).init, jax.random.key(0), tokens, tokens)["params"]
        found = family.abstract_params(bart.parts, config)
        assert jax.tree.map(lambda leaf: leaf.shape, own) == jax.tree.map(lambda leaf: leaf.shape, found)


def test_flops_are_six_for_each_weight_and_token_and_twelve_for_each_pair():
    c, inputs, targets = CONFIG, 10, 4

    def tokens_of(path):
        if path.startswith("encoder_0"):
            return inputs
        reads_inputs = "cross/k" in path or "cross/v" in path
        return inputs if reads_inputs else targets if path.startswith(("decoder_0", "decoder_1")) else 0

    sizes = {path: leaf.size for path, leaf in tree.flatten(family.abstract_params(bart.parts, c))}
    pairs = inputs**2 + 2 * (targets**2 / 2 + inputs * targets)
    weights = sum(size * tokens_of(path) for path, size in sizes.items()) + targets * c.embed_dim * c.vocab_size
    assert bart.flops_per_row(c, inputs, targets) == 6 * weights + 12 * c.embed_dim * pairs
