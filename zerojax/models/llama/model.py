"""Llama, a decoder-only language model. This module knows no meshes, stages or rematerialisation.

It has RMSNorm, rotary positions, grouped-query attention and SwiGLU. Layers are a plain unrolled list of named modules, and the train
step decides where weights are gathered. Weights have the compute dtype. Norms and softmax compute in float32.

Shapes: B batch, T length, D embed, H query heads, K key and value heads, N head dim, F mlp, V vocabulary.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import family, layers
from zerojax.ops import attention as attention_lib
from zerojax.ops import losses


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
    attention: attention_lib.Kernel = "xla"


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        q_BTHN = layers.Linear((c.num_heads, c.head_dim), name="q")(x_BTD)
        k_BTKN = layers.Linear((c.num_kv_heads, c.head_dim), name="k")(x_BTD)
        v_BTKN = layers.Linear((c.num_kv_heads, c.head_dim), name="v")(x_BTD)
        q_BTHN, k_BTKN = rotate(q_BTHN, c.rope_theta), rotate(k_BTKN, c.rope_theta)
        with jax.named_scope("attention"):
            y_BTHN = attention_lib.attend(q_BTHN, k_BTKN, v_BTKN, c.attention, is_causal=True)
        return layers.Linear((c.embed_dim,), contracted=2, stddev=_residual_stddev(c), name="o")(y_BTHN)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        gate_BTF = layers.Linear((c.mlp_dim,), name="gate")(x_BTD)
        up_BTF = layers.Linear((c.mlp_dim,), name="up")(x_BTD)
        return layers.Linear((c.embed_dim,), stddev=_residual_stddev(c), name="down")(nn.silu(gate_BTF) * up_BTF)


class Layer(nn.Module):
    """One residual attention and one residual MLP."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        x_BTD = x_BTD + Attention(c, name="attention")(layers.RMSNorm(c.norm_eps, name="attention_norm")(x_BTD))
        return x_BTD + MLP(c, name="mlp")(layers.RMSNorm(c.norm_eps, name="mlp_norm")(x_BTD))


class Llama(nn.Module):
    """The full model. Its weights are under embed, layer_0, layer_1, ..., norm and head."""

    config: LlamaConfig

    def setup(self) -> None:
        modules = {name: module.clone() for name, (module, _) in parts(self.config).items()}
        self.embed, self.norm = modules["embed"], modules["norm"]
        self.layer = [modules[f"layer_{i}"] for i in range(self.config.num_layers)]
        if not self.config.tie_embeddings:
            self.head = modules["head"]

    def hidden(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the normalised hidden states, the head's input: float[B, T, D]."""
        x_BTD = self.embed(tokens_BT)
        for layer in self.layer:
            x_BTD = layer(x_BTD)
        return self.norm(x_BTD)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits: float32[B, T, V] from tokens int32[B, T]."""
        x_BTD = self.hidden(tokens_BT)
        return layers.logits(x_BTD, self.embed.embedding.T) if self.config.tie_embeddings else self.head(x_BTD)

    def loss(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns the mean next-token loss: float32[] from tokens int32[B, T + 1]."""
        x_BTD, labels_BT = self.hidden(tokens_BS[:, :-1]), tokens_BS[:, 1:]
        with jax.named_scope("loss"):
            if self.config.tie_embeddings:
                return losses.one_pass_cross_entropy(x_BTD, self.embed.embedding.T, labels_BT)
            return self.head.loss(x_BTD, labels_BT)


def parts(config: LlamaConfig) -> family.Parts:
    """Returns the modules that make up the weight tree, each with the inputs to initialise it with."""
    c = config
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
    states = (jax.ShapeDtypeStruct((1, 1, c.embed_dim), jnp.float32),)
    embed = layers.Embed(c.vocab_size, c.embed_dim, embedding_init=nn.initializers.normal(0.02))
    found: family.Parts = {"embed": (embed, tokens)}
    found |= {f"layer_{i}": (Layer(c), states) for i in range(c.num_layers)}
    found["norm"] = (layers.RMSNorm(c.norm_eps), states)
    return found if c.tie_embeddings else found | {"head": (layers.Head(c.embed_dim, c.vocab_size), states)}


def rotate(x_BTHN: jax.Array, theta: float) -> jax.Array:
    """Rotates pairs (x_i, x_{i + N/2}) by position * theta^(-2i/N) (RoPE, arXiv:2104.09864; the pairing is Hugging Face's)."""
    length, half = x_BTHN.shape[1], x_BTHN.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_TN = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    sin, cos = jnp.sin(angle_TN)[:, None, :], jnp.cos(angle_TN)[:, None, :]
    first, second = jnp.split(x_BTHN.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHN.dtype)


def count_params(config: LlamaConfig) -> int:
    """Returns the number of weights."""
    return family.count_params(parts, config)


def flops_per_token(config: LlamaConfig, seq_len: int) -> float:
    """Returns the floating-point operations of training on one token: 6 per weight outside the embedding table, and
    6 * layers * heads * head_dim * seq_len for causal attention (only its lower half, without recomputation)."""
    c = config
    used = count_params(c) - (0 if c.tie_embeddings else c.vocab_size * c.embed_dim)
    return 6.0 * used + 6.0 * c.num_layers * c.num_heads * c.head_dim * seq_len


def _residual_stddev(config: LlamaConfig) -> float:
    # Each layer adds two terms to the residual stream. This keeps the final variance near that of one term (GPT-2).
    return 0.02 / (2 * config.num_layers) ** 0.5
