"""Says in which dtypes a run stores and computes. This module holds these policies and casts to them.

Bytes a parameter with Adam and float32 moments, N-way `data` (ZeRO, arXiv:1910.02054, section 3.1, with K = 12 for master, mu and nu):

    precision    stage 0   stages 1, 2   stage 3
    fp32         12        4 + 8/N       12/N      the weights are their own master
    bf16, fp16   2 + 12    2 + 12/N      12/N      stage 3 keeps no 16-bit copy: it casts, then gathers
    bf16_sr      2 + 8     2 + 8/N       10/N      no master: 16-bit weights are updated, and rounded at random

Moments take 4 bytes fewer in bf16, and about 6 fewer in int8; `memory.bytes_per_parameter` counts any of these.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.errors import UserError

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which dtypes a run computes and keeps its weights; updates are always computed in float32.

    Attributes:
      compute_dtype: of forward and backward arithmetic.
      weight_dtype: of the weights that updates are added to. In 16 bits most updates are smaller than half a last place, so they
        are rounded up or down at random, and add up in the mean (Gupta et al., arXiv:1502.02551).
      scales_loss: whether gradients need a loss scale to fit `compute_dtype`.
    """

    compute_dtype: Any
    weight_dtype: Any = jnp.float32
    scales_loss: bool = False

    @property
    def rounds_stochastically(self) -> bool:
        """Says whether updated weights are rounded at random."""
        return self.weight_dtype != jnp.float32

    def copy_dtype(self, *, splits_params: bool) -> Any:
        """Returns the dtype of a copy kept beside the weights for computing, or None.

        Where params are split, none is kept: what is gathered is cast first.
        """
        return None if splits_params or self.compute_dtype == self.weight_dtype else self.compute_dtype


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(compute_dtype=jnp.float32),
    "bf16": Precision(compute_dtype=jnp.bfloat16),
    "fp16": Precision(compute_dtype=jnp.float16, scales_loss=True),
    "bf16_sr": Precision(compute_dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16),
}


# The dtype in which gradients are summed over devices, by its name in a config.
DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def floating(name: str, dtype: Any) -> Any:
    """Returns the dtype of an argument, floating and of 16 bits or more; None stays None.

    Raises:
      UserError: it is another; the line names the argument.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise UserError(f"{name}: must be a floating dtype of at least 16 bits, such as jnp.bfloat16, and is {dtype!r}")
    return found


def cast_floating(values: PyTree, dtype: Any) -> PyTree:
    """Casts floating leaves to `dtype`; None and other leaves pass through."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, values)


def at_least_float32(dtype: Any) -> Any:
    """Returns a dtype that sums may be made in: the same, or float32 where it holds less."""
    return widened(dtype) if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32


def widened(dtype: Any) -> Any:
    """Returns float32 for floating dtypes that hold less, and others as they are."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype
