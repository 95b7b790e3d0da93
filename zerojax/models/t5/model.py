"""T5, an encoder-decoder. This module knows no meshes, stages or rematerialisation.

Each stack adds a learned bias to the scores of its self-attention. It depends on the distance between query and key, and all layers
share it (arXiv:1910.10683, section 2.1). It is computed once per stack and passed to the layers. v1.1 has gated GELU and an untied head.

Shapes: B batch, S encoder length (of a cache: slots), T decoder length, D embed, H heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, encoder_decoder, family, layers
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention
from zerojax.ops import tokens as tokens_lib


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The model's shape (arXiv:1910.10683; v1.1: arXiv:2002.05202)."""

    vocab_size: int
    num_layers: int  # of the encoder and of the decoder, each
    embed_dim: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    mlp: str = "gated_gelu"  # an activation of `layers.ACTIVATIONS`, after "gated_" if a second projection gates it
    tie_embeddings: bool = False
    # Whether the head's input is divided by sqrt(embed_dim); None: if embeddings are tied
    scale_outputs: bool | None = None
    decoder_layers: int = 0  # 0: as many as the encoder has
    buckets: int = 32  # of distances
    max_distance: int = 128  # longer distances share the last bucket
    norm_eps: float = 1e-6
    max_seq_len: int | None = None  # relative distances have no limit
    attention: attention_lib.Kernel = "xla"
    # How devices attend that hold parts of sequences; None: a device has all tokens
    way: context_attention.Way | None = None
    # In training: of embeddings, activations, the output of each residual branch and of each stack
    dropout: float = 0.0

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """Returns the decoder's layers, the heads of its caches and their width."""
        return self.decoder_layers or self.num_layers, self.num_heads, self.head_dim


class RelativeBias(nn.Module):
    """The bias of each head's scores by the distance between query and key, for all layers of a stack."""

    config: T5Config
    is_causal: bool

    @nn.compact
    def __call__(self, positions_T: jax.Array, key_positions_S: jax.Array | None = None) -> jax.Array:
        """Returns float[..., H, T, S] for the positions int32[..., T] of queries and int32[..., S] of keys, by default the same."""
        c = self.config
        keys_S = positions_T if key_positions_S is None else key_positions_S
        initializer = nn.initializers.normal(c.embed_dim**-0.5)
        table_KH = self.param("embedding", initializer, (c.buckets, c.num_heads))
        distance_TS = keys_S[..., None, :] - positions_T[..., :, None]
        bucket_TS = bucket_of(distance_TS, c.buckets, c.max_distance, is_causal=self.is_causal)
        # As a matmul, the table's gradient sums T * T terms in float32 and needs no scatter.
        hit_TSK = jax.nn.one_hot(bucket_TS, c.buckets, dtype=table_KH.dtype)
        return jnp.einsum("...tsk,kh->...hts", hit_TSK, table_KH)


class FeedForward(nn.Module):
    """down(gelu(gate(x)) * up(x)) in v1.1 (GEGLU, arXiv:2002.05202), down(relu(up(x))) before v1.1."""

    config: T5Config

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        stddev = c.embed_dim**-0.5
        h_BTF = layers.Linear((c.mlp_dim,), stddev=stddev, name="up")(x_BTD)
        # Hugging Face's name "gated-gelu" means the approximate form.
        activation = layers.ACTIVATIONS["gelu_new" if c.mlp == "gated_gelu" else c.mlp.removeprefix("gated_")]
        if c.mlp.startswith("gated_"):
            h_BTF = activation(layers.Linear((c.mlp_dim,), stddev=stddev, name="gate")(x_BTD)) * h_BTF
        else:
            h_BTF = activation(h_BTF)
        y_BTD = layers.Linear((c.embed_dim,), stddev=c.mlp_dim**-0.5, name="down")(layers.Dropout(c.dropout)(h_BTF))
        return layers.Dropout(c.dropout)(y_BTD)


class EncoderLayer(nn.Module):
    """One residual self-attention and one residual MLP."""

    calls_are_alike = True

    config: T5Config

    @nn.compact
    def __call__(self, x_BSD: jax.Array, bias_HSS: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        c = self.config
        y_BSD = layers.RMSNorm(c.norm_eps, name="attention_norm")(x_BSD)
        y_BSD, _ = attention(c, "attention")(y_BSD, bias=bias_HSS, mask_BS=mask_BS)
        x_BSD = x_BSD + layers.Dropout(c.dropout)(y_BSD)
        return x_BSD + FeedForward(c, name="mlp")(layers.RMSNorm(c.norm_eps, name="mlp_norm")(x_BSD))


class DecoderLayer(nn.Module):
    """One residual causal self-attention, one residual attention to the encoder's states, and one residual MLP."""

    calls_are_alike = True

    config: T5Config

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        bias: jax.Array,
        encoded_BSD: jax.Array | None,
        mask_BS: jax.Array | None = None,
        past: decoding.Past | None = None,
        keys: tuple[jax.Array, jax.Array] | None = None,
    ) -> Any:
        """See `encoder_decoder.EncoderDecoder`; `bias` of the scores of self-attention is float[H, T, T], or float[B, H, 1, S] of a token
        with a past."""
        c = self.config
        y_BTD = layers.RMSNorm(c.norm_eps, name="attention_norm")(x_BTD)
        y_BTD, own = attention(c, "attention", is_causal=True)(y_BTD, bias=bias, past=past)
        x_BTD = x_BTD + layers.Dropout(c.dropout)(y_BTD)
        y_BTD = layers.RMSNorm(c.norm_eps, name="cross_norm")(x_BTD)
        y_BTD, keys = attention(c, "cross")(y_BTD, encoded_BSD, mask_BS=mask_BS, keys=keys)
        x_BTD = x_BTD + layers.Dropout(c.dropout)(y_BTD)
        x_BTD = x_BTD + FeedForward(c, name="mlp")(layers.RMSNorm(c.norm_eps, name="mlp_norm")(x_BTD))
        return x_BTD if past is None else (x_BTD, own, keys)


class T5(encoder_decoder.EncoderDecoder):
    """The full model. Its weights are under embed, encoder_bias, encoder_0, ..., encoder_norm, the same for decoder_, and head."""

    config: T5Config

    def setup(self) -> None:
        layers.own(self, parts(self.config))
        self.dropout = layers.Dropout(self.config.dropout)

    def first_inputs(
        self, side: str, tokens_BT: jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        length, x_BTD = tokens_BT.shape[1], self.dropout(self.embed(tokens_BT))
        # The same in all rows. Where a device has a part of the tokens, its queries see all keys.
        distant = (jnp.arange(length),) if positions is None else (positions[0], jnp.arange(tokens_lib.of_all(length)))
        return x_BTD, (getattr(self, f"{side}_bias")(*distant),)

    def next_inputs(self, targets_BT: jax.Array, step: decoding.Step) -> tuple[jax.Array, tuple[jax.Array]]:
        length = step.positions_BT.shape[1]  # several tokens see themselves, and one every slot
        distant = (jnp.arange(length),) if length > 1 else (step.positions_BT, step.slot_positions_BS)
        return self.embed(targets_BT), (self.decoder_bias(*distant),)

    def final(self, side: str, x_BTD: jax.Array) -> jax.Array:
        c, x_BTD = self.config, self.dropout(getattr(self, f"{side}_norm")(x_BTD))
        # Rows of a tied embedding table have length sqrt(D).
        is_scaled = c.tie_embeddings if c.scale_outputs is None else c.scale_outputs
        return x_BTD * c.embed_dim**-0.5 if is_scaled and side == "decoder" else x_BTD


def parts(config: T5Config) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    positions = jax.ShapeDtypeStruct((1,), jnp.int32)
    states = jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32)
    bias = jax.ShapeDtypeStruct((c.num_heads, 1, 1), jnp.float32)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=layers.normal(1.0))
    found: family.Parts = {"embed": (embed, (tokens,))}
    found["encoder_bias"] = (RelativeBias(c, is_causal=False), (positions,))
    found |= {f"encoder_{i}": (EncoderLayer(c), (states, bias)) for i in range(c.num_layers)}
    found["encoder_norm"] = (layers.RMSNorm(c.norm_eps), (states,))
    found["decoder_bias"] = (RelativeBias(c, is_causal=True), (positions,))
    found |= {f"decoder_{i}": (DecoderLayer(c), (states, bias, states)) for i in range(depth_of_decoder(c))}
    found["decoder_norm"] = (layers.RMSNorm(c.norm_eps), (states,))
    head = layers.Head(c.embed_dim, c.vocab_size, stddev=c.embed_dim**-0.5)
    return found if c.tie_embeddings else found | {"head": (head, (states,))}


def depth_of_decoder(config: T5Config) -> int:
    """Returns the number of the decoder's layers."""
    return config.decoder_layers or config.num_layers


def attention(config: T5Config, name: str, *, is_causal: bool = False) -> layers.MultiHeadAttention:
    """Returns attention whose scores are not scaled: the initialisation of `q` includes the scale."""
    c, inner = config, config.num_heads * config.head_dim
    stddevs = ((c.embed_dim * c.head_dim) ** -0.5, c.embed_dim**-0.5, inner**-0.5)
    return layers.MultiHeadAttention(
        c.embed_dim, c.num_heads, c.head_dim, c.attention, is_causal, scale=1.0, way=c.way, stddevs=stddevs, name=name
    )


def bucket_of(distance: jax.Array, buckets: int, max_distance: int, *, is_causal: bool) -> jax.Array:
    """Returns the bucket of each distance (key position - query position), with the same shape.

    Half of the buckets hold one distance each. The others grow with the logarithm of the distance, up to `max_distance`.
    Unless attention is causal, keys after the query have the upper half of all buckets.
    """
    bucket = jnp.zeros_like(distance)
    if is_causal:
        distance = jnp.maximum(-distance, 0)
    else:
        buckets //= 2
        bucket += jnp.where(distance > 0, buckets, 0)
        distance = abs(distance)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = jnp.minimum(exact + (ratio * (buckets - exact)).astype(distance.dtype), buckets - 1)
    return bucket + jnp.where(distance < exact, distance, far)


def flops_per_row(config: T5Config, inputs: int, targets: int, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on a row of `inputs` encoder and `targets` decoder tokens, without recomputation.

    A weight costs `per_weight` per token that it multiplies: 6, or 4 if it is frozen.
    Keys and values of cross-attention multiply the encoder's tokens. Embedding tables
    cost nothing. Scores and their use cost 12 * heads * head_dim per pair of tokens, and half of that in causal attention.
    """
    c = config
    shapes = family.abstract_params(parts, c)
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    encoder, decoder = (
        sum(size for name, size in sizes.items() if name.startswith(side) and not name.endswith("bias"))
        for side in ("encoder", "decoder")
    )
    inner = c.num_heads * c.head_dim
    depth = depth_of_decoder(c)
    across = depth * 2 * c.embed_dim * inner  # keys and values of the encoder's states
    head = c.embed_dim * c.vocab_size
    weights = (encoder + across) * inputs + (decoder - across + head) * targets
    pairs = c.num_layers * inputs**2 + depth * (targets**2 / 2 + inputs * targets)
    return per_weight * weights + 12.0 * inner * pairs
