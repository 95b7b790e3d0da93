"""Losses of rewarded answers, by the ratio of their probability to that when they were drawn. This module holds a table of them.

With a ratio r, the advantage A of its answer and two bounds c and d, a term is that of PPO (arXiv:1707.06347, equation 7)

    -min(r A, clip(r, 1 - c, 1 + d) A)

A row of VARIANTS says how A follows from the rewards of a group, of what r is the ratio, what c and d are, and of what the loss is the
mean. A token's divergence from a reference is estimated as in arXiv:2402.03300, equation 4.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

SMALLEST = 1e-4  # added to a group's standard deviation
OWN = -1.0  # of a field: the variant's own


@dataclasses.dataclass(frozen=True)
class Grpo:
    """arXiv:2402.03300: rewards in units of their group's deviation, ratios of tokens, and the mean over answers of each one's mean.

    Attributes:
      clip: c, below 1.
      clip_high: d; -1 is as `clip`.
    """

    clip: float = 0.2
    clip_high: float = OWN

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Returns float64[prompts, group] from the rewards of each group."""
        return _centred(rewards) / (rewards.std(axis=1, keepdims=True) + SMALLEST)

    def ratio(self, gains: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns float32[answers, tokens], or [answers, 1] for all tokens of an answer.

        Args:
          gains: log-probabilities less those when the answers were drawn, float32[answers, tokens].
          counts: 1 for the tokens that are learned, else 0.
        """
        return jnp.exp(gains)

    def clipped(self, ratio: jax.Array, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the terms of ratios, and 1 where a bound took effect, float32 both."""
        above = self.clip if self.clip_high == OWN else self.clip_high
        free, bound = ratio * advantage, jnp.clip(ratio, 1 - self.clip, 1 + above) * advantage
        return -jnp.minimum(free, bound), (bound < free).astype(jnp.float32)

    def weighted(self, terms: jax.Array, counts: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        """Returns values and weights, of which the loss is the mean, from the terms of tokens; an answer has `most` tokens at most."""
        each = jnp.sum(terms * counts, axis=1) / jnp.maximum(jnp.sum(counts, axis=1), 1)
        return each, jnp.ones(len(each))


class DrGrpo(Grpo):
    """arXiv:2503.20783: no deviation, and no mean over an answer's own tokens, which would make long wrong answers cheap."""

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        return _centred(rewards)

    def weighted(self, terms: jax.Array, counts: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        each = jnp.sum(terms * counts, axis=1) / most
        return each, jnp.ones(len(each))


@dataclasses.dataclass(frozen=True)
class Dapo(Grpo):
    """arXiv:2503.14476, sections 3.1 and 3.3: unlikely tokens may gain more, and the mean is over all tokens of the batch."""

    clip_high: float = 0.28

    def weighted(self, terms: jax.Array, counts: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
        return terms, counts


@dataclasses.dataclass(frozen=True)
class Gspo(Grpo):
    """arXiv:2507.18071, equations 5 and 7: the ratio of an answer is the geometric mean of those of its tokens."""

    clip: float = 3e-4
    clip_high: float = 4e-4

    def ratio(self, gains: jax.Array, counts: jax.Array) -> jax.Array:
        total = jnp.sum(gains * counts, axis=1, keepdims=True)
        return jnp.exp(total / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1))


class Rloo(Grpo):
    """arXiv:2402.14740, section 3.2: an answer is one action, and the others of its group are its baseline."""

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        group = rewards.shape[1]
        return _centred(rewards) * group / (group - 1)

    def ratio(self, gains: jax.Array, counts: jax.Array) -> jax.Array:
        return jnp.exp(jnp.sum(gains * counts, axis=1, keepdims=True))


VARIANTS: Mapping[str, type[Grpo]] = {"grpo": Grpo, "dr_grpo": DrGrpo, "dapo": Dapo, "gspo": Gspo, "rloo": Rloo}


def drift(gain: jax.Array) -> jax.Array:
    """Returns exp(q) - q - 1, never below 0, of q: the reference's log-probability less the model's."""
    return jnp.expm1(gain) - gain


def _centred(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean(axis=1, keepdims=True)
