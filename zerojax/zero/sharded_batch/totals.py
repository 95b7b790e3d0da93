"""Sums and weighted means over the whole batch, whatever part of it a device or a pass sees. This module defines them and combines them.

A loss function sees one device's examples of one pass. The mean of such means is the mean over the batch only if all have the same
weight, so a mean over a mask is returned as its two sums, which are added over devices and passes before the division:

    Mean(total, weight)    sum of totals / sum of weights
    Sum(total)             sum of totals
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of weighted terms, as the two sums over the examples that the loss function sees.

    Return it as the loss, a metric or a value of the state. Over all devices and passes its value is sum of totals / sum of weights, and 0
    where the weights add up to 0. No gradient flows through `weight`.

    Attributes:
      total: float[...], the sum of weight * term.
      weight: the sum of the weights, such as the number of tokens that are not padding; of the shape of `total`, or a scalar.

    >>> loss = Mean(jnp.sum(mask * losses), jnp.sum(mask))
    """

    total: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over the examples that the loss function sees: a loss, a metric or a value of the state; added over devices and passes.

    In the state it is the old value plus a sum, and what is added to the old value is summed.

    Attributes:
      total: a number or an array.

    >>> metrics = {"correct": Sum(jnp.sum(predicted == labels))}
    """

    total: Any


def is_total(node: Any) -> bool:
    """Returns whether a node is a `Mean` or a `Sum`."""
    return isinstance(node, (Mean, Sum))


def value(node: Any) -> Any:
    """Returns the value of a `Mean` or a `Sum` of which nothing more is to come, and other values unchanged."""
    if isinstance(node, Mean):
        return ratio(node.total, node.weight)
    return node.total if isinstance(node, Sum) else node


def ratio(total: Any, weight: Any) -> jax.Array:
    """Returns total / weight, and 0 where the weight is 0."""
    weight = jnp.asarray(weight, jnp.result_type(total, jnp.float32))
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def objective(loss: Any, passes: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the scalar to differentiate in one of several passes, and {"weight": its weight among them} if they differ.

    A `Mean` must have its weight over all devices already. Each pass is a mean, so that 16-bit gradients stay in range.
    """
    if isinstance(loss, Mean):
        weight = jax.lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32))
        return ratio(loss.total, weight), {"weight": weight}
    return (loss.total * passes if isinstance(loss, Sum) else loss), {}


def in_float32(loss: Any) -> Any:
    """Returns a loss, which may be a `Mean` or a `Sum`, in float32.

    Raises:
      UserError: it is not a real scalar.
    """
    parts = [loss.total, *([loss.weight] if isinstance(loss, Mean) else [])] if is_total(loss) else [loss]
    for part in parts:
        if (
            not isinstance(part, (jax.Array, np.ndarray, np.generic, int, float))
            or jnp.shape(part)
            or jnp.iscomplexobj(part)
        ):
            what = f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else type(part).__name__
            inside = f" in zerojax.{type(loss).__name__}" if is_total(loss) else ""
            raise UserError(
                f"loss_fn: returned {what}{inside} as the loss, and it must be a real scalar; take its mean"
            )
    if is_total(loss):
        return dataclasses.replace(loss, total=jnp.asarray(loss.total, jnp.float32))
    return jnp.asarray(loss, jnp.float32)


def times(loss: Any, factor: Any) -> Any:
    """Returns a loss, which may be a `Mean` or a `Sum`, times a number."""
    return dataclasses.replace(loss, total=loss.total * factor) if is_total(loss) else loss * factor
