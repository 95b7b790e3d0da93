"""Checks draws with settings of each row against those of one setting for all. This module tests zerojax.inference.engine.draws."""

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.inference import sampling
from zerojax.inference.engine import draws

SETTINGS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (2.0, 9, 0.8), (0.0, 0, 1.0), (1.0, 100, 0.01)]


def of(settings, min_p=0.0):
    rows = draws.Draws.of_rows(len(settings))
    temperature, top_k, top_p = map(np.array, zip(*settings))
    rows.temperature[:], rows.top_k[:], rows.top_p[:], rows.min_p[:] = temperature, top_k, top_p, min_p
    rows.seed[:], rows.stream[:] = 3, np.arange(len(settings))
    return draws.Draws(*map(jnp.asarray, rows))


def test_each_row_draws_as_a_generator_of_its_settings_does():
    scores = jnp.asarray(np.random.default_rng(0).normal(0, 2, (len(SETTINGS), 40)).round(1), jnp.float32)  # with ties
    found = draws.draw(scores, of(SETTINGS), jnp.full(len(SETTINGS), 4), jnp.zeros(scores.shape, bool))
    own = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(len(SETTINGS)))
    keys = jax.vmap(jax.random.fold_in, (0, None))(own, 4)
    for row, settings in enumerate(SETTINGS):
        wanted = sampling.pick(scores[row : row + 1], sampling.Sampling(*settings), keys[row : row + 1])
        assert found[row] == wanted[0], settings


def test_min_p_keeps_tokens_of_a_share_of_the_likeliest_ones_probability():
    scores = jnp.log(jnp.array([[0.5, 0.26, 0.14, 0.1]]))
    for min_p, kept in ((0.0, 4), (0.25, 3), (0.5, 2), (1.0, 1)):
        assert np.isfinite(draws.kept(scores, of([(1.0, 0, 1.0)], min_p))).sum() == kept
