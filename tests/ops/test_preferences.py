"""Checks losses of pairs against their equations. This module tests zerojax.ops.preferences."""

import numpy as np
import pytest

from zerojax.ops import preferences

ROUNDING = 1e-6  # float32

MARGINS = np.array([-30.0, -1.0, 0.0, 0.5, 30.0], np.float32)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sigmoid_is_the_cross_entropy_of_the_order_of_a_pair(smoothing):
    likely = 1 / (1 + np.exp(-MARGINS.astype(np.float64)))
    wanted = -(1 - smoothing) * np.log(likely) - smoothing * np.log1p(-likely + 1e-300)
    found = preferences.LOSSES["sigmoid"](MARGINS, 0.1, smoothing)
    np.testing.assert_allclose(found[:4], wanted[:4], rtol=ROUNDING)
    assert np.isfinite(found).all()


def test_ipo_is_least_where_the_log_probabilities_gain_half_of_one_over_beta():
    beta, gains = 0.2, np.linspace(0, 5, 51, dtype=np.float32)
    found = preferences.LOSSES["ipo"](beta * gains, beta, 0.0)
    np.testing.assert_allclose(found, (gains - 1 / (2 * beta)) ** 2, rtol=1e-5, atol=ROUNDING)
    assert gains[np.argmin(found)] == pytest.approx(1 / (2 * beta))


def test_a_ratio_is_clipped_only_where_that_lowers_the_gain():
    ratio, advantage = np.array([0.5, 0.5, 1.0, 2.0, 2.0], np.float32), np.array([1, -1, 1, 1, -1], np.float32)
    terms, is_clipped = preferences.clipped(ratio, advantage, 0.2)
    np.testing.assert_allclose(terms, [-0.5, 0.8, -1.0, -1.2, 2.0], rtol=ROUNDING)
    np.testing.assert_array_equal(is_clipped, [0, 1, 0, 1, 0])


def test_the_drift_is_never_below_zero_and_zero_without_a_gain():
    gains = np.linspace(-3, 3, 61, dtype=np.float32)
    found = np.asarray(preferences.drift(gains))
    np.testing.assert_allclose(found, np.exp(gains) - gains - 1, rtol=1e-4, atol=1e-6)
    assert found.min() >= 0 and found[30] == pytest.approx(0, abs=1e-6)
