"""Chooses the tokens of a generation one after the other. This module holds the state of the rows, and when all of them have ended."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax.inference import sampling as sampling_lib
from zerojax.models import family as family_lib


class AnswerPart(NamedTuple):
    """The part of each row's new tokens that one reading of its text adds."""

    begun: Any  # int32[rows], the number of new tokens that the text that is read has already
    most: Any  # int32[rows], the most that are added


class Found(NamedTuple):
    """What is known of the rows."""

    num_tokens: jax.Array  # int32[], the number of tokens that each row got
    token: jax.Array  # int32[rows], the last one
    is_over: jax.Array  # bool[rows], whether a row has ended
    tokens: jax.Array  # int32[rows, new_tokens], padded


@dataclasses.dataclass(frozen=True)
class Choice:
    """How tokens are chosen."""

    new_tokens: int  # the most tokens that are added to a row
    special: family_lib.SpecialTokens  # the tokens that begin, end and pad a row
    sampling: sampling_lib.Sampling  # how a token is picked from its scores

    def first(self, scores: jax.Array, lengths: jax.Array, part: AnswerPart, seed: jax.Array) -> Found:
        """Returns the rows with their first token, from scores float32[rows, vocab] after texts of `lengths` tokens, int32[rows]."""
        rows = scores.shape[0]
        token = self._pick(scores, part.begun, jnp.zeros(rows, bool), seed)
        if self.special.forced_first is not None:
            token = jnp.where(lengths == 1, self.special.forced_first, token)
        tokens = jnp.full((rows, self.new_tokens), self.special.pad, jnp.int32).at[:, 0].set(token)
        return Found(jnp.int32(1), token, self._ends(token) | (part.most <= 1), tokens)

    def add(self, found: Found, scores: jax.Array, part: AnswerPart, seed: jax.Array) -> Found:
        """Returns the rows with one more token."""
        count, _, is_over, tokens = found
        token = self._pick(scores, part.begun + count, is_over, seed)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], count, axis=1)
        return Found(count + 1, token, is_over | self._ends(token) | (part.most <= count + 1), tokens)

    def goes_on(self, found: Found) -> jax.Array:
        """Returns whether a row gets another token: bool[], the same on all devices."""
        return (found.num_tokens < self.new_tokens) & ~jnp.all(found.is_over)

    def _ends(self, token: jax.Array) -> jax.Array:
        return jnp.isin(token, jnp.asarray(self.special.stops, jnp.int32))

    def _pick(self, scores: jax.Array, counts: jax.Array, is_over: jax.Array, seed: jax.Array) -> jax.Array:
        own = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(scores.shape[0]))
        token = sampling_lib.pick(scores, self.sampling, jax.vmap(jax.random.fold_in)(own, counts))
        if self.special.forced_last is not None:
            token = jnp.where(counts == self.new_tokens - 1, self.special.forced_last, token)
        return jnp.where(is_over, self.special.pad, token)
