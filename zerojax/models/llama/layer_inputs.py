"""Inputs per layer: beside its embedding a token has a small one for each layer (Gemma 3n and 4). This module makes them, and adds one in
its layer.

With the embedding x of a token, its row e of a table of small embeddings, and a projection p of x, each of all layers, layer i has

    s[i] = (norm(p[i] / sqrt(D)) + sqrt(P) e[i]) / sqrt(2)

and adds norm(out(activation(gate(y)) s[i])) to its result y.

Shapes: B batch, T length, D embed, L layers, P width of an input.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import layers


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The shape.

    Attributes:
      width: of the input of a layer.
      vocab_size: the rows of the table. Tokens beyond have its first row.
    """

    width: int
    vocab_size: int


class LayerInputs(nn.Module):
    """The inputs of all layers. Its weights are `embed`, `project` and `norm`."""

    shape: Inputs
    num_layers: int
    norm_eps: float

    @nn.compact
    def __call__(self, x_BTD: jax.Array, tokens_BT: jax.Array | None = None) -> jax.Array:
        """Returns float[B, T, L, P] of tokens, and their embeddings as the first layer reads them."""
        (batch, length, dim), s, dtype = x_BTD.shape, self.shape, x_BTD.dtype
        tokens_BT = jnp.zeros((batch, length), jnp.int32) if tokens_BT is None else tokens_BT
        tokens_BT = jnp.where(tokens_BT < s.vocab_size, tokens_BT, 0)
        table = layers.Embed(s.vocab_size, self.num_layers * s.width, embedding_init=layers.normal(0.02), name="embed")
        projected = layers.Linear((self.num_layers, s.width), name="project")(x_BTD) * jnp.asarray(dim**-0.5, dtype)
        normed_BTLP = layers.RMSNorm(self.norm_eps, name="norm")(projected)
        own_BTLP = table(tokens_BT).reshape(projected.shape) * jnp.asarray(s.width**0.5, dtype)
        return (normed_BTLP + own_BTLP) * jnp.asarray(2**-0.5, dtype)


class InputBranch(nn.Module):
    """What a layer adds of its input. Its weights are `to_input`, `from_input` and `norm`."""

    width: int
    activation: str
    norm_eps: float
    stddev: float

    @nn.compact
    def __call__(self, y_BTD: jax.Array, input_BTP: jax.Array) -> jax.Array:
        """Returns float[B, T, D]."""
        gated_BTP = (
            layers.ACTIVATIONS[self.activation](layers.Linear((self.width,), name="to_input")(y_BTD)) * input_BTP
        )
        out_BTD = layers.Linear((y_BTD.shape[-1],), stddev=self.stddev, name="from_input")(gated_BTP)
        return layers.RMSNorm(self.norm_eps, name="norm")(out_BTD)
