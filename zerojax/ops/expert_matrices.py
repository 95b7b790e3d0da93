"""The matrices of a mixture's experts and what is beside them. This module multiplies rows by them, also where they are stored in few bits
or have a low-rank adapter each.

    y = x W[e] + scale x A[e] B[e]         of a row x of expert e

In fp8, with q and s of `ops.fp8` and one scale for all experts' matrices of a kind,

    x W[e]      ~  q(x s(x)) q(W s(W))[e] / (s(x) s(W))
    dx          ~  q(dy s(dy)) q(W s(W))[e]^T / (s(dy) s(W))
    dW[e]       =  sum over its rows of x^T dy

all in e4m3, since kernels for Hopper GPUs (JAX 0.10) multiply no e5m2 by e4m3. dW stays in 16 bits: an 8-bit matmul needs the contracted
dim last, here the rows, so both operands would be transposed, and groups begin at any row. Its time is that of writing the result.

Shapes: E experts, R rows sorted by expert, K inputs, N outputs, r an adapter's rank.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_kernels import grouped, grouped_mxfp4
from zerojax.ops import fp8, quantized, residuals

NAMES = ("gate", "up", "down")  # of the stacked weights that may be `StoredMatrices`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """Matrices that are no array.

    Attributes:
      kernel: float[E, K, N], or what `quantized.quantize` returns of each of them. N may be several dims until `flat`.
      a, b: float[E, K, r] and float[E, r, N]; None without adapters.
      scale: of the adapters.
      part: of adapters for several matrices, with b float[E, r, matrices, N], the number of these; None for those of one.
      in_fp8: whether rows are multiplied by `kernel` in fp8.
      known: `kernel` in fp8, where it came so; its values are not read then.
    """

    kernel: Any
    a: jax.Array | None = None
    b: jax.Array | None = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    part: int | None = dataclasses.field(default=None, metadata={"static": True})
    in_fp8: bool = dataclasses.field(default=False, metadata={"static": True})
    known: fp8.EightBits | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns [E, K, N]."""
        return quantized.shape_of(self.kernel) if quantized.is_quantized(self.kernel) else tuple(self.kernel.shape)


Matrices = jax.Array | StoredMatrices


def multiply(x_RK: jax.Array, matrices: Matrices, sizes_E: jax.Array) -> jax.Array:
    """Returns each row times the matrix of its expert: [R, N] of the dtype of `x_RK`.

    Args:
      x_RK: the rows, sorted by expert; those after the last expert's are 0 in the result.
      matrices: of the experts.
      sizes_E: int32, the rows of each expert.
    """
    return residuals.of_matmul(_multiplied(x_RK, matrices, sizes_E))


def _multiplied(x_RK: jax.Array, matrices: Matrices, sizes_E: jax.Array) -> jax.Array:
    if not isinstance(matrices, StoredMatrices):
        return _grouped(x_RK, matrices, sizes_E)
    y_RN = _by_kernel(x_RK, matrices, sizes_E)
    if matrices.a is None or matrices.b is None:
        return y_RN
    with jax.named_scope("lora"):
        low_Rr = residuals.of_matmul(_grouped(x_RK, matrices.a.astype(x_RK.dtype), sizes_E)) * matrices.scale
        return (y_RN + _grouped(low_Rr.astype(x_RK.dtype), _b(matrices).astype(x_RK.dtype), sizes_E)).astype(x_RK.dtype)


def _by_kernel(x_RK: jax.Array, matrices: StoredMatrices, sizes_E: jax.Array) -> jax.Array:
    if not matrices.in_fp8 and quantized.is_quantized(matrices.kernel) and quantized.MXFP4 in matrices.kernel:
        return _in_mxfp4(x_RK, *quantized.values_of(matrices.kernel), sizes_E)
    kernel_EKN = _kernel(matrices, x_RK.dtype)
    return (
        _in_fp8(x_RK, kernel_EKN, matrices.known, sizes_E) if matrices.in_fp8 else _grouped(x_RK, kernel_EKN, sizes_E)
    )


def with_adapter(matrices: Matrices, a: jax.Array, b: jax.Array, scale: float, part: int | None) -> StoredMatrices:
    """Returns matrices with an adapter; see `StoredMatrices`."""
    stored = matrices if isinstance(matrices, StoredMatrices) else StoredMatrices(matrices)
    return dataclasses.replace(stored, a=a, b=b, scale=scale, part=part)


def flat(matrices: Matrices) -> Matrices:
    """Returns matrices of which N is one dim."""
    if len(matrices.shape) == 3:
        return matrices
    if not isinstance(matrices, StoredMatrices):
        return matrices.reshape(*matrices.shape[:2], -1)
    assert matrices.part is None
    kernel, b = matrices.kernel, matrices.b
    if quantized.is_quantized(kernel):  # in mxfp4, with the inputs last
        kernel = jax.tree.map(lambda part: part.reshape(part.shape[0], -1, part.shape[-1]), kernel)
    else:
        kernel = kernel.reshape(*kernel.shape[:2], -1)
    return dataclasses.replace(matrices, kernel=kernel, b=None if b is None else b.reshape(*b.shape[:2], -1))


def in_fp8(matrices: Matrices, known: fp8.EightBits | None) -> StoredMatrices:
    """Returns matrices by which rows are multiplied in fp8, as which they are known or not."""
    stored = matrices if isinstance(matrices, StoredMatrices) else StoredMatrices(matrices)
    return dataclasses.replace(stored, in_fp8=True, known=known)


def merged(matrices: Matrices) -> jax.Array:
    """Returns the matrices as one array: float[E, K, N], what `multiply` multiplies by."""
    if not isinstance(matrices, StoredMatrices):
        return matrices
    if matrices.a is None or matrices.b is None:
        return _kernel(matrices, jnp.float32)
    return _kernel(matrices, matrices.a.dtype) + matrices.scale * (matrices.a @ _b(matrices))


def _b(matrices: StoredMatrices) -> jax.Array:
    assert matrices.b is not None
    return matrices.b if matrices.part is None else matrices.b[:, :, matrices.part]


def _kernel(matrices: StoredMatrices, dtype: DTypeLike) -> jax.Array:
    kernel = matrices.kernel
    return quantized.dequantize(kernel, dtype) if quantized.is_quantized(kernel) else kernel.astype(dtype)


def _grouped(x_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return grouped.grouped_matmul(x_RK, matrices_EKN, sizes_E, grouped.BY_PLATFORM)


@jax.custom_vjp
def _in_mxfp4(x_RK: jax.Array, codes_ENH: jax.Array, exponents_ENJ: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _rows_in_mxfp4(x_RK, codes_ENH, exponents_ENJ, sizes_E, False)


def _rows_in_mxfp4(
    rows: jax.Array, codes_ENH: jax.Array, exponents_ENJ: jax.Array, sizes_E: jax.Array, transposed: bool
) -> jax.Array:
    """Returns rows times frozen matrices, or these transposed: on GPUs by a kernel that reads the codes, else by the matrices as floats."""

    def by_floats(rows: jax.Array, codes: jax.Array, exponents: jax.Array, sizes_E: jax.Array) -> jax.Array:
        matrices = quantized.dequantize({quantized.MXFP4: codes, quantized.EXPONENTS: exponents}, rows.dtype)
        return grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM].rows(rows, matrices, sizes_E, transposed)

    arrays = rows, codes_ENH, exponents_ENJ, sizes_E
    if not grouped_mxfp4.takes(rows, codes_ENH, transposed):
        return by_floats(*arrays)
    by_codes = functools.partial(grouped_mxfp4.rows, transposed=transposed)
    return jax.lax.platform_dependent(*arrays, cuda=by_codes, default=by_floats)


def _backward_in_mxfp4(saved: Any, dy_RN: jax.Array) -> tuple[jax.Array, None, None, None]:
    codes_ENH, exponents_ENJ, sizes_E = saved
    return _rows_in_mxfp4(dy_RN, codes_ENH, exponents_ENJ, sizes_E, True), None, None, None


_in_mxfp4.defvjp(lambda *arrays: (_in_mxfp4(*arrays), arrays[1:]), _backward_in_mxfp4)


@jax.custom_vjp
def _in_fp8(x_RK: jax.Array, kernel_EKN: jax.Array, known: fp8.EightBits | None, sizes_E: jax.Array) -> jax.Array:
    return _forward(x_RK, kernel_EKN, known, sizes_E)[0]


def _forward(
    x_RK: jax.Array, kernel_EKN: jax.Array, known: fp8.EightBits | None, sizes_E: jax.Array
) -> tuple[jax.Array, Any]:
    with jax.named_scope(fp8.SCOPE):
        matrices = known or _cast(kernel_EKN, checkpoint_name(fp8.scale_of(kernel_EKN, fp8.FORWARD), fp8.SCALE))
        swapped = matrices.values.swapaxes(1, 2) if matrices.swapped is None else matrices.swapped
        y_RN = _rows(x_RK, swapped, matrices.scale, sizes_E)
    # As in `ops.fp8`: the weight itself is kept, which may be gathered again.
    return y_RN, (x_RK, known or fp8.EightBits(kernel_EKN, matrices.scale), jnp.zeros((0,), kernel_EKN.dtype), sizes_E)


def _backward(saved: Any, dy_RN: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    x_RK, matrices, like, sizes_E = saved
    with jax.named_scope(fp8.SCOPE):
        coded = matrices if matrices.values.dtype == fp8.FORWARD else _cast(matrices.values, matrices.scale)
        dx_RK = _rows(dy_RN, coded.values, matrices.scale, sizes_E)
    dkernel_EKN = grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM].matrices(x_RK, dy_RN, sizes_E)
    return dx_RK, dkernel_EKN.astype(like.dtype), None, None


_in_fp8.defvjp(_forward, _backward)


def _cast(kernel_EKN: jax.Array, scale: jax.Array) -> fp8.EightBits:
    # The barrier: XLA would write what the scale and the cast have in common, turned, before both.
    kernel_EKN, scale = jax.lax.optimization_barrier((kernel_EKN, scale))
    return fp8.quantized(kernel_EKN, fp8.FORWARD, scale)


def _rows(rows_RK: jax.Array, matrices_ENK: jax.Array, scale: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Returns rows, cast with their own scale, times matrices in fp8, whose scale is given, in the rows' dtype."""
    rows = fp8.quantized(rows_RK, fp8.FORWARD, checkpoint_name(fp8.scale_of(rows_RK, fp8.FORWARD), fp8.SCALE))
    multiply = grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM].rows
    return multiply(rows.values, matrices_ENK, sizes_E, True, scale=1.0 / (rows.scale * scale), dtype=rows_RK.dtype)
