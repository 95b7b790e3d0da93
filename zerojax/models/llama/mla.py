"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). This module holds its weights, and attends by its small cache.

A token's keys and values are linear in one short vector, its latent, so a cache holds latents, and one rotated key that all heads share.
Prompts and training make each head's keys and values. A token that is added reads the cache alone: a head's matrix of keys moves to its
query, and that of its values to its result, so that the latents are the keys, and the values, of all heads.

Shapes: B batch, T tokens, H heads, R rank of the latents, N width of a head's part that is not rotated, V of its values.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.models import decoding, layers, rope
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention, quantized, tokens

NORM_EPS = 1e-6  # of the norms of latents, in every config


@dataclasses.dataclass(frozen=True)
class Latent:
    """The shape.

    Attributes:
      rank: of a token's latent.
      query_rank: of the latent of its queries; 0: they are made of the token's state.
      plain_dim, rotary_dim: the parts of a head's queries and keys that are not rotated, and that are.
      value_dim: of a head.
      is_interleaved: whether neighbouring dims are rotated as a pair, and not the two halves.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    is_interleaved: bool = True


class KeysAndValues(layers.Linear):
    """Makes each head's keys and values of latents: float[B, T, H, N + V]."""

    def absorbed(self, q_BTHN: jax.Array) -> jax.Array:
        """Returns queries of which the latents are the keys: float[B, T, H, R]."""
        return jnp.einsum("bthn,rhn->bthr", q_BTHN, self._matrix(q_BTHN.dtype)[..., : q_BTHN.shape[-1]])

    def values(self, y_BTHR: jax.Array, width: int) -> jax.Array:
        """Returns the sums of values that belong to sums of latents: float[B, T, H, V], of `width` V."""
        return jnp.einsum("bthr,rhv->bthv", y_BTHR, self._matrix(y_BTHR.dtype)[..., -width:])

    def _matrix(self, dtype: DTypeLike) -> jax.Array:
        kernel = self.variables["params"]["kernel"]
        return quantized.dequantize(kernel, dtype) if quantized.is_quantized(kernel) else kernel


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, with the rotation of a layer.

    Attributes:
      shape: of latents and heads.
      embed_dim, num_heads: of the model.
      kernel: the implementation of attention.
      rotation: of queries and keys.
      scale: multiplies the scores.
      use_bias: of the projections that read or write the residual stream, but for queries without a latent.
      stddev: of the initial output kernel.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
    """

    shape: Latent
    embed_dim: int
    num_heads: int
    kernel: attention_lib.Kernel
    rotation: rope.Rope
    scale: float
    use_bias: bool
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
        """Returns the result, float[B, T, D], and the cache; for the arguments see `model.Layer`."""
        s = self.shape
        width = s.plain_dim + s.rotary_dim
        if s.query_rank:
            q_BTR = layers.Linear((s.query_rank,), use_bias=self.use_bias, name="q_a")(x_BTD)
            q_BTR = layers.RMSNorm(NORM_EPS, name="q_a_norm")(q_BTR)
            q_BTHN = layers.Linear((self.num_heads, width), name="q_b")(q_BTR)
        else:
            q_BTHN = layers.Linear((self.num_heads, width), name="q")(x_BTD)
        both_BTR = layers.Linear((s.rank + s.rotary_dim,), use_bias=self.use_bias, name="kv_a")(x_BTD)
        latent_BTR = layers.RMSNorm(NORM_EPS, name="kv_a_norm")(both_BTR[..., : s.rank])
        positions_BT = positions_BT if past is None else past.step.positions_BT
        q_BTHN, turned_q = q_BTHN[..., : s.plain_dim], self._turned(q_BTHN[..., s.plain_dim :], positions_BT)
        turned_k_BT1N = self._turned(both_BTR[:, :, None, s.rank :], positions_BT)
        expand = KeysAndValues((self.num_heads, s.plain_dim + s.value_dim), name="kv_b")
        held_BT1R = jnp.concatenate([latent_BTR[:, :, None], turned_k_BT1N], axis=-1)
        keys: tuple[jax.Array, ...] | None = None
        if past is None or decoding.is_first(past, x_BTD.shape[1]):
            made = expand(latent_BTR)
            turned_k = jnp.broadcast_to(turned_k_BT1N, turned_q.shape)
            arrays = (
                jnp.concatenate([q_BTHN, turned_q], axis=-1),
                jnp.concatenate([made[..., : s.plain_dim], turned_k], axis=-1),
                made[..., s.plain_dim :],
            )
            most = max(width, s.value_dim)  # kernels and exchanges take heads of one width
            q, k, v = (jnp.pad(a, [(0, 0)] * 3 + [(0, most - a.shape[-1])]) for a in arrays)
            with jax.named_scope("attention"):
                given: dict[str, Any] = {
                    "mask": mask_BT,
                    "segments_BT": segments_BT,
                    "scale": self.scale,
                    "way": self.way,
                }
                y_BTHV = tokens.attend(q, k, v, self.kernel, is_causal=True, **given)
            y_BTHV = y_BTHV[..., : s.value_dim]
            keys = None if past is None else past.add(held_BT1R)
        else:
            q_BTHR = jnp.concatenate([expand.absorbed(q_BTHN), turned_q], axis=-1)
            with jax.named_scope("attention"):
                y_BTHR, keys = decoding.attend(q_BTHR, held_BT1R, None, self.kernel, past, scale=self.scale)
            y_BTHV = expand.values(y_BTHR[..., : s.rank], s.value_dim)
        out = layers.Linear((self.embed_dim,), contracted=2, stddev=self.stddev, use_bias=self.use_bias, name="o")
        return out(y_BTHV), keys

    def _turned(self, x_BTHN: jax.Array, positions_BT: jax.Array | None) -> jax.Array:
        """Returns the rotated part of queries or keys; pairs of neighbours become pairs of the halves, in both."""
        theta, scaling = self.rotation
        if self.shape.is_interleaved:
            x_BTHN = rope.halved(x_BTHN, self.shape.rotary_dim)
        frequency_F = rope.frequencies(self.shape.rotary_dim, theta, scaling)
        return rope.rotate(x_BTHN, frequency_F, positions_BT, 1.0 if scaling is None else scaling.attention_factor)
