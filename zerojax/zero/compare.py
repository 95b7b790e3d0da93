"""Compares what a step computes on each device's examples with what it computes on the whole batch. This module finds losses that
`reduce_dtype` changes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero import step, step_values
from zerojax.zero.blocks import block_settings, where_used
from zerojax.zero.sharded_batch import dependence, inputs, keys, parts
from zerojax.zero.weights import partition as partition_lib

_WAYS_OUT = (
    "return zerojax.Mean(total, weight) for a weighted mean and zerojax.Sum(total) for a sum, give batch norm "
    'axis_name=("replica", "data"), pass batch_specs for leaves that count no examples, or omit reduce_dtype'
)
_WAYS_OUT_OF_PARTS = (
    "attend with zerojax.attention, take positions and labels from the batch, return zerojax.Mean(total, weight) for a weighted mean and "
    "zerojax.Sum(total) for a sum, or give a leaf that is not sharded over `context` to all devices and count it once"
)


def compare_sums(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    state: State,
    batch: PyTree,
    *,
    reduce_dtype: DTypeLike | None = jnp.float32,
    tolerance: float = 1e-3,
    **options: Any,
) -> list[str]:
    """Runs one step with `reduce_dtype` and one without, and returns a line for each value that differs; [] if all agree.

    There is also a line for each line of code that draws the same random numbers on every device.

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
    lines = _apart(loss_fn, partition, state, batch, reduce_dtype, tolerance, options, _WAYS_OUT)
    return lines + _equal_draws(loss_fn, partition, state, batch, options)


def compare_context(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    state: State,
    batch: PyTree,
    *,
    batch_specs: PyTree,
    tolerance: float = 1e-3,
    **options: Any,
) -> list[str]:
    """Runs one step in which each device has a part of every sequence and one on the whole batch, and returns a line for each value that
    differs; [] if the loss stays the same when its tokens are sharded.

    A loss differs if a token reads others without an exchange: attention that is not `zerojax.attention`, positions counted from 0 on
    each device, labels cut from a device's own tokens, means over labels of which devices have unequally many. A step refuses what it
    finds of these in the loss's trace; that refusal is the first line if numbers differ. Without lines such a loss runs with
    `check_context=False`.

    Args:
      loss_fn, partition, state, batch: as of `compare_sums`.
      batch_specs: names every leaf, and the dim of its tokens; see `make_train_step`.
      tolerance, **options: as of `compare_sums`.

    Raises:
      UserError: the mesh has no devices along `context`, or as the steps do.

    >>> specs = [("tokens|labels|positions", PartitionSpec(("replica", "data"), "context"))]
    >>> for line in compare_context(loss_fn, partition, state, batch, batch_specs=specs):
    ...     print(line)
    """
    if mesh_lib.size(partition.mesh, mesh_lib.TOKENS) == 1:
        raise UserError(
            f"compare_context: the mesh has {mesh_lib.text(partition.mesh, mesh_lib.TOKENS)}, so no tokens are sharded; pass a state on "
            "zerojax.make_mesh(context=2)"
        )
    options |= {"batch_specs": batch_specs}

    def apart(**more: Any) -> list[str]:
        every = options | more
        return _apart(loss_fn, partition, state, batch, jnp.float32, tolerance, every, _WAYS_OUT_OF_PARTS)

    try:
        return apart()
    except parts.Refused as error:
        found = apart(check_context=False)
        return [str(error), *found] if found else []


def _apart(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    state: State,
    batch: PyTree,
    reduce_dtype: DTypeLike | None,
    tolerance: float,
    options: dict,
    way_out: str,
) -> list[str]:
    """Returns a line for each value of a step that differs between each device's part of the batch and the whole."""
    tree.untraced((state, batch))
    found, whole_step = [], dict[str, Any](donate=False, programs=block_settings.ONE)
    sums, blocks = step_values.Sums.of(options.get("sums")), options.get("blocks")
    if isinstance(blocks, block_settings.Blocks):
        whole_step["blocks"] = dataclasses.replace(blocks, programs=block_settings.ONE)
    for dtype in (reduce_dtype, None):
        whole_step["sums"] = dataclasses.replace(sums, reduce_dtype=dtype)
        train_step = step.make_train_step(loss_fn, partition, **options | whole_step)
        after, metrics = train_step(state, batch)
        found.append({**_values(metrics), **_fields(after)})
    by_device, whole = found
    return [line for name in whole for line in _difference(name, by_device[name], whole[name], tolerance, way_out)]


def _equal_draws(
    loss_fn: Callable[..., Any], partition: partition_lib.Partition, state: State, batch: PyTree, options: dict
) -> list[str]:
    """Returns a line for each line of the user's code that draws the same random numbers on every device."""
    values = step_values.of_batch(partition, options)
    layout = inputs.Layout(partition.mesh, values.sums.grad_accum, values.batch.batch_specs, by_device=True)
    batch = jax.eval_shape(layout.place, batch)
    params = where_used.abstract_used(state.params, partition, values.compute_dtype)

    def aux_of(params: PyTree, batch: PyTree, state: State) -> PyTree:
        return None, loss_fn(params, batch, state)

    own_keys = keys.own(lambda: dependence.of_loss(aux_of, params, batch, state, layout), layout, batch, state)

    def on_device(params: PyTree, batch: PyTree, inputs: PyTree) -> PyTree:
        own = [keys.fold(values, paths, inputs["device"]) for values, paths in zip((inputs["state"], batch), own_keys)]
        with keys.folded_in_flax(inputs["device"]):
            return aux_of(params, own[1], own[0])

    everything = {"state": state, "device": jnp.int32(0)}
    program = dependence.of_loss(on_device, params, batch, everything, layout)
    return [
        f"{place}: draws the same random numbers on every device, since its key is that of all; fold it from a key in the state"
        for place in program.draws_without("device")
    ]


def _fields(state: State) -> dict[str, Any]:
    """Returns the values of a train state that its loss function may return, by path."""
    fields = {name: part for name, part in vars(state).items() if name not in ("params", "opt_state", "apply_fn", "tx")}
    return {f"state/{path}": leaf for path, leaf in _values(fields).items()}


def _values(values: PyTree) -> dict[str, Any]:
    return {path: leaf for path, leaf in tree.flatten(values) if not tree.is_key(leaf)}


def _difference(name: str, by_device: PyTree, whole: PyTree, tolerance: float, way_out: str) -> list[str]:
    ours, theirs = (np.asarray(value, np.float64) for value in (by_device, whole))
    if not theirs.size:
        return []
    largest = np.abs(theirs).max()
    apart = np.abs(ours - theirs)
    if apart.max() <= tolerance * largest:
        return []
    place = np.unravel_index(apart.argmax(), apart.shape)
    share = f"{apart.max() / largest:.1%} apart" if largest else "apart"
    return [f"{name}: {ours[place]:.6g} with reduce_dtype, {theirs[place]:.6g} on the whole batch ({share}); {way_out}"]
