"""Checks what grouped attention sees. This module tests zerojax.models.llama.attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.models.llama import attention, model
from zerojax.models.llama import family as presets

ROUNDING = 2e-5  # float32 sums of some hundred terms in another order
CONFIG = dataclasses.replace(presets.PRESETS["test"], vocab_size=61)
X_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(2, 12, CONFIG.embed_dim)), jnp.float32)


def module(config=CONFIG):
    return attention.Attention(config, rotation=config.rope_of(0))


def make_params():
    random, shapes = np.random.default_rng(0), jax.eval_shape(module().init, jax.random.key(0), X_BTD)["params"]
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)


def attend(params, x_BTD, config=CONFIG):
    return module(config).apply({"params": params}, x_BTD)[0]


@pytest.mark.parametrize("changed", [1, 5, 11])
def test_a_later_token_changes_no_earlier_result(changed):
    params = make_params()
    before, after = attend(params, X_BTD), attend(params, X_BTD.at[:, changed].add(1))
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (abs(before[:, changed:] - after[:, changed:]).max(axis=(0, 2)) > 0).all()


def test_queries_that_grow_by_their_positions_do_so_within_each_text_of_a_row():
    config = CONFIG.changed(heads={"growth": (0.5, 4)})
    assert np.abs(attend(make_params(), X_BTD, config) - attend(make_params(), X_BTD))[:, 4:].min(axis=(0, 2)).all()
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (1, 22)))
    net, segments = model.Llama(config), jnp.where(jnp.arange(22) < 12, 1, 2)[None]
    shapes = jax.eval_shape(net.init, jax.random.key(0), tokens)["params"]
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.3, leaf.shape), leaf.dtype), shapes)
    found = net.apply({"params": params}, tokens, segments, by_token=True, method="loss")
    alone = net.apply({"params": params}, tokens[:, 12:], by_token=True, method="loss")
    np.testing.assert_allclose(found[:, 12:], alone, rtol=ROUNDING)


def test_grouped_attention_is_full_attention_with_repeated_heads():
    full = dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads)
    params, group = make_params(), CONFIG.num_heads // CONFIG.num_kv_heads
    wide = params | {name: {"kernel": jnp.repeat(params[name]["kernel"], group, axis=1)} for name in ("k", "v")}
    np.testing.assert_allclose(attend(params, X_BTD), attend(wide, X_BTD, full), atol=ROUNDING)
