"""Attention whose heads each have a sink (gpt-oss, arXiv:2508.10925, section 2.3). This module adds it to any kernel.

A sink is a learned score that takes a share of a query's attention, and gives nothing. With l the log-sum-exp of the
query's scores and s its head's sink, it is one more block of keys, whose values are 0:

    l' = log(exp(l) + exp(s))    y' = exp(l - l') y    ds = -sum exp(s - l') (dy' y')

so that any kernel that returns l computes it, and the gradients of q, k and v are those of a block (`attention_blocks`). Without sinks
it is attention by the same kernels, which JAX's own check of the local GPU does not keep from programs for absent ones. By XLA's kernel
not all scores are in memory at once, and none are kept for the backward pass.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, N head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.ops import attention, attention_blocks, residuals


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: attention.Kernel,
    *,
    sinks_H: jax.Array | None,
    is_causal: bool,
    mask: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Returns attention with sinks: float[B, T, H, N].

    Args:
      q_BTHN, k_BSKN, v_BSKN, is_causal, mask, scale, window, cap: see `attention.attend`. A window is of a causal call. A query that
        sees no key has 0.
      kernel: "cudnn", or another for XLA's, which holds the scores of a part of the queries in float32. With a cap XLA's runs.
      sinks_H: the heads' scores, not scaled; None for no sinks.
    """
    form = attention_blocks.BlockForm(
        "cudnn" if kernel == "cudnn" and not cap else "xla",
        q_BTHN.shape[3] ** -0.5 if scale is None else scale,
        is_causal,
        window if window < k_BSKN.shape[1] else 0,
        cap,
    )
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None] if mask.ndim == 2 else mask, (*q_BTHN.shape[:2], k_BSKN.shape[1]))
    # Where `of_heads` has scores.
    sinks = None if sinks_H is None else sinks_H.astype(jnp.float32)[None, :, None, None]

    def of_own(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks_1H11: jax.Array | None, seen: jax.Array | None
    ) -> jax.Array:
        return _attend(form, q, k, v, None if sinks_1H11 is None else sinks_1H11[0, :, 0, 0], seen)

    return attention.of_heads(of_own, q_BTHN.shape[2], k_BSKN.shape[2])(q_BTHN, k_BSKN, v_BSKN, sinks, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    form: attention_blocks.BlockForm, q: jax.Array, k: jax.Array, v: jax.Array, sinks_H: Any, seen: Any
) -> jax.Array:
    return _forward(form, q, k, v, sinks_H, seen)[0]


def _forward(
    form: attention_blocks.BlockForm,
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sinks_H: jax.Array | None,
    seen: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    block = attention_blocks.forward(form, q_BTHN, k_BSKN, v_BSKN, seen)
    if sinks_H is None:
        y_BTHN, l_BHT = attention_blocks.finished(block)
    else:
        sink_BHT = jnp.broadcast_to(sinks_H[:, None], block[1].shape)
        y_BTHN, l_BHT = attention_blocks.merged((jnp.zeros_like(block[0]), sink_BHT), block)
    y_BTHN, l_BHT = residuals.of_attention(y_BTHN.astype(q_BTHN.dtype)), residuals.of_attention(l_BHT)
    return y_BTHN, (q_BTHN, k_BSKN, v_BSKN, sinks_H, seen, y_BTHN, l_BHT)


def _backward(form: attention_blocks.BlockForm, kept: tuple, dy_BTHN: jax.Array) -> tuple:
    q_BTHN, k_BSKN, v_BSKN, sinks_H, seen, y_BTHN, l_BHT = kept
    grads = attention_blocks.backward(form, q_BTHN, k_BSKN, v_BSKN, seen, y_BTHN, l_BHT, dy_BTHN)
    own = (x.astype(like.dtype) for x, like in zip(grads, (q_BTHN, k_BSKN, v_BSKN)))
    if sinks_H is None:
        return (*own, None, None)
    dots_BTH = jnp.sum(dy_BTHN.astype(jnp.float32) * y_BTHN.astype(jnp.float32), axis=-1)
    share_BHT = jnp.exp(sinks_H[:, None] - l_BHT)
    d_sinks_H = -jnp.einsum("bht,bth->h", share_BHT, dots_BTH, precision="highest")
    return (*own, d_sinks_H, None)


_attend.defvjp(_forward, _backward)
