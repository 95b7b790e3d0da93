"""The recurrent branch of a layer of Mamba-2 (arXiv:2405.21060), also in hybrids. This module holds its shape, its weights and its state.

A projection makes a gate, the values, keys and queries of all heads, and their steps dt. A short convolution runs over values, keys and
queries. With A < 0 of a head, its state decays by exp(dt A) at each token, and its values are scaled by dt (`ops.recurrence`). Norms,
decays and states are float32.

Shapes: B batch, T length, D embed, H heads, G groups of heads, K width of a state's keys, V of its values, I values of all heads (H V),
C channels of the convolution (I + 2 G K).
"""

import dataclasses
import itertools
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, layers
from zerojax.ops import context_attention, recurrence, tokens

STEPS = (1e-3, 0.1)  # between which a head's dt begins
LEAST_STEP = 1e-4


@dataclasses.dataclass(frozen=True)
class Scan:
    """The shape, and the layers.

    Attributes:
      heads, head_dim: of the states' values.
      state_dim: the width of the states' keys.
      groups: heads of a group have equal keys and queries.
      window: tokens that the convolution sees.
      steps: the least and the largest dt of a token.
      activation: after the convolution.
      has_bias, has_conv_bias: whether the two projections have biases, and the convolution.
      pattern: for each layer, whether it is recurrent. Fewer than there are layers are repeated.
    """

    NAME: ClassVar[str] = "mamba"  # of the module in a layer of a hybrid

    heads: int
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 1
    window: int = 4
    steps: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"
    has_bias: bool = False
    has_conv_bias: bool = True
    pattern: tuple[bool, ...] = (True,)

    @property
    def inner_dim(self) -> int:
        """Returns the values of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Returns the channels of the convolution."""
        return self.inner_dim + 2 * self.groups * self.state_dim

    def caches(self) -> tuple[decoding.Held, decoding.Held]:
        """Returns what a layer remembers of a text: its state, and the last inputs of its convolution."""
        state = decoding.Held((self.heads, self.state_dim, self.head_dim), None, dtype=jnp.float32)
        return state, decoding.Held((self.window - 1, self.channels), None, has_heads=False)

    def flops(self) -> float:
        """Returns the operations of a layer's recurrence for a token, in a forward pass."""
        return recurrence.flops(self.groups, self.heads, self.state_dim, self.head_dim, is_delta=False)

    def branch(self, embed_dim: int, norm_eps: float, stddev: float, way: context_attention.Way | None) -> nn.Module:
        """Returns a layer's branch; see `Mixer`."""
        return Mixer(self, embed_dim, norm_eps, stddev, way, name=self.NAME)


class GatedNorm(nn.Module):
    """RMSNorm of y silu(z), over the channels of each group."""

    eps: float
    groups: int

    @nn.compact
    def __call__(self, y_BTI: jax.Array, z_BTI: jax.Array) -> jax.Array:
        scale_I, shape = self.param("scale", nn.initializers.ones, (y_BTI.shape[-1],)), y_BTI.shape
        y_BTI = y_BTI.astype(jnp.float32) * nn.silu(z_BTI.astype(jnp.float32))
        y_BTGX = y_BTI.reshape(*shape[:2], self.groups, -1)
        y_BTGX *= jax.lax.rsqrt(jnp.mean(y_BTGX**2, axis=-1, keepdims=True) + self.eps)
        return y_BTGX.reshape(shape).astype(z_BTI.dtype) * scale_I


class Mixer(nn.Module):
    """A layer's branch; `stddev` is of the initial output kernel, and `way` as of `tokens.recur`."""

    shape: Scan
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
        """Returns the result, float[B, T, D], and what is remembered: the state, and the inputs of the convolution.

        Args:
          x_BTD: the tokens' states.
          mask_BT: False for padding.
          past: the tokens before these.
          segments_BT: the number of the text that a token belongs to, where a row holds several: it knows no other text.
          positions_BT: not read.
        """
        c, (batch, length) = self.shape, x_BTD.shape[:2]
        log_a_H = self.param("A_log", lambda _, shape: jnp.log(jnp.arange(1.0, shape[0] + 1)), (c.heads,))
        dt_bias_H = self.param("dt_bias", _first_steps, (c.heads,))
        skip_H = self.param("D", nn.initializers.ones, (c.heads,))
        held, counts_B, mask_BT = decoding.recurrent(past, mask_BT, length)
        x_BTD = x_BTD.astype(log_a_H.dtype)
        x_BTD = x_BTD if mask_BT is None else jnp.where(mask_BT[..., None], x_BTD, 0)
        sizes = (c.inner_dim, c.inner_dim, c.groups * c.state_dim, c.groups * c.state_dim, c.heads)
        made = layers.Linear((sum(sizes),), use_bias=c.has_bias, name="in_proj")(x_BTD)
        z_BTI, *of_conv, dt_BTH = jnp.split(made, list(itertools.accumulate(sizes))[:-1], axis=-1)
        if mask_BT is not None and c.has_bias:
            of_conv = [jnp.where(mask_BT[..., None], part, 0) for part in of_conv]
        convolve = layers.ShortConvolution(c.window, c.has_conv_bias, self.way, name="conv")
        of_conv, inputs = convolve(*of_conv, before_BWC=held[1], segments_BT=segments_BT, counts_B=counts_B)
        x_BTI, k_BTX, q_BTX = map(layers.ACTIVATIONS[c.activation], of_conv)
        x_BTHV = x_BTI.reshape(batch, length, c.heads, c.head_dim).astype(jnp.float32)
        k_BTGK, q_BTGK = (each.reshape(batch, length, c.groups, c.state_dim) for each in (k_BTX, q_BTX))
        dt_BTH = jnp.clip(nn.softplus(dt_BTH.astype(jnp.float32) + dt_bias_H.astype(jnp.float32)), *c.steps)
        decay_BTH = -jnp.exp(log_a_H.astype(jnp.float32)) * dt_BTH
        terms = recurrence.Terms(q_BTGK, k_BTGK, dt_BTH[..., None] * x_BTHV, decay_BTH)
        with jax.named_scope("recurrence"):
            y_BTHV, state = tokens.recur(terms, held[0], way=self.way, mask_BT=mask_BT, segments_BT=segments_BT)
        y_BTHV += skip_H.astype(jnp.float32)[:, None] * x_BTHV
        y_BTI = GatedNorm(self.norm_eps, c.groups, name="norm")(y_BTHV.reshape(batch, length, -1), z_BTI)
        out = layers.Linear((self.embed_dim,), stddev=self.stddev, use_bias=c.has_bias, name="out_proj")
        return out(y_BTI), None if past is None else (state, inputs)


def _first_steps(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns biases of which softplus makes steps that are even in their logarithms."""
    low, high = map(math.log, STEPS)
    steps = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)), LEAST_STEP)
    return steps + jnp.log(-jnp.expm1(-steps))
