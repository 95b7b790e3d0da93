"""Counts what a step over a pipeline takes of each device's memory. This module follows the order in which the step sends its programs."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from zerojax import jitted, tree
from zerojax.zero.host import memory_kind, selection
from zerojax.zero.pipeline import order as order_lib
from zerojax.zero.pipeline import sending, stage_programs, state


@dataclasses.dataclass(frozen=True)
class GroupMemory:
    """What a step takes of each device of a group, in bytes."""

    peak: int  # at most at once
    state: int  # leaves of the state, and copies of weights of other groups (a tied embedding)
    sums: int  # of gradients
    batch: int  # all micro-batches, and the batch that they are made of
    # what passes have left for others when they take the most: what a backward pass reads, and what other groups sent
    values: int
    sent: int  # to other groups in a step
    # optimizer state in host memory or on a disk, which is not in the peak. As much arrives in a step, and leaves.
    host: int = 0
    # of activations in host memory at once (`offload` of `make_train_step`), which are not in the peak either
    kept_on_host: int = 0


def of_groups(
    placed: state.Placed,
    sent: Sequence[tuple[order_lib.Op, bool]],
    found: stage_programs.StagePrograms,
    leaves: Sequence[tuple[str, Any]],
    updates: Sequence[int],
) -> list[GroupMemory]:
    """Returns the memory of each group.

    Args:
      placed: the pipeline of the state.
      sent: the passes of a step, of `order.sent`.
      found: their programs.
      leaves: of the abstract state, with their paths.
      updates: what the update of each group takes beside state and gradients.
    """
    host = [sum(map(tree.shard_bytes, selection.host_leaves(own).values())) for own in placed.offloaded()]
    groups, micros = range(len(placed.groups)), 1 + max(op.micro for op, _ in sent)
    held_state = [
        sum(tree.shard_bytes(leaf) for _, leaf in placed.held(group, leaves)) - host[group] for group in groups
    ]
    for number, path in found.paths.items():
        home = placed.homes.get(f"params/{path[2:]}" if path.startswith("0/") else path[2:], state.EVERYWHERE)
        for group in found.readers[number]:
            held_state[group] += found.nbytes(number) * (
                path[:2] in ("0/", "2/") and home not in (group, state.EVERYWHERE)
            )
    sums = [0] * len(groups)
    for program in found.programs.values():
        sums[program.group] += sum(map(tree.shard_bytes, program.sums.values()))
    batch = 2 * micros * sum(found.nbytes(number) for number, path in found.paths.items() if path.startswith("1/"))
    held, most, peak, moved, kept, most_kept = ([0] * len(groups) for _ in range(6))
    written = {number for program in found.programs.values() for number in program.writes}

    def take(names: Iterable[Any], sign: int) -> None:
        for name in names:
            if isinstance(name, sending.Name) and name.number in written:
                of, at_most = (kept, most_kept) if memory_kind.is_on_host(found.values[name.number]) else (held, most)
                of[name.group] += sign * found.nbytes(name.number)
                at_most[name.group] = max(at_most[name.group], of[name.group])

    moves, order = sending.of(found, sent)
    for move, own, dropped in zip(moves, order.programs, order.dropped):
        group = move.program.group
        if move.target == group:
            peak[group] = max(peak[group], held[group] + jitted.bytes_beside(move.program.run))
        elif move.target is not None:
            moved[group] += sum(map(found.nbytes, move.numbers))
        take(own.writes, 1)
        take(dropped, -1)
    used = [max(batch + max(both), of_update) for *both, of_update in zip(peak, most, updates)]
    peaks = [sum(of_group) for of_group in zip(held_state, sums, used)]
    columns = peaks, held_state, sums, [batch] * len(groups), most, moved, host, most_kept
    return [GroupMemory(*of_group) for of_group in zip(*columns)]
