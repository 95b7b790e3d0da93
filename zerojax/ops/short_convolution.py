"""A causal convolution of few tokens, each channel with weights of its own. This module computes it for texts, also where they go on.

    y_t = sum_w kernel_w x_{t - W + 1 + w}

Shapes: B batch, T tokens, C channels, W tokens of the window.
"""

import jax
import jax.numpy as jnp


def convolve(
    x_BTC: jax.Array,
    kernel_WC: jax.Array,
    before_BWC: jax.Array | None = None,
    *,
    segments_BT: jax.Array | None = None,
    counts_B: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the results, float[B, T, C], and the last W - 1 of all inputs, which the next call needs: float[B, W - 1, C].

    Args:
      x_BTC: the tokens.
      kernel_WC: the weights; the last one is the token's own.
      before_BWC: the last W - 1 inputs before these tokens, of the same text; None: 0, as before a text.
      segments_BT: the number of the text that a token belongs to, where a row holds several: it sees no other. Without inputs before them.
      counts_B: int32[B], the tokens of each row that are text, at its beginning; None: all.
    """
    (batch, length, channels), past = x_BTC.shape, len(kernel_WC) - 1
    if before_BWC is None:
        before_BWC = jnp.zeros((batch, past, channels), x_BTC.dtype)
    all_BSC = jnp.concatenate([before_BWC.astype(x_BTC.dtype), x_BTC], axis=1)
    y_BTC = jnp.zeros(x_BTC.shape, jnp.float32)
    for shift, kernel_C in enumerate(kernel_WC.astype(jnp.float32)):
        seen_BTC = all_BSC[:, shift : shift + length].astype(jnp.float32)
        if segments_BT is not None and shift < past:
            distance = past - shift
            numbers_BT = jnp.pad(segments_BT, ((0, 0), (distance, 0)), mode="edge")[:, :length]
            seen_BTC = jnp.where((numbers_BT == segments_BT)[..., None], seen_BTC, 0)
        y_BTC += seen_BTC * kernel_C[None, None]
    if counts_B is None:
        return y_BTC.astype(x_BTC.dtype), all_BSC[:, length:]
    at_BW = counts_B[:, None] + jnp.arange(past)
    return y_BTC.astype(x_BTC.dtype), jnp.take_along_axis(all_BSC, at_BW[..., None], axis=1)
