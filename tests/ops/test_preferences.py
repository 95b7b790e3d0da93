"""Checks losses of pairs against their equations and TRL. This module tests zerojax.ops.preferences."""

import pathlib

import jax
import numpy as np
import preferences_by_numpy
import pytest

from zerojax.ops import preferences

ROUNDING = 2e-6  # float32
# As in tests/golden/trl/make_losses.py
FIELDS = {
    "sigmoid": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.3},
    "kto": {"beta": 0.3, "desirable": 1.0, "undesirable": 1.5},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "gamma": 1.0},
}


@pytest.fixture(scope="module")
def given():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "trl" / "losses.npz") as found:
        return dict(found)


def answers(given, tokens=1.0):
    names = ("chosen", "rejected", "mismatched")
    own, reference = (np.stack([given[name + end] for name in names], 1) for end in ("", "_reference"))
    return preferences.Answers(own * tokens, reference, np.full(own.shape, tokens, np.float32), np.ones(len(own)))


@pytest.mark.parametrize("name", preferences.LOSSES)
def test_a_loss_is_its_equation_and_trls(given, name):
    chosen = preferences.make(name, {**FIELDS[name], "not_read": 0.0})
    for tokens in (1.0, 3.0):
        found = answers(given, tokens)
        terms = np.asarray(chosen.terms(chosen.rewards(found), found))
        wanted = preferences_by_numpy.losses(name, *found[:3], **FIELDS[name])
        np.testing.assert_allclose(terms, wanted, rtol=ROUNDING)
    found = answers(given)
    terms = np.asarray(chosen.terms(chosen.rewards(found), found))
    wanted = given[f"trl/{name}"]
    if name == "orpo":
        wanted = -wanted - found.log_probs[:, 0]  # TRL adds the chosen answer's loss elsewhere, with its prompt
    np.testing.assert_allclose(terms.mean() if name == "kto" else terms, wanted, rtol=ROUNDING)


@pytest.mark.parametrize("name", preferences.LOSSES)
def test_pairs_without_any_label_have_a_finite_gradient(name):
    def total(log_probs):
        found = preferences.Answers(log_probs, 0 * log_probs, 0 * log_probs, np.zeros(2, np.float32))
        chosen = preferences.LOSSES[name]()
        return chosen.terms(chosen.rewards(found), found).sum()

    assert np.isfinite(jax.grad(total)(np.zeros((2, 3), np.float32))).all()


def test_the_mean_reward_of_other_prompts_counts_pairs_that_have_labels(given):
    found = answers(given)
    chosen = preferences.Kto(beta=0.3)
    counts = np.arange(len(found.counts)) < 5
    some = preferences.Answers(*(array[:5] for array in found))
    wanted = chosen.terms(chosen.rewards(some), some)
    masked = found._replace(counts=counts.astype(np.float32))
    np.testing.assert_allclose(chosen.terms(chosen.rewards(masked), masked)[:5], wanted, rtol=ROUNDING)
