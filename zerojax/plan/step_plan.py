"""Compiles a train step ahead of time and says what it will need and send. This module allocates nothing and needs no accelerator.

A plan joins four readings of one compiled program: its buffers, its collectives, what is wrong with it, and the least time it can take.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from zerojax import mesh as mesh_lib
from zerojax import roles, specs, tree
from zerojax.hlo import buffer_roles
from zerojax.hlo import buffers as buffers_lib
from zerojax.plan import bound as bound_lib
from zerojax.plan import departures, findings, flops, ledger, targets
from zerojax.zero import memory, stages
from zerojax.zero import placement as placement_lib

LARGEST = 10  # leaves and temporaries that are listed


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one role on one device, three ways; None where a way says nothing.

    Attributes:
      theory: the role's bytes, divided by the size of `data` where the stage shards it (ZeRO, arXiv:1910.02054, figure 1).
      arithmetic: what the shardings give: replicated leaves, padding and copies counted.
      assigned: what XLA's buffer assignment holds; of gradients and temporaries, what lives at the peak.
    """

    role: str
    theory: int | None
    arithmetic: int | None
    assigned: int | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a train step will need on each device, and send.

    Attributes:
      target: the kind of device.
      devices, mesh_shape: how many, and how they are laid out.
      stage: the ZeRO stage; None for a step of one's own.
      tokens: tokens (or examples) of one step, over all devices; 0 where not said.
      memory: rows by role.
      buffers, ledger, findings, departures, bound: the readings.
      theory: what the stage should send, by role, in units of the parameters.
      compile_seconds: what the plan took.
      compiled: the step itself; it runs where the devices are real.
    """

    target: targets.Target
    devices: int
    mesh_shape: Mapping[str, int]
    stage: int | None
    tokens: int
    memory: tuple[MemoryRow, ...]
    buffers: buffers_lib.Buffers
    ledger: ledger.Ledger
    findings: tuple[findings.Finding, ...]
    departures: tuple[departures.Departure, ...]
    theory: Mapping[str, float]
    bound: bound_lib.Bound | None
    compile_seconds: float
    compiled: jax.stages.Compiled = dataclasses.field(repr=False)

    @property
    def peak(self) -> int:
        """Returns the most bytes in use on a device."""
        return self.buffers.peak

    @property
    def usable(self) -> int | None:
        """Returns the bytes that XLA may use on a device, or None where its memory is not known."""
        return self.target.usable

    @property
    def largest_leaves(self) -> list[buffers_lib.Argument]:
        """Returns the largest leaves of the step's arguments, the largest first."""
        return sorted(self.buffers.arguments, key=lambda leaf: -leaf.nbytes)[:LARGEST]

    @property
    def largest_temporaries(self) -> list[buffers_lib.Temporary]:
        """Returns the largest temporaries at the peak, the largest first."""
        return list(self.buffers.at_peak[:LARGEST])

    @property
    def fits(self) -> bool | None:
        """Says whether the step fits; None where the device's memory is not known."""
        return None if self.usable is None else self.peak <= self.usable


def plan_step(
    train_step: Any,
    state: Any,
    *args: Any,
    mesh: Mesh,
    target: str = "here",
    placement: placement_lib.Partition | None = None,
    tokens: int = 0,
    compute_dtype: Any = None,
    passes: int = 1,
    by_hand: bool = False,
    from_cache: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Plans any jitted train step.

    Args:
      train_step: a `jax.jit` function of (state, *args).
      state: the train state, abstract: ShapeDtypeStructs with shardings on `mesh`; its weights lie under `params`.
      *args: the other arguments, abstract.
      mesh: the mesh the step is lowered for, of compile-only devices (`targets.devices`) or real ones.
      target: whose memory and rates to compare with.
      placement: the state's partition; without it the stage is not known, and theory counts the shardings as given.
      tokens: tokens of one step, for the time bound.
      compute_dtype: dtype of the forward pass; None for that of most matmuls.
      passes: forward and backward passes a step.
      by_hand: whether gradients are summed by explicit collectives, in float32 (`make_train_step`'s reduce_dtype).
      from_cache: see `buffers.compile_with_buffers`.
      compiler_options: XLA's, beside those of the step itself.

    >>> plan = plan_step(train_step, partition.abstract_state, batch, mesh=mesh, target="h200", placement=partition)
    """
    known = targets.get(target)
    began = time.perf_counter()
    traced = train_step.trace(state, *args)
    compiled, held = buffers_lib.compile_with_buffers(
        traced.lower(), from_cache=from_cache, compiler_options=compiler_options
    )
    seconds = time.perf_counter() - began
    weights = placement.placements if placement else _weights(state)
    sent = ledger.ledger(held.hlo_text, mesh, weights)
    ways = math.prod(size for axis, size in mesh.shape.items() if axis != mesh_lib.MODEL)
    return Plan(
        target=known,
        devices=mesh.size,
        mesh_shape=dict(mesh.shape),
        stage=placement.stage if placement else None,
        tokens=tokens,
        memory=_memory(held, placement, passes, by_hand),
        buffers=held,
        ledger=sent,
        findings=findings.findings(
            sent, planned=placement.abstract_state if placement else state, compute_dtype=compute_dtype, passes=passes
        ),
        departures=departures.departures(sent, passes=passes),
        theory=ledger.theory(sent.weights, ways, passes),
        bound=bound_lib.least_step(
            known,
            mesh,
            flops=flops.count(traced),
            traffic=bound_lib.memory_traffic(sent.flow),
            received=_received(sent),
            host=max(bound_lib.host_traffic(sent.flow)),
        ),
        compile_seconds=seconds,
        compiled=compiled,
    )


def _weights(state: Any) -> dict[str, Any]:
    """Returns the leaves of a state that are weights, by path."""
    role_of = stages.leaf_roles(state)
    return {path: leaf for path, leaf in tree.flatten(state) if role_of[path] == roles.PARAMS}


def _received(sent: ledger.Ledger) -> dict[tuple[str, ...], float]:
    """Returns the bytes that a device receives, by the mesh axes that they travel over."""
    found: dict[tuple[str, ...], float] = {}
    for row in sent.rows:
        found[row.axes] = found.get(row.axes, 0.0) + row.nbytes
    return found


def _memory(
    held: buffers_lib.Buffers, placement: placement_lib.Partition | None, passes: int, by_hand: bool
) -> tuple[MemoryRow, ...]:
    """Returns the memory by role, three ways."""
    assigned = {**held.arguments_by_role, roles.HOST: held.host}
    temporaries = held.temporaries_by_role if held.at_peak else {}
    for role in (roles.GRADIENTS, roles.GATHERED, roles.COLLECTIVE_BUFFERS):
        assigned[role] = temporaries.get(role, 0)
    rest = held.temporaries - sum(temporaries.get(role, 0) for role in assigned)
    assigned[roles.TEMPORARIES] = rest + held.outputs + held.constants
    theory, arithmetic = _theory(placement, passes, by_hand) if placement else ({}, {})
    shown = (
        roles.PARAMS,
        roles.MASTER,
        roles.MOMENTS,
        roles.GRADIENTS,
        roles.GATHERED,
        roles.COLLECTIVE_BUFFERS,
        roles.TEMPORARIES,
        roles.REST,
        roles.HOST,
    )
    return tuple(MemoryRow(role, theory.get(role), arithmetic.get(role), assigned.get(role, 0)) for role in shown)


def _theory(placement: placement_lib.Partition, passes: int, by_hand: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns bytes by role as the stage's table has them, and as the shardings do."""
    splits, ways = stages.STAGES[placement.stage], placement.mesh.shape[stages.DATA]
    is_sharded = {
        roles.PARAMS: splits.params,
        roles.MASTER: splits.opt_state,
        roles.MOMENTS: splits.opt_state,
        roles.GRADIENTS: splits.grads,
    }
    theory, arithmetic = dict.fromkeys(is_sharded, 0.0), dict.fromkeys(is_sharded, 0)
    for path, leaf in tree.flatten(placement.abstract_state):
        role = buffer_roles.argument_role(f"state/{path}")
        if role not in is_sharded:
            continue
        # A device's part if the leaf were replicated over `data`: other axes, such as `model`, still shard it.
        part = NamedSharding(placement.mesh, specs.without(leaf.sharding.spec, stages.DATA)).shard_shape(leaf.shape)
        theory[role] += tree.nbytes(leaf, part) / (ways if is_sharded[role] else 1)
        arithmetic[role] += tree.nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
        if role == roles.PARAMS and placement.placements[path].trainable:
            item = 4 / leaf.dtype.itemsize if passes > 1 or by_hand else 1
            theory[roles.GRADIENTS] += item * tree.nbytes(leaf, part) / (ways if splits.grads else 1)
    counted = memory.bytes_per_device(placement, accumulates=passes > 1, by_hand=by_hand)
    arithmetic[roles.GRADIENTS] = counted[roles.GRADIENTS]
    return {role: round(count) for role, count in theory.items()}, arithmetic
