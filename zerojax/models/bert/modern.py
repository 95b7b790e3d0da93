"""ModernBERT, an encoder (arXiv:2412.13663), with a head that classifies texts. This module knows no meshes, stages or rematerialisation.

It has rotary positions, a LayerNorm before each branch but the first, gated MLPs, and layers in which a token sees those near it alone.

Shapes: B batch, T length, D embed, H heads, N head dim, F mlp, C classes.
"""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import family, layers, rope
from zerojax.models.bert import model
from zerojax.ops import tokens as tokens_lib


@dataclasses.dataclass(frozen=True)
class ModernBertConfig(model.BertConfig):
    """The model's shape; see `BertConfig`. There are no kinds of texts, and positions have no weights.

    Attributes:
      windows: for each layer, the tokens to either side that a token sees (0: all). Fewer than there are layers are repeated.
      thetas: the bases of the rotations in layers that see all tokens, and in the others.
      norm_bias, attention_bias, mlp_bias, head_bias: what has biases beside the last linear module.
      pooling: the head reads the state of the first token, or the mean of a text's states.
    """

    num_kinds: int = 0
    num_positions: int = 8192
    head_activation: str = "gelu"
    norm_eps: float = 1e-5
    windows: tuple[int, ...] = (0, 64, 64)
    thetas: tuple[float, float] = (160000.0, 10000.0)
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    pooling: Literal["cls", "mean"] = "cls"
    model_type: str = "modernbert"

    def window_of(self, layer: int) -> int:
        """Returns the window of a layer."""
        return self.windows[layer % len(self.windows)]


class ModernAttention(nn.Module):
    """Attention of tokens to those of their text, or to those near them."""

    config: ModernBertConfig
    window: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        c, size, length = self.config, self.config.embed_dim // self.config.num_heads, x_BTD.shape[1]
        given: dict[str, Any] = {"stddev": c.stddev, "use_bias": c.attention_bias}
        qkv_BTXHN = layers.Linear((3, c.num_heads, size), name="qkv", **given)(x_BTD)
        frequency_F = rope.frequencies(size, c.thetas[self.window > 0])
        q_BTHN, k_BTHN = (rope.rotate(qkv_BTXHN[:, :, part], frequency_F) for part in (0, 1))
        seen = mask_BT
        if 0 < self.window < length - 1:
            index_T = jnp.arange(length)
            near_1TT = (jnp.abs(index_T[:, None] - index_T) <= self.window)[None]
            seen = (
                jnp.broadcast_to(near_1TT, (len(x_BTD), length, length)) if seen is None else near_1TT & seen[:, None]
            )
        with jax.named_scope("attention"):
            attend: dict[str, Any] = {"way": c.way, "is_causal": False, "mask": seen}
            y_BTHN = tokens_lib.attend(q_BTHN, k_BTHN, qkv_BTXHN[:, :, 2], c.attention, **attend)
        return layers.Linear((c.embed_dim,), contracted=2, name="o", **given)(y_BTHN)


class ModernMLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        given: dict[str, Any] = {"stddev": c.stddev, "use_bias": c.mlp_bias}
        both_BTXF = layers.Linear((2, c.mlp_dim), name="gate_up", **given)(x_BTD)
        h_BTF = layers.ACTIVATIONS[c.activation](both_BTXF[:, :, 0]) * both_BTXF[:, :, 1]
        return layers.Linear((c.embed_dim,), name="down", **given)(h_BTF)


class ModernLayer(nn.Module):
    """One residual attention and one residual MLP; the first layer's attention reads the normalised embeddings."""

    calls_are_alike = True

    config: ModernBertConfig
    window: int
    is_first: bool = False

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns float[B, T, D]. `mask_BT` is False for tokens that no other sees."""
        c, dropout = self.config, layers.Dropout(self.config.dropout)
        read_BTD = x_BTD if self.is_first else _norm(c, "attention_norm")(x_BTD)
        x_BTD += dropout(ModernAttention(c, self.window, name="attention")(read_BTD, mask_BT))
        return x_BTD + dropout(ModernMLP(c, name="mlp")(_norm(c, "mlp_norm")(x_BTD)))


class ModernHead(nn.Module):
    """out(norm(gelu(dense(x)))) of the state x of each text."""

    config: ModernBertConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns float32[B, C]."""
        c = self.config
        x_BD = x_BTD[:, 0]
        if c.pooling == "mean":
            x_BD = jnp.mean(x_BTD, axis=1, where=None if mask_BT is None else mask_BT[..., None])
        dense_BD = layers.Linear((c.embed_dim,), stddev=c.stddev, use_bias=c.head_bias, name="dense")(x_BD)
        normed_BD = _norm(c, "norm")(layers.ACTIVATIONS[c.head_activation](dense_BD))
        out = layers.Linear((len(c.classes),), stddev=c.stddev, use_bias=True, name="out")
        return out(layers.Dropout(c.dropout)(normed_BD)).astype(jnp.float32)


class ModernBert(model.Bert):
    """The full model. Its weights are under embed, norm, layer_0, layer_1, ..., final_norm and head."""

    config: ModernBertConfig

    def setup(self) -> None:
        layers.own(self, parts(self.config))
        self.dropout = layers.Dropout(self.config.dropout)

    def __call__(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, kinds_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the scores of every class, as `Bert` does; there are no kinds."""
        x_BTD = self.dropout(self.norm(self.embed(tokens_BT)))
        masks = () if mask_BT is None else (mask_BT,)
        for layer in self.layer:
            x_BTD = layer(x_BTD, *masks)
        return self.head(self.final_norm(x_BTD), *masks)


def parts(config: ModernBertConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=layers.normal(c.stddev))
    found: family.Parts = {"embed": (embed, (jax.ShapeDtypeStruct((1, 1), jnp.int32),)), "norm": (_norm(c), states)}
    found |= {f"layer_{i}": (ModernLayer(c, c.window_of(i), is_first=i == 0), states) for i in range(c.num_layers)}
    return found | {"final_norm": (_norm(c), states), "head": (ModernHead(c), states)}


def _norm(config: ModernBertConfig, name: str | None = None) -> nn.Module:
    return layers.LayerNorm(config.norm_eps, config.norm_bias, name=name)
