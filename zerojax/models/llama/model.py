"""Llama, a decoder-only language model, and its relatives. This module knows no meshes or stages. It names what a backward pass may keep in
place of matmuls (`ops.residuals`).

It has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Relatives differ in a few fields of the config: biases, norms of
queries and keys, sliding windows. Layers are a plain unrolled list of named modules, and the train
step decides where weights are gathered. Weights have the compute dtype. Norms and softmax compute in float32.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax.models import decoding, family, layers
from zerojax.models.llama import rope
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention, residuals, tiles


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The model's shape (Llama 3, arXiv:2407.21783, table 3).

    Attributes:
      rope_scaling: stretches the rotary positions; None: as they are.
      qkv_bias, o_bias, mlp_bias: whether these projections have biases.
      qk_norm: whether queries and keys are normalised in each head before they are rotated.
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
      windows: for each layer, the number of tokens that a query sees, with its own (0: all before it); () for all layers 0.
      tile_tokens: tokens for which each layer's MLP, with its norm and its residual, runs at a time (`ops.tiles`); 0: all.
      model_type: the name of the row in Hugging Face's config.json.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int = 8192
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention: attention_lib.Kernel = "xla"
    rope_scaling: rope.Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()
    activation: str = "silu"
    tile_tokens: int = 0
    way: context_attention.Way | None = None
    model_type: str = "llama"


Keys = tuple[jax.Array, jax.Array] | None


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    config: LlamaConfig
    window: int = 0

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Keys]:
        c = self.config
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        of_x = [layers.Linear((n, c.head_dim), use_bias=c.qkv_bias, name=name) for name, n in heads.items()]
        # Their three gradients of x are added up in each tile. Where the compiler shards, x is gathered here.
        tile = 0 if self.is_initializing() or mesh_lib.rest() else c.tile_tokens
        q_BTHN, k_BTKN, v_BTKN = tiles.over_tiles(lambda x_BTD: [linear(x_BTD) for linear in of_x], x_BTD, tile)
        if c.qk_norm:
            q_BTHN = layers.RMSNorm(c.norm_eps, name="q_norm")(q_BTHN)
            k_BTKN = layers.RMSNorm(c.norm_eps, name="k_norm")(k_BTKN)
        frequency_F = rope.frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        # Distances alone count in rotary positions, so a text may begin at any position.
        positions_BT = positions_BT if past is None else past.step.positions_BT
        q_BTHN, k_BTKN = (rope.rotate(x_BTXN, frequency_F, positions_BT) for x_BTXN in (q_BTHN, k_BTKN))
        if not c.qk_norm:  # the norms' gradients read the matmuls' results
            q_BTHN, k_BTKN, v_BTKN = map(residuals.in_place, (q_BTHN, k_BTKN, v_BTKN))
        with jax.named_scope("attention"):
            y_BTHN, keys = decoding.attend(
                q_BTHN,
                k_BTKN,
                v_BTKN,
                c.attention,
                past,
                mask=mask_BT,
                segments_BT=segments_BT,
                window=self.window,
                way=c.way,
            )
        out = layers.Linear((c.embed_dim,), contracted=2, stddev=_residual_stddev(c), use_bias=c.o_bias, name="o")
        return out(y_BTHN), keys


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        gate_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp_bias, name="gate")(x_BTD)
        up_BTF = layers.Linear((c.mlp_dim,), use_bias=c.mlp_bias, name="up")(x_BTD)
        down = layers.Linear((c.embed_dim,), stddev=_residual_stddev(c), use_bias=c.mlp_bias, name="down")
        return down(layers.ACTIVATIONS[c.activation](gate_BTF) * up_BTF)


class Layer(nn.Module):
    """One residual attention and one residual MLP."""

    config: LlamaConfig
    window: int = 0

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, Keys]:
        """Returns float[B, T, D] and, if there is a past, the layer's keys and values after these tokens.

        Args:
          x_BTD: the tokens' states.
          mask_BT: False for tokens that no other sees.
          past: the tokens before these.
          segments_BT: the number of the text that a token belongs to, where a row holds several: it sees no other text. Without a mask.
          positions_BT: of the tokens in their rows; None: 0, 1, ...
        """
        c = self.config
        y_BTD = layers.RMSNorm(c.norm_eps, name="attention_norm")(x_BTD)
        y_BTD, keys = Attention(c, self.window, name="attention")(y_BTD, mask_BT, past, segments_BT, positions_BT)
        x_BTD = residuals.in_place(x_BTD + y_BTD)
        mlp, norm = MLP(c, name="mlp"), layers.RMSNorm(c.norm_eps, name="mlp_norm")
        tile = 0 if self.is_initializing() else c.tile_tokens
        x_BTD = tiles.over_tiles(lambda x_BTD: x_BTD + mlp(norm(x_BTD)), x_BTD, tile)
        return x_BTD if past is None else (x_BTD, keys)


class Llama(nn.Module):
    """The full model. Its weights are under embed, layer_0, layer_1, ..., norm and head."""

    config: LlamaConfig

    def setup(self) -> None:
        modules = {name: module.clone() for name, (module, _) in parts(self.config).items()}
        self.embed, self.norm = modules["embed"], modules["norm"]
        self.layer = [modules[f"layer_{i}"] for i in range(self.config.num_layers)]
        if not self.config.tie_embeddings:
            self.head = modules["head"]

    def hidden(
        self,
        tokens_BT: jax.Array,
        mask_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the normalised hidden states, the head's input: float[B, T, D]. For the other arguments see `Layer`."""
        given = {"mask_BT": mask_BT, "segments_BT": segments_BT, "positions_BT": positions_BT}
        seen = {name: array for name, array in given.items() if array is not None}
        x_BTD = self.embed(tokens_BT)
        for layer in self.layer:
            x_BTD = layer(x_BTD, **seen)
        return self.norm(x_BTD)

    def __call__(self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T]. `mask_BT` is False for padding."""
        return self._logits(self.hidden(tokens_BT, mask_BT))

    def start(self, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int) -> tuple[jax.Array, Any]:
        """Returns the logits after each row's first `lengths_B` tokens, float32[B, V], and every layer's keys and values."""
        c, (batch, length) = self.config, tokens_BT.shape
        x_BTD = self.embed(tokens_BT)
        empty = decoding.empty(batch, slots, c.num_kv_heads, c.head_dim, x_BTD.dtype)
        step = decoding.first_step(batch, length, slots)
        x_BTD, caches = self._through(x_BTD, [empty] * c.num_layers, step)
        return self._logits(self.norm(layers.at_last(x_BTD, lengths_B)))[:, 0], caches

    def extend(self, caches: Any, step: decoding.Step, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after one more token a row, int32[B], or several, int32[B, T]: float32[B, V], and every layer's keys and
        values."""
        x_BTD, caches = self._through(self.embed(tokens.reshape(len(tokens), -1)), caches, step)
        return self._logits(self.norm(step.last(x_BTD)))[:, 0], caches

    def _through(self, x_BTD: jax.Array, caches: Any, step: decoding.Step) -> tuple[jax.Array, list]:
        after = []
        for layer, keys in zip(self.layer, caches):
            x_BTD, keys = layer(x_BTD, None, decoding.Past(keys, step))
            after.append(keys)
        return x_BTD, after

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        return layers.next_logits(self._head(), x_BTD)

    def _head(self) -> nn.Module:
        return self.embed if self.config.tie_embeddings else self.head

    def loss(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        labeled: jax.Array | None = None,
        labels_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1], or int32[B, T] with `labels_BT`.

        Rows may be padded at their ends. `segments` separates the texts of a row (see `Layer`). Labels with `labeled` 0 are not learned.
        Both have the shape of `tokens`.
        """
        tokens_BT, labels_BT, ignored = layers.read_and_labels(tokens, labeled, labels_BT)
        segments_BT = None if segments is None else segments[:, : tokens_BT.shape[1]]
        x_BTD = self.hidden(tokens_BT, segments_BT=segments_BT, positions_BT=positions_BT)
        return layers.next_loss(self._head(), x_BTD, labels_BT, ignored)


def parts(config: LlamaConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=nn.initializers.normal(0.02))
    found: family.Parts = {"embed": (embed, tokens)}
    windows = c.windows or (0,) * c.num_layers
    found |= {f"layer_{i}": (Layer(c, windows[i]), states) for i in range(c.num_layers)}
    found["norm"] = (layers.RMSNorm(c.norm_eps), states)
    return found if c.tie_embeddings else found | {"head": (layers.Head(c.embed_dim, c.vocab_size), states)}


def count_params(config: LlamaConfig) -> int:
    """Returns the number of weights."""
    return family.count_params(parts, config)


def flops_per_token(config: LlamaConfig, seq_len: int, per_weight: float = 6.0) -> float:
    """Returns the floating-point operations of training on one token: 6 per weight outside the embedding table (4 if it is frozen), and
    6 * layers * heads * head_dim * seq_len for causal attention (only its lower half, without recomputation)."""
    c = config
    used = count_params(c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    return per_weight * used + 6.0 * c.num_layers * c.num_heads * c.head_dim * seq_len


def _residual_stddev(config: LlamaConfig) -> float:
    # Each layer adds two terms to the residual stream. This keeps the final variance near that of one term (GPT-2).
    return 0.02 / (2 * config.num_layers) ** 0.5
