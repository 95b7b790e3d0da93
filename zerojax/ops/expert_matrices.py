"""The matrices of a mixture's experts and what is beside them. This module multiplies rows by them, also where they are stored in few bits
or have a low-rank adapter each.

    y = x W[e] + scale x A[e] B[e]         of a row x of expert e

Shapes: E experts, R rows sorted by expert, K inputs, N outputs, r an adapter's rank.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import grouped
from zerojax.ops import quantized, residuals


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredMatrices:
    """Matrices that are no array.

    Attributes:
      kernel: float[E, K, N], or what `quantized.quantize` returns of each of them.
      a, b: float[E, K, r] and float[E, r, N]; None without adapters.
      scale: of the adapters.
    """

    kernel: Any
    a: jax.Array | None = None
    b: jax.Array | None = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})

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
    y_RN = _grouped(x_RK, _kernel(matrices, x_RK.dtype), sizes_E)
    if matrices.a is None or matrices.b is None:
        return y_RN
    with jax.named_scope("lora"):
        low_Rr = residuals.of_matmul(_grouped(x_RK, matrices.a.astype(x_RK.dtype), sizes_E)) * matrices.scale
        return (y_RN + _grouped(low_Rr.astype(x_RK.dtype), matrices.b.astype(x_RK.dtype), sizes_E)).astype(x_RK.dtype)


def merged(matrices: Matrices) -> jax.Array:
    """Returns the matrices as one array: float[E, K, N], what `multiply` multiplies by."""
    if not isinstance(matrices, StoredMatrices):
        return matrices
    if matrices.a is None or matrices.b is None:
        return _kernel(matrices, jnp.float32)
    return _kernel(matrices, matrices.a.dtype) + matrices.scale * (matrices.a @ matrices.b)


def _kernel(matrices: StoredMatrices, dtype: DTypeLike) -> jax.Array:
    kernel = matrices.kernel
    return quantized.dequantize(kernel, dtype) if quantized.is_quantized(kernel) else kernel.astype(dtype)


def _grouped(x_RK: jax.Array, matrices_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return grouped.grouped_matmul(x_RK, matrices_EKN, sizes_E, grouped.BY_PLATFORM)
