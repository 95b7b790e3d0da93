"""Gated DeltaNet (arXiv:2412.06464), as layers of hybrids have it in place of attention. This module holds its weights and its state.

Projections make queries, keys, values and a gate; heads of values that share a head of keys are its group. A short convolution runs over
queries, keys and values, and SiLU. Queries and keys have length 1. A token's beta is a sigmoid, and its decay exp(-exp(A) softplus(a + dt))
(`ops.recurrence`). Each head's result is normalised and gated. Decays and states are float32.

Shapes: B batch, T length, D embed, G groups, H heads of values, K width of a key, V of a value, C channels of the convolution.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, layers
from zerojax.ops import context_attention, recurrence, tokens

LEAST_SQUARES = 1e-6  # is added to the squares of a query or key


@dataclasses.dataclass(frozen=True)
class Delta:
    """The shape, and the layers.

    Attributes:
      groups, heads: of keys, and of values.
      key_dim, value_dim: of a head.
      window: tokens that the convolution sees.
      activation: after the convolution.
      is_fused: two projections make all that is read of a token, group by group; else four make queries with keys and values, gates, betas
        and decays.
      pattern: for each layer, whether it is recurrent. Fewer than there are layers are repeated.
    """

    NAME: ClassVar[str] = "delta"  # of the module in a layer

    groups: int
    heads: int
    key_dim: int
    value_dim: int
    window: int = 4
    activation: str = "silu"
    is_fused: bool = True
    pattern: tuple[bool, ...] = (True, True, True, False)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns the channels of queries, of keys and of values."""
        return self.groups * self.key_dim, self.groups * self.key_dim, self.heads * self.value_dim

    def caches(self) -> tuple[decoding.Held, decoding.Held]:
        """Returns what a layer remembers of a text: its state, and the last inputs of its convolution."""
        state = decoding.Held((self.heads, self.key_dim, self.value_dim), None, dtype=jnp.float32)
        return state, decoding.Held((self.window - 1, sum(self.sizes)), None, has_heads=False)

    def flops(self) -> float:
        """Returns the operations of a layer's recurrence for a token, in a forward pass."""
        return recurrence.flops(self.groups, self.heads, self.key_dim, self.value_dim, is_delta=True)

    def branch(self, embed_dim: int, norm_eps: float, stddev: float, way: context_attention.Way | None) -> nn.Module:
        """Returns a layer's branch; see `GatedDelta`."""
        return GatedDelta(self, embed_dim, norm_eps, stddev, way, name=self.NAME)


class GatedDelta(nn.Module):
    """A layer's branch; `stddev` is of the initial output kernel, and `way` as of `tokens.recur`."""

    shape: Delta
    embed_dim: int
    norm_eps: float
    stddev: float
    way: context_attention.Way | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Returns the result, float[B, T, D], and what is remembered; for the arguments see `model.Layer`. Positions are not read."""
        s, (batch, length) = self.shape, x_BTD.shape[:2]
        held, counts_B, mask_BT = decoding.recurrent(past, mask_BT, length)
        x_BTD = x_BTD if mask_BT is None else jnp.where(mask_BT[..., None], x_BTD, 0)
        of_conv, z_BTX, beta_BTX, a_BTX = self._projected(x_BTD)
        convolve = layers.ShortConvolution(s.window, way=self.way, name="conv")
        of_conv, inputs = convolve(*of_conv, before_BWC=held[1], segments_BT=segments_BT, counts_B=counts_B)
        q_BTX, k_BTX, v_BTX = map(layers.ACTIVATIONS[s.activation], of_conv)
        q_BTGK, k_BTGK = (_of_length_1(each.reshape(batch, length, s.groups, s.key_dim)) for each in (q_BTX, k_BTX))
        log_a_H = self.param("A_log", _first_decays, (s.heads,)).astype(jnp.float32)
        dt_bias_H = self.param("dt_bias", nn.initializers.ones, (s.heads,)).astype(jnp.float32)
        a_BTH = a_BTX.reshape(batch, length, -1).astype(jnp.float32)
        terms = recurrence.Terms(
            q_BTGK * s.key_dim**-0.5,
            k_BTGK,
            v_BTX.reshape(batch, length, s.heads, s.value_dim),
            -jnp.exp(log_a_H) * nn.softplus(a_BTH + dt_bias_H),
            nn.sigmoid(beta_BTX.reshape(batch, length, -1).astype(jnp.float32)),
        )
        with jax.named_scope("recurrence"):
            y_BTHV, state = tokens.recur(terms, held[0], way=self.way, mask_BT=mask_BT, segments_BT=segments_BT)
        y_BTHV = layers.RMSNorm(self.norm_eps, name="norm")(y_BTHV)
        y_BTHV *= nn.silu(z_BTX.reshape(y_BTHV.shape).astype(jnp.float32))
        out = layers.Linear((self.embed_dim,), contracted=2, stddev=self.stddev, name="out")
        return out(y_BTHV.astype(x_BTD.dtype)), None if past is None else (state, inputs)

    @nn.nowrap
    def _projected(self, x_BTD: jax.Array) -> tuple[Any, ...]:
        """Returns queries, keys and values before the convolution, and gates, betas and decays, each float[B, T, ...]."""
        s = self.shape
        if not s.is_fused:
            widths = {"keys": sum(s.sizes), "z": s.sizes[2], "b": s.heads, "a": s.heads}
            joined, *others = (layers.Linear((width,), name=name)(x_BTD) for name, width in widths.items())
            return jnp.split(joined, (s.sizes[0], 2 * s.sizes[0]), axis=-1), *others
        values = s.heads // s.groups * s.value_dim
        parts = layers.Linear((s.groups, 2 * (s.key_dim + values)), name="qkvz")(x_BTD)
        *of_conv, z_BTGX = jnp.split(parts, (s.key_dim, 2 * s.key_dim, 2 * s.key_dim + values), axis=-1)
        both = layers.Linear((s.groups, 2 * s.heads // s.groups), name="ba")(x_BTD)
        return [part.reshape(*x_BTD.shape[:2], -1) for part in of_conv], z_BTGX, *jnp.split(both, 2, axis=-1)


def _of_length_1(x_BTGK: jax.Array) -> jax.Array:
    x_BTGK = x_BTGK.astype(jnp.float32)
    return x_BTGK * jax.lax.rsqrt(jnp.sum(x_BTGK**2, axis=-1, keepdims=True) + LEAST_SQUARES)


def _first_decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))
