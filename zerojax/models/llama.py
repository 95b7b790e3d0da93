"""A decoder-only language model in Llama's form. This module knows nothing of meshes, stages or rematerialisation.

RMSNorm, rotary positions, grouped-query attention, SwiGLU: layers are a plain unrolled list of named modules, and whoever trains it
decides where weights are gathered. Weights come in the dtype of the arithmetic; norms and softmax run in float32.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.ops import embedding, losses


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The model's shape (Llama 3, arXiv:2407.21783, table 3)."""

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
    attention: Literal["xla", "cudnn"] = "xla"  # "cudnn" never materialises the scores


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
        # As matrices: of more dims, XLA lays out the kernel's gradient in another order than the kernel, and turns its state each step.
        y = x.reshape(*kept, -1) @ kernel.reshape(math.prod(contracted), -1)
        return y.reshape(*kept, *self.features)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        q_BTHN = Linear((c.num_heads, c.head_dim), name="q")(x_BTD)
        k_BTKN = Linear((c.num_kv_heads, c.head_dim), name="k")(x_BTD)
        v_BTKN = Linear((c.num_kv_heads, c.head_dim), name="v")(x_BTD)
        q_BTHN, k_BTKN = rotate(q_BTHN, c.rope_theta), rotate(k_BTKN, c.rope_theta)
        with jax.named_scope("attention"):
            y_BTHN = _attend(q_BTHN, k_BTKN, v_BTKN, c.attention)
        return Linear((c.embed_dim,), contracted=2, stddev=_residual_stddev(c), name="o")(y_BTHN)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        gate_BTF = Linear((c.mlp_dim,), name="gate")(x_BTD)
        up_BTF = Linear((c.mlp_dim,), name="up")(x_BTD)
        return Linear((c.embed_dim,), stddev=_residual_stddev(c), name="down")(nn.silu(gate_BTF) * up_BTF)


class Layer(nn.Module):
    """One residual attention and one residual MLP."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        x_BTD = x_BTD + Attention(c, name="attention")(RMSNorm(c.norm_eps, name="attention_norm")(x_BTD))
        return x_BTD + MLP(c, name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x_BTD))


class Embed(nn.Embed):
    """Looks tokens up; the table's gradient adds up in float32."""

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return embedding.embedding_lookup(self.embedding, tokens_BT)


class Head(nn.Module):
    """The output projection; its kernel is float[D, V]."""

    config: LlamaConfig

    def setup(self) -> None:
        shape = (self.config.embed_dim, self.config.vocab_size)
        self.kernel = self.param("kernel", nn.initializers.normal(0.02), shape)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return _logits(x_BTD, self.kernel)

    def loss(self, x_BTD: jax.Array, labels_BT: jax.Array) -> jax.Array:
        """Returns the mean loss of next tokens, without the logits at once."""
        return losses.one_pass_cross_entropy(x_BTD, self.kernel, labels_BT)


class Llama(nn.Module):
    """The whole model; weights lie under embed, layer_0, layer_1, ..., norm and head."""

    config: LlamaConfig

    def setup(self) -> None:
        modules = {name: module.clone() for name, (module, _) in parts(self.config).items()}
        self.embed, self.norm = modules["embed"], modules["norm"]
        self.layer = [modules[f"layer_{i}"] for i in range(self.config.num_layers)]
        if not self.config.tie_embeddings:
            self.head = modules["head"]

    def hidden(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the normalised states that the head reads: float[B, T, D]."""
        x_BTD = self.embed(tokens_BT)
        for layer in self.layer:
            x_BTD = layer(x_BTD)
        return self.norm(x_BTD)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T]."""
        x_BTD = self.hidden(tokens_BT)
        return _logits(x_BTD, self.embed.embedding.T) if self.config.tie_embeddings else self.head(x_BTD)

    def loss(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns the mean loss of each token's next one: float32[] from tokens int32[B, T + 1]."""
        x_BTD, labels_BT = self.hidden(tokens_BS[:, :-1]), tokens_BS[:, 1:]
        with jax.named_scope("loss"):
            if self.config.tie_embeddings:
                return losses.one_pass_cross_entropy(x_BTD, self.embed.embedding.T, labels_BT)
            return self.head.loss(x_BTD, labels_BT)


def parts(config: LlamaConfig) -> dict[str, tuple[nn.Module, jax.ShapeDtypeStruct]]:
    """Returns the modules that make up the weight tree, each with an input to initialise it on.

    Equal modules initialise alike, so one compiled function serves every layer, where one for the whole tree takes minutes.
    """
    c = config
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    states = jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32)
    embed = Embed(c.vocab_size, c.embed_dim, embedding_init=nn.initializers.normal(0.02))
    found: dict[str, tuple[nn.Module, jax.ShapeDtypeStruct]] = {"embed": (embed, tokens)}
    found |= {f"layer_{i}": (Layer(c), states) for i in range(c.num_layers)}
    found["norm"] = (RMSNorm(c.norm_eps), states)
    return found if c.tie_embeddings else found | {"head": (Head(c), states)}


def rotate(x_BTHN: jax.Array, theta: float) -> jax.Array:
    """Turns pairs (x_i, x_{i + N/2}) by position * theta^(-2i/N) (RoPE, arXiv:2104.09864; halves as Hugging Face lays them)."""
    length, half = x_BTHN.shape[1], x_BTHN.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_TN = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    sin, cos = jnp.sin(angle_TN)[:, None, :], jnp.cos(angle_TN)[:, None, :]
    first, second = jnp.split(x_BTHN.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHN.dtype)


def count_params(config: LlamaConfig) -> int:
    """Returns the number of weights."""
    c = config
    attention = c.embed_dim * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
    layer = attention + 3 * c.embed_dim * c.mlp_dim + 2 * c.embed_dim
    tables = (1 if c.tie_embeddings else 2) * c.vocab_size * c.embed_dim
    return c.num_layers * layer + tables + c.embed_dim


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Returns the floating-point operations of training on one token: 6 a weight outside the embedding table, and
    6 * layers * heads * head_dim * seq_len for causal attention (its lower half once; nothing recomputed)."""
    c = config
    used = count_params(c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    return 6.0 * used + 6.0 * c.num_layers * c.num_heads * c.head_dim * seq_len


def _attend(q_BTHN: jax.Array, k_BTKN: jax.Array, v_BTKN: jax.Array, attention: Literal["xla", "cudnn"]) -> jax.Array:
    """Returns causal attention's sums of values: float[B, T, H, N]."""
    # jax asks for products of float16 in a way that its CPU backend refuses.
    dtype = jnp.float32 if attention == "xla" and q_BTHN.dtype == jnp.float16 else q_BTHN.dtype
    q_BTHN, k_BTKN, v_BTKN, given = q_BTHN.astype(dtype), k_BTKN.astype(dtype), v_BTKN.astype(dtype), q_BTHN.dtype
    y_BTHN = jax.nn.dot_product_attention(q_BTHN, k_BTKN, v_BTKN, is_causal=True, implementation=attention)
    return y_BTHN.astype(given)


def _logits(x_BTD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    return jnp.dot(x_BTD, kernel_DV, preferred_element_type=jnp.float32)


def _residual_stddev(config: LlamaConfig) -> float:
    # Each layer adds two terms to the residual stream; this keeps its variance at the end near that of one (GPT-2).
    return 0.02 / (2 * config.num_layers) ** 0.5
