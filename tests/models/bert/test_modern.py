"""Checks ModernBERT beside what golden models show. This module tests zerojax.models.bert.modern."""

import jax
import numpy as np

from zerojax.models import family
from zerojax.models.bert import modern


def test_the_mean_of_a_text_is_that_of_its_own_tokens():
    config = modern.ModernBertConfig(61, 2, 32, 4, 48, windows=(0, 2), pooling="mean", stddev=0.3)
    net, random = modern.ModernBert(config), np.random.default_rng(0)
    shapes = family.abstract_params(modern.parts, config)
    params = jax.tree.map(lambda leaf: random.normal(0.5, 0.3, leaf.shape).astype(np.float32), shapes)
    tokens, mask = random.integers(0, 61, (2, 9)), np.arange(9) < np.asarray([[9], [6]])
    scores = net.apply({"params": params}, tokens, mask)
    np.testing.assert_allclose(scores[1:], net.apply({"params": params}, tokens[1:, :6]), rtol=2e-5)
    alone = net.apply({"params": params}, tokens[1:, :6], np.ones((1, 6), bool))
    np.testing.assert_allclose(scores[1:], alone, rtol=2e-5)
    assert np.abs(net.apply({"params": params}, tokens)[1] - scores[1]).max() > 1e-3
