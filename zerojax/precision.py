"""Policies of dtypes for storing and computing. This module holds them and casts to them.

Bytes per parameter with Adam and float32 moments, N-way `data` (ZeRO, arXiv:1910.02054, section 3.1, with K = 12 for master, mu and nu):

    precision    stage 0   stages 1, 2   stage 3
    fp32         12        4 + 8/N       12/N      the weights are their own master
    bf16, fp16   2 + 12    2 + 12/N      12/N      stage 3 has no 16-bit copy: it casts, then gathers
    fp8          as bf16
    bf16_sr      2 + 8     2 + 8/N       10/N      no master: 16-bit weights are updated and rounded stochastically

bf16 moments save 4 bytes, and int8 moments about 6; `zero.state_bytes.bytes_per_parameter` computes all of these.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax.errors import UserError
from zerojax.tree import Leaf

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes in which a run computes and stores its weights; updates are always computed in float32."""

    compute_dtype: Any  # of forward and backward arithmetic
    # of the weights that are updated. In 16 bits most updates are smaller than half a last place, so they are rounded stochastically, and
    # add up in expectation (Gupta et al., arXiv:1502.02551).
    weight_dtype: Any = jnp.float32
    scales_loss: bool = False  # whether gradients need a loss scale to fit `compute_dtype`
    has_fp8: bool = False  # whether the matmuls of blocks run in fp8 (`zero.fp8`)

    @property
    def rounds_stochastically(self) -> bool:
        """Returns whether updated weights are rounded stochastically."""
        return self.weight_dtype != jnp.float32

    def copy_dtype(self, *, splits_params: bool) -> DTypeLike | None:
        """Returns the dtype of a copy of the weights for computing, or None.

        Sharded params have no copy: they are cast, then gathered.
        """
        return None if splits_params or self.compute_dtype == self.weight_dtype else self.compute_dtype


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(compute_dtype=jnp.float32),
    "bf16": Precision(compute_dtype=jnp.bfloat16),
    "fp16": Precision(compute_dtype=jnp.float16, scales_loss=True),
    "fp8": Precision(compute_dtype=jnp.bfloat16, has_fp8=True),
    "bf16_sr": Precision(compute_dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16),
}


# The dtype in which gradients are summed over devices, by its name in a config.
DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def floating(name: str, dtype: DTypeLike | None) -> Any:
    """Returns the dtype of an argument; None stays None.

    Raises:
      UserError: it is not floating or has fewer than 16 bits; the line names the argument.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except (TypeError, ValueError):  # ValueError: a text that is not UTF-8
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise UserError(f"{name}: must be a floating dtype of at least 16 bits, such as jnp.bfloat16, and is {dtype!r}")
    return found


def cast_floating(values: PyTree, dtype: DTypeLike | None) -> PyTree:
    """Casts floating leaves to `dtype`; other leaves, and all if `dtype` is None, are unchanged."""

    def cast(leaf: Leaf) -> Leaf:
        return leaf.astype(dtype) if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, values)


def at_least_float32(dtype: DTypeLike) -> DTypeLike:
    """Returns a dtype to sum in: the same, or float32 if it has less precision."""
    return widened(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def widened(dtype: DTypeLike) -> DTypeLike:
    """Returns float32 for floating dtypes of fewer bits, and other dtypes unchanged."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype
