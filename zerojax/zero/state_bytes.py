"""Counts bytes per device by role. This module shows, before any allocation, the bytes of a state and the share that its stage saves."""

import math
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from zerojax import display, precision, roles, tree
from zerojax import mesh as mesh_lib
from zerojax.optim import eight_bit
from zerojax.train_state import State
from zerojax.zero import stages
from zerojax.zero.blocks import block_settings
from zerojax.zero.host import memory_kind, selection, storage
from zerojax.zero.weights import gather
from zerojax.zero.weights import partition as partition_lib

ROLES = (roles.PARAMS, roles.FROZEN, roles.GRADIENTS, roles.OPT_STATE, roles.OTHER)
_IN = {roles.HOST: "in host memory", roles.DISK: "on disk"}
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": eight_bit.BYTES}  # of one moment of a parameter


def bytes_per_device(
    partition: partition_lib.Partition,
    *,
    accumulates: bool = False,
    by_hand: bool = False,
    one_block: str = "",
    in_16_bits: bool = False,
) -> dict[str, int]:
    """Returns {role: bytes on each device}, computed from the shardings; activations and host memory are not counted.

    Frozen weights have a role of their own, and no gradients.

    Gradients exist while a step runs, on the device, also those of weights in host memory. They have the dtype of their weights. If they
    accumulate over several passes, they are float32, or bf16 with `in_16_bits` (`make_train_step`'s accum_dtype). If they are summed by
    explicit collectives (`by_hand`: its reduce_dtype), they are float32, and one pass leaves them sharded as the optimizer state.
    `one_block` is a regex of the blocks if no gradient outlives its block (docs/offload.md); those of the largest block are counted then,
    and those of weights outside of blocks. Of a pipeline's groups of devices it is the one that holds the most.
    """
    known, placed = tree.flatten(partition.abstract_state), partition.pipeline
    parts = [known] if placed is None else [placed.held(group, known) for group in range(len(placed.groups))]
    how = (accumulates, by_hand, one_block, in_16_bits)
    return max((_counted(partition, part, *how) for part in parts), key=lambda counted: sum(counted.values()))


def _counted(
    partition: partition_lib.Partition,
    leaves: Iterable[tuple[str, Any]],
    accumulates: bool,
    by_hand: bool,
    one_block: str,
    in_16_bits: bool,
) -> dict[str, int]:
    """Returns `bytes_per_device` of these leaves."""
    counted = dict.fromkeys(ROLES, 0)
    of_blocks: dict[str, int] = {}
    for path, leaf in leaves:
        role = partition.leaves[path].role
        if path not in partition.on_host:
            counted[role] += tree.shard_bytes(leaf)
        if role == roles.PARAMS:
            sums = 2 if in_16_bits and accumulates else 4
            item = sums if accumulates or by_hand else jnp.dtype(leaf.dtype).itemsize
            weight, reduction = partition.placements[path], gather.Reduction(jnp.float32, at_once=not accumulates)
            sharding = reduction.target(weight) if by_hand else weight.grad
            name = tree.block_of(path, re.compile(one_block)) or ""
            of_blocks[name] = of_blocks.get(name, 0) + item * math.prod(sharding.shard_shape(leaf.shape))
    counted[roles.GRADIENTS] = of_blocks.pop("", 0) + max(of_blocks.values(), default=0)
    return counted


def bytes_elsewhere(partition: partition_lib.Partition) -> dict[str, int]:
    """Returns {role: bytes of the state for each device} of host memory and of the disk, where they hold any.

    Of a pipeline's groups of devices it is the one with the most.
    """
    found: dict[str, int] = {}
    for part in partition.offloaded:
        own, on_disk = dict[str, int](), storage.on_disk(part)
        for path, leaf in selection.host_leaves(part).items():
            role = roles.DISK if path in on_disk else roles.HOST
            own[role] = own.get(role, 0) + tree.shard_bytes(leaf)
        found |= {role: max(count, found.get(role, 0)) for role, count in own.items()}
    return found


def bytes_per_parameter(
    policy: precision.Precision, stage: int, ways: int, *, moments: str = "fp32"
) -> dict[str, float]:
    """Returns {role: bytes on each device for each parameter} of the train state (ZeRO, arXiv:1910.02054, section 3.1).

    Every leaf counts as evenly sharded if the stage shards its role. Gradients are not counted, because they exist only during a step.

    Args:
      policy: a value of `precision.PRECISIONS`.
      stage: 0 to 3.
      ways: devices along `data`.
      moments: "fp32", "bf16" or "int8", of Adam's two.

    >>> bytes_per_parameter(precision.PRECISIONS["bf16"], 2, 8)
    {'params': 2.0, 'master weights': 0.5, 'moments': 1.0}
    """
    sharded = stages.STAGES[stage]
    weight, copy_dtype = jnp.dtype(policy.weight_dtype), policy.copy_dtype(splits_params=sharded.params)
    params = weight.itemsize if copy_dtype is None else jnp.dtype(copy_dtype).itemsize
    opt_state_ways = ways if sharded.opt_state else 1
    return {
        roles.PARAMS: params / (ways if sharded.params else 1),
        roles.MASTER: 0.0 if copy_dtype is None else weight.itemsize / opt_state_ways,
        roles.MOMENTS: 2 * MOMENT_BYTES[moments] / opt_state_ways,
    }


def per_parameter_line(partition: partition_lib.Partition, name: str, moments: str) -> str:
    """Returns a line with the bytes of state that each device holds for each parameter, computed from the shardings."""
    counted = bytes_per_device(partition)
    weights = [leaf for path, leaf in tree.flatten(partition.abstract_state) if path in partition.placements]
    stored = (roles.PARAMS, *([roles.FROZEN] if counted[roles.FROZEN] else []), roles.OPT_STATE)
    total = sum(map(tree.size, weights))
    each = {role: counted[role] / total for role in stored}
    shown = ", ".join(f"{roles.WORDS.get(role, role)} {value:.4g}" for role, value in each.items())
    rest = "".join(f" and {count / total:.4g} {_IN[role]}" for role, count in bytes_elsewhere(partition).items())
    return f"precision {name}, moments {moments}: {sum(each.values()):.4g} bytes a parameter on each device ({shown}){rest}"


def memory_table(
    partition: partition_lib.Partition,
    baseline: partition_lib.Partition,
    accumulates: bool = False,
    by_hand: bool = False,
    one_block: str = "",
    in_16_bits: bool = False,
) -> Table:
    """Returns a table of the bytes of a partition and of `baseline`, the same run at stage 0; see `bytes_per_device`."""
    block_settings.check_regex("one_block", one_block, r"layer_\d+", one_block)
    how: dict[str, Any] = {"accumulates": accumulates, "by_hand": by_hand, "in_16_bits": in_16_bits}
    here, there = bytes_per_device(partition, one_block=one_block, **how), bytes_per_device(baseline, **how)
    own = f"stage {partition.stage}"
    table = display.table(f"Bytes on each device: {own}, {_axes(partition)}", ("role", own, "stage 0", "saved"))
    for role in (role for role in ROLES if role != roles.FROZEN or here[role] or there[role]):
        sizes = (display.human(here[role]), display.human(there[role]), _saved(here[role], there[role]))
        table.add_row(roles.WORDS.get(role, role), *sizes)
    table.add_section()
    total, total_there = sum(here.values()), sum(there.values())
    table.add_row("total", display.human(total), display.human(total_there), _saved(total, total_there))
    for role, count in bytes_elsewhere(partition).items():
        table.add_row(role, display.human(count), display.human(0), "")
    if partition.kept_whole and partition.stage:
        table.caption = _caption(partition.kept_whole)
    return table


def _axes(partition: partition_lib.Partition) -> str:
    """Returns the sizes of the axes over which a partition shards, those of experts beside those of all else."""
    mesh = partition.mesh
    of_all = mesh_lib.text(mesh, (*mesh_lib.STATE, *mesh_lib.COMPILER))
    over = next((weight.over for weight in partition.placements.values() if weight.is_experts), None)
    if over is None:
        return of_all
    rest = f" x {mesh_lib.text(mesh, over)}" if mesh_lib.size(mesh, over) > 1 else ""
    return f"{of_all}, experts {mesh_lib.text(mesh, mesh_lib.EXPERT)}{rest}"


def measured_bytes(state: State, device: jax.Device) -> int:
    """Returns the measured bytes of a state's shards in one device's memory."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if not memory_kind.is_on_host(leaf)]
    shards = [s for leaf in leaves for s in leaf.addressable_shards if s.device == device]
    return sum(shard.data.nbytes for shard in shards)


def _saved(here: int, there: int) -> str:
    return f"{1 - here / there:.0%}" if there >= here and there else "-"


def _caption(replicated: dict[str, str]) -> str:
    reasons: dict[str, int] = {}
    for reason in replicated.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    return "replicated: " + "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
