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
from zerojax import precision, specs, tree
from zerojax.hlo import buffer_roles, buffers
from zerojax.plan import bound as bound_lib
from zerojax.plan import departures, findings, flops, ledger, targets
from zerojax.trainer import config as config_lib
from zerojax.trainer import program
from zerojax.zero import memory, stages
from zerojax.zero import placement as placement_lib

HOST, TEMPORARIES = "host memory", "activations and temporaries"


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one role on one device, three ways; None where a way says nothing.

    Attributes:
      theory: the role's bytes, divided by the ways of `data` where the stage splits it (ZeRO, arXiv:1910.02054, figure 1).
      arithmetic: what the shardings give: leaves kept whole, padding and copies counted.
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
    buffers: buffers.Buffers
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
    """Plans any jitted train step, one's own too.

    Args:
      train_step: a `jax.jit` function of (state, *args).
      state: the train state, abstract: ShapeDtypeStructs with shardings on `mesh`; its weights lie under `params`.
      *args: the other arguments, abstract.
      mesh: the mesh the step is lowered for, of compile-only devices (`targets.devices`) or real ones.
      target: whose memory and rates to compare with.
      placement: the state's partition; without it the stage is not known, and theory counts the shardings as given.
      tokens: tokens of one step, for the time bound.
      compute_dtype: dtype of the forward pass; None for that of most matrix products.
      passes: forward and backward passes a step.
      by_hand: whether gradients are summed by hand, in float32 (`make_train_step`'s reduce_dtype).
      from_cache: see `buffers.compile_with_buffers`.
      compiler_options: XLA's, beside those of the step itself.

    >>> plan = plan_step(train_step, partition.abstract_state, batch, mesh=mesh, target="h200", placement=partition)
    """
    known = targets.get(target)
    began = time.perf_counter()
    traced = train_step.trace(state, *args)
    compiled, held = buffers.compile_with_buffers(
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
            flops=flops.count(traced).by_dtype,
            traffic=bound_lib.memory_traffic(sent.flow),
            received=_received(sent),
            host=max(bound_lib.host_traffic(sent.flow)),
        ),
        compile_seconds=seconds,
        compiled=compiled,
    )


def plan_config(
    config: config_lib.Config, target: str, topology: str = "", *, compiler_options: Mapping[str, Any] | None = None
) -> Plan:
    """Plans the trainer's step under a config, for devices that need not be there.

    Raises:
      UserError: the config, the target or the topology is wrong, or an extra is not installed.
    """
    devices = targets.devices(target, topology)
    built = program.build(config, devices=devices)
    return plan_program(built, target, compiler_options=compiler_options)


def plan_program(
    built: program.Program,
    target: str,
    *,
    from_cache: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Plan:
    """Plans a program that is built, on its own mesh."""
    config, sizes = built.config, built.sizes
    return plan_step(
        built.train_step,
        built.partition.abstract_state,
        built.abstract_batch,
        mesh=built.mesh,
        target=target,
        placement=built.partition,
        tokens=sizes.global_batch_size * config.seq_len,
        compute_dtype=precision.PRECISIONS[config.precision].compute_dtype,
        passes=sizes.grad_accum,
        by_hand=True,
        from_cache=from_cache,
        compiler_options=compiler_options,
    )


def _weights(state: Any) -> dict[str, Any]:
    """Returns the leaves of a state that are weights, by path."""
    role_of = stages.leaf_roles(state)
    return {path: leaf for path, leaf in tree.flatten(state) if role_of[path] == stages.PARAMS}


def _received(sent: ledger.Ledger) -> dict[tuple[str, ...], float]:
    """Returns the bytes that a device receives, by the mesh axes that they travel over."""
    found: dict[tuple[str, ...], float] = {}
    for row in sent.rows:
        found[row.axes] = found.get(row.axes, 0.0) + row.nbytes
    return found


def _memory(
    held: buffers.Buffers, placement: placement_lib.Partition | None, passes: int, by_hand: bool
) -> tuple[MemoryRow, ...]:
    """Returns the memory by role, three ways."""
    assigned = {**held.arguments_by_role, HOST: held.host}
    temporaries = held.temporaries_by_role if held.at_peak else {}
    for role in (buffer_roles.GRADIENTS, buffer_roles.GATHERED, buffer_roles.COLLECTIVES):
        assigned[role] = temporaries.get(role, 0)
    rest = held.temporaries - sum(temporaries.get(role, 0) for role in assigned)
    assigned[TEMPORARIES] = rest + held.outputs + held.constants
    theory, arithmetic = _theory(placement, passes, by_hand) if placement else ({}, {})
    roles = (
        buffer_roles.PARAMS,
        buffer_roles.MASTER,
        buffer_roles.MOMENTS,
        buffer_roles.GRADIENTS,
        buffer_roles.GATHERED,
        buffer_roles.COLLECTIVES,
        TEMPORARIES,
        buffer_roles.REST,
        HOST,
    )
    return tuple(MemoryRow(role, theory.get(role), arithmetic.get(role), assigned.get(role, 0)) for role in roles)


def _theory(placement: placement_lib.Partition, passes: int, by_hand: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns bytes by role as the stage's table has them, and as the shardings do."""
    splits, ways = stages.STAGES[placement.stage], placement.mesh.shape[stages.DATA]
    is_split = {
        buffer_roles.PARAMS: splits.params,
        buffer_roles.MASTER: splits.opt_state,
        buffer_roles.MOMENTS: splits.opt_state,
        buffer_roles.GRADIENTS: splits.grads,
    }
    theory, arithmetic = dict.fromkeys(is_split, 0.0), dict.fromkeys(is_split, 0)
    for path, leaf in tree.flatten(placement.abstract_state):
        role = buffer_roles.argument_role(f"state/{path}")
        if role not in is_split:
            continue
        # A device's part were it whole along `data`: other axes, such as `model`, still split it.
        whole = NamedSharding(placement.mesh, specs.without(leaf.sharding.spec, stages.DATA)).shard_shape(leaf.shape)
        theory[role] += tree.nbytes(leaf, whole) / (ways if is_split[role] else 1)
        arithmetic[role] += tree.nbytes(leaf, leaf.sharding.shard_shape(leaf.shape))
        if role == buffer_roles.PARAMS:
            item = 4 / leaf.dtype.itemsize if passes > 1 or by_hand else 1
            theory[buffer_roles.GRADIENTS] += item * tree.nbytes(leaf, whole) / (ways if splits.grads else 1)
    counted = memory.bytes_per_device(placement, accumulates=passes > 1, by_hand=by_hand)
    arithmetic[buffer_roles.GRADIENTS] = counted["grads"]
    return {role: round(count) for role, count in theory.items()}, arithmetic
