"""Calls cuDNN's attention kernels as JAX does. This module knows their backend config.

It gives the log-sum-exp of the scores in float32, for attention that is added up block by block. And with it two equal calls of a
program run where XLA is told to be deterministic: JAX's own calls fail there (jax 0.11.2, "raw_hash_map::at").

Shapes: B batch, T queries, S keys, H query heads, K key and value heads, N head dim.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import xla_flags
from zerojax.ops import residuals

_MASKED = {"bfloat16": -float(2 << 40), "float16": -float(2 << 14)}  # what JAX gives cuDNN for a masked score
_MATMULS = {  # (contracted dims of left and right, batch dims of left and right) of attention of BTHN arrays
    "bmm1": (3, 3, (0, 2), (0, 2)),
    "bmm2": (3, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    seen: jax.Array | None,
    scale: float,
    is_causal: bool,
    window: int,
) -> jax.Array:
    """Returns attention, with cuDNN's gradients: [B, T, H, N] in the dtype of q, bfloat16 or float16.

    Args:
      q_BTHN, k_BSKN, v_BSKN: queries, keys and values.
      seen: bool[B or 1, T, S], whether a query sees a key; None: all do. Where it is given T and S are even.
      scale: multiplies the scores.
      is_causal: query t sees keys 0 to t.
      window: if causal, query t sees no keys before t - window + 1; 0 for no limit.
    """
    return _attend_forward(q_BTHN, k_BSKN, v_BSKN, seen, scale, is_causal, window)[0]


def _attend_forward(q, k, v, seen, scale, is_causal, window):  # type: ignore[no-untyped-def]
    y, l = (residuals.of_attention(x) for x in forward(q, k, v, seen, scale=scale, is_causal=is_causal, window=window))
    return y, (q, k, v, seen, y, l)


def _attend_backward(scale, is_causal, window, kept, dy):  # type: ignore[no-untyped-def]
    q, k, v, seen, y, l = kept
    return *backward(q, k, v, l, dy, y, seen, scale=scale, is_causal=is_causal, window=window), None


attend.defvjp(_attend_forward, _attend_backward)


def forward(
    q_BTHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, seen: jax.Array | None, **form: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns attention, [B, T, H, N], and the log-sum-exp of its scores, float32[B, H, T]. The form is that of `attend`."""
    return _call("Softmax", seen, (q_BTHN, k_BSKN, v_BSKN), **form)


def backward(
    q_BTHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    l_BHT: jax.Array,
    dy_BTHN: jax.Array,
    y_BTHN: jax.Array,
    seen: jax.Array | None,
    **form: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of q, k and v in their dtype, from `forward`'s results and the gradient of the first."""
    return _call("SoftmaxBackward", seen, (q_BTHN, k_BSKN, v_BSKN, l_BHT, dy_BTHN, y_BTHN), **form)


def _call(
    name: str, seen: jax.Array | None, arrays: tuple[jax.Array, ...], *, scale: float, is_causal: bool, window: int
) -> Any:
    """Returns the outputs of cuDNN's kernel, BTHN arrays and log-sum-exps in float32, as JAX lowers `jax.nn.dot_product_attention`."""
    q, k = arrays[:2]
    is_backward = name.endswith("Backward")
    dims = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if seen is not None:
        masked = jnp.where(seen[:, None], 0, _MASKED[q.dtype.name]).astype(q.dtype)
        arrays = (*arrays[:5], masked, *arrays[5:])
    matmuls = {key: dims for key, dims in _MATMULS.items() if is_backward == ("grad" in key)}
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[q.dtype.name],
            "dimensions": [str(size) for size in dims],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if is_causal else "NO_MASK",
        **{
            f"{key}_dot_dimension_numbers": {
                "lhs_contracting_dimensions": [str(left)],
                "rhs_contracting_dimensions": [str(right)],
                "lhs_batch_dimensions": [str(dim) for dim in left_batch],
                "rhs_batch_dimensions": [str(dim) for dim in right_batch],
            }
            for key, (left, right, left_batch, right_batch) in matmuls.items()
        },
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    if xla_flags.is_deterministic():
        # XLA writes this itself, but only into the first of several equal calls; the others then find no kernel when they run.
        config["force_deterministic"] = True
    heads_first = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in arrays[:3]]
    results = heads_first if is_backward else [heads_first[0], jax.ShapeDtypeStruct(dims[:3], jnp.float32)]
    call = jax.ffi.ffi_call(
        f"__cudnn$fmha{'ScaleBias' if seen is not None else ''}{name}",
        (*results, jax.ShapeDtypeStruct((0,), jnp.uint8)),  # the last is cuDNN's workspace, which XLA sizes
        output_layouts=[*((0, 2, 1, 3) if len(like.shape) == 4 else None for like in results), None],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}),
    )
    *outputs, _ = call(*arrays)
    return tuple(jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for x in outputs)
