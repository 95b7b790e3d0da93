"""Picks the next token from its scores. This module takes the likeliest, or draws by temperature, top-k and top-p.

Shapes: B batch, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from zerojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is picked."""

    temperature: float = 0.0  # divides the scores before a token is drawn; 0 takes the likeliest token
    top_k: int = 0  # draws among the k likeliest tokens; 0: among all
    # draws among the likeliest tokens that together have this probability (nucleus sampling, arXiv:1904.09751); 1: among all
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Raises UserError for a value that is out of range or cannot take effect."""
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: must be 0 (the likeliest token) or more, and is {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k: must be 0 (all tokens) or more, and is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be above 0 and at most 1 (all tokens), and is {self.top_p}")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise UserError(
                f"temperature: is 0, which takes the likeliest token, so top_k={self.top_k} and top_p={self.top_p} cannot take effect; "
                "set temperature=1, or omit them"
            )


def pick(scores_BV: jax.Array, sampling: Sampling, keys_B: jax.Array) -> jax.Array:
    """Returns a token for each row: int32[B]. A row draws with its own key, so its draw does not depend on the other rows."""
    if not sampling.temperature:
        return jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    scores_BV = kept(scores_BV / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys_B, scores_BV).astype(jnp.int32)


def kept(scores_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the scores, with minus infinity for tokens that are not drawn. The likeliest token is always kept."""
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        least_B1 = jax.lax.top_k(scores_BV, sampling.top_k)[0][:, -1:]
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(scores_BV, axis=-1, descending=True)
        likelihood_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(likelihood_BV, axis=-1) - likelihood_BV  # of the likelier tokens
        least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        scores_BV = jnp.where(scores_BV < least_B1, -jnp.inf, scores_BV)
    return scores_BV
