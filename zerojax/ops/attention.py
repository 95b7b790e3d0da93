"""Attention, and the choice of its kernel. This module calls XLA's or cuDNN's kernel.

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
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    window: int = 0,
) -> jax.Array:
    """Returns softmax(scale * q k^T + bias) v: float[B, T, H, N].

    Args:
      q_BTHN, k_BSKN, v_BSKN: queries, keys and values. H is a multiple of K, and H / K adjacent query heads share keys and values.
      kernel: the implementation.
      is_causal: a query sees no later key.
      bias: float[H, T, S] or float[B, H, T, S], added to the scores; None for no bias.
      mask: bool[B, S], False for keys that no query sees, or bool[B, T, S], False for keys that a query does not see; None for no mask.
      scale: multiplies the scores; None: 1 / sqrt(N).
      window: a query sees its own token and the `window` - 1 before it; 0 for no limit.
    """
    # JAX's CPU backend does not support the float16 matmuls of this function.
    dtype = jnp.float32 if kernel == "xla" and q_BTHN.dtype == jnp.float16 else q_BTHN.dtype
    out_dtype = q_BTHN.dtype
    is_limited = 0 < window < k_BSKN.shape[1]
    q_BTHN, k_BSKN, v_BSKN = q_BTHN.astype(dtype), k_BSKN.astype(dtype), v_BSKN.astype(dtype)
    y_BTHN = jax.nn.dot_product_attention(
        q_BTHN,
        k_BSKN,
        v_BSKN,
        bias=bias[None] if bias is not None and bias.ndim == 3 else bias,
        mask=mask if mask is None else mask[:, None, None, :] if mask.ndim == 2 else mask[:, None],
        scale=scale,
        is_causal=is_causal,
        local_window_size=(window - 1, 0) if is_limited else None,
        implementation=kernel,
    )
    return y_BTHN.astype(out_dtype)


def choose_kernel(wanted: str, known: Sequence[str], platform: str, compute_dtype: Any) -> Kernel:
    """Returns the kernel to run. "auto" takes cuDNN's on GPUs in 16-bit arithmetic, and XLA's elsewhere.

    Args:
      wanted: "auto", or a kernel.
      known: the kernels that the model family supports.
      platform: of the devices, as returned by `mesh.platform`.
      compute_dtype: the dtype of the matmuls.

    Raises:
      UserError: the wanted kernel cannot run.
    """
    if wanted not in ("auto", *known):
        raise UserError(
            f"config.model.attention: this preset supports only {' and '.join(known)}, and the config sets {wanted}; "
            f"set --config.model.attention=auto"
        )
    can_cudnn = "cudnn" in known and platform == "gpu" and compute_dtype != jnp.float32
    if wanted == "cudnn" and not can_cudnn:
        raise UserError(
            f"config.model.attention: cudnn needs an NVIDIA GPU and 16-bit arithmetic; this run has {platform} and "
            f"{jnp.dtype(compute_dtype).name}; set --config.model.attention=xla"
        )
    return "cudnn" if wanted == "cudnn" or (wanted == "auto" and can_cudnn) else "xla"
