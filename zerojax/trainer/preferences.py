"""The losses of pairs of answers, and the log-probabilities that one compares with. This module holds what
`dpo` and `reward` add to a step.

The reference is the model that the run starts from; under fresh adapters, the model without them. Its log-probabilities of the answers do
not change, so they are computed once, before the first step, and are part of the data: no second copy of the weights exists, in a step or
beside it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.data import parts
from zerojax.data.pairs import rows
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import preferences
from zerojax.trainer import settings as settings_lib
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import outputs

Batch = Mapping[str, jax.Array]


def log_probs(
    family: family_lib.Family, model: ModelConfig, params: PyTree, batch: Batch, *keys: jax.Array
) -> jax.Array:
    """Returns the log-probabilities of the answers of pairs: float32[pairs, answers], the chosen one first."""
    terms = family.loss(model, params, answers_of(batch), *keys, by_token=True)
    return -jnp.sum(terms, axis=-1).reshape(batch[rows.REFERENCE].shape)


def answers_of(batch: Batch) -> dict[str, jax.Array]:
    """Returns the arrays of the answers of pairs, one a row."""
    pairs, count = batch[rows.REFERENCE].shape

    def apart(name: str, array: jax.Array) -> jax.Array:
        return jnp.repeat(array, count, axis=0) if name in rows.PROMPT else array.reshape(count * pairs, -1)

    return {name: apart(name, array) for name, array in batch.items() if name != rows.REFERENCE}


def loss(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the mean over pairs, metrics); see `ops.preferences`. Pairs without labels do not count."""
    chosen = preferences.make(config.dpo.loss, vars(config.dpo))

    def of_pairs(params: PyTree, batch: Batch, *keys: jax.Array) -> tuple[outputs.Mean, dict[str, Any]]:
        reference = jax.lax.bitcast_convert_type(batch[rows.REFERENCE], jnp.float32)
        labels = batch["labeled"].reshape(*reference.shape, -1) > 0  # no answer's first token is one
        found = preferences.Answers(
            log_probs(family, model, params, batch, *keys),
            reference,
            jnp.sum(labels, axis=-1, dtype=jnp.float32),
            counts := jnp.any(parts.labeled(batch) > 0, axis=-1).astype(jnp.float32),
        )
        rewards = chosen.rewards(found)
        margin = preferences.margins(rewards)
        return _means(margin, chosen.terms(rewards, found), rewards, counts)

    return of_pairs


def reward_loss(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the mean over pairs of -log sigmoid(r_c - r_r), metrics), with the model's values r of the
    chosen and the rejected text (Bradley-Terry; arXiv:2203.02155, equation 1)."""

    def of_pairs(params: PyTree, batch: Batch, *keys: jax.Array) -> tuple[outputs.Mean, dict[str, Any]]:
        values = family.loss(model, params, answers_of(batch), *keys).reshape(batch[rows.REFERENCE].shape)
        labels = batch["labeled"].reshape(*values.shape, -1) > 0
        counts = jnp.all(jnp.any(labels, axis=-1), axis=-1).astype(jnp.float32)
        margin = preferences.margins(values)
        return _means(margin, -jax.nn.log_sigmoid(margin), values, counts)

    return of_pairs


def _means(
    margin: jax.Array, terms: jax.Array, rewards: jax.Array, counts: jax.Array
) -> tuple[outputs.Mean, dict[str, Any]]:
    """Returns the mean over pairs of their losses, and metrics of their rewards."""

    mean = functools.partial(outputs.weighted_mean, weights=counts)

    metrics = {
        "reward_chosen": mean(rewards[:, 0]),
        "reward_rejected": mean(rewards[:, 1]),
        "reward_margin": mean(margin),
        "reward_accuracy": mean((margin > 0).astype(jnp.float32)),
    }
    return mean(terms), metrics
