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
