"""The loss of rewarded answers. This module holds what the task `grpo` adds to a step (arXiv:2402.03300, equations 3 and 4).

The term of a token is that of `config.grpo.variant` (`ops.ratios`) and kl (exp(q) - q - 1), with the log-probability q of the model without
adapters less the token's own. The variant also says of what the loss is the mean. The gap between the log-probabilities of the program that
drew the tokens and those of training, by the same weights, is a metric.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.data import parts
from zerojax.models import family as family_lib
from zerojax.models.family import ModelConfig
from zerojax.ops import ratios
from zerojax.trainer import settings as settings_lib
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import outputs

# Arrays of a batch that hold bits of float32: of an answer, and of its tokens.
REWARD, ADVANTAGE, DRAWN, OLD, REFERENCE = "reward", "advantage", "drawn", "old", "reference"
CHOICES = "choices"  # of routers, for each token, layer with experts, and one of its experts
OF_ANSWER = (REWARD, ADVANTAGE, DRAWN, OLD, REFERENCE)
WIDE = 0.01  # of a gap between log-probabilities: a share of tokens above it is a metric


def lengths(config: settings_lib.Config, model: ModelConfig, of_rows: Mapping[str, int]) -> dict[str, int]:
    """Returns the lengths of a row's arrays, by name. The old log-probabilities are the step's own if its weights drew the answers."""
    tokens = of_rows["labeled"] - 1
    old = {OLD: tokens} if config.grpo.inner_steps > 1 or config.grpo.rollout_devices else {}
    reference = {REFERENCE: tokens} if config.grpo.kl else {}
    mixture = family_lib.mixture(model)
    chosen = {}
    if config.grpo.replay and mixture is not None:
        chosen[CHOICES] = tokens * mixture.per_token * sum(map(model.has_experts, range(model.num_layers)))
    return {**of_rows, REWARD: 1, ADVANTAGE: 1, DRAWN: tokens, **old, **reference, **chosen}


def loss(config: settings_lib.Config, family: family_lib.Family, model: ModelConfig) -> Callable[..., Any]:
    """Returns f(params, batch, *keys) -> (the loss of the variant, metrics)."""
    chosen = config.grpo
    most = config.data.answer_len * (chosen.turns if chosen.environment else 1)
    variant = ratios.VARIANTS[chosen.variant](chosen.clip, chosen.clip_high)

    def of_answers(params: PyTree, batch: Mapping[str, jax.Array], *keys: jax.Array) -> tuple[Any, dict[str, Any]]:
        read = {name: array for name, array in batch.items() if name not in OF_ANSWER}
        log_probs = -family.loss(model, params, read, *keys, by_token=True)
        own = {name: jax.lax.bitcast_convert_type(batch[name], jnp.float32) for name in OF_ANSWER if name in batch}
        counts = (parts.labeled(batch) > 0).astype(jnp.float32)
        ratio = variant.ratio(log_probs - own.get(OLD, jax.lax.stop_gradient(log_probs)), counts)
        terms, is_clipped = variant.clipped(ratio, own[ADVANTAGE])
        drift = ratios.drift(own.get(REFERENCE, jax.lax.stop_gradient(log_probs)) - log_probs)

        gap = jnp.abs(own.get(OLD, log_probs) - own[DRAWN]) * counts
        metrics = {
            "reward": outputs.weighted_mean(own[REWARD][:, 0], jnp.ones(len(counts))),
            "gap_mean": outputs.weighted_mean(gap, counts),
            "gap_max": outputs.Max(jnp.max(gap)),
            "gap_share": outputs.weighted_mean(gap > WIDE, counts),
        }
        metrics |= {"clipped": outputs.weighted_mean(is_clipped, counts)} if OLD in own else {}
        metrics |= {"kl": outputs.weighted_mean(drift, counts)} if REFERENCE in own else {}
        return outputs.weighted_mean(*variant.weighted(terms + chosen.kl * drift, counts, most)), metrics

    return of_answers
