"""Counts the bytes that a compiled train step sends, and those that theory expects. This module has a row for each collective's arrays.

In a ring over N devices, each device receives and sends, each time that a collective runs:

    all-gather        (N - 1) / N of its output          all-to-all           (N - 1) / N of its output
    reduce-scatter    (N - 1) / N of its input           collective-permute   its output
    all-reduce        2 (N - 1) / N of its output
"""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax import roles
from zerojax import specs as specs_lib
from zerojax.hlo import collectives, replica_groups, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import attribution, matmuls
from zerojax.plan.attribution import WeightDims
from zerojax.zero.weights import placement


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of one collective, counted for one step and one device.

    Attributes:
      name, kind, computation: the instruction, its kind of collective, and its computation.
      dtype, dims: of the larger array: a gather's output, a reduction's input.
      axes, ways, group: the mesh axes that it runs over ("?" if they are no axes of the mesh), the number of devices, and the indices of
        those of its first group.
      elements, nbytes: the amount that a device receives in a step, over all runs.
      times: how often it runs in a step.
      role: one of `roles.SENT`.
      weights: the paths of the weights that it may belong to: several if the program does not distinguish them.
      is_async, overlaps: whether it is asynchronous, and the number of instructions by kind that run beside it.
      is_kept: whether it gathers a weight in the forward pass that the backward pass reads too.
      read_by: the op_names of the instructions that read the result. Only for gathered weights and activations.
      op_name, source: the operation and the source line that it was traced from.
    """

    name: str
    kind: str
    computation: str
    dtype: str
    dims: tuple[int, ...]
    axes: tuple[str, ...]
    ways: int
    elements: int
    nbytes: int
    times: int
    role: str
    weights: tuple[str, ...]
    is_async: bool
    overlaps: Mapping[str, int]
    is_kept: bool
    read_by: tuple[str, ...]
    op_name: str
    source: str
    group: tuple[int, ...] = ()

    @property
    def over(self) -> tuple[str, ...] | tuple[int, ...]:
        """Returns what tells its hosts: its axes, or its devices where they are no axes."""
        return self.group if replica_groups.UNKNOWN in self.axes else self.axes


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The rows of a program in execution order, with its weights and its mesh."""

    rows: tuple[Row, ...]
    weights: Mapping[str, WeightDims]
    mesh: Mesh
    flow: hlo_flow.Flow

    @functools.cached_property
    def matmuls(self) -> tuple[matmuls.Matmul, ...]:
        """Returns the program's matmuls, with the dtypes in which they run."""
        return matmuls.matmuls(self.flow)

    @functools.cached_property
    def params(self) -> int:
        """Returns the number of elements of all weights as one device uses them: the unit of the totals."""
        return sum(weight.size for weight in self.weights.values())

    @property
    def ways(self) -> int:
        """Returns the number of devices that a batch is sharded over: all axes but the compiler's, in a step of the user's own too."""
        return mesh_lib.size(self.mesh, set(self.mesh.shape) - set(mesh_lib.COMPILER))

    @functools.cached_property
    def read_once(self) -> frozenset[str]:
        """Returns the weights that the backward pass does not read: gathered in the forward pass, not kept, and not gathered again.

        An embedding's gradient does not depend on it, and a loss in one pass has made the gradients of the output projection.
        """
        first = {path for row in self.rows if row.role == roles.WEIGHTS_FORWARD for path in row.weights}
        again = {path for row in self.rows if row.role == roles.WEIGHTS_BACKWARD or row.is_kept for path in row.weights}
        return frozenset(first - again)

    def theory(self, passes: int = 1, only: Collection[str] | None = None) -> dict[str, float]:
        """Returns `theory` of the program's weights, or of some, in units of their parameters."""
        weights = {path: weight for path, weight in self.weights.items() if only is None or path in only}
        return theory(weights, self.ways, passes, self.read_once)

    @property
    def exchanged(self) -> tuple[Row, ...]:
        """Returns the all-to-alls of tokens to their experts and back, in rooms of a fixed size."""
        scope = rf"\b{roles.EXPERT_PARALLEL}\b"
        return tuple(row for row in self.rows if row.role == roles.ACTIVATIONS and re.search(scope, row.op_name))

    def totals(self) -> dict[str, dict[str, float]]:
        """Returns {role: {"params", "bytes", "exposed"}} that a device receives in a step.

        "params" is in units of the model's parameters. "exposed" counts the bytes of collectives with no work scheduled beside them.
        """
        found: dict[str, dict[str, float]] = {role: {"params": 0.0, "bytes": 0, "exposed": 0} for role in roles.SENT}
        for row in self.rows:
            found[row.role]["params"] += row.elements / max(1, self.params)
            found[row.role]["bytes"] += row.nbytes
            found[row.role]["exposed"] += 0 if row.overlaps else row.nbytes
        return found


def ledger(program: str | syntax.Module, mesh: Mesh, weights: Mapping[str, Any]) -> Ledger:
    """Reads the collectives of a compiled step.

    Args:
      program: the text of `compiled.as_text()`, or what `syntax.parse` makes of it.
      mesh: the mesh that the step was compiled for. Its axes may have any names.
      weights: by path, `Partition.placements`, or arrays or ShapeDtypeStructs with shardings (see `weights_of`).

    >>> found = ledger(step.lower(state, batch).compile().as_text(), partition.mesh, partition.placements)
    """
    flow = hlo_flow.flow(syntax.parse(program) if isinstance(program, str) else program)
    known = weights_of(weights, mesh)
    owner = attribution.Attribution(flow, known, mesh.size)
    rows = [_row(flow, owner, found, part) for found in collectives.collectives(flow, mesh) for part in found.parts]
    return Ledger(tuple(rows), known, mesh, flow)


def weights_of(weights: Mapping[str, Any], mesh: Mesh) -> dict[str, WeightDims]:
    """Returns each weight's dims.

    A Placement has all of them. An array with a sharding is assumed to be gathered over the axes of `mesh.STATE`, or over all axes of a
    mesh without them. Its gradient and its moments are assumed to be sharded as the weight is.
    """
    gathered_over = tuple(axis for axis in mesh_lib.STATE if axis in mesh.shape) or tuple(mesh.shape)
    found = {}
    for path, weight in weights.items():
        if isinstance(weight, placement.Placement):
            shape = weight.shape or ()
            found[path] = WeightDims(
                path,
                shape,
                used=weight.used.shard_shape(shape),
                stored=weight.stored.shard_shape(shape),
                grad=weight.grad.shard_shape(shape),
                moments=weight.update.shard_shape(shape),
                trainable=weight.trainable,
                axes=frozenset(specs_lib.axes(weight.used.spec)),
                apart=mesh_lib.size(mesh, specs_lib.axes(weight.used.spec) - {*mesh_lib.COMPILER}),
                received=weight.wire.received(weight),
            )
            continue
        shape, sharding = tuple(weight.shape), getattr(weight, "sharding", None)
        used, spec = (stored := shape), P()
        if isinstance(sharding, NamedSharding):
            stored, spec = sharding.shard_shape(shape), specs_lib.without(sharding.spec, gathered_over)
            used = NamedSharding(sharding.mesh, spec).shard_shape(shape)
        found[path] = WeightDims(path, shape, used, stored, stored, stored, axes=frozenset(specs_lib.axes(spec)))
    return found


def theory(
    weights: Mapping[str, WeightDims], ways: int, passes: int = 1, read_once: Collection[str] = ()
) -> dict[str, float]:
    """Returns the parameters that a device must receive in a step, by role, in units of the weights' parameters.

    Let a weight have u elements on a device as used, s as stored, and g in the smaller shard of its gradient and its moments. It moves:

        forward pass, backward pass    u - s each                            all-gather
        gradient                       2 u (n - 1) / n                       all-reduce over n devices, if g = u
                                       u - g, then 2 g (r - 1) / r           reduce-scatter, then all-reduce of r = n g / u replicas
        after the update               s - g                                 all-gather

    If all leaves are sharded N ways, the sums are the paper's: 2 (N - 1) / N parameters, and 3 (N - 1) / N if weights are sharded too
    (ZeRO, arXiv:1910.02054, section 7). A wire that packs weights or gradients says itself what it brings, in elements of its own arrays
    (`placement.Wire.received`): codes and scales. A weight that is not trainable is gathered, in the backward pass too, but has no
    gradient and no update.

    Args:
      weights: see `weights_of`.
      ways: the number of devices that a batch is sharded over.
      passes: forward and backward passes in a step. Each pass gathers, and each reduces the gradients that are sharded.
      read_once: the paths of weights that the backward pass does not read, and does not gather.
    """
    total = max(1, sum(weight.size for weight in weights.values()))
    found = dict.fromkeys(roles.SENT_OF_WEIGHTS, 0.0)
    for weight in weights.values():
        used, stored, own = weight.size, math.prod(weight.stored), weight.received
        forward, backward = (own.get(role, used - stored) for role in (roles.WEIGHTS_FORWARD, roles.WEIGHTS_BACKWARD))
        found[roles.WEIGHTS_FORWARD] += passes * forward / total
        found[roles.WEIGHTS_BACKWARD] += 0 if weight.path in read_once else passes * backward / total
        if not weight.trainable:
            continue
        shard = min(math.prod(weight.grad), math.prod(weight.moments))
        copies = max(1.0, ways / weight.apart * shard / used)
        reduced = own.get(roles.GRADIENTS, used - shard + 2 * shard * (copies - 1) / copies)
        found[roles.GRADIENTS] += (passes if math.prod(weight.grad) < used else 1) * reduced / total
        found[roles.UPDATED_WEIGHTS] += max(0, stored - math.prod(weight.moments)) / total
    return found


def _row(
    flow: hlo_flow.Flow, owner: attribution.Attribution, found: collectives.Collective, part: collectives.Part
) -> Row:
    larger = part.taken if found.kind in collectives.REDUCTIONS else part.given
    role, weights = owner.role(found, part)
    is_followed = role in (roles.WEIGHTS_FORWARD, roles.ACTIVATIONS) and not re.search(
        rf"\b{roles.SECOND_COPY}\b", part.op_name
    )
    readers = owner.readers(found, part) if is_followed else ()
    if role == roles.WEIGHTS_FORWARD and readers and all(attribution.is_backward(reader.op_name) for reader in readers):
        role = roles.WEIGHTS_BACKWARD  # it has a name of the forward pass, but only the backward pass reads it
    moved = _received(found.kind, larger.elements, found.ways) * found.call.times
    return Row(
        name=found.start.name,
        kind=found.kind,
        computation=found.computation.name,
        dtype=larger.dtype,
        dims=larger.dims,
        axes=found.axes,
        ways=found.ways,
        elements=round(moved),
        nbytes=round(moved * syntax.bits(larger.dtype) / 8),
        times=found.call.times,
        role=role,
        weights=weights,
        is_async=found.is_async,
        overlaps=found.overlaps,
        is_kept=role == roles.WEIGHTS_FORWARD and owner.is_kept(readers),
        read_by=tuple(dict.fromkeys(reader.op_name for reader in readers if reader.op_name)),
        op_name=part.op_name,
        source=flow.module.source(found.start),
        group=found.group,
    )


def _received(kind: str, elements: int, ways: int) -> float:
    """Returns the elements that a device receives, by the table above."""
    if kind == "collective-permute":
        return elements
    return (2.0 if kind == "all-reduce" else 1.0) * elements * (ways - 1) / ways
