"""BERT, an encoder (arXiv:1810.04805), RoBERTa (arXiv:1907.11692) and DistilBERT (arXiv:1910.01108), with a head that classifies texts.
This module knows no meshes, stages or rematerialisation.

Positions are learned. Each residual sum is normalised (post-norm). All projections have biases. The head reads the state of a text's first
token. The models compute the same but for the number of the first position, kinds of texts, and the head's activation.

Shapes: B batch, T length, D embed, F mlp, C classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import family, layers
from zerojax.ops import attention as attention_lib
from zerojax.ops import chunks, context_attention, losses


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The model's shape.

    Attributes:
      classes: their names.
      num_positions: rows of the table of positions.
      pad: the id that has no position of its own, so that a text's first one is `pad` + 1 (RoBERTa); None: positions are 0, 1, ...
      num_kinds: rows of the table of kinds of texts; a token is of kind 0 unless a batch tells. 0: there is no table.
      dropout: in training: of the embeddings, of the output of each residual branch, and of what the head reads.
      way: always None, since a device has all tokens of its rows.
      model_type: in Hugging Face's config.json.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    classes: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    num_positions: int = 512
    pad: int | None = None
    num_kinds: int = 2
    activation: str = "gelu"
    head_activation: str = "tanh"
    norm_eps: float = 1e-12
    stddev: float = 0.02
    dropout: float = 0.0
    tie_embeddings: bool = False
    attention: attention_lib.Kernel = "xla"
    way: context_attention.Way | None = None
    model_type: str = "bert"

    @property
    def max_seq_len(self) -> int:
        """Returns the most tokens of a text."""
        return self.num_positions - (0 if self.pad is None else self.pad + 1)


class BertLayer(nn.Module):
    """One residual self-attention and one residual MLP, each normalised after its sum."""

    calls_are_alike = True

    config: BertConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, mask_BT: jax.Array | None = None) -> jax.Array:
        """Returns float[B, T, D]. `mask_BT` is False for tokens that no other sees."""
        c, dropout = self.config, layers.Dropout(self.config.dropout)
        size, stddevs = c.embed_dim // c.num_heads, (c.stddev,) * 3
        attend = layers.MultiHeadAttention(
            c.embed_dim, c.num_heads, size, c.attention, use_bias=True, stddevs=stddevs, name="attention"
        )
        y_BTD, _ = attend(x_BTD, mask_BS=mask_BT)
        x_BTD = layers.LayerNorm(c.norm_eps, name="attention_norm")(x_BTD + dropout(y_BTD))
        y_BTD = layers.FullyConnected(c.embed_dim, c.mlp_dim, c.activation, c.stddev, name="mlp")(x_BTD)
        return layers.LayerNorm(c.norm_eps, name="mlp_norm")(x_BTD + dropout(y_BTD))


class ClassHead(nn.Module):
    """out(tanh(dense(x))), or with another activation, of the state x of each text's first token."""

    config: BertConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns float32[B, C]."""
        c, dropout = self.config, layers.Dropout(self.config.dropout)
        # BERT's dense layer is its pooler, which has no dropout before it, and DistilBERT's has none.
        first_BD = dropout(x_BTD[:, 0]) if c.model_type.endswith("roberta") else x_BTD[:, 0]
        dense_BD = layers.Linear((c.embed_dim,), stddev=c.stddev, use_bias=True, name="dense")(first_BD)
        dense_BD = layers.ACTIVATIONS[c.head_activation](dense_BD)
        out = layers.Linear((len(c.classes),), stddev=c.stddev, use_bias=True, name="out")
        return out(dropout(dense_BD)).astype(jnp.float32)


class Bert(nn.Module):
    """The full model. Its weights are under embed, positions, kinds, norm, layer_0, layer_1, ... and head."""

    config: BertConfig

    def setup(self) -> None:
        layers.own(self, parts(self.config))
        self.dropout = layers.Dropout(self.config.dropout)

    def __call__(
        self, tokens_BT: jax.Array, mask_BT: jax.Array | None = None, kinds_BT: jax.Array | None = None
    ) -> jax.Array:
        """Returns the scores of every class: float32[B, C] from tokens int32[B, T].

        Args:
          tokens_BT: the texts.
          mask_BT: False for padding.
          kinds_BT: int32, the kind of text that a token belongs to; None: 0 for all.
        """
        c = self.config
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        if c.pad is not None:
            is_text_BT = (tokens_BT != c.pad).astype(jnp.int32)
            positions_BT = jnp.cumsum(is_text_BT, axis=1) * is_text_BT + c.pad
        x_BTD = self.embed(tokens_BT)
        if c.num_kinds:
            x_BTD += self.kinds(jnp.zeros_like(tokens_BT) if kinds_BT is None else kinds_BT)
        x_BTD += self.positions(positions_BT)
        x_BTD = self.dropout(self.norm(x_BTD))
        masks = () if mask_BT is None else (mask_BT,)
        for layer in self.layer:
            x_BTD = layer(x_BTD, *masks)
        return self.head(x_BTD)

    def loss(
        self,
        tokens_BT: jax.Array,
        labels_B1: jax.Array,
        mask_BT: jax.Array | None = None,
        labeled_B1: jax.Array | None = None,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean cross-entropy of the labels, numbers of classes: float32[]. Tokens with `mask_BT` 0 are padding, and rows with
        `labeled_B1` 0 are not learned. With `by_token` it returns the loss of each text too, float32[B, 1]."""
        logits_BC = self(tokens_BT, None if mask_BT is None else mask_BT > 0)
        ignored = None if labeled_B1 is None else chunks.NO_LABEL
        if labeled_B1 is not None:
            labels_B1 = jnp.where(labeled_B1 > 0, labels_B1, chunks.NO_LABEL)
        found = losses.mean_and_terms(logits_BC[:, None], labels_B1, ignored=ignored)
        return found if by_token else found[0]


def parts(config: BertConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    tables = {"embed": c.vocab_size, "positions": c.num_positions} | ({"kinds": c.num_kinds} if c.num_kinds else {})
    normal = layers.normal(c.stddev)
    found: family.Parts = {
        name: (layers.Embed(rows, c.embed_dim, embedding_init=normal), tokens) for name, rows in tables.items()
    }
    found["norm"] = (layers.LayerNorm(c.norm_eps), states)
    found |= {f"layer_{i}": (BertLayer(c), states) for i in range(c.num_layers)}
    return found | {"head": (ClassHead(c), states)}


def flops_per_token(
    config: BertConfig,
    seq_len: int,
    per_weight: float = 6.0,
    *,
    parts: Callable[[Any], family.Parts] = parts,
    seen: float | None = None,
) -> float:
    """Returns the floating-point operations of training on one token: `per_weight` for each weight of a layer, and 12 * embed_dim for each
    token that it sees in a layer, without recomputation: those of all layers are `seen`, or all of its text. The head multiplies one token
    of a text. `parts` makes the weights."""
    c, shapes = config, family.abstract_params(parts, config)
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(shapes[name])) for name in shapes}
    in_layers = sum(size for name, size in sizes.items() if name.startswith("layer_"))
    return per_weight * (in_layers + sizes["head"] / seq_len) + 12.0 * c.embed_dim * (
        c.num_layers * seq_len if seen is None else seen
    )
