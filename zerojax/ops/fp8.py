"""Matmuls of 8-bit floats. This module multiplies 16- or 32-bit arrays in fp8 and differentiates the product in fp8.

The operands of a forward matmul are cast to e4m3, and gradients to e5m2, which has the wider range (arXiv:2209.05433). With s(a) the scale
of an array a,

    y = x w      ~  q(x s(x)) q(w s(w)) / (s(x) s(w))
    dx = dy w^T  ~  q(dy s(dy)) q(w s(w))^T / (s(dy) s(w))
    dw = x^T dy  ~  q(x s(x))^T q(dy s(dy)) / (s(x) s(dy))

    s(a) = 2^floor(log2(top / amax)),   top = 448 in e4m3 and 57344 in e5m2

A scale is a power of two, so scaling rounds nothing: an array that was cast with its scale is cast again without a change. `amax` is the
largest finite magnitude of the array ("tensorwise"), or of each row or column along the contracted dim ("rowwise", which keeps more of
small rows next to large ones and casts each array twice). "delayed" is "tensorwise" with the largest `amax` of earlier steps for x and dy;
what is larger is clipped. An `amax` of 0 gives the scale 1.

Values that are not finite stay so. e4m3 has no infinity: an infinite value becomes NaN.

Matmuls take the fp8 arrays themselves. A matmul of arrays cast back to 16 bits would silently run in 16 bits on a GPU by default.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from zerojax import errors
from zerojax.errors import UserError
from zerojax.ops import residuals

TENSORWISE, DELAYED, ROWWISE = "tensorwise", "delayed", "rowwise"
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2

SCALE = "zerojax: an fp8 scale"  # the name of an operand's scale for policies of rematerialisation
# Part of the op_name of each matmul that was asked for in fp8.
SCOPE = "fp8_matmul"

# Exponents of scales. The product of two scales and its inverse are normal in float32 and bfloat16 if the arrays are.
_SMALLEST, _LARGEST = -120, 63
_FRACTION, _BIAS = 23, 127  # of a float32: the bits of its fraction, and what is added to its exponent
_WIDE = (jnp.float32, jnp.bfloat16)  # dtypes that hold every scale
_FREE = ((), ())


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which values share a scale, and where it comes from."""

    by_row: bool = False  # whether each row or column has a scale of its own
    remembers: bool = False  # whether the scales of x and dy come from earlier steps


RECIPES = {TENSORWISE: Recipe(), DELAYED: Recipe(remembers=True), ROWWISE: Recipe(by_row=True)}


class EightBits(NamedTuple):
    """An array in fp8: `values` / `scale` is the array. The scale is float32[] or, along the contracted dim, of size 1. `swapped` are the
    values of a stack of matrices with the last two dims swapped, or None."""

    values: jax.Array
    scale: jax.Array
    swapped: jax.Array | None = None


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    recipe: str = TENSORWISE,
    rhs_in_fp8: EightBits | None = None,
    history: jax.Array | None = None,
) -> jax.Array:
    """Returns `jax.lax.dot_general` of two arrays, computed in fp8; so are its gradients. For `dot_general=` of Linen's and NNX's layers.

    Args:
      lhs, rhs: floating arrays of 16 or 32 bits.
      dimension_numbers: see `jax.lax.dot_general`. Each batch element has scales of its own.
      precision: is not read: the operands have 8 bits.
      preferred_element_type: of the result; None: that of the operands.
      out_sharding: must be None; a sharding comes from `jax.lax.with_sharding_constraint`.
      recipe: "tensorwise", "delayed" or "rowwise".
      rhs_in_fp8: the values and the scale of `rhs`, where they are known; the values of `rhs` are not read then.
      history: float32[2, steps], the magnitudes of `lhs` and of the result's gradient in earlier steps, for "delayed". Its gradient is
        what they are now, in its first column. Batched matmuls do not read it.

    Raises:
      UserError: an unknown recipe, operands that are not floating, an `out_sharding`, or no history.

    >>> layer = nn.Dense(4096, dot_general=zerojax.fp8.dot_general)
    """
    errors.one_of("recipe", recipe, RECIPES)
    dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise UserError(
                f"fp8.dot_general: {name} must be a floating array, and is {array.dtype}; use jax.lax.dot_general"
            )
    if out_sharding is not None:
        raise UserError("fp8.dot_general: out_sharding is not supported; constrain the result instead")
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    if RECIPES[recipe].remembers and history is None:
        raise UserError(
            "fp8.dot_general: the recipe 'delayed' needs a history; pass fp8= to make_train_step, or take 'tensorwise'"
        )
    if rhs_batch:
        rhs_in_fp8 = history = None  # each batch element has a scale of its own
    if rhs_in_fp8 is not None:
        values = rhs_in_fp8.values.reshape(rhs.shape)
        rhs_in_fp8 = rhs_in_fp8._replace(values=_as_matrices(values, rhs_batch, rhs_contracted, kept_first=False)[0])
    lhs, lhs_kept = _as_matrices(lhs, lhs_batch, lhs_contracted, kept_first=True)
    rhs, rhs_kept = _as_matrices(rhs, rhs_batch, rhs_contracted, kept_first=False)
    run = functools.partial(_matmul, dtype, RECIPES[recipe])
    for _ in lhs_batch:
        run = jax.vmap(run, in_axes=(0, 0, None, None))
    shape = (*lhs.shape[: len(lhs_batch)], *lhs_kept, *rhs_kept)
    return residuals.of_matmul(run(lhs, rhs, rhs_in_fp8, history)).reshape(shape)


def _as_matrices(
    array: jax.Array, batch: Sequence[int], contracted: Sequence[int], *, kept_first: bool
) -> tuple[jax.Array, tuple[int, ...]]:
    """Returns [batch dims..., kept, contracted], or with the last two in the other order, and the sizes of the kept dims."""
    kept = [dim for dim in range(array.ndim) if dim not in (*batch, *contracted)]
    order = (*batch, *kept, *contracted) if kept_first else (*batch, *contracted, *kept)
    sizes = [tuple(array.shape[dim] for dim in dims) for dims in (batch, kept, contracted)]
    outer, rows, inner = sizes
    matrix = (math.prod(rows), math.prod(inner)) if kept_first else (math.prod(inner), math.prod(rows))
    return array.transpose(order).reshape(*outer, *matrix), rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(
    dtype: DTypeLike, how: Recipe, x_MK: jax.Array, w_KN: jax.Array, in_fp8: EightBits | None, history: jax.Array | None
) -> jax.Array:
    """Returns x w: float[M, N] in `dtype`, computed in fp8; see the module."""
    return _forward(dtype, how, x_MK, w_KN, in_fp8, history)[0]


def _forward(
    dtype: DTypeLike, how: Recipe, x_MK: jax.Array, w_KN: jax.Array, in_fp8: EightBits | None, history: jax.Array | None
) -> tuple[jax.Array, Any]:
    with jax.named_scope(SCOPE):
        amax = checkpoint_name(amax_of(x_MK, _axis(how, 1)), SCALE)
        x = quantized(x_MK, FORWARD, scale_of_amax(_largest(history, 0, amax), FORWARD))
        w = in_fp8 or quantized(w_KN, FORWARD, checkpoint_name(scale_of(w_KN, FORWARD, axis=_axis(how, 0)), SCALE))
        # The backward pass reads the weight itself, which may be gathered again. It reads x in fp8, or casts it anew along the other dim.
        kept = (None, x_MK) if how.by_row else (x, None)
        weight = in_fp8 or EightBits(w_KN, w.scale)
        likes = jnp.zeros((0,), x_MK.dtype), jnp.zeros((0,), w_KN.dtype)
        return _product(x, w, 1, 0, dtype), (kept, weight, likes, history, amax)


def _backward(dtype: DTypeLike, how: Recipe, residuals: Any, dy_MN: jax.Array) -> tuple[Any, ...]:
    (x, x_MK), (w_KN, w_scale, _), (like_x, like_w), history, x_amax = residuals
    with jax.named_scope(SCOPE):
        amax = amax_of(dy_MN, _axis(how, 1))
        by_row = quantized(dy_MN, BACKWARD, scale_of_amax(_largest(history, 1, amax), BACKWARD))
        if w_KN.dtype == FORWARD:
            w, by_column = EightBits(w_KN, w_scale), by_row
        elif not how.by_row:
            w, by_column = quantized(w_KN, FORWARD, w_scale), by_row
        else:
            w, by_column, x = (
                quantized(a, dtype_of, scale_of(a, dtype_of, axis))
                for a, dtype_of, axis in ((w_KN, FORWARD, 1), (dy_MN, BACKWARD, 0), (x_MK, FORWARD, 0))
            )
        dx_MK = _product(by_row, w, 1, 1, like_x.dtype)
        # In float32, so that a sum over devices in float32 loses nothing (`blocks.float32_grads` removes the cast).
        dw_KN = _product(x, by_column, 0, 0, jnp.float32).astype(like_w.dtype)
    seen = None if history is None else jnp.zeros_like(history).at[:, 0].set(jnp.stack([x_amax, amax]))
    return dx_MK, dw_KN, None, seen


_matmul.defvjp(_forward, _backward)


def _largest(history: jax.Array | None, row: int, amax: jax.Array) -> jax.Array:
    """Returns the largest magnitude of a history, or `amax` if there is none yet."""
    if history is None:
        return amax
    largest = jnp.max(history[row])
    return jnp.where(largest > 0, largest, amax)


def _axis(how: Recipe, contracted: int) -> int | None:
    """Returns the dim along which the values share a scale; None: all do."""
    return contracted if how.by_row else None


def _product(a: EightBits, b: EightBits, a_dim: int, b_dim: int, dtype: DTypeLike) -> jax.Array:
    """Returns the product of two matrices along one dim each. On a GPU the inverse of a scalar scale is part of the matmul."""
    exact = dtype if dtype in _WIDE else jnp.float32
    values = jax.lax.dot_general(a.values, b.values, (((a_dim,), (b_dim,)), _FREE), preferred_element_type=exact)
    b_scale = b.scale if b_dim == 0 or b.scale.ndim == 0 else b.scale.T
    a_scale = a.scale if a_dim == 1 or a.scale.ndim == 0 else a.scale.T
    return (values * (1.0 / (a_scale * b_scale)).astype(exact)).astype(dtype)


def scale_of(array: jax.Array, dtype: DTypeLike, axis: int | None = None) -> jax.Array:
    """Returns the scale of an array for a dtype, float32: a power of two, or 1 if the array has only zeros and values that are not finite.

    Args:
      array: floating.
      dtype: e4m3 or e5m2.
      axis: the dim whose values share a scale, of size 1 in the result; None: all share one, float32[].
    """
    return scale_of_amax(amax_of(array, axis), dtype)


def amax_of(array: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns the largest finite magnitude, float32; 0 if there is none."""
    magnitudes = jnp.where(jnp.isfinite(array), jnp.abs(array), 0)
    return jnp.max(magnitudes, axis=axis, keepdims=axis is not None, initial=0).astype(jnp.float32)


def scale_of_amax(amax: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the largest power of two that scales magnitudes up to `amax` into the range of a dtype; 1 for an `amax` of 0."""
    # The bits of a float are its exponent and then its fraction, so the shifted difference is that of the exponents, less 1 if the
    # fraction of `amax` is the larger one. `jnp.frexp` and `jnp.ldexp` are some 30 operations more in each of a layer's scales.
    top = jnp.float32(jnp.finfo(dtype).max)
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    exponent = (bits(top) - bits(amax)) >> _FRACTION
    new_bits = (jnp.clip(exponent, _SMALLEST, _LARGEST) + _BIAS) << _FRACTION
    scale = jax.lax.bitcast_convert_type(new_bits, jnp.float32)
    return jnp.where(amax > 0, scale, 1.0)


def quantized(array: jax.Array, dtype: DTypeLike, scale: jax.Array) -> EightBits:
    """Returns an array in fp8. Values beyond the range are clipped to it, and values that are not finite stay so (in e4m3: NaN)."""
    top = float(jnp.finfo(dtype).max)
    is_finite = jnp.isfinite(array)
    wide = array.dtype if array.dtype in _WIDE else jnp.float32
    values = jnp.clip(array.astype(wide) * scale.astype(wide), -top, top)
    # Not left to the cast: a GPU's instruction makes an infinity the largest number.
    others = array if dtype == BACKWARD else jnp.nan
    return EightBits(jnp.where(is_finite, values, others).astype(dtype), scale)
