"""Checks what a text's padding and its kinds change. This module tests zerojax.models.bert.model."""

import dataclasses

import jax
import numpy as np
import pytest

from zerojax.models.bert import model

CONFIG = model.BertConfig(61, 1, 16, 2, 24, num_positions=20, norm_eps=1e-5)


@pytest.mark.parametrize("pad", [pytest.param(None, marks=pytest.mark.long), 1])
def test_padding_changes_nothing_and_a_kind_of_text_changes_the_scores(pad):
    net = model.Bert(dataclasses.replace(CONFIG, pad=pad))
    tokens = np.array([[5, 7, 11, 13]])
    params = jax.jit(net.init)(jax.random.key(0), tokens)
    params = jax.tree.map(lambda leaf: leaf * (10 if leaf.ndim > 1 else 1), params)
    apply = jax.jit(net.apply, static_argnames="method")
    scores = apply(params, tokens)
    padded, mask = np.pad(tokens, ((0, 0), (0, 3)), constant_values=1), np.arange(7)[None] < 4
    np.testing.assert_allclose(apply(params, padded, mask), scores, atol=1e-5)
    assert abs(apply(params, tokens, None, np.array([[0, 0, 1, 1]])) - scores).max() > 1e-3
    assert net.config.max_seq_len == (20 if pad is None else 18)
    loss = apply(params, np.repeat(tokens, 2, axis=0), np.array([[1], [0]]), None, np.array([[1], [0]]), method="loss")
    np.testing.assert_allclose(loss, -jax.nn.log_softmax(scores)[0, 1], rtol=1e-6)
