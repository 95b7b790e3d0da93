"""Losses of answers that are compared with each other. This module holds their equations.

With the reward r = beta * (log p(answer) - log p_reference(answer)) and the margin m = r(chosen) - r(rejected), a pair's loss is

    sigmoid   -(1 - e) log sigmoid(m) - e log sigmoid(-m)     DPO, arXiv:2305.18290, equation 7; e is the label smoothing
    ipo       (m / beta - 1 / (2 beta))^2                      arXiv:2310.12036, equation 17

A token of a rewarded answer has the clipped ratio of PPO (arXiv:1707.06347, equation 7) and an estimate of the divergence from a reference
(arXiv:2402.03300, equation 4).
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

SIGMOID, IPO = "sigmoid", "ipo"


def sigmoid(margin: jax.Array, beta: float, label_smoothing: float) -> jax.Array:
    """Returns the loss of each pair; `beta` is in the margin already."""
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(margin) - label_smoothing * jax.nn.log_sigmoid(-margin)


def ipo(margin: jax.Array, beta: float, label_smoothing: float) -> jax.Array:
    """Returns the loss of each pair. There is no smoothing."""
    return jnp.square(margin / beta - 1 / (2 * beta))


# name -> (margin: float32[pairs], beta, label_smoothing) -> float32[pairs]
LOSSES: Mapping[str, Callable[[jax.Array, float, float], jax.Array]] = {SIGMOID: sigmoid, IPO: ipo}


def clipped(ratio: jax.Array, advantage: jax.Array, clip: float) -> tuple[jax.Array, jax.Array]:
    """Returns -min(r A, clip(r, 1 - c, 1 + c) A) of tokens, and 1 where the bound took effect, float32 both."""
    free, bound = ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage
    return -jnp.minimum(free, bound), (bound < free).astype(jnp.float32)


def drift(gain: jax.Array) -> jax.Array:
    """Returns exp(q) - q - 1, never below 0, of q: the reference's log-probability less the model's."""
    return jnp.expm1(gain) - gain
