"""Compares what a step computes on each device's examples with what it computes on the whole batch. This module finds losses that
`reduce_dtype` changes.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax import tree
from zerojax.zero import step
from zerojax.zero.sharded_batch import keys

_WAYS_OUT = (
    "return zerojax.Mean(total, weight) for a weighted mean and zerojax.Sum(total) for a sum, give batch norm "
    'axis_name=("replica", "data"), pass batch_specs for leaves that count no examples, or omit reduce_dtype'
)


def compare_sums(
    loss_fn: Callable[..., Any],
    partition: Any,
    state: Any,
    batch: Any,
    *,
    reduce_dtype: Any = jnp.float32,
    tolerance: float = 1e-3,
    **options: Any,
) -> list[str]:
    """Runs one step with `reduce_dtype` and one without, and returns a line for each value that differs; [] if all agree.

    Call it once, before training, on a batch of a few examples a device. Neither step changes `state`. Losses that mix examples
    (contrastive ones, batch statistics), means with unequal weights, sums, and batch leaves that count no examples differ. A loss that
    draws random numbers differs by chance: switch that off, or compare with a `tolerance` that allows it.

    Args:
      loss_fn, partition: as for `make_train_step`.
      state, batch: as for the step.
      reduce_dtype: as for `make_train_step`.
      tolerance: the largest difference that is not reported, relative to the largest value of an array.
      **options: further arguments of `make_train_step`.

    Raises:
      UserError: as the steps do.

    >>> for line in compare_sums(loss_fn, partition, state, batch):
    ...     print(line)
    """
    found = []
    for dtype in (reduce_dtype, None):
        train_step = step.make_train_step(loss_fn, partition, reduce_dtype=dtype, **options | {"donate": False})
        after, metrics = train_step(state, batch)
        found.append({**_values(metrics), **_fields(after)})
    by_device, whole = found
    return [line for name in whole for line in _difference(name, by_device[name], whole[name], tolerance)]


def _fields(state: Any) -> dict[str, Any]:
    """Returns the values of a train state that its loss function may return, by path."""
    fields = {name: part for name, part in vars(state).items() if name not in ("params", "opt_state", "apply_fn", "tx")}
    return {f"state/{path}": leaf for path, leaf in _values(fields).items()}


def _values(values: Any) -> dict[str, Any]:
    return {path: leaf for path, leaf in tree.flatten(values) if not keys.is_typed(leaf)}


def _difference(name: str, by_device: Any, whole: Any, tolerance: float) -> list[str]:
    ours, theirs = (np.asarray(value, np.float64) for value in (by_device, whole))
    if not theirs.size:
        return []
    largest = np.abs(theirs).max()
    apart = np.abs(ours - theirs)
    if apart.max() <= tolerance * largest:
        return []
    place = np.unravel_index(apart.argmax(), apart.shape)
    share = f"{apart.max() / largest:.1%} apart" if largest else "apart"
    return [
        f"{name}: {ours[place]:.6g} with reduce_dtype, {theirs[place]:.6g} on the whole batch ({share}); {_WAYS_OUT}"
    ]
