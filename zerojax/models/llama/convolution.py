"""A gated short convolution, as layers of LFM2 have it in place of attention. This module holds its weights and what it remembers.

With the three projections b, c and x of a token, the result is a projection of c conv(b x). The convolution is causal, of each channel
alone (`ops.short_convolution`).

Shapes: B batch, T length, D embed.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from zerojax.models import decoding, layers
from zerojax.ops import context_attention


@dataclasses.dataclass(frozen=True)
class Convolution:
    """The shape, and the layers.

    Attributes:
      width: the channels, those of the residual stream.
      window: tokens that the convolution sees.
      has_bias: whether the projections and the convolution have biases.
      pattern: for each layer, whether it has a convolution. Fewer than there are layers are repeated.
    """

    NAME: ClassVar[str] = "convolution"  # of the module in a layer

    width: int
    window: int = 3
    has_bias: bool = False
    pattern: tuple[bool, ...] = (True, True, False)

    def caches(self) -> tuple[decoding.Held]:
        """Returns what a layer remembers of a text: the last inputs of its convolution."""
        return (decoding.Held((self.window - 1, self.width), None, has_heads=False),)

    def flops(self) -> float:
        """Returns the operations of a layer's convolution for a token, in a forward pass."""
        return 2.0 * self.window * self.width

    def branch(self, embed_dim: int, norm_eps: float, stddev: float, way: context_attention.Way | None) -> nn.Module:
        """Returns a layer's branch; see `GatedConvolution`."""
        return GatedConvolution(self, embed_dim, stddev, way, name=self.NAME)


class GatedConvolution(nn.Module):
    """A layer's branch; `stddev` is of the initial output kernel, and `way` as of `tokens.recur`."""

    shape: Convolution
    embed_dim: int
    stddev: float
    way: context_attention.Way | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BT: jax.Array | None = None,
        past: decoding.Past | None = None,
        segments_BT: jax.Array | None = None,
        positions_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Returns the result, float[B, T, D], and what is remembered; for the arguments see `model.Layer`. Positions are not read."""
        s = self.shape
        held, counts_B, mask_BT = decoding.recurrent(past, mask_BT, x_BTD.shape[1])
        x_BTD = x_BTD if mask_BT is None else jnp.where(mask_BT[..., None], x_BTD, 0)
        made = layers.Linear((3, s.width), use_bias=s.has_bias, name="in_proj")(x_BTD)
        b_BTD, c_BTD, x_BTD = (made[:, :, number] for number in range(3))
        x_BTD = b_BTD * x_BTD
        if mask_BT is not None and s.has_bias:
            x_BTD = jnp.where(mask_BT[..., None], x_BTD, 0)
        convolve = layers.ShortConvolution(s.window, s.has_bias, self.way, name="conv")
        (x_BTD,), inputs = convolve(x_BTD, before_BWC=held[0], segments_BT=segments_BT, counts_B=counts_B)
        out = layers.Linear((self.embed_dim,), stddev=self.stddev, use_bias=s.has_bias, name="out_proj")
        return out(c_BTD * x_BTD), None if past is None else (inputs,)
