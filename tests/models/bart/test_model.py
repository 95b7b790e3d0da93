"""Checks the model's properties. This module tests zerojax.models.bart.model.

tests/interop/test_pretrained.py compares the model with transformers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zerojax import tree
from zerojax.models import families, family
from zerojax.models.bart import model as bart
from zerojax.ops import losses

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order
CONFIG = dataclasses.replace(
    families.PRESETS["bart_test"].presets["bart_test"],
    vocab_size=61,
    num_layers=1,
    decoder_layers=2,
    decoder_heads=2,
    decoder_mlp_dim=96,
    scale_embeddings=True,
)


def make_params(config=CONFIG):
    random = np.random.default_rng(0)
    shapes = family.abstract_params(bart.parts, config)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)


def make_batch(inputs=14, targets=9):
    draw = np.random.default_rng(1).integers
    return (jnp.asarray(draw(CONFIG.vocab_size, size=(2, size)), jnp.int32) for size in (inputs, targets))


def logits(params, *arrays, config=CONFIG):
    return bart.Bart(config).apply({"params": params}, *arrays)


def test_a_later_target_changes_no_earlier_logits_and_every_input_changes_all():
    params = make_params()
    inputs, targets = make_batch()
    before = logits(params, inputs, targets)
    after = logits(params, inputs, targets.at[:, 5].add(1) % CONFIG.vocab_size)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (abs(before - after)[:, 5:].max(axis=(0, 2)) > 0).all()
    other = logits(params, inputs.at[:, -1].add(1) % CONFIG.vocab_size, targets)
    assert (abs(before - other).max(axis=(0, 2)) > 0).all()


def test_masked_inputs_change_nothing():
    params = make_params()
    inputs, targets = make_batch()
    mask = jnp.broadcast_to(jnp.arange(14) < 10, (2, 14))
    masked = logits(params, inputs, targets, mask)
    np.testing.assert_array_equal(masked, logits(params, inputs.at[:, 10:].set(0), targets, mask))
    np.testing.assert_allclose(masked, logits(params, inputs[:, :10], targets), atol=ROUNDING)


def test_the_loss_is_the_cross_entropy_of_the_next_targets_and_does_not_train_the_bias_of_the_logits():
    for config in (CONFIG, dataclasses.replace(CONFIG, tie_embeddings=False)):
        params = make_params(config)
        inputs, targets = make_batch()

        def loss(params):
            return bart.Bart(config).apply({"params": params}, inputs, targets, method="loss")  # noqa: B023

        found, grads = jax.jit(jax.value_and_grad(loss))(params)
        expected = losses.cross_entropy(logits(params, inputs, targets[:, :-1], config=config), targets[:, 1:])
        np.testing.assert_allclose(found, expected, rtol=1e-5)
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
