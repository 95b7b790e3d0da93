"""Cuts a pass of a stage into turns, one for each block. This module says what XLA's scheduler may not begin earlier.

Free to choose, XLA computes all blocks again at once, and with copies from the host in a program the gradients of all weights last: what
they are made from then stays until the end. Planned for H200s, 17 layers of a decoder's 8B shapes with `remat="full"`: 14.8 GB of
temporaries, and 2.2 in turns.

Where weights are sharded, forward passes have turns too, and a block's weights are gathered once the block two before it begins. XLA would
gather those of all blocks early. Planned for 8B over pipe 2 and data 2 at stage 3: 63.5 GiB become 60.1, and a step is 1.1% shorter.
Begun one block later, gathers do not hide beside the sums of gradients: the same memory, and 0.9% longer.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from zerojax import traces
from zerojax.zero.step_programs import blocks, cut


def of(part: cut.StepPart, kind: str, weight_of: Mapping[Any, Any]) -> list[cut.StepPart]:
    """Returns the turns: one for each block, with what follows from it, and one for the gradients of weights that no block reads.

    Args:
      part: a pass of a stage.
      kind: FORWARD or BACKWARD, of the blocks' passes in it.
      weight_of: the variable of the weight, or None if the pass does not read it, for each gradient that it returns.
    """
    (call,) = part.calls
    eqns, turn_of, turn = call.closed.jaxpr.eqns, dict[Any, int](), 0
    last = sum(blocks.pass_of(eqn) == kind for eqn in eqns) - 1
    if last < 0:
        return [part]
    groups: list[list[jex.JaxprEqn]] = [[] for _ in range(last + 2)]
    for eqn in eqns:
        after = [turn_of[var] for var in traces.variables(eqn.invars) if var in turn_of]
        at = min(turn if blocks.pass_of(eqn) == kind or not after else max(after), last)
        groups[at].append(eqn)
        turn_of |= dict.fromkeys(eqn.outvars, at)
        turn += blocks.pass_of(eqn) == kind
    read = {var for eqn in eqns if blocks.pass_of(eqn) == kind for var in traces.variables(eqn.invars)}
    needed = set(
        map(id, traces.live(groups[last], (var for var in part.writes if weight_of.get(var, var) in {var, *read})))
    )
    groups[last + 1] = [eqn for eqn in groups[last] if id(eqn) not in needed]
    groups[last] = [eqn for eqn in groups[last] if id(eqn) in needed]
    read_in = [traces.variables(atom for eqn in group for atom in eqn.invars) for group in groups]
    wanted = [{*part.writes, *itertools.chain(*read_in[number:])} for number in range(1, len(groups) + 1)]
    return [cut.part_of(part.name, group, own) for group, own in zip(groups, wanted) if group]


def ends(
    turns: Sequence[cut.StepPart], number: int, sums: Collection[Any], gathered: Collection[Any], *, lags: bool
) -> tuple[list[Any], list[Any]]:
    """Returns the variables that wait for the end of a turn, and those of `sums`, by the variable of the gradient, that are its end.

    What the turn made for later ones waits, and what the next turn but one has on the host, so that copies begin a turn early, and what the
    turn after that gathers. It waits for the sums of this turn or, if it `lags`, of the one before: with several devices the gradients of
    weights then run beside the next block's collectives.
    """
    later, of = turns[number + 1 :], number - 1 if lags else number
    read = {var for turn in later for var in turn.reads}
    far = [var for turn in later[1:2] for var in turn.reads if var.aval.memory_space == jax.memory.Space.Host]
    far += [var for turn in later[2:3] for var in turn.reads if var in gathered and var not in far]
    waiting = [*(var for var in turns[number].writes if var in read), *far]
    return waiting, [var for var in turns[of].writes if var in sums] if of >= 0 else []
