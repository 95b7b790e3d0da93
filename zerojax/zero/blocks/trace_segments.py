"""Cuts the trace of a loss into the calls of its blocks. This module reads a trace alone, and knows no modules.

A block is the set of weights below one module path. In the order of a trace, a call of it goes from the first operation that reads its
weights to the last one; blocks that read theirs in turns, as the layers of two streams, are one segment. Between two segments the trace is
cut where the fewest bytes pass. What is made of weights alone (casts, transposes, scaled norms) is no operation of the trace: it is made
anew wherever it is read, so that the weights arrive as they are stored.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from zerojax import traces

OUTSIDE, STACK = "", "/"  # in place of a block: weights in none, and those whose layers a scan gathers
SAME_ROWS = frozenset({traces.CAST, "copy", "copy_p", "stop_gradient"})  # a layer of the result is that of the operand
_PARTS = traces.MOVES | {"split"}


@dataclasses.dataclass(eq=False)
class TraceValue:
    """A variable of a trace.

    Attributes:
      aval: its type.
      block: the block of whose weights alone it is made, or OUTSIDE, or STACK; None: it is made of other values too.
      path: of the weight, if it is one as stored.
      maker: the operation that makes it anew wherever it is read; None if it is made once.
      is_constant: whether it depends on nothing.
      constant: its array, if the trace holds one.
      has_shards: whether a sum over the weight may be taken shard by shard.
      of_weight: the weight of whose elements its own are, each of one, if that has shards.
      is_uniform: whether all its elements are one constant.
      from_elements: the operation that makes it, in these two cases.
    """

    aval: Any
    block: str | None = None
    path: str = ""
    maker: "Operation | None" = None
    is_constant: bool = False
    constant: Any = None
    has_shards: bool = False
    of_weight: "TraceValue | None" = None
    is_uniform: bool = False
    from_elements: "Operation | None" = None

    @property
    def nbytes(self) -> int:
        """Returns its size; random keys have one of no meaning."""
        return math.prod(self.aval.shape) * getattr(self.aval.dtype, "itemsize", 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation outside of jitted functions, which are inlined where they read weights of several blocks."""

    eqn: Any
    reads: Sequence[Any]  # values and literals
    writes: Sequence[TraceValue]
    around: Sequence[Any] = ()  # the calls that it is inside of
    inside: "Operations | None" = None  # those of a checkpoint that reads weights of several blocks
    terms: TraceValue | None = None  # what it sums, if it is the sum of a function of each element of one weight

    @property
    def blocks(self) -> set[str]:
        """Returns the blocks whose weights it reads, with OUTSIDE and STACK."""
        return {value.block for value in self.reads if isinstance(value, TraceValue) and value.block is not None}

    @functools.cached_property
    def sources(self) -> "list[TraceValue]":
        """Returns what the `sources` are of all that it reads, inside of it too."""
        return sources(atoms(self))

    @property
    def is_edge(self) -> bool:
        """Returns whether it is in no segment: a scan over stacks, a checkpoint with segments of its own, a sum over a weight's shards."""
        return self.inside is not None or self.terms is not None or STACK in self.blocks


@dataclasses.dataclass(frozen=True, eq=False)
class Operations:
    """A trace, read."""

    operations: Sequence[Operation]
    results: Sequence[Any]

    @functools.cached_property
    def last_reads(self) -> dict[TraceValue, int]:
        """Returns the position at which each value is read last; that of results is behind all operations."""
        last = dict[TraceValue, int]()
        for number, operation in enumerate(self.operations):
            last.update(dict.fromkeys(operation.sources, number))
        return last | dict.fromkeys(sources(self.results), len(self.operations))


@dataclasses.dataclass(frozen=True)
class BlockSegment:
    """The operations from `start` to `stop`, which read the weights of these blocks."""

    start: int
    stop: int
    blocks: Sequence[str]


@dataclasses.dataclass
class _BlockReads:
    """The positions at which a block's weights are read in one call of it."""

    block: str
    positions: list[int]
    seen: set[TraceValue]
    last: set[TraceValue]


def read(program: traces.Program, inputs: Sequence[TraceValue], whole: dict[str, str]) -> Operations:
    """Returns the operations of a trace.

    Args:
      program: the trace.
      inputs: its arguments; those with a path are weights.
      whole: becomes by path the line of code of each weight of a block that is read together with another block's by one operation that
        cannot be cut. These are OUTSIDE.
    """
    while True:
        for value in inputs:
            if value.path in whole:
                value.block = OUTSIDE
        found = _TraceReader().read(program, inputs)
        before = len(whole)
        _note_whole(found, whole)
        if len(whole) == before:
            return found


def _note_whole(found: Operations, whole: dict[str, str]) -> None:
    for operation in found.operations:
        if operation.inside is not None:
            _note_whole(operation.inside, whole)
        elif len(operation.blocks - {OUTSIDE, STACK}) > 1:
            line = traces.line(operation.eqn)
            for value in operation.reads:
                if isinstance(value, TraceValue) and value.block not in (None, OUTSIDE, STACK):
                    whole |= {leaf.path: line for leaf in leaves([value])}


class _TraceReader:
    """Reads programs whose variables are `TraceValue`s."""

    def read(self, program: traces.Program, given: Sequence[Any], around: Sequence[Any] = ()) -> Operations:
        """Returns the operations of a program, without those whose results nothing reads."""
        found = list[Operation]()
        results = self._into(found, program, given, around)
        needed, kept = set(sources(results)), []
        for operation in reversed(found):
            if traces.acts(operation.eqn) or needed.intersection(operation.writes):
                kept.append(operation)
                needed.update(operation.sources)
        kept.reverse()
        kept.sort(key=lambda own: own.terms is None)  # sums of weights read nothing else, and cut no block in two there
        return Operations(kept, results)

    def _into(
        self, found: list[Operation], program: traces.Program, given: Sequence[Any], around: Sequence[Any]
    ) -> list[Any]:
        jaxpr, constants = traces.opened(program)
        known: dict[Any, Any] = dict(zip(jaxpr.invars, given))
        for var, constant in zip(jaxpr.constvars, constants):
            is_constant = not isinstance(constant, jax.core.Tracer)
            known[var] = TraceValue(var.aval, is_constant=is_constant, constant=constant)
        value = lambda atom: known[atom] if traces.is_var(atom) else atom  # noqa: E731
        for eqn in jaxpr.eqns:
            reads = [value(atom) for atom in eqn.invars]
            known.update(zip(eqn.outvars, self._results(found, eqn, reads, around)))
        return [value(atom) for atom in jaxpr.outvars]

    def _results(self, found: list[Operation], eqn: Any, reads: list[Any], around: Sequence[Any]) -> Any:
        values = [value for value in reads if isinstance(value, TraceValue)]
        blocks = {value.block for value in values} - {None, OUTSIDE}
        inner, name, inside = traces.called(eqn), eqn.primitive.name, None
        weight = _weight_of_elements(reads)
        if weight is not None and name == "reduce_sum" and not eqn.outvars[0].aval.shape:
            found.append(Operation(eqn, (), [TraceValue(eqn.outvars[0].aval)], around, terms=reads[0]))
            return found[-1].writes
        is_scalar = weight is not None and not any(var.aval.shape for var in eqn.outvars)
        if inner is not None and (len(blocks) > 1 or STACK in blocks or is_scalar):
            if name in traces.INLINED:
                return self._into(found, inner, reads, (*around, eqn))
            if name in traces.CHECKPOINTS:
                inside = self.read(inner, reads)
        writes = [TraceValue(var.aval) for var in eqn.outvars]
        operation = Operation(eqn, reads, writes, around, inside)
        is_uniform = all(map(_is_uniform, reads)) and (name == "broadcast_in_dim" or name in traces.ELEMENTWISE)
        if is_uniform or (weight is not None and _is_elementwise(eqn, weight)):
            for own in writes:
                own.of_weight, own.is_uniform, own.from_elements = weight, is_uniform, operation
        if all(value.is_constant for value in values) and not traces.acts(eqn):
            for own in writes:
                own.is_constant = True
        elif (block := _block_of_all(eqn, values)) is not None:
            for own in writes:
                own.block, own.maker = block, operation
            return writes
        found.append(operation)
        return writes


def _block_of_all(eqn: Any, values: Sequence[TraceValue]) -> str | None:
    """Returns the block whose weights an operation changes without reducing them, of values that are nothing else; None for others."""
    blocks = {value.block for value in values if not value.is_constant}
    if len(blocks) != 1 or None in blocks or traces.acts(eqn):
        return None
    (block,) = blocks
    if block == STACK:
        return block if eqn.primitive.name in SAME_ROWS else None
    made = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    is_whole = made >= max(math.prod(value.aval.shape) for value in values)
    return block if is_whole or eqn.primitive.name in _PARTS else None


def _weight_of_elements(reads: Sequence[Any]) -> TraceValue | None:
    """Returns the one weight with shards of whose elements all that an operation reads is made, beside constants."""
    weights = {value if value.has_shards else value.of_weight for value in reads if not _is_uniform(value)}
    return weights.pop() if len(weights) == 1 else None


def _is_uniform(value: Any) -> bool:
    return (
        not isinstance(value, TraceValue) or value.is_uniform or (value.constant is not None and not value.aval.shape)
    )


def _is_elementwise(eqn: Any, weight: TraceValue) -> bool:
    """Returns whether an operation makes each element of its results of one of a weight."""
    inner = traces.called(eqn) if eqn.primitive.name in traces.INLINED else None
    if inner is not None and any(map(np.ndim, traces.constants(inner))):
        return False
    eqns = [eqn] if inner is None else [*traces.equations(inner)]
    names = {own.primitive.name for own in eqns} - (traces.INLINED if inner is not None else set())
    shapes = {var.aval.shape for own in (*eqns, eqn) for var in own.outvars}
    return names <= traces.ELEMENTWISE - {"sharding_constraint"} and shapes == {weight.aval.shape}


def leaves(values: Iterable[Any]) -> list[TraceValue]:
    """Returns the stored weights that values are made of, each once."""
    return [value for value in _made_of(values) if value.path]


def sources(values: Iterable[Any]) -> list[TraceValue]:
    """Returns the other values that these are, or are made of together with weights, each once."""
    return [value for value in _made_of(values) if not value.path]


def _made_of(values: Iterable[Any]) -> list[TraceValue]:
    found, waiting = dict[TraceValue, None](), [value for value in values if isinstance(value, TraceValue)][::-1]
    while waiting:
        value = waiting.pop()
        if value.maker is None:
            found[value] = None
        else:
            waiting += [own for own in value.maker.reads if isinstance(own, TraceValue)][::-1]
    return list(found)


def atoms(operation: Operation) -> Iterator[Any]:
    """Yields all that an operation reads, inside of it too."""
    yield from operation.reads
    if operation.terms is not None:
        yield operation.terms.of_weight or operation.terms
    if operation.inside is not None:
        yield from operation.inside.results
        for own in operation.inside.operations:
            yield from atoms(own)


def have_blocks(found: Operations) -> bool:
    """Returns whether any operation reads weights of a block."""
    return any(
        have_blocks(own.inside) if own.inside is not None else bool(own.blocks - {OUTSIDE, STACK})
        for own in found.operations
    )


def of_blocks(found: Operations) -> list[BlockSegment]:
    """Returns the segments of a trace, in order."""
    calls = _calls(found.operations)
    merged = list[tuple[int, int, list[str]]]()
    for call in sorted(calls, key=lambda own: own.positions[0]):
        first, last = call.positions[0], call.positions[-1] + 1
        if merged and first < merged[-1][1]:
            start, stop, blocks = merged[-1]
            merged[-1] = start, max(stop, last), [*dict.fromkeys([*blocks, call.block])]
        else:
            merged.append((first, last, [call.block]))
    bounds = _bounds(found, [(start, stop) for start, stop, _ in merged])
    return [BlockSegment(start, stop, blocks) for (start, stop), (_, _, blocks) in zip(bounds, merged)]


def _calls(operations: Sequence[Operation]) -> list[_BlockReads]:
    """Returns the calls of all blocks.

    A call ends before a weight that it has read is read again, unless nothing else was read between; before an edge; and where the gap
    between two of its reads has a whole call of another block.
    """
    calls, latest, begun = list[_BlockReads](), None, dict[str, _BlockReads]()
    for number, operation in enumerate(operations):
        if operation.is_edge:
            begun.clear()
            continue
        for block in operation.blocks - {OUTSIDE}:
            own = set(
                leaves(value for value in operation.reads if isinstance(value, TraceValue) and value.block == block)
            )
            call = begun.get(block)
            if call is None or (own & call.seen and not (call is latest and own & call.last)):
                begun[block] = call = _BlockReads(block, [], set(), set())
                calls.append(call)
            call.positions.append(number)
            call.seen |= own
            call.last, latest = own, call
    return [part for call in calls for part in _parted(call, calls)]


def _parted(call: _BlockReads, calls: Sequence[_BlockReads]) -> Iterator[_BlockReads]:
    others = [(own.positions[0], own.positions[-1]) for own in calls if own.block != call.block]
    positions = call.positions[:1]
    for last, number in itertools.pairwise(call.positions):
        if any(last < first and end < number for first, end in others):
            yield dataclasses.replace(call, positions=positions)
            positions = []
        positions.append(number)
    yield dataclasses.replace(call, positions=positions)


def _has(sorted_numbers: Sequence[int], first: int, last: int) -> bool:
    return any(first < number < last for number in sorted_numbers)


def _bounds(found: Operations, reads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns where segments begin and end, given where they first and last read weights.

    Operations between two segments belong to one of them. Before the first and behind the last one, and beside operations that read
    other weights, a segment reaches as far as it does elsewhere.
    """
    passing = _passing(found)
    others = [number for number, own in enumerate(found.operations) if own.is_edge or OUTSIDE in own.blocks]

    def cut(numbers: Sequence[int]) -> int:
        return min(numbers, key=lambda number: passing[number])

    bounds = [list(own) for own in reads]
    gaps = [(one[1], other[0]) for one, other in itertools.pairwise(reads)]
    free = [not _has(others, before - 1, after) for before, after in gaps]
    for number, ((before, after), is_free) in enumerate(zip(gaps, free)):
        if is_free:
            bounds[number][1] = bounds[number + 1][0] = cut(range(before, after + 1))
    head = max((own[0] - bound[0] for own, bound in zip(reads, bounds)), default=0)
    tail = max((bound[1] - own[1] for own, bound in zip(reads, bounds)), default=0)
    for number, (start, stop) in enumerate(reads):
        if number == 0 or not free[number - 1]:
            least = max(
                [0, start - head, *(own + 1 for own in others if own < start), *bounds[number - 1][1:] * (number > 0)]
            )
            bounds[number][0] = cut(range(least, start + 1))
        if number == len(reads) - 1 or not free[number]:
            after = reads[number + 1][0] if number + 1 < len(reads) else len(found.operations)
            most = min([after, stop + tail, *(own for own in others if own >= stop)])
            bounds[number][1] = cut(range(stop, most + 1))
    return [(start, stop) for start, stop in bounds]


def _passing(found: Operations) -> list[int]:
    """Returns for each position the bytes that operations before it make for those behind it."""
    last = found.last_reads
    change = [0] * (len(found.operations) + 2)
    for number, operation in enumerate(found.operations):
        for value in operation.writes:
            if last.get(value, number) > number:
                change[number + 1] += value.nbytes
                change[last[value] + 1] -= value.nbytes
    return list(itertools.accumulate(change))[:-1]


def read_later(found: Operations, segment: BlockSegment) -> list[TraceValue]:
    """Returns what operations of a segment make for those behind it, and for the results."""
    made = [value for own in found.operations[segment.start : segment.stop] for value in own.writes]
    return [value for value in made if found.last_reads.get(value, -1) >= segment.stop]
