"""Losses of pairs in float64, one pair after the other. This module is the plain form of `zerojax.ops.preferences`."""

import numpy as np


def losses(name, log_probs, reference, tokens, beta, **own):
    """Returns the loss of each pair, from float[pairs, answers] each; `own` are the other fields of the loss."""
    log_probs, reference = (np.asarray(array, np.float64) for array in (log_probs, reference))
    z = max(0.0, np.mean(beta * (log_probs - reference)[:, 2])) if name == "kto" else 0.0
    return np.array([_loss(name, *rows, z, beta, **own) for rows in zip(log_probs, reference, tokens)])


def _loss(name, log_probs, reference, tokens, z, beta, label_smoothing=0.0, desirable=1.0, undesirable=1.0, gamma=1.0):
    chosen, rejected = beta * (log_probs - reference)[:2]
    means = (log_probs / tokens)[:2]
    if name == "sigmoid":
        likely = _sigmoid(chosen - rejected)
        return -(1 - label_smoothing) * np.log(likely) - label_smoothing * np.log(1 - likely)
    if name == "ipo":
        return ((chosen - rejected) / beta - 1 / (2 * beta)) ** 2
    if name == "kto":
        return (desirable * (1 - _sigmoid(chosen - z)) + undesirable * (1 - _sigmoid(z - rejected))) / 2
    if name == "simpo":
        return -np.log(_sigmoid(beta * means[0] - beta * means[1] - gamma))
    odds = np.exp(means) / (1 - np.exp(means))
    return -means[0] - beta * np.log(_sigmoid(np.log(odds[0] / odds[1])))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))
