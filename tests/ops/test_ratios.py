"""Checks losses of rewarded answers against their equations and TRL. This module tests zerojax.ops.ratios."""

import pathlib

import numpy as np
import pytest
import ratios_by_numpy

from zerojax.ops import ratios

ROUNDING = 2e-6  # float32
KL = 0.5  # as in tests/golden/trl/make_losses.py


@pytest.fixture(scope="module")
def given():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "trl" / "losses.npz") as found:
        return dict(found)


@pytest.mark.parametrize("name", ratios.VARIANTS)
def test_a_variants_loss_is_its_equations_and_trls(given, name):
    variant = ratios.VARIANTS[name]()
    log_probs, old, counts = (given[key] for key in ("log_probs", "old", "counts"))
    advantages, most = given["advantages"], counts.shape[1]
    terms, _ = variant.clipped(variant.ratio(log_probs - old, counts), advantages[:, None])
    kl = 0 if name == "rloo" else KL  # TRL's RLOO takes it from the rewards
    drift = kl * np.asarray(ratios.drift(given["reference"] - log_probs))
    values, weights = map(np.asarray, variant.weighted(terms + drift, counts, most))
    found = np.sum(values * weights) / np.sum(weights)
    plain = ratios_by_numpy.loss(name, log_probs, old, advantages, counts, most, *vars(variant).values(), drift)
    np.testing.assert_allclose(found, plain, rtol=ROUNDING)
    np.testing.assert_allclose(found, given[f"trl/{name}"], rtol=ROUNDING)


def test_a_ratio_is_clipped_only_where_that_lowers_the_gain():
    ratio, advantage = np.array([0.5, 0.5, 1.0, 2.0, 2.0], np.float32), np.array([1, -1, 1, 1, -1], np.float32)
    terms, is_clipped = ratios.Grpo().clipped(ratio, advantage)
    np.testing.assert_allclose(terms, [-0.5, 0.8, -1.0, -1.2, 2.0], rtol=ROUNDING)
    np.testing.assert_array_equal(is_clipped, [0, 1, 0, 1, 0])
    np.testing.assert_allclose(ratios.Dapo().clipped(ratio, advantage)[0], [-0.5, 0.8, -1, -1.28, 2], rtol=ROUNDING)


def test_advantages_of_groups_are_those_of_the_papers():
    rewards = np.array([[0.0, 1, 0, 1], [5, 5, 5, 5], [1, 0, 0, 0]])
    unit = (rewards[2] - 0.25) / rewards[2].std()
    np.testing.assert_allclose(ratios.Grpo().advantages(rewards), [[-1, 1, -1, 1], [0] * 4, unit], rtol=1e-3)
    np.testing.assert_allclose(ratios.DrGrpo().advantages(rewards)[2], [0.75, -0.25, -0.25, -0.25])
    others = [rewards[2][np.arange(4) != at].mean() for at in range(4)]
    np.testing.assert_allclose(ratios.Rloo().advantages(rewards)[2], rewards[2] - others)


def test_the_drift_is_never_below_zero_and_zero_without_a_gain():
    gains = np.linspace(-3, 3, 61, dtype=np.float32)
    found = np.asarray(ratios.drift(gains))
    np.testing.assert_allclose(found, np.exp(gains) - gains - 1, rtol=1e-4, atol=1e-6)
    assert found.min() >= 0 and found[30] == pytest.approx(0, abs=1e-6)
