"""Checks the choice of a token against its definition. This module tests zerojax.inference.sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import UserError
from zerojax.inference import sampling

SCORES = np.log(np.array([[0.05, 0.4, 0.1, 0.2, 0.25], [0.9, 0.04, 0.03, 0.02, 0.01]], np.float32))


def kept(**settings):
    found = sampling.kept(jnp.asarray(SCORES), sampling.Sampling(1.0, **settings))
    is_kept = np.isfinite(found)
    np.testing.assert_array_equal(np.where(is_kept, found, 0), np.where(is_kept, SCORES, 0))
    return [np.flatnonzero(row).tolist() for row in is_kept]


def test_top_k_keeps_the_k_likeliest():
    assert kept(top_k=2) == [[1, 4], [0, 1]]
    assert kept(top_k=5) == kept(top_k=9) == [[0, 1, 2, 3, 4]] * 2


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_p():
    assert kept(top_p=0.6) == [[1, 4], [0]]
    assert kept(top_p=0.7) == [[1, 3, 4], [0]]
    assert kept(top_p=0.001) == [[1], [0]]


def test_top_p_counts_only_what_top_k_keeps():
    assert kept(top_k=3, top_p=0.5) == [[1, 4], [0]]  # 0.4 of 0.85 is less than a half


def test_tokens_are_drawn_as_often_as_their_probability_and_a_row_depends_on_its_key_alone():
    count = 2000
    keys = jax.random.split(jax.random.key(0), count)
    rows = jnp.broadcast_to(SCORES[0], (count, 5))
    drawn = sampling.pick(rows, sampling.Sampling(1.0), keys)
    p = np.exp(SCORES[0])
    four_deviations = 4 * np.sqrt(p * (1 - p) / count)
    assert (abs(np.bincount(drawn, minlength=5) / count - p) < four_deviations).all()
    np.testing.assert_array_equal(sampling.pick(rows[:7], sampling.Sampling(1.0), keys[:7]), drawn[:7])


def test_a_low_temperature_draws_what_is_likeliest():
    keys = jax.random.split(jax.random.key(0), 2)
    for temperature in (0.0, 1e-3):
        assert sampling.pick(jnp.asarray(SCORES), sampling.Sampling(temperature), keys).tolist() == [1, 0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1.0}, "temperature: must be 0"),
        ({"temperature": float("nan")}, "temperature: must be 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k: must be 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: must be above 0"),
        ({"top_k": 5}, "cannot take effect"),
        ({"top_p": 0.5}, "cannot take effect"),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_or_has_no_effect_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        sampling.Sampling(**settings)
