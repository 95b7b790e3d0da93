"""Chooses which residuals the backward pass keeps. This module chooses by primitive, so that models need no `checkpoint_name`. Ours name
some arrays that "dots" keeps in place of matmuls (`ops.residuals`).

Gathered weights are never kept, nor are values derived from a weight by a cast, a transpose or a slice.

A policy sees a primitive and its parameters, but not its module; `marks` tells it of modules, and keeps arrays in host memory. The results
of matmuls in fp8 and of experts' matmuls have a name (`residuals.PRODUCT`): the former are scaled after the matmul, and what is kept is the
scaled result; the latter are of kernels that the policy cannot see, since each platform has its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from zerojax import traces
from zerojax.ops import fp8, residuals

# Their results may be a gathered weight, moved or cast, and are cheap to recompute.
_MAY_BE_WEIGHTS = traces.MOVES | frozenset(
    {traces.CAST, "sharding_constraint", "custom_vjp_call", "optimization_barrier", "all_gather"}
)

Policy = Callable[..., bool] | None  # of `jax.checkpoint`; None for no rematerialisation


def policy(name: str, *, in_place: bool = True, moves: bool = True) -> Policy:
    """Returns the policy of a name in REMAT, or None where everything is kept.

    Args:
      name: of the policy.
      in_place: "dots" keeps arrays named `residuals.IN_PLACE`. False where `recompute` or `offload` name modules whose results are not
        kept on the device: arrays kept in place of these results would take their memory.
      moves: whether any weight is gathered; gathered weights are never kept.
    """
    if name == "none" and not moves:
        return None
    return REMAT[name] if in_place or name != "dots" else _keep_only_matmuls


class NotKept(tuple):
    """The precision of a matmul's two operands; "dots" does not keep a matmul with a precision of this class (`marks.not_kept`)."""


def _is_complex(primitive: jex.Primitive, operands: tuple[Any, ...]) -> bool:
    """Returns whether a result may be complex. JAX rounds what it keeps by `reduce_precision`, which refuses complex numbers (2026)."""
    are = (jnp.issubdtype(getattr(operand, "dtype", bool), jnp.complexfloating) for operand in operands)
    return primitive.name in ("complex", "fft") or any(are)


def _keep_all_but_weights(primitive: jex.Primitive, *operands: Any, **params: Any) -> bool:
    return primitive.name not in _MAY_BE_WEIGHTS and not _is_complex(primitive, operands)


def _keep_matmuls(primitive: jex.Primitive, *operands: Any, **params: Any) -> bool:
    is_in_place = primitive.name == "name" and params["name"] == residuals.IN_PLACE
    return is_in_place or _keep_only_matmuls(primitive, *operands, **params)


def _keep_only_matmuls(primitive: jex.Primitive, *operands: Any, **params: Any) -> bool:
    # Attention's forward, cuDNN's or a Pallas kernel, also returns the softmax statistics, so the backward pass does not run it again.
    name = primitive.name
    if name == "name":
        return params["name"] in (residuals.PRODUCT, fp8.SCALE, residuals.ATTENTION)
    if name in traces.MATMULS and operands[0].dtype.itemsize == 1 and jnp.issubdtype(operands[0].dtype, jnp.floating):
        return False  # its scaled result has a name
    is_matmul = name in traces.MATMULS and not isinstance(params.get("precision"), NotKept)
    return (is_matmul and not _is_complex(primitive, operands)) or _keep_attention(primitive)


def _keep_attention(primitive: jex.Primitive, *_: Any, **params: Any) -> bool:
    name = params["name"] if primitive.name == "name" else primitive.name
    return name in ("pallas_call", residuals.ATTENTION) or "dot_product_attention_fwd" in name


# The rest is recomputed.
REMAT: dict[str, Callable[..., bool]] = {
    "none": _keep_all_but_weights,
    "dots": _keep_matmuls,
    "attention": _keep_attention,
    "full": jax.checkpoint_policies.nothing_saveable,
}
