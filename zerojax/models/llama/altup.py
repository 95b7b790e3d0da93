"""Layers of several residual streams, of which one passes through attention and MLP: alternating updates (AltUp, arXiv:2301.13310), and the
learned residual of low rank beside attention (LAuReL, arXiv:2411.07501), as Gemma 3n has both. This module holds their weights.

A layer predicts all streams from all, runs on the active one, and corrects each by what it found there beyond its prediction. With r(x) the
tanh of a projection of norm(x) / D, streams h and the layer f of the active stream a,

    p_j = h_j + sum_i P(r(h_a))_ji h_i    h_j = p_j + (1 + C(r(f(p_a)))_j) (f(p_a) - p_a)

Shapes: B batch, T length, S streams, D embed.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import layers

LEAST_SQUARE = 1e-5  # of a stream that is scaled


@dataclasses.dataclass(frozen=True)
class AltUp:
    """The shape.

    Attributes:
      streams: their number.
      active: the number of the one that layers run on.
      rank: of the residual beside attention.
      has_scale: what a layer reads its input with is scaled dim by dim.
    """

    streams: int = 4
    active: int = 0
    rank: int = 64
    has_scale: bool = True


class ResidualStreams(nn.Module):
    """The prediction and the correction of a layer's streams."""

    shape: AltUp
    embed_dim: int
    norm_eps: float

    def setup(self) -> None:
        count = self.shape.streams
        self.norm = layers.RMSNorm(self.norm_eps)
        self.router = layers.Linear((count,))
        self.predicting = layers.Linear((count, count))
        self.correcting = layers.Linear((count,))
        self.correct_scale = self.param("correct_scale", nn.initializers.zeros, (self.embed_dim,))

    def predict(self, h_BTSD: jax.Array) -> jax.Array:
        """Returns the predicted streams."""
        p_BTSS = self.predicting(self._routed(h_BTSD[:, :, self.shape.active]))
        return h_BTSD + jnp.einsum("btji,btid->btjd", p_BTSS, h_BTSD)

    def correct(self, p_BTSD: jax.Array, found_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the corrected streams, and what the layer reads its input with: float[B, T, D]."""
        c_BTS = 1 + self.correcting(self._routed(found_BTD))
        more_BTD = found_BTD - p_BTSD[:, :, self.shape.active]
        h_BTSD = p_BTSD + c_BTS[..., None] * more_BTD[:, :, None]
        active_BTD = h_BTSD[:, :, self.shape.active]
        return h_BTSD, active_BTD * self.correct_scale if self.shape.has_scale else active_BTD

    def _routed(self, x_BTD: jax.Array) -> jax.Array:
        small_BTD = self.norm(x_BTD) * jnp.asarray(1 / self.embed_dim, x_BTD.dtype)
        return jnp.tanh(self.router(small_BTD).astype(jnp.float32)).astype(x_BTD.dtype)


class LowRankResidual(nn.Module):
    """x + norm(right(left(x)))."""

    rank: int
    norm_eps: float

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        low_BTr = layers.Linear((self.rank,), name="left")(x_BTD)
        return x_BTD + layers.RMSNorm(self.norm_eps, name="norm")(
            layers.Linear((x_BTD.shape[-1],), name="right")(low_BTr)
        )


class Spread(nn.Module):
    """Makes the streams of one: the others are projections of it, of its length."""

    streams: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns float[B, T, S, D]."""
        dim, like = x_BTD.shape[-1], _length(x_BTD)
        made = (layers.Linear((dim,), name=f"stream_{i}")(x_BTD) for i in range(self.streams - 1))
        return jnp.stack([x_BTD, *(_of_length(own, like) for own in made)], axis=2)


class Joined(nn.Module):
    """Returns the mean of streams: the first, and projections of the others, of its length."""

    streams: int

    @nn.compact
    def __call__(self, h_BTSD: jax.Array) -> jax.Array:
        """Returns float[B, T, D]."""
        if h_BTSD.ndim == 3:  # where it is initialised
            h_BTSD = jnp.broadcast_to(h_BTSD[:, :, None], (*h_BTSD.shape[:2], self.streams, h_BTSD.shape[-1]))
        dim, like = h_BTSD.shape[-1], _length(h_BTSD[:, :, 0])
        made = (layers.Linear((dim,), name=f"stream_{i}")(h_BTSD[:, :, i + 1]) for i in range(self.streams - 1))
        return jnp.mean(jnp.stack([h_BTSD[:, :, 0], *(_of_length(own, like) for own in made)]), axis=0)


def _length(x_BTD: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(x_BTD**2, axis=-1, keepdims=True))


def _of_length(x_BTD: jax.Array, length_BT1: jax.Array) -> jax.Array:
    return x_BTD * length_BT1 / jnp.sqrt(jnp.maximum(jnp.mean(x_BTD**2, axis=-1, keepdims=True), LEAST_SQUARE))
