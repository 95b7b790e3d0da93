"""Attention, and the choice of its kernel. This module calls XLA's or cuDNN's.

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, N head dim.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from zerojax.errors import UserError

Kernel = Literal["xla", "cudnn"]  # "cudnn" never materialises the scores


def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    kernel: Kernel,
    *,
    is_causal: bool,
    bias_HTS: jax.Array | None = None,
    mask_BS: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(scale * q k^T + bias) v: float[B, T, H, N].

    Args:
      q_BTHN, k_BSKN, v_BSKN: queries, keys and values; H is a multiple of K, and heads share keys and values in runs of H / K.
      kernel: what computes it.
      is_causal: a query sees no key behind it.
      bias_HTS: float[H, T, S], added to the scores; None for none.
      mask_BS: bool[B, S], False for keys that no query sees; None for none.
      scale: multiplies the scores; None: 1 / sqrt(N).
    """
    # jax asks for products of float16 in a way that its CPU backend refuses.
    dtype = jnp.float32 if kernel == "xla" and q_BTHN.dtype == jnp.float16 else q_BTHN.dtype
    q_BTHN, k_BSKN, v_BSKN, given = q_BTHN.astype(dtype), k_BSKN.astype(dtype), v_BSKN.astype(dtype), q_BTHN.dtype
    y_BTHN = jax.nn.dot_product_attention(
        q_BTHN,
        k_BSKN,
        v_BSKN,
        bias=None if bias_HTS is None else bias_HTS[None],
        mask=None if mask_BS is None else mask_BS[:, None, None, :],
        scale=scale,
        is_causal=is_causal,
        implementation=kernel,
    )
    return y_BTHN.astype(given)


def choose_kernel(wanted: str, known: Sequence[str], platform: str, compute_dtype: Any) -> Kernel:
    """Returns the kernel to run: of "auto", cuDNN's on GPUs for 16-bit floats, and XLA's elsewhere.

    Args:
      wanted: "auto", or a kernel.
      known: the kernels that the model family can run.
      platform: of the devices, as `mesh.platform` names it.
      compute_dtype: the dtype of the arithmetic.

    Raises:
      UserError: the wanted kernel cannot run.
    """
    if wanted not in ("auto", *known):
        raise UserError(
            f"config.model.attention: this preset runs {' and '.join(known)} alone, and the config says {wanted}; "
            f"set --config.model.attention=auto"
        )
    can_cudnn = "cudnn" in known and platform == "gpu" and compute_dtype != jnp.float32
    if wanted == "cudnn" and not can_cudnn:
        raise UserError(
            f"config.model.attention: cudnn needs an NVIDIA GPU and 16-bit arithmetic; this run has {platform} and "
            f"{jnp.dtype(compute_dtype).name}; set --config.model.attention=xla"
        )
    return "cudnn" if wanted == "cudnn" or (wanted == "auto" and can_cudnn) else "xla"
