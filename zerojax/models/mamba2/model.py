"""Mamba-2 (arXiv:2405.21060), a decoder whose layers are recurrent. This module knows no meshes, stages or rematerialisation.

A layer has one residual branch (`mixer`). Weights have the compute dtype. Norms, decays and states are float32.

Shapes: B batch, T length, D embed, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, family, layers, scan_mixer
from zerojax.ops import attention as attention_lib
from zerojax.ops import context_attention
from zerojax.tree import PyTree


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """The model's shape.

    Attributes:
      scan: of a layer's branch.
      has_float32_residual: whether the residual stream is float32.
      max_seq_len: None, since states have one size for texts of any length.
      attention: not read, since no layer attends.
      way: that devices each hold a part of every row; None: a device has all tokens.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    scan: scan_mixer.Scan
    norm_eps: float = 1e-5
    has_float32_residual: bool = True
    tie_embeddings: bool = False
    max_seq_len: int | None = None
    attention: attention_lib.Kernel = "xla"
    way: context_attention.Way | None = None

    @property
    def num_heads(self) -> int:
        """Returns the heads of a layer's states."""
        return self.scan.heads

    @property
    def head_dim(self) -> int:
        """Returns the width of their values."""
        return self.scan.head_dim


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
        c = self.config
        branch = scan_mixer.Mixer(c.scan, c.embed_dim, c.norm_eps, 0.02 / c.num_layers**0.5, c.way, name="mixer")
        y_BTD, held = branch(layers.RMSNorm(c.norm_eps, name="norm")(x_BTD), mask_BT, past, segments_BT)
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
        labels_BT: jax.Array | None = None,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1], of whose shape the others are, or int32[B, T] with
        `labels_BT`.

        With `by_token` it returns the loss of each token, float32[B, T]; see `layers.next_loss`. Rows may be padded at their ends.
        """
        tokens_BT, labels_BT, ignored = layers.read_and_labels(tokens, labeled, labels_BT)
        x_BTD = self.hidden(tokens_BT, {"segments_BT": None if segments is None else segments[:, : tokens_BT.shape[1]]})
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
    arrays = (batch["tokens"], *map(batch.get, ("segments", "labeled", "labels")), by_token)
    return Mamba2(config).apply({"params": params}, *arrays, method="loss")


logits = functools.partial(decoding.logits, Mamba2)
start = functools.partial(decoding.start, Mamba2)
extend = functools.partial(decoding.extend, Mamba2)


def caches(config: Mamba2Config) -> PyTree:
    """Returns what every layer remembers of a text: its state, and the last inputs of its convolution."""
    return [config.scan.caches()] * config.num_layers


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
    return per_weight * used + 3.0 * c.num_layers * c.scan.flops()
