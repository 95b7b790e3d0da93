"""Picks the next token of rows that each have settings of their own. This module is `inference.sampling` with settings that are arrays.

Shapes: B rows, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Draws(NamedTuple):
    """The settings of each row, [B]; see `requests.RequestSettings`. `most` is the most new tokens, `is_live` whether a row gets tokens,
    `begun` how many the text that is read has, `until` how many it may have before it is read anew (`family.Stretch`), `adapter` the
    number of the row's adapter (`adapters`), and `allowed` the tokens that may come next, uint32[B, V / 32] with a bit for each; None
    where no row is bound to a grammar."""

    is_live: jax.Array
    most: jax.Array
    begun: jax.Array
    until: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    penalty: jax.Array
    seed: jax.Array
    stream: jax.Array
    adapter: jax.Array
    allowed: Any = None  # or an array

    @classmethod
    def of_rows(cls, rows: int) -> "Draws":
        """Returns the settings of rows without requests, as NumPy arrays."""
        whole, real = (lambda value: np.full(rows, value, np.int32)), (lambda value: np.full(rows, value, np.float32))
        seeds = np.zeros(rows, np.uint32)
        settings: Any = (
            whole(1),
            whole(0),
            whole(1),
            real(0),
            whole(0),
            real(1),
            real(0),
            real(1),
            seeds,
            seeds.copy(),
            whole(0),
        )
        return cls(np.zeros(rows, bool), *settings)  # type: ignore[arg-type]


def bound(scores_BV: jax.Array, draws: Draws) -> jax.Array:
    """Returns the scores, with minus infinity for tokens that may not come."""
    if draws.allowed is None:
        return scores_BV
    bits = (draws.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(len(scores_BV), -1)[:, : scores_BV.shape[1]] == 1, scores_BV, -jnp.inf)


def draw(scores_BV: jax.Array, draws: Draws, counts_B: jax.Array, seen_BV: jax.Array) -> jax.Array:
    """Returns the next token of each row: int32[B].

    Args:
      scores_BV: float32.
      draws: the rows' settings.
      counts_B: int32[B], the number of the token, from 0.
      seen_BV: bool, whether the row's text has the token.
    """
    penalty_B1 = draws.penalty[:, None]
    penalised_BV = jnp.where(scores_BV > 0, scores_BV / penalty_B1, scores_BV * penalty_B1)
    scores_BV = jnp.where(seen_BV, penalised_BV, scores_BV)
    likeliest_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    is_drawn_B = draws.temperature > 0
    kept_BV = kept(scores_BV / jnp.where(is_drawn_B, draws.temperature, 1)[:, None], draws)

    def one(seed: jax.Array, stream: jax.Array, count: jax.Array, scores_V: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), count)
        return jax.random.categorical(key, scores_V)

    drawn_B = jax.vmap(one)(draws.seed, draws.stream, counts_B, kept_BV).astype(jnp.int32)
    return jnp.where(is_drawn_B, drawn_B, likeliest_B)


def kept(scores_BV: jax.Array, draws: Draws) -> jax.Array:
    """Returns the scores, with minus infinity for tokens that are not drawn; see `sampling.kept`."""
    vocab = scores_BV.shape[-1]
    sorted_BV = jnp.sort(scores_BV, axis=-1, descending=True)
    last_B = jnp.where(draws.top_k > 0, jnp.minimum(draws.top_k, vocab), vocab) - 1
    least_B1 = jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)
    sorted_BV = jnp.where(sorted_BV < least_B1, -jnp.inf, sorted_BV)
    likelihood_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(likelihood_BV, axis=-1) - likelihood_BV  # of the likelier tokens
    is_first_BV = (before_BV < draws.top_p[:, None]) | (draws.top_p >= 1)[:, None]
    nucleus_B1 = jnp.min(jnp.where(is_first_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    share_B1 = sorted_BV[:, :1] + jnp.log(draws.min_p)[:, None]
    least_B1 = jnp.maximum(jnp.maximum(least_B1, nucleus_B1), share_B1)
    return jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
