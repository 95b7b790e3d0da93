"""Adds what packing lost of a gradient to the next one (error feedback). This module keeps it in the train state.

    sent_t = packed(g_t + e_t)        e_{t+1} = g_t + e_t - sent_t        (EF-SGD, arXiv:1901.09847)

What was sent so far, and e, add up to the sum of the gradients so far, so no part of a gradient is lost, but some are late. g is what a
device sends to other hosts: the sums over its own host of the gradients' shards. e is therefore 4 bytes for each weight over the devices of
a host, on every device, and differs between devices. Inside a host gradients travel in 8 bits, and have no feedback. Adam's second moments
count the error twice, see docs/multi_host.md.

The state's field `unsent_grads` has for each weight float32[devices, hosts, n], n the elements of a shard, or of a stack whose first dim is
not sharded, and of which `nn.scan` hands out layers, [devices, layers, hosts, n]. Gradients are those of a pass, without the loss scale.
"""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import roles, specs, tree
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import columns, packed

FIELD = "unsent_grads"  # of the train state


class Kept(gather.Feedback):
    """Gives the field to the wires of a step, and renews it in each pass.

    Args:
      rows: the abstract field, with its shardings.
      scale: f(state) -> the factor of the loss.
    """

    def __init__(self, rows: Mapping[str, jax.ShapeDtypeStruct], scale: Callable[[Any], Any]):
        self._rows, self._scale = rows, scale

    def specs(self) -> dict[str, Any]:
        manual = {axis.name for axis in mesh_lib.AXES if not axis.compiler}
        return {FIELD: {path: specs.only(_spec(row), manual) for path, row in self._rows.items()}}

    def state_specs(self, state: State) -> PyTree:
        return jax.tree.map(lambda _: P(), state).replace(**self.specs())

    def fields(self, state: State) -> dict[str, Any]:
        return {FIELD: getattr(state, FIELD)}

    def rows(self, state: State) -> Mapping[str, jax.Array]:
        return {path: row[0] for path, row in getattr(state, FIELD).items()}

    def value_and_grad(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def of_rows(both: tuple[Any, Any], batch: PyTree, state: State) -> tuple[jax.Array, Any]:
            return loss(both[0], batch, state.replace(**{FIELD: both[1]}))

        def value_and_grad(inputs: PyTree, batch: PyTree, state: State) -> Any:
            scale = self._scale(state)
            scaled = jax.tree.map(lambda row: row * scale, getattr(state, FIELD))
            (value, aux), (grads, rows) = jax.value_and_grad(of_rows, has_aux=True)((inputs, scaled), batch, state)
            rows = jax.tree.map(lambda row: row / scale, rows)
            return (value, {**aux, "state": {**aux["state"], FIELD: rows}}), grads

        return value_and_grad


def in_step(sent: partition_lib.Partition, scale: Callable[[Any], Any]) -> gather.Feedback:
    """Returns the feedback of a step, from a partition with the step's wires.

    Raises:
      UserError: the state's field is not that of the wires.
    """
    wanted, found = _wanted(sent), getattr(sent.abstract_state, FIELD, ())
    shapes = {path: row.shape for path, row in found.items()} if isinstance(found, Mapping) else {}
    if wanted and shapes != {path: row.shape for path, row in wanted.items()}:
        raise UserError(
            f"wire.error_feedback: needs the train state's field `{FIELD}` for these wires and this mesh; pass the state and the partition "
            "that zerojax.with_unsent returns"
        )
    if shapes and not wanted:
        raise UserError(
            f"wire.error_feedback: is off, and the train state has the field `{FIELD}`; set it, or create the state without"
        )
    return Kept(wanted, scale) if wanted else gather.NO_FEEDBACK


def with_unsent(
    state: State,
    partition: partition_lib.Partition,
    wires: packed.PackedWires | Sequence[tuple[str, Any]],
    by_columns: str = "",
) -> tuple[State, partition_lib.Partition]:
    """Returns a sharded train state, and its partition, with the field `unsent_grads` that `error_feedback` needs; nothing is unsent yet.

    Args:
      state, partition: of `shard_train_state`. The state has a field `unsent_grads`, as zerojax.TrainState does.
      wires, by_columns: those of `make_train_step`.

    Raises:
      UserError: the state has no such field, or `wires` do not fit the partition (see `make_train_step`).

    >>> state, partition = zerojax.with_unsent(state, partition, wires)
    """
    if not hasattr(state, FIELD):
        raise UserError(
            f"with_unsent: the state needs a field `{FIELD}`; declare `{FIELD}: Any = ()` in your TrainState, or use zerojax.TrainState"
        )
    any_blocks = "."  # which do not change what is kept; `make_train_step` checks them
    rows = [("", wires)] if isinstance(wires, packed.PackedWires) else [*wires]
    sent = columns.marked(partition, by_columns, any_blocks, jnp.float32)
    for pattern, choice in sorted(rows, key=lambda row: row[1].sends_rest):
        sent = choice.marked(sent, pattern, any_blocks, jnp.float32)
    extended = in_partition(partition, sent)
    return state.replace(**{FIELD: first(extended)}), extended


def in_partition(partition: partition_lib.Partition, sent: partition_lib.Partition) -> partition_lib.Partition:
    """Returns a partition whose state has the field; `sent` is the same with a step's wires. Without feedback it is unchanged."""
    rows = _wanted(sent)
    if not rows:
        return partition
    decisions = {
        f"{FIELD}/{path}": partition_lib.Decision(roles.OTHER, row.shape, row.dtype, _spec(row), _spec(row), "unsent")
        for path, row in rows.items()
    }
    return dataclasses.replace(
        partition,
        abstract_state=partition.abstract_state.replace(**{FIELD: rows}),
        specs=partition.specs.replace(**{FIELD: {path: _spec(row) for path, row in rows.items()}}),
        shardings=partition.shardings.replace(**{FIELD: {path: row.sharding for path, row in rows.items()}}),
        leaves={**partition.leaves, **decisions},
        resident=partition.resident and in_partition(partition.resident, sent),
    )


def first(partition: partition_lib.Partition) -> dict[str, jax.Array]:
    """Returns the field before the first step, sharded as the partition says."""
    rows = getattr(partition.abstract_state, FIELD, ())
    return jax.jit(functools.partial(zeros, rows), out_shardings=jax.tree.map(lambda row: row.sharding, rows))()


def zeros(rows: PyTree) -> PyTree:
    """Returns the field before the first step, from its abstract form."""
    return jax.tree.map(lambda row: jnp.zeros(row.shape, row.dtype), rows)


def layout(sent: partition_lib.Partition) -> str:
    """Returns what the field's meaning depends on, as a short text; "" without the field. `sent` has the wires of a step.

    A row of another layout is of other elements, or of other hosts.
    """
    rows = {
        path: [row.shape, str(_spec(row)), str(sent.placements[f"params/{path}"].stored.spec)]
        for path, row in _wanted(sent).items()
    }
    found = json.dumps([list(sent.mesh.shape.items()), sorted(rows.items())])
    return hashlib.sha256(found.encode()).hexdigest()[:16] if rows else ""


def _wanted(sent: partition_lib.Partition) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the abstract field of a partition with a step's wires, by path below the params; {} without feedback."""
    mesh, rows = sent.mesh, {}
    for path, weight in sent.placements.items():
        if not (isinstance(weight.wire, packed.InBlocks) and weight.wire.has_feedback and weight.trainable):
            continue
        assert weight.shape is not None
        shape, hosts = gather.local_shape(weight.shape, weight.stored), weight.wire.hosts.count
        is_stack = len(shape) > 2 and not specs.names((*weight.stored.spec, None)[0])
        layers = shape[:1] if is_stack else ()
        own = (*layers, hosts, math.prod(shape[len(layers) :]))
        last = packed.compiler_axes(weight)
        spec = P(mesh_lib.SUMMED, *[None] * (len(own) - 1), last)
        rows[tree.below_params(path)] = jax.ShapeDtypeStruct(
            (mesh_lib.size(mesh, mesh_lib.SUMMED), *own), jnp.float32, sharding=NamedSharding(mesh, spec)
        )
    return rows


def _spec(row: jax.ShapeDtypeStruct) -> P:
    assert isinstance(row.sharding, NamedSharding)
    return row.sharding.spec
