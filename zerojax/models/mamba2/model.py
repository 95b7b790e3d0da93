"""Mamba-2 (arXiv:2405.21060), a decoder whose layers are recurrent. This module knows no meshes, stages or rematerialisation.

A layer has one residual branch: a projection makes a gate, the values, keys and queries of all heads, and their steps dt. A short
convolution runs over values, keys and queries. With A < 0 of a head, its state decays by exp(dt A) at each token, and its values are scaled
by dt (`ops.recurrence`). Weights have the compute dtype. Norms, decays and states are float32.

Shapes: B batch, T length, D embed, H heads, G groups of heads, K width of a state's keys, V of its values, I values of all heads (H V),
C channels of the convolution (I + 2 G K).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, family, layers
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention, recurrence
from zerojax.tree import PyTree

STEPS = (1e-3, 0.1)  # between which a head's dt begins
LEAST_STEP = 1e-4


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """The model's shape.

    Attributes:
      num_heads, head_dim: of the states' values.
      state_dim: the width of the states' keys.
      groups: heads of a group have equal keys and queries.
      window: tokens that the convolution sees.
      steps: the least and the largest dt of a token.
      activation: after the convolution.
      has_bias, has_conv_bias: whether the two projections have biases, and the convolution.
      has_float32_residual: whether the residual stream is float32.
      max_seq_len: None, since states have one size for texts of any length.
      attention, way: not read, since no layer attends.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 1
    window: int = 4
    steps: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"
    norm_eps: float = 1e-5
    has_bias: bool = False
    has_conv_bias: bool = True
    has_float32_residual: bool = True
    tie_embeddings: bool = False
    max_seq_len: int | None = None
    attention: attention_lib.Kernel = "xla"
    way: context_attention.Way | None = None

    @property
    def inner_dim(self) -> int:
        """Returns the values of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Returns the channels of the convolution."""
        return self.inner_dim + 2 * self.groups * self.state_dim


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
    """A layer's branch."""

    config: Mamba2Config

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns the result, and the state and the inputs of the convolution after these tokens; for the arguments see `Mamba2Layer`."""
        c, (batch, length) = self.config, x_BTD.shape[:2]
        log_a_H = self.param("A_log", lambda _, shape: jnp.log(jnp.arange(1.0, shape[0] + 1)), (c.num_heads,))
        dt_bias_H = self.param("dt_bias", _first_steps, (c.num_heads,))
        skip_H = self.param("D", nn.initializers.ones, (c.num_heads,))
        held, counts_B, mask_BT = decoding.recurrent(past, mask_BT, length)
        x_BTD = x_BTD.astype(log_a_H.dtype)
        x_BTD = x_BTD if mask_BT is None else jnp.where(mask_BT[..., None], x_BTD, 0)
        sizes = (c.inner_dim, c.channels, c.num_heads)
        made = layers.Linear((sum(sizes),), use_bias=c.has_bias, name="in_proj")(x_BTD)
        z_BTI, x_BTC, dt_BTH = jnp.split(made, (sizes[0], sizes[0] + sizes[1]), axis=-1)
        if mask_BT is not None and c.has_bias:
            x_BTC = jnp.where(mask_BT[..., None], x_BTC, 0)
        convolve = layers.ShortConvolution(c.window, c.has_conv_bias, name="conv")
        x_BTC, inputs = convolve(x_BTC, held[1], segments_BT=segments_BT, counts_B=counts_B)
        x_BTC = layers.ACTIVATIONS[c.activation](x_BTC)
        x_BTI, k_BTX, q_BTX = jnp.split(x_BTC, (c.inner_dim, c.inner_dim + c.groups * c.state_dim), axis=-1)
        x_BTHV = x_BTI.reshape(batch, length, c.num_heads, c.head_dim).astype(jnp.float32)
        k_BTGK, q_BTGK = (each.reshape(batch, length, c.groups, c.state_dim) for each in (k_BTX, q_BTX))
        dt_BTH = jnp.clip(nn.softplus(dt_BTH.astype(jnp.float32) + dt_bias_H.astype(jnp.float32)), *c.steps)
        decay_BTH = -jnp.exp(log_a_H.astype(jnp.float32)) * dt_BTH
        terms = recurrence.Terms(q_BTGK, k_BTGK, dt_BTH[..., None] * x_BTHV, decay_BTH)
        with jax.named_scope("recurrence"):
            y_BTHV, state = recurrence.go_on(terms, held[0], mask_BT=mask_BT, segments_BT=segments_BT)
        y_BTHV += skip_H.astype(jnp.float32)[:, None] * x_BTHV
        y_BTI = GatedNorm(c.norm_eps, c.groups, name="norm")(y_BTHV.reshape(batch, length, -1), z_BTI)
        stddev = 0.02 / c.num_layers**0.5
        return layers.Linear((c.embed_dim,), stddev=stddev, use_bias=c.has_bias, name="out_proj")(y_BTI), (
            state,
            inputs,
        )


class Mamba2Layer(nn.Module):
    """One residual branch."""

    calls_are_alike = True

    config: Mamba2Config

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
    ) -> Any:
        """Returns float[B, T, D] and, if there is a past, what the layer remembers after these tokens.

        Args:
          x_BTD: the tokens' states.
          mask_BT: False for padding.
          segments_BT: the number of the text that a token belongs to, where a row holds several: it knows no other text.
          past: the tokens before these.
        """
        y_BTD, held = Mixer(self.config, name="mixer")(
            layers.RMSNorm(self.config.norm_eps, name="norm")(x_BTD), mask_BT, segments_BT, past
        )
        x_BTD += y_BTD.astype(x_BTD.dtype)
        return x_BTD if past is None else (x_BTD, held)


class Mamba2(nn.Module):
    """The full model. Its weights are under embed, layer_0, layer_1, ..., norm and head."""

    config: Mamba2Config

    def setup(self) -> None:
        layers.own(self, parts(self.config))

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T]. `mask_BT` is False for padding."""
        return layers.next_logits(self._head(), self.hidden(tokens_BT, {"mask_BT": mask_BT}))

    def hidden(self, tokens_BT: jax.Array, seen: Mapping[str, jax.Array | None]) -> jax.Array:
        """Returns the head's input, float[B, T, D]; for what is `seen` see `Mamba2Layer`."""
        x_BTD = self._embedded(tokens_BT)
        given = {name: array for name, array in seen.items() if array is not None}
        for layer in self.layer:
            x_BTD = layer(x_BTD, **given)
        return self._final(x_BTD)

    def extend(self, caches: PyTree, step: decoding.Step, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after one more token a row, int32[B], or several, int32[B, T]: float32[B, V], and what layers remember."""
        x_BTD, after = self._embedded(tokens.reshape(len(tokens), -1)), []
        for layer, held in zip(self.layer, caches):
            x_BTD, held = layer(x_BTD, past=decoding.Past(held, step))
            after.append(held)
        return layers.next_logits(self._head(), self._final(step.last(x_BTD)))[:, 0], after

    def start(self, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        """Returns the logits after each row's first `lengths_B` tokens, float32[B, V], and what layers remember of these."""
        batch, length = tokens_BT.shape
        empty = decoding.empty(caches(self.config), batch, slots, self.embed.embedding.dtype)
        step = decoding.first_step(batch, length, slots)._replace(counts_B=lengths_B)
        return self.extend(empty, step, tokens_BT)

    @nn.nowrap
    def _embedded(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = self.embed(tokens_BT)
        return x_BTD.astype(jnp.float32) if self.config.has_float32_residual else x_BTD

    @nn.nowrap
    def _final(self, x_BTD: jax.Array) -> jax.Array:
        return self.norm(x_BTD).astype(self.embed.embedding.dtype)

    @nn.nowrap
    def _head(self) -> nn.Module:
        return self.embed if self.config.tie_embeddings else self.head

    def loss(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        labeled: jax.Array | None = None,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1], of whose shape the others are.

        With `by_token` it returns the loss of each token, float32[B, T]; see `layers.next_loss`. Rows may be padded at their ends.
        """
        tokens_BT, labels_BT, ignored = layers.read_and_labels(tokens, labeled)
        x_BTD = self.hidden(tokens_BT, {"segments_BT": None if segments is None else segments[:, :-1]})
        return layers.next_loss(self._head(), x_BTD, labels_BT, ignored, by_token=by_token)


def loss(
    config: Mamba2Config,
    params: PyTree,
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    *,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean loss of the next tokens, or the loss of each. There is no dropout, for which `key` would be."""
    arrays = (batch["tokens"], batch.get("segments"), batch.get("labeled"), by_token)
    return Mamba2(config).apply({"params": params}, *arrays, method="loss")


logits = functools.partial(decoding.logits, Mamba2)
start = functools.partial(decoding.start, Mamba2)
extend = functools.partial(decoding.extend, Mamba2)


def caches(config: Mamba2Config) -> PyTree:
    """Returns what every layer remembers of a text: its state, and the last inputs of its convolution."""
    c = config
    state = decoding.Held((c.num_heads, c.state_dim, c.head_dim), None, dtype=jnp.float32)
    return [(state, decoding.Held((c.window - 1, c.channels), None, has_heads=False))] * c.num_layers


def parts(config: Mamba2Config) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=layers.normal(0.02))
    found: family.Parts = {"embed": (embed, (jax.ShapeDtypeStruct((1, 1), jnp.int32),))}
    found |= {f"layer_{i}": (Mamba2Layer(c), states) for i in range(c.num_layers)}
    found["norm"] = (layers.RMSNorm(c.norm_eps), states)
    return found if c.tie_embeddings else found | {"head": (layers.Head(c.embed_dim, c.vocab_size), states)}


def flops_per_token(config: Mamba2Config, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on one token: 6 per weight outside a table of embeddings that is not the head
    (4 if it is frozen), and three times those of a chunk's matmuls in each layer, without recomputation."""
    c = config
    used = family.count_params(parts, c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    inside = recurrence.flops(c.groups, c.num_heads, c.state_dim, c.head_dim, is_delta=False)
    return per_weight * used + 3.0 * c.num_layers * inside


def _first_steps(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns biases of which softplus makes steps that are even in their logarithms."""
    low, high = map(math.log, STEPS)
    steps = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)), LEAST_STEP)
    return steps + jnp.log(-jnp.expm1(-steps))
