"""Modules that several families share. This module holds norms, a linear layer, activations, attention, an embedding and an output
projection.

Weights have the compute dtype. Norms compute in float32. Shapes: B batch, T length, S memory length, D embed, H heads, N head dim,
V vocabulary.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding
from zerojax.ops import attention, chunks, context_attention, divergences, embedding, losses, tokens

DROPOUT = "dropout"  # the collection of its random keys

# name of an activation in Hugging Face's configs -> the function
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    **dict.fromkeys(("gelu", "gelu_python"), functools.partial(nn.gelu, approximate=False)),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"), functools.partial(nn.gelu, approximate=True)
    ),
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),  # arXiv:1606.08415, section 2
    "relu": nn.relu,
    "relu2": lambda x: jnp.square(nn.relu(x)),
    "relu6": nn.relu6,
    **dict.fromkeys(("silu", "swish"), nn.silu),
    "mish": lambda x: x * jnp.tanh(nn.softplus(x)),  # arXiv:1908.08681, eq. 1
    "sigmoid": nn.sigmoid,
    "tanh": jnp.tanh,
}


class LayerNorm(nn.Module):
    """Subtracts the mean, divides by the standard deviation, scales and shifts, unless it has no bias (arXiv:1607.06450)."""

    eps: float
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        scale_D = self.param("scale", nn.initializers.ones, (x_BTD.shape[-1],))
        bias_D = self.param("bias", nn.initializers.zeros, (x_BTD.shape[-1],)) if self.use_bias else None
        x32_BTD = x_BTD.astype(jnp.float32)
        x32_BTD -= jnp.mean(x32_BTD, axis=-1, keepdims=True)
        norm_BTD = x32_BTD * jax.lax.rsqrt(jnp.mean(x32_BTD**2, axis=-1, keepdims=True) + self.eps)
        y_BTD = norm_BTD.astype(x_BTD.dtype) * scale_D
        return y_BTD if bias_D is None else y_BTD + bias_D


class RMSNorm(nn.Module):
    """Divides by the root mean square and scales (arXiv:1910.07467, eq. 4)."""

    eps: float  # is added to the mean square
    offset: float = 0.0  # is added to the scale, in float32
    dims: int = 1  # the last dims over which the mean is

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        shape = x_BTD.shape
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), shape[len(shape) - self.dims :])
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        flat = x_BTD.reshape(*shape[: len(shape) - self.dims], -1) if self.dims > 1 else x_BTD
        return rms_norm(flat, scale.reshape(-1), self.eps).astype(x_BTD.dtype).reshape(shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """Returns scale x / rms(x), with rms(x)^2 = mean(x^2) + eps. With D channels, n = x / rms(x), and dy the gradient of the result,

        dx = (scale dy - n mean(n scale dy)) / rms(x)        dscale = sum over tokens of n dy

    in float32, rounded once. JAX's own derivative rounds n and scale dy to 16 bits and adds dscale up in 16 bits, and reads n, which
    is one more array to write, where this one reads x.
    """
    return _rms_norm(x_BTD, scale_D, eps)[0]


def _rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns the result and 1 / rms(x)."""
    x32_BTD = x_BTD.astype(jnp.float32)
    inverse_BT1 = jax.lax.rsqrt(jnp.mean(x32_BTD**2, axis=-1, keepdims=True) + eps)
    return (x32_BTD * inverse_BT1).astype(x_BTD.dtype) * scale_D, inverse_BT1


@rms_norm.defjvp
def _rms_norm_jvp(eps: float, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    x_BTD, scale_D = primals
    y_BTD, inverse_BT1 = _rms_norm(x_BTD, scale_D, eps)
    x32_BTD, scale32_D, dx_BTD, dscale_D = (a.astype(jnp.float32) for a in (x_BTD, scale_D, *tangents))
    # The mean of x dx, not of n dx: it does not wait for that of x^2. Factors one by one, since a cube may be too small for float32.
    mean_BT1 = jnp.mean(x32_BTD * dx_BTD, axis=-1, keepdims=True) * inverse_BT1 * inverse_BT1 * inverse_BT1
    dnorm_BTD = dx_BTD * inverse_BT1 - x32_BTD * mean_BT1
    return y_BTD, (dnorm_BTD * scale32_D + x32_BTD * inverse_BT1 * dscale_D).astype(y_BTD.dtype)


def norm(kind: str, eps: float, offset: float, name: str | None = None) -> nn.Module:
    """Returns a norm: "rms", to whose scale an offset is added, "layer", or "unbiased", which is that without a bias."""
    return RMSNorm(eps, offset, name=name) if kind == "rms" else LayerNorm(eps, kind == "layer", name=name)


class Linear(nn.Module):
    """Contracts the last `contracted` dims of its input with a kernel, and adds a bias if it has one.

    `dot_general` replaces `jax.lax.dot_general`, as in `nn.Dense`.
    """

    features: tuple[int, ...]
    contracted: int = 1
    stddev: float = 0.02
    use_bias: bool = False
    dot_general: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept, contracted = x.shape[: x.ndim - self.contracted], x.shape[x.ndim - self.contracted :]
        kernel = self.param("kernel", nn.initializers.normal(self.stddev), (*contracted, *self.features))
        # A matmul of matrices: with more dims, XLA gives the kernel's gradient another layout than the kernel, and transposes it each step.
        x, matrix = x.reshape(*kept, -1), kernel.reshape(math.prod(contracted), -1)
        y = x @ matrix if self.dot_general is None else self.dot_general(x, matrix, (((x.ndim - 1,), (0,)), ((), ())))
        y = y.reshape(*kept, *self.features)
        return y + self.param("bias", nn.initializers.zeros, self.features) if self.use_bias else y


class FullyConnected(nn.Module):
    """down(activation(up(x))), with biases."""

    embed_dim: int
    mlp_dim: int
    activation: str
    stddev: float
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = Linear((self.mlp_dim,), stddev=self.stddev, use_bias=True, name="up")(x_BTD)
        down = Linear((self.embed_dim,), stddev=self.stddev, use_bias=True, name="down")
        return Dropout(self.dropout)(down(ACTIVATIONS[self.activation](h_BTF)))


class ShortConvolution(nn.Module):
    """A causal convolution of each channel (`ops.short_convolution`); its weight is [C, 1, W], as PyTorch has it. `way` is as of
    `tokens.convolve`."""

    window: int
    use_bias: bool = False
    way: context_attention.Way | None = None

    @nn.compact
    def __call__(self, *parts: jax.Array, **given: Any) -> tuple[list[jax.Array], Any]:
        """Returns the results of parts of the channels, each float[B, T, its channels], and the inputs that a later call needs."""
        bound, channels = self.window**-0.5, sum(part.shape[-1] for part in parts)
        drawn = lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)  # noqa: E731
        weight_C1W = self.param("weight", drawn, (channels, 1, self.window))
        bias_C = self.param("bias", nn.initializers.zeros, (channels,)) if self.use_bias else None
        return tokens.convolve(parts, weight_C1W[:, 0].T, bias_C, way=self.way, **given)


class MultiHeadAttention(nn.Module):
    """Attention of tokens to themselves or to an encoder's states. There are as many key heads as query heads.

    Attributes:
      embed_dim, num_heads, head_dim: the sizes.
      kernel: the implementation.
      is_causal: a token sees no later token.
      use_bias: whether the four projections have biases.
      scale: multiplies the scores; None: 1 / sqrt(head_dim).
      way: how devices attend that each hold a part of every sequence; None: a device has all tokens.
      stddevs: of the initial query, key and value, and output kernels.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    kernel: attention.Kernel
    is_causal: bool = False
    use_bias: bool = False
    scale: float | None = None
    way: context_attention.Way | None = None
    stddevs: tuple[float, float, float] = (0.02, 0.02, 0.02)

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        mask_BS: jax.Array | None = None,
        past: decoding.Past | None = None,
        keys: tuple[jax.Array, ...] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns float[B, T, D] and the keys and values.

        Args:
          x_BTD: the queries' states.
          memory_BSD: the states that are seen; None: `x_BTD`.
          bias: added to the scores; see `ops.attention.attend`.
          mask_BS: bool[B, S], False for states that no query sees.
          past: the tokens before these. Needs `is_causal`.
          keys: the keys and values of the memory, if an earlier call returned them.
        """
        heads, (q_stddev, kv_stddev, o_stddev) = (self.num_heads, self.head_dim), self.stddevs
        q_BTHN = Linear(heads, stddev=q_stddev, use_bias=self.use_bias, name="q")(x_BTD)
        if keys is None:
            seen_BSD = x_BTD if memory_BSD is None else memory_BSD
            k_BSHN = Linear(heads, stddev=kv_stddev, use_bias=self.use_bias, name="k")(seen_BSD)
            v_BSHN = Linear(heads, stddev=kv_stddev, use_bias=self.use_bias, name="v")(seen_BSD)
        else:
            k_BSHN, v_BSHN = keys
        with jax.named_scope("attention"):
            given: dict[str, Any] = {"way": self.way, "bias": bias, "scale": self.scale}
            if past is None:
                keys = k_BSHN, v_BSHN
                y_BTHN = tokens.attend(q_BTHN, *keys, self.kernel, is_causal=self.is_causal, mask=mask_BS, **given)
            else:
                y_BTHN, keys = decoding.attend(q_BTHN, k_BSHN, v_BSHN, self.kernel, past, **given)
        out = Linear((self.embed_dim,), contracted=2, stddev=o_stddev, use_bias=self.use_bias, name="o")
        return out(y_BTHN), keys


class Dropout(nn.Module):
    """Sets a share of its input to 0 and scales the rest to the same mean, where the call of the model has a random key for it."""

    rate: float  # the share, at least 0 and below 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.rate or not self.has_rng(DROPOUT):
            return x
        return nn.Dropout(self.rate, deterministic=False, rng_collection=DROPOUT)(x)


# The same initializer for the same deviation: modules with it are equal, so their shapes and programs are found again.
normal = functools.cache(nn.initializers.normal)


class Embed(nn.Embed):
    """Looks tokens up. The table's gradient is accumulated in float32."""

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        return embedding.embedding_lookup(self.embedding, tokens_BT)


class LogitsBias(nn.Module):
    """A bias of every token's logit."""

    vocab_size: int
    is_trained: bool = False

    @nn.compact
    def __call__(self) -> jax.Array:
        """Returns float[V]."""
        bias_V = self.param("bias", nn.initializers.zeros, (self.vocab_size,))
        return bias_V if self.is_trained else jax.lax.stop_gradient(bias_V)


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

    def loss(
        self,
        x_BTD: jax.Array,
        labels_BT: jax.Array,
        bias_V: jax.Array | None = None,
        *,
        ignored: int | None = None,
        cap: float = 0.0,
        by_token: bool | str = False,
    ) -> Any:
        """Returns the mean cross-entropy of the labels but `ignored` ones, without materialising all logits. For `bias_V`, `cap` and
        `by_token` see `next_loss`."""
        return _LOSSES[by_token](x_BTD, self.kernel, labels_BT, bias=bias_V, ignored=ignored, cap=cap)


BESIDE, DRAWS, SCORED = "beside", "draws", "scored"  # of `by_token`
_LOSSES: Mapping[bool | str, Callable[..., Any]] = {
    False: losses.one_pass_cross_entropy,
    True: losses.token_losses,
    BESIDE: losses.one_pass_and_terms,
    DRAWS: losses.token_draws,
    SCORED: divergences.Scored,
}


def own(module: nn.Module, parts: Mapping[str, tuple[nn.Module, Any]]) -> None:
    """Makes parts (`family.Parts`) a module's own in its `setup`, each by its name; `layer_0`, `layer_1` and so on are the list `layer`."""
    lists: dict[str, list[nn.Module]] = {}
    for name, (part, _) in parts.items():
        if series := re.fullmatch(r"(.+)_\d+", name):
            lists.setdefault(series[1], []).append(part.clone())
        else:
            setattr(module, name, part.clone())
    for name, found in lists.items():
        setattr(module, name, found)


def next_loss(
    head: nn.Module,
    x_BTD: jax.Array,
    labels_BT: jax.Array,
    ignored: int | None,
    bias_V: jax.Array | None = None,
    cap: float = 0.0,
    by_token: bool | str = False,
) -> Any:
    """Returns the mean cross-entropy of the labels but `ignored` ones: float32[].

    Args:
      head: a `Head`, or the `Embed` whose table is the output projection.
      x_BTD: the head's input.
      labels_BT, ignored: see `read_and_labels`.
      bias_V: of the logits.
      cap: bounds the logits before the bias (`ops.softcap`); 0 for no bound.
      by_token: returns the cross-entropy of each label instead, float32[B, T], 0 of ignored ones. BESIDE: both, in this order, with no
        gradient through the second. DRAWS: a token drawn after each, int32[B, T], and its cross-entropy; labels are bits that seed
        the draws. SCORED: what scores the tokens, a `divergences.Scored`; the head is then no block of its own.
    """
    with jax.named_scope("loss"):
        if isinstance(head, Head) and by_token == SCORED:
            return _LOSSES[by_token](x_BTD, head.kernel, labels_BT, bias=bias_V, ignored=ignored, cap=cap)
        if isinstance(head, Head):
            return head.loss(x_BTD, labels_BT, bias_V, ignored=ignored, cap=cap, by_token=by_token)
        return _LOSSES[by_token](x_BTD, head.embedding.T, labels_BT, bias=bias_V, ignored=ignored, cap=cap)


def next_logits(head: nn.Module, x_BTD: jax.Array) -> jax.Array:
    """Returns the scores of every next token, float32[B, T, V]; for `head` see `next_loss`."""
    return head(x_BTD) if isinstance(head, Head) else logits(x_BTD, head.embedding.T)


def read_and_labels(
    tokens: jax.Array, labeled: jax.Array | None, labels: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, int | None]:
    """Returns the tokens to read and their labels, int32[B, T] both, and the label that the loss ignores where `labeled` is 0.

    Args:
      tokens: int32[B, T + 1], each but the first a label; or int32[B, T], with `labels`.
      labeled: int32, 0 where a token is no label; of the shape of `labels` if there are some, else of `tokens`. None: all are labels,
        and None is ignored.
      labels: int32[B, T], of each token, where a device has a part of a sequence and not the token after it.
    """
    if labels is None:
        tokens, labels, labeled = tokens[:, :-1], tokens[:, 1:], None if labeled is None else labeled[:, 1:]
    if labeled is None:
        return tokens, labels, None
    return tokens, jnp.where(labeled > 0, labels, chunks.NO_LABEL), chunks.NO_LABEL


def logits(x_BTD: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    """Returns the scores of every token: float32[B, T, V]."""
    return jnp.dot(x_BTD, kernel_DV, preferred_element_type=jnp.float32)
