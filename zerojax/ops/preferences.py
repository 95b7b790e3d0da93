"""Losses of answers that are compared with each other. This module holds a table of them.

An answer's log-probability is log p, and log q that under the reference; n is the number of its tokens. A pair has a chosen answer, c,
and a rejected one, r. A row of LOSSES gives each answer a reward, and each pair a loss of its rewards.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib

SIGMOID, IPO = "sigmoid", "ipo"
_SURE = -1e-6  # the largest mean log-probability of which odds are taken


class Answers(NamedTuple):
    """The answers of pairs: the chosen one, the rejected one, and of a loss that `compares` three a chosen one to another prompt."""

    log_probs: jax.Array  # float32[pairs, answers]
    reference: jax.Array  # float32[pairs, answers]
    tokens: jax.Array  # float32[pairs, answers]
    counts: jax.Array  # float32[pairs], 0 for pairs that only fill a batch

    @property
    def means(self) -> jax.Array:
        """Returns the mean log-probability of the tokens of each answer."""
        return self.log_probs / jnp.maximum(self.tokens, 1)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of pairs. Its fields have the names of settings."""

    has_reference: ClassVar[bool] = True
    compares: ClassVar[int] = 2  # answers

    beta: float = 0.1

    def rewards(self, found: Answers) -> jax.Array:
        """Returns beta (log p - log q), float32[pairs, answers]."""
        return self.beta * (found.log_probs - found.reference)

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        """Returns the loss of each pair, float32[pairs]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Sigmoid(Loss):
    """DPO, arXiv:2305.18290, equation 7: -(1 - e) log sigmoid(m) - e log sigmoid(-m) of the margin m, with the label smoothing e."""

    label_smoothing: float = 0.0

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        margin, smoothing = margins(rewards), self.label_smoothing
        return -(1 - smoothing) * jax.nn.log_sigmoid(margin) - smoothing * jax.nn.log_sigmoid(-margin)


class Ipo(Loss):
    """arXiv:2310.12036, equation 17: (m / beta - 1 / (2 beta))^2."""

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        return jnp.square(margins(rewards) / self.beta - 1 / (2 * self.beta))


@dataclasses.dataclass(frozen=True)
class Kto(Loss):
    """arXiv:2402.01306, equation 8: the mean of a (1 - sigmoid(r_c - z)) and b (1 - sigmoid(z - r_r)), where z is the mean reward of
    answers to other prompts, 0 or more, of all devices' pairs in a pass; no gradient flows through it."""

    compares = 3

    desirable: float = 1.0  # a
    undesirable: float = 1.0  # b

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        sums = jnp.stack([jnp.sum(rewards[:, 2] * found.counts), jnp.sum(found.counts)])
        axes = mesh_lib.around(mesh_lib.SUMMED)
        total, count = jax.lax.psum(sums, axes) if axes else sums
        z = jax.lax.stop_gradient(jnp.maximum(total / jnp.maximum(count, 1), 0))
        good, bad = jax.nn.sigmoid(z - rewards[:, 0]), jax.nn.sigmoid(rewards[:, 1] - z)
        return (self.desirable * good + self.undesirable * bad) / 2


@dataclasses.dataclass(frozen=True)
class Orpo(Loss):
    """arXiv:2403.07691, equations 6 and 7: -log p_c / n - beta log sigmoid(o_c - o_r), with the log-odds o of the mean log-probability."""

    has_reference = False

    def rewards(self, found: Answers) -> jax.Array:
        """Returns beta log p / n."""
        return self.beta * found.means

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        means = jnp.minimum(found.means, _SURE)
        odds = means - jnp.log(-jnp.expm1(means))
        return -found.means[:, 0] - self.beta * jax.nn.log_sigmoid(margins(odds))


@dataclasses.dataclass(frozen=True)
class Simpo(Loss):
    """arXiv:2405.14734, equation 6: -log sigmoid(m - gamma), with rewards beta log p / n."""

    has_reference = False

    beta: float = 2.0
    gamma: float = 1.0

    def rewards(self, found: Answers) -> jax.Array:
        """Returns beta log p / n."""
        return self.beta * found.means

    def terms(self, rewards: jax.Array, found: Answers) -> jax.Array:
        return -jax.nn.log_sigmoid(margins(rewards) - self.gamma)


LOSSES: Mapping[str, type[Loss]] = {SIGMOID: Sigmoid, IPO: Ipo, "kto": Kto, "orpo": Orpo, "simpo": Simpo}
# name -> the settings that it reads
READS = {name: tuple(field.name for field in dataclasses.fields(loss)) for name, loss in LOSSES.items()}


def make(name: str, given: Mapping[str, float]) -> Loss:
    """Returns the loss of a name, with those of the given fields that it reads."""
    return LOSSES[name](**{field: given[field] for field in READS[name]})


def margins(rewards: jax.Array) -> jax.Array:
    """Returns the reward of the chosen answer of each pair less that of the other."""
    return rewards[:, 0] - rewards[:, 1]
