"""Modules that several families share. This module holds a norm, a linear layer, an embedding and an output projection.

Weights have the compute dtype. The norm computes in float32. Shapes: B batch, T length, D embed, V vocabulary.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.ops import embedding, losses


class RMSNorm(nn.Module):
    """Divides by the root mean square and scales (arXiv:1910.07467, eq. 4)."""

    eps: float

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scale_D = self.param("scale", nn.initializers.ones, (x_BTD.shape[-1],))
        x32_BTD = x_BTD.astype(jnp.float32)
        norm_BTD = x32_BTD * jax.lax.rsqrt(jnp.mean(x32_BTD**2, axis=-1, keepdims=True) + self.eps)
        return norm_BTD.astype(x_BTD.dtype) * scale_D


class Linear(nn.Module):
    """Contracts the last `contracted` dims of its input with a kernel, without a bias."""

    features: tuple[int, ...]
    contracted: int = 1
    stddev: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept, contracted = x.shape[: x.ndim - self.contracted], x.shape[x.ndim - self.contracted :]
        kernel = self.param("kernel", nn.initializers.normal(self.stddev), (*contracted, *self.features))
        # A matmul of matrices: with more dims, XLA gives the kernel's gradient another layout than the kernel, and transposes it each step.
        y = x.reshape(*kept, -1) @ kernel.reshape(math.prod(contracted), -1)
        return y.reshape(*kept, *self.features)


class Embed(nn.Embed):
    """Looks tokens up. The table's gradient is accumulated in float32."""

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return embedding.embedding_lookup(self.embedding, tokens_BT)


class Head(nn.Module):
    """The output projection, with a kernel float[D, V]."""

    embed_dim: int
    vocab_size: int
    stddev: float = 0.02

    def setup(self) -> None:
        shape = (self.embed_dim, self.vocab_size)
        self.kernel = self.param("kernel", nn.initializers.normal(self.stddev), shape)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return logits(x_BTD, self.kernel)

    def loss(self, x_BTD: jax.Array, labels_BT: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of the labels, without materialising all logits."""
        return losses.one_pass_cross_entropy(x_BTD, self.kernel, labels_BT)


def logits(x_BTD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    """Returns the scores of every token: float32[B, T, V]."""
    return jnp.dot(x_BTD, kernel_DV, preferred_element_type=jnp.float32)
