"""BART, an encoder-decoder (arXiv:1910.13461). This module knows no meshes, stages or rematerialisation.

Positions are learned. Each residual sum is normalised (post-norm). All projections have biases. The embedding table is also the output
projection, unless `tie_embeddings` is False. A fixed bias of the logits is part of the weights and is not trained. Relatives (mBART,
Pegasus, Marian) differ in a few fields of the config, which are off by default.

Shapes: B batch, S encoder length (of a cache: slots), T decoder length, D embed, H heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.models import decoding, encoder_decoder, family, layers
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention

OFFSET = 2  # the first rows of a table of positions are not used
NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class BartConfig:
    """The model's shape. A field of the decoder that is 0 has the encoder's value."""

    vocab_size: int
    num_layers: int  # of the encoder
    embed_dim: int
    num_heads: int
    mlp_dim: int
    decoder_layers: int = 0
    decoder_heads: int = 0
    decoder_mlp_dim: int = 0
    max_seq_len: int = 1024  # positions in each table
    activation: str = "gelu"
    scale_embeddings: bool = False  # multiplies embeddings by sqrt(embed_dim)
    tie_embeddings: bool = True
    separate_embeddings: bool = False  # the encoder and the decoder each have a table, and the shared one is not used
    stddev: float = 0.02
    attention: attention_lib.Kernel = "xla"
    # How devices attend that hold parts of sequences; None: a device has all tokens
    way: context_attention.Way | None = None
    dropout: float = 0.0  # in training: of the embeddings and of the output of each residual branch
    norm_first: bool = False  # each residual branch is normalised before it, and not the sum after it
    has_embed_norm: bool = True  # embeddings are normalised
    has_final_norm: bool = False  # the states after the last layer are normalised
    has_sinusoids: bool = False  # positions are sines and cosines, not weights
    # Tables of positions are not trained, begin as sines and cosines, and have no unused rows
    has_fixed_positions: bool = False
    starts_with_last: bool = False  # the first target is the last label of its text, which answers end with for that
    model_type: str = "bart"  # in Hugging Face's config.json

    @property
    def encoder_shape(self) -> tuple[int, int, int]:
        """Returns the encoder's layers, heads and MLP dims."""
        return self.num_layers, self.num_heads, self.mlp_dim

    @property
    def decoder_shape(self) -> tuple[int, int, int]:
        """Returns the decoder's layers, heads and MLP dims."""
        own = (self.decoder_layers, self.decoder_heads, self.decoder_mlp_dim)
        return tuple(mine or other for mine, other in zip(own, self.encoder_shape))  # type: ignore[return-value]

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """Returns the decoder's layers, the heads of its caches and their width."""
        layers, heads, _ = self.decoder_shape
        return layers, heads, self.embed_dim // heads


class BartEncoderLayer(nn.Module):
    """One residual self-attention and one residual MLP, each normalised after its sum."""

    calls_are_alike = True

    config: BartConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array, mask_BS: jax.Array | None = None) -> jax.Array:
        c, (_, heads, mlp_dim) = self.config, self.config.encoder_shape
        attend = attention(c, heads, "attention")
        x_BSD, _ = _added(c, "attention_norm", x_BSD, lambda x_BSD: attend(x_BSD, mask_BS=mask_BS))
        mlp = layers.FullyConnected(c.embed_dim, mlp_dim, c.activation, c.stddev, c.dropout, name="mlp")
        return _added(c, "mlp_norm", x_BSD, lambda x_BSD: (mlp(x_BSD), None), drops=False)[0]


class BartDecoderLayer(nn.Module):
    """One residual causal self-attention, one residual attention to the encoder's states, and one residual MLP."""

    calls_are_alike = True

    config: BartConfig

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        encoded_BSD: jax.Array | None,
        mask_BS: jax.Array | None = None,
        past: decoding.Past | None = None,
        keys: tuple[jax.Array, jax.Array] | None = None,
    ) -> Any:
        """See `encoder_decoder.EncoderDecoder`."""
        _, heads, mlp_dim = self.config.decoder_shape
        c, before = self.config, keys
        attend, cross = attention(c, heads, "attention", is_causal=True), attention(c, heads, "cross")
        mlp = layers.FullyConnected(c.embed_dim, mlp_dim, c.activation, c.stddev, c.dropout, name="mlp")
        x_BTD, own = _added(c, "attention_norm", x_BTD, lambda x_BTD: attend(x_BTD, past=past))
        x_BTD, keys = _added(
            c, "cross_norm", x_BTD, lambda x_BTD: cross(x_BTD, encoded_BSD, mask_BS=mask_BS, keys=before)
        )
        x_BTD, _ = _added(c, "mlp_norm", x_BTD, lambda x_BTD: (mlp(x_BTD), None), drops=False)
        return x_BTD if past is None else (x_BTD, own, keys)


def _added(
    config: BartConfig,
    name: str,
    x_BTD: jax.Array,
    branch: Callable[[jax.Array], tuple[jax.Array, Any]],
    *,
    drops: bool = True,
) -> tuple[jax.Array, Any]:
    """Returns the residual stream with what a branch adds, normalised before it or after the sum, and what else the branch returns.

    Called in a module's body, whose norm has this name. `drops`: the branch has no dropout of its own.
    """
    norm, dropout = layers.LayerNorm(NORM_EPS, name=name), layers.Dropout(config.dropout if drops else 0.0)
    y_BTD, other = branch(norm(x_BTD) if config.norm_first else x_BTD)
    x_BTD = x_BTD + dropout(y_BTD)
    return x_BTD if config.norm_first else norm(x_BTD), other


class Bart(encoder_decoder.EncoderDecoder):
    """The full model. Weights are under embed, encoder_positions, encoder_norm, encoder_0, ..., the same for decoder_, and logits_bias."""

    config: BartConfig

    def setup(self) -> None:
        layers.own(self, parts(self.config))
        self.dropout = layers.Dropout(self.config.dropout)

    def first_inputs(self, side: str, tokens_BT: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, tuple[()]]:
        c = self.config
        positions = jnp.arange(tokens_BT.shape[1]) if positions is None else positions
        x_BTD = (getattr(self, f"{side}_embed") if c.separate_embeddings else self.embed)(tokens_BT)
        x_BTD = x_BTD * math.sqrt(c.embed_dim) if c.scale_embeddings else x_BTD
        if c.has_sinusoids:
            x_BTD += sinusoids(positions, c.embed_dim).astype(x_BTD.dtype)
        else:
            table = getattr(self, f"{side}_positions")
            x_BTD += jax.lax.stop_gradient(table(positions)) if c.has_fixed_positions else table(OFFSET + positions)
        return self.dropout(getattr(self, f"{side}_norm")(x_BTD) if c.has_embed_norm else x_BTD), ()

    def next_inputs(self, targets_BT: jax.Array, step: decoding.Step) -> tuple[jax.Array, tuple[()]]:
        return self.first_inputs("decoder", targets_BT, step.positions_BT)

    def final(self, side: str, x_BTD: jax.Array) -> jax.Array:
        return getattr(self, f"{side}_final_norm")(x_BTD) if self.config.has_final_norm else x_BTD

    def bias_of_logits(self) -> jax.Array:
        """Returns float[V]."""
        return self.logits_bias()


def sinusoids(positions: jax.Array, dims: int) -> jax.Array:
    """Returns sin(position * w_k), then cos(position * w_k), with w_k = 10000^(-2k / dims): float32[..., dims] (arXiv:1706.03762)."""
    angles = [
        positions[..., None] * 10000.0 ** (-2 * jnp.arange(count, dtype=jnp.float32) / dims)
        for count in (dims - dims // 2, dims // 2)
    ]
    return jnp.concatenate([jnp.sin(angles[0]), jnp.cos(angles[1])], axis=-1)


def _sinusoids(key: jax.Array, shape: tuple[int, int], dtype: DTypeLike = jnp.float32) -> jax.Array:
    return sinusoids(jnp.arange(shape[0]), shape[1]).astype(dtype)


def attention(config: BartConfig, heads: int, name: str, *, is_causal: bool = False) -> layers.MultiHeadAttention:
    """Returns attention with biases and scaled scores."""
    c = config
    return layers.MultiHeadAttention(
        c.embed_dim,
        heads,
        c.embed_dim // heads,
        c.attention,
        is_causal,
        use_bias=True,
        way=c.way,
        stddevs=(c.stddev,) * 3,
        name=name,
    )


def parts(config: BartConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    states = jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32)
    normal = layers.normal(c.stddev)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=normal)
    positions = layers.Embed(OFFSET + c.max_seq_len, c.embed_dim, embedding_init=normal)
    if c.has_fixed_positions:
        positions = layers.Embed(c.max_seq_len, c.embed_dim, embedding_init=_sinusoids)
    norm = layers.LayerNorm(NORM_EPS)
    found: family.Parts = {"embed": (embed, (tokens,))}
    if c.separate_embeddings:
        found |= {"encoder_embed": (embed, (tokens,)), "decoder_embed": (embed, (tokens,))}
    for side in ("encoder", "decoder"):
        if not c.has_sinusoids:
            found[f"{side}_positions"] = (positions, (tokens,))
        if c.has_embed_norm:
            found[f"{side}_norm"] = (norm, (states,))
        if c.has_final_norm:
            found[f"{side}_final_norm"] = (norm, (states,))
    found |= {f"encoder_{i}": (BartEncoderLayer(c), (states,)) for i in range(c.encoder_shape[0])}
    found |= {f"decoder_{i}": (BartDecoderLayer(c), (states, states)) for i in range(c.decoder_shape[0])}
    if not c.tie_embeddings:
        found["head"] = (layers.Head(c.embed_dim, c.vocab_size, stddev=c.stddev), (states,))
    return found | {"logits_bias": (layers.LogitsBias(c.vocab_size), ())}


def flops_per_row(config: BartConfig, inputs: int, targets: int, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on a row of `inputs` encoder and `targets` decoder tokens, without recomputation.

    A weight of a layer or of the head costs `per_weight` per token that it multiplies: 6, or 4 if it is frozen.
    Keys and values of cross-attention multiply the encoder's
    tokens. Scores and their use cost 12 * embed_dim per pair of tokens and layer, and half of that in causal attention.
    """
    c, shapes = config, family.abstract_params(parts, config)
    encoder, decoder = (
        sum(leaf.size for i in range(depth) for leaf in jax.tree.leaves(shapes[f"{side}_{i}"]))
        for side, depth in (("encoder", c.encoder_shape[0]), ("decoder", c.decoder_shape[0]))
    )
    across = c.decoder_shape[0] * 2 * c.embed_dim * (c.embed_dim + 1)  # keys and values of the encoder's states
    weights = (encoder + across) * inputs + (decoder - across + c.embed_dim * c.vocab_size) * targets
    pairs = c.encoder_shape[0] * inputs**2 + c.decoder_shape[0] * (targets**2 / 2 + inputs * targets)
    return per_weight * weights + 12.0 * c.embed_dim * pairs
