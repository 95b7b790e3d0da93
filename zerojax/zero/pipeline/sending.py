"""Puts passes of stages, and what travels between groups, into one order of programs. This module names their values.

A group drops a value after its last reader there, or once it is sent to the other groups that read it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from zerojax.zero.pipeline import stage_programs
from zerojax.zero.pipeline.order import Op
from zerojax.zero.step_programs import schedule

ALL = -1  # the micro-batch of what all micro-batches read alike
STEP = -1  # the number of the state's count of steps


class Name(NamedTuple):
    """A value of a micro-batch on a group. A sum of gradients has the path of its weight instead."""

    number: int  # as of `StagePrograms`
    micro: int
    group: int


class Move(NamedTuple):
    """A pass, what it made on the way to another group, or the end of a micro-batch."""

    op: Op  # the pass
    program: stage_programs.StageProgram  # its program
    target: int | None  # the group that runs it, or that it is sent to; None for the end of a micro-batch
    numbers: Sequence[int]  # of what it reads, sends, or leaves


def name(found: stage_programs.StagePrograms, number: int, micro: int, group: int) -> Name:
    """Returns the name of a value."""
    is_alike = number in found.constants or found.paths.get(number, "")[:2] in ("0/", "2/")
    return Name(number, ALL if is_alike else micro, group)


def of(
    found: stage_programs.StagePrograms,
    sent: Sequence[tuple[Op, bool]],
    due: Sequence[Sequence[Op]] | None = None,
    here: Collection[int] | None = None,
    run: Callable[[Move], Any] = lambda move: None,
    *,
    is_serial: bool = False,
) -> tuple[list[Move], schedule.ProgramOrder]:
    """Returns what a process sends, and its order.

    Args:
      found: the programs.
      sent: the passes, of `order.sent`.
      due: of `order.due`, where what passes made is sent when they have ended; None: at once.
      here: the groups of this process; None: all.
      run: f(move) -> f(*what it reads) -> what it writes.
      is_serial: as of `schedule.ProgramOrder`.
    """
    moves, programs = [], []
    of_process = {program.group for program in found.programs.values()} if here is None else {*here}
    for move in _moves(found, sent, due):
        (_, _, micro), program, target, numbers = move
        source = 0 if target is None else program.group  # which has what a micro-batch leaves
        if of_process.isdisjoint({source, target}):
            continue
        names = lambda numbers, group: [name(found, n, micro, group) for n in numbers]  # noqa: B023, E731
        reads: list[Any] = names(numbers, source) if source in of_process else []
        writes: list[Any] = []
        if target == program.group:
            reads += [*program.sums, *names([] if program.weight is None else [program.weight], target)]
            reads += [Name(STEP, ALL, target)] if program.is_seeded else []
            writes = [*names(program.writes, target), *program.sums]
        elif target in of_process:
            writes = names(numbers, target)
        moves.append(move)
        devices = target if target == program.group else None
        programs.append(schedule.SentProgram(run(move), reads, writes, devices=devices))
    sums = {path for program in found.programs.values() for path in program.sums}
    size = lambda name: found.nbytes(name.number) if isinstance(name, Name) else math.inf  # noqa: E731
    return moves, schedule.ProgramOrder(programs, size, sums, is_serial=is_serial)


def _moves(
    found: stage_programs.StagePrograms, sent: Sequence[tuple[Op, bool]], due: Sequence[Sequence[Op]] | None
) -> Iterator[Move]:
    """Yields what all groups do, in order."""
    for index, (op, is_last) in enumerate(sent):
        for ended in () if due is None else due[index]:
            yield from _hops(found, ended)
        program = found.programs[op.kind, op.stage]
        yield Move(op, program, program.group, program.reads)
        if due is None:
            yield from _hops(found, op)
        if is_last:
            yield Move(op, program, None, sorted(found.kept))


def _hops(found: stage_programs.StagePrograms, op: Op) -> Iterator[Move]:
    """Yields what a pass made on the way to each other group that reads some of it."""
    program = found.programs[op.kind, op.stage]
    for group in sorted({group for number in program.writes for group in found.readers[number]} - {program.group}):
        numbers = [number for number in program.writes if group in found.readers[number]]
        yield Move(op, program, group, numbers)
