"""Checks draws with settings of each row against those of one setting for all. This module tests zerojax.inference.engine.row_sampling."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.inference import sampling
from zerojax.inference.engine import row_sampling

SETTINGS = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (2.0, 9, 0.8), (0.0, 0, 1.0), (1.0, 100, 0.01)]


def of(settings, min_p=0.0):
    rows = row_sampling.Draws.of_rows(len(settings))
    temperature, top_k, top_p = map(np.array, zip(*settings))
    rows.temperature[:], rows.top_k[:], rows.top_p[:], rows.min_p[:] = temperature, top_k, top_p, min_p
    rows.seed[:], rows.stream[:] = 3, np.arange(len(settings))
    return jax.tree.map(jnp.asarray, rows)


def test_each_row_draws_as_a_generator_of_its_settings_does():
    scores = jnp.asarray(np.random.default_rng(0).normal(0, 2, (len(SETTINGS), 40)).round(1), jnp.float32)  # with ties
    found = row_sampling.draw(scores, of(SETTINGS), jnp.full(len(SETTINGS), 4), jnp.zeros(scores.shape, bool))
    own = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(len(SETTINGS)))
    keys = jax.vmap(jax.random.fold_in, (0, None))(own, 4)
    for row, settings in enumerate(SETTINGS):
        wanted = sampling.pick(scores[row : row + 1], sampling.Sampling(*settings), keys[row : row + 1])
        assert found[row] == wanted[0], settings


def by_numpy(scores, top_k, top_p, min_p):
    """Returns the tokens that may be drawn, likeliest first: k of them, then the fewest whose share of these reaches p, each of a share."""
    order = np.argsort(-scores)[: top_k or len(scores)]
    likelihood = np.exp(scores[order]) / np.exp(scores[order]).sum()
    is_before = np.cumsum(likelihood) - likelihood < top_p
    return set(order[is_before & (likelihood >= min_p * likelihood[0])].tolist())


def test_a_row_keeps_exactly_the_tokens_of_its_own_settings():
    """Any top_k, top_p and min_p, alone and together."""
    settings = list(itertools.product((0, 1, 2, 7, 39, 40, 41, 100), (1.0, 0.9, 0.5, 0.01), (0.0, 0.02, 0.3, 1.0)))
    scores = np.random.default_rng(1).normal(0, 2, (len(settings), 40)).astype(np.float32)
    found = np.isfinite(
        row_sampling.kept(jnp.asarray(scores), of([(1.0, *own[:2]) for own in settings], [own[2] for own in settings]))
    )
    for own, row, is_kept in zip(settings, scores.astype(np.float64), found):
        assert set(np.flatnonzero(is_kept).tolist()) == by_numpy(row, *own), own


def test_tokens_as_likely_as_the_last_of_top_k_are_kept_with_it():
    scores = jnp.array([[3.0, 1.0, 2.0, 2.0, 0.0]])
    assert np.isfinite(row_sampling.kept(scores, of([(1.0, 2, 1.0)]))).tolist() == [[True, False, True, True, False]]


def test_min_p_keeps_tokens_of_a_share_of_the_likeliest_ones_probability():
    scores = jnp.log(jnp.array([[0.5, 0.26, 0.14, 0.1]]))
    for min_p, kept in ((0.0, 4), (0.25, 3), (0.5, 2), (1.0, 1)):
        assert np.isfinite(row_sampling.kept(scores, of([(1.0, 0, 1.0)], min_p))).sum() == kept
