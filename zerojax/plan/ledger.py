"""Counts what a compiled train step sends, and what theory says it must. This module is a table: a row for each array of each collective.

By the ring convention a device receives, and sends, per run of a collective over N devices:

    all-gather        (N - 1) / N of its output          all-to-all           (N - 1) / N of its output
    reduce-scatter    (N - 1) / N of its input           collective-permute   its output
    all-reduce        2 (N - 1) / N of its output
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh, NamedSharding

from zerojax import mesh as mesh_lib
from zerojax import roles
from zerojax import specs as specs_lib
from zerojax.hlo import collectives, syntax
from zerojax.hlo import flow as hlo_flow
from zerojax.plan import attribution
from zerojax.plan.attribution import WeightDims
from zerojax.zero import placement


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of one collective, counted for one step and one device.

    Attributes:
      name, kind, computation: the instruction, what it does, and the computation it is in.
      dtype, dims: of the larger array: a gather's output, a reduction's input.
      axes, ways: the mesh axes it runs over ("?" where they are none of the mesh's), and over how many devices.
      elements, nbytes: what a device receives in a step, all runs counted.
      times: how often it runs in a step.
      role: one of `roles.SENT`.
      weights: the paths it may be of; several where the program does not say which.
      is_async, overlaps: whether it runs beside other work, and beside how many instructions of which kind.
      is_kept: a weight gathered in the forward pass that the backward pass reads too.
      read_by: what computes with the result (op_names); of gathered weights and activations.
      op_name, source: what it was traced from, and the line.
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


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The rows of a program, in the order in which they run, with the weights and the mesh they were read against."""

    rows: tuple[Row, ...]
    weights: Mapping[str, WeightDims]
    mesh: Mesh
    flow: hlo_flow.Flow

    @property
    def params(self) -> int:
        """Returns the elements of all weights as one device uses them: the unit of the totals."""
        return sum(weight.size for weight in self.weights.values())

    @property
    def ways(self) -> int:
        """Returns the devices that a batch is sharded over: those of all mesh axes but `model`."""
        return math.prod(size for axis, size in self.mesh.shape.items() if axis != mesh_lib.MODEL)

    def totals(self) -> dict[str, dict[str, float]]:
        """Returns {role: {"params": in units of the model's parameters, "bytes", "exposed"}} received by a device in a step.

        "exposed" counts the bytes of collectives that no other work is scheduled beside.
        """
        found: dict[str, dict[str, float]] = {role: {"params": 0.0, "bytes": 0, "exposed": 0} for role in roles.SENT}
        for row in self.rows:
            found[row.role]["params"] += row.elements / max(1, self.params)
            found[row.role]["bytes"] += row.nbytes
            found[row.role]["exposed"] += 0 if row.overlaps else row.nbytes
        return found


def ledger(hlo_text: str, mesh: Mesh, weights: Mapping[str, Any]) -> Ledger:
    """Reads the collectives of a compiled step.

    Args:
      hlo_text: what `compiled.as_text()` returns.
      mesh: the mesh it was compiled for, whatever its axes are called.
      weights: by path, `Partition.placements`, or arrays or ShapeDtypeStructs with shardings (see `weights_of`).

    >>> found = ledger(step.lower(state, batch).compile().as_text(), partition.mesh, partition.placements)
    """
    flow = hlo_flow.flow(syntax.parse(hlo_text))
    known = weights_of(weights, mesh)
    owner = attribution.Attribution(flow, known)
    rows = [_row(flow, owner, found, part) for found in collectives.collectives(flow, mesh) for part in found.parts]
    return Ledger(tuple(rows), known, mesh, flow)


def weights_of(weights: Mapping[str, Any], mesh: Mesh) -> dict[str, WeightDims]:
    """Returns each weight's dims.

    A Placement says all of them. For an array with a sharding the rule is that weights are gathered over the axis `data`, or over every
    axis where the mesh has none of that name, and that gradients and moments are sharded as the weight is.
    """
    gathered_over = [mesh_lib.DATA] if mesh_lib.DATA in mesh.shape else list(mesh.shape)
    found = {}
    for path, given in weights.items():
        if isinstance(given, placement.Placement):
            shape = given.shape or ()
            found[path] = WeightDims(
                path,
                shape,
                used=given.used.shard_shape(shape),
                stored=given.stored.shard_shape(shape),
                grad=given.grad.shard_shape(shape),
                moments=given.update.shard_shape(shape),
                trainable=given.trainable,
            )
            continue
        shape, sharding = tuple(given.shape), getattr(given, "sharding", None)
        used = stored = shape
        if isinstance(sharding, NamedSharding):
            stored, spec = sharding.shard_shape(shape), sharding.spec
            for axis in gathered_over:
                spec = specs_lib.without(spec, axis)
            used = NamedSharding(sharding.mesh, spec).shard_shape(shape)
        found[path] = WeightDims(path, shape, used, stored, stored, stored)
    return found


def theory(weights: Mapping[str, WeightDims], ways: int, passes: int = 1) -> dict[str, float]:
    """Returns what a device must receive in a step, by role, in units of the weights' parameters.

    A weight of u elements in use, s as stored, and g where its gradient or its moments are kept, moves: u - s to be gathered, twice, if
    it is stored sharded; 2 u (n - 1) / n to be all-reduced over n devices, or u - g and then 2 g (r - 1) / r over the r = n g / u copies of
    a shard; and s - g to be gathered again after the update. With all leaves sharded N ways these are the paper's:
    2 (N - 1) / N parameters, and 3 (N - 1) / N where weights are sharded too (ZeRO, arXiv:1910.02054, section 7). A weight that is not
    trainable is gathered, for the gradients of activations too, and neither reduced nor updated.

    Args:
      weights: see `weights_of`.
      ways: the devices that a batch is sharded over.
      passes: forward and backward passes a step; each gathers, and each reduces gradients that are kept sharded.
    """
    total = max(1, sum(weight.size for weight in weights.values()))
    found = dict.fromkeys(roles.SENT_OF_WEIGHTS, 0.0)
    for weight in weights.values():
        used, stored = weight.size, math.prod(weight.stored)
        found[roles.WEIGHTS_FORWARD] += passes * (used - stored) / total
        found[roles.WEIGHTS_BACKWARD] += passes * (used - stored) / total
        if not weight.trainable:
            continue
        shard = min(math.prod(weight.grad), math.prod(weight.moments))
        copies = max(1.0, ways * shard / used)
        reduced = used - shard + 2 * shard * (copies - 1) / copies
        found[roles.GRADIENTS] += (passes if math.prod(weight.grad) < used else 1) * reduced / total
        found[roles.UPDATED_WEIGHTS] += max(0, stored - math.prod(weight.moments)) / total
    return found


def _row(
    flow: hlo_flow.Flow, owner: attribution.Attribution, found: collectives.Collective, part: collectives.Part
) -> Row:
    larger = part.taken if found.kind in collectives.REDUCTIONS else part.given
    role, weights = owner.role(found, part)
    is_followed = role in (roles.WEIGHTS_FORWARD, roles.ACTIVATIONS)
    readers = owner.readers(found, part) if is_followed else ()
    if role == roles.WEIGHTS_FORWARD and readers and all(attribution.is_backward(reader.op_name) for reader in readers):
        role = roles.WEIGHTS_BACKWARD  # named after the forward pass, and gathered for the backward pass alone
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
    )


def _received(kind: str, elements: int, ways: int) -> float:
    """Returns the elements that a device receives; see the table above."""
    if kind == "collective-permute":
        return elements
    return (2.0 if kind == "all-reduce" else 1.0) * elements * (ways - 1) / ways
