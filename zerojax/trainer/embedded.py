"""The loss of texts that belong together. This module holds what the task `embed` adds to a step."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.data.pairs import rows
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import contrastive, tokens
from zerojax.trainer import preferences
from zerojax.trainer import settings as settings_lib
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import outputs


def loss(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the mean over queries, metrics); see `ops.contrastive`."""
    chosen = config.embedding

    def of_texts(params: PyTree, batch: Mapping[str, jax.Array], *keys: jax.Array) -> tuple[Any, dict[str, Any]]:
        count, several = batch[rows.REFERENCE].shape
        texts = preferences.answers_of(batch)
        labels = texts["labeled"] > 0
        states = family.loss(model, params, texts, *keys)
        vectors = contrastive.pooled(states, jnp.arange(labels.shape[1]) < tokens.lengths(labels), chosen.pooling)
        vectors = vectors.reshape(count, several, -1)
        counts = jnp.all(jnp.any(labels, axis=-1).reshape(count, several), axis=-1).astype(jnp.float32)
        terms, nearest = contrastive.info_nce(vectors[:, 0], vectors[:, 1:], counts, chosen.temperature)
        mean = functools.partial(outputs.weighted_mean, weights=counts)
        return mean(terms), {"nearest": mean(nearest)}

    return of_texts
