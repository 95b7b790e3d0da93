"""Brings params from host memory or a disk beside the programs of a run. This module decides when each copy is sent.

A weight is on the device only from its copy to the programs that read it. A copy begins when the programs that were sent before it have
ended, because its memory may be theirs, and runs beside those that are sent after it. So copies are sent some programs ahead, in one of
two ways. Large arrays are sent one by one beside the programs. That costs the host some 70 us an array, as long as the link takes for
3 MiB. So smaller ones are results of a program some programs before, which copies them beside its arithmetic for a tenth of that.

A disk is slower. All reads of a run are asked for in their order when it begins, and go as far ahead as the disk's buffers reach. What was
read is copied to the device when a copy from host memory would be sent.

Between two steps the host is busy with the end of one and the beginning of the next, and sends no program. So the first copies of weights
that a step leaves as they are, frozen ones, are sent for the next step after the last copies of this one, and the link works meanwhile.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.tree import Leaf
from zerojax.zero.blocks import where_used
from zerojax.zero.gradients import forward_only
from zerojax.zero.host import memory_kind, selection, storage
from zerojax.zero.step_programs import arrivals, blocks, forward
from zerojax.zero.step_programs.arrivals import PASS, STEP
from zerojax.zero.weights import partition as partition_lib

SMALL = 32 * 2**20  # bytes on each device; smaller arrays are copied by programs
EARLY = 8  # programs before the end of a pass when the first copies for the next are sent: an embedding takes long, and much is free then


class FetchedParams(arrivals.ArgumentSource):
    """The params that are stored in host memory or on a disk.

    Args:
      paths: theirs.
      on_disk: whether they are on a disk, so that no program can copy them.
      frozen: the paths of those that no step changes.
      ahead: programs between the sending of a copy and its use.
    """

    def __init__(
        self,
        paths: Collection[str],
        *,
        on_disk: bool = False,
        frozen: Collection[str] = (),
        ahead: int = arrivals.AHEAD,
    ):
        self.paths, self.on_disk, self.ahead = paths, on_disk, ahead
        # What was read from a disk would keep one of its few buffers until the next step.
        self.frozen = () if on_disk else frozen
        self.early: tuple[ParamCopies, _Early] | None = None

    def used(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        """Returns an abstract leaf in device memory."""
        return memory_kind.as_on_device(leaf)

    def arrivals(self, late: Mapping[int, str], reads: Sequence[Sequence[int]], values: Sequence[Any]) -> "ParamCopies":
        """Returns when each copy is sent; see `arrivals.ArgumentSource`."""
        return ParamCopies(self, late, reads, values)


def of(partition: partition_lib.Partition, frozen: Collection[str] = ()) -> FetchedParams:
    """Returns the params of a partition that are not stored on the device; `frozen` are the paths of those that no step changes."""
    return FetchedParams(partition.on_host, on_disk=selection.are_params_on_disk(partition), frozen=frozen)


def mean_of(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Callable[[Any, Any], jax.Array]:
    """Returns `forward_only.mean(loss_fn, partition, **how)` for params in host memory, which are fetched block by block."""
    mean = forward_only.mean(loss_fn, partition, runner=blocks.ForwardBlocks, **how)
    return forward.Forward(mean, of(partition), compiler_options)


def by_row(function: Callable[..., Any], partition: partition_lib.Partition, **how: Any) -> forward.Forward:
    """Returns `forward_only.by_row(function, partition, **how)` for params in host memory, which are fetched block by block."""
    return forward.Forward(forward_only.by_row(function, partition, runner=blocks.ForwardBlocks, **how), of(partition))


def on_all(function: Callable[..., Any], partition: partition_lib.Partition, **how: Any) -> Callable[[Any, Any], Any]:
    """Returns f(params, batch) -> the result of `function` for rows, replicated, so that every process can read it; params may be in host
    memory. For `how` see `by_row`."""
    replicated = NamedSharding(partition.mesh, P())
    if not selection.are_params_on_host(partition):
        whole = where_used.forward_only(function, partition.placements, **how)
        return jax.jit(whole, out_shardings=replicated)
    sharded, replicate = by_row(function, partition, **how), jax.jit(lambda found: found, out_shardings=replicated)
    return lambda params, batch: replicate(sharded(params, (batch,)))


class ParamCopies(arrivals.Arrivals):
    """The copies of a run's params, each sent `ahead` programs before the one that reads it.

    Attributes:
      first: the numbers of those that are sent before the first program, for each of the first `ahead` programs.
      after: the numbers of those that are sent just before each program.
      brings: the numbers of those that each program makes.
    """

    def __init__(
        self,
        source: FetchedParams,
        late: Mapping[int, str],
        reads: Sequence[Sequence[int]],
        values: Sequence[jax.ShapeDtypeStruct],
    ):
        self._source, self._reads, self._values = source, reads, {number: values[number] for number in late}
        self.late, self.ahead, self._has_run = frozenset(late), source.ahead, False
        small = set() if source.on_disk else {n for n in late if tree.shard_bytes(values[n]) < SMALL}
        self.first, self.after, self.brings = _copies(reads, small, self.ahead)
        frozen = {number for number, path in late.items() if path in source.frozen}
        beside_last: Mapping[int, Sequence[int]] = dict(enumerate(self.first, max(0, len(reads) - EARLY)))
        self._sent_for = {PASS: beside_last, STEP: self._after_copies(frozen)}
        self._stored: Sequence[Any] = ()
        self._follows, self._early = arrivals.NOTHING, dict[int, Any]()

    def rider(self, index: int) -> arrivals.Rider:
        """Returns the copies that a program makes."""
        brought = [self._values[number] for number in self.brings[index]]
        places = [memory_kind.of_value(v.sharding.mesh, v.sharding.spec, is_on_host=True) for v in brought]
        stored = [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place) for v, place in zip(brought, places)]
        # Without a memory kind the copy would be a hint of the sharding alone.
        there = [value.sharding.with_memory_kind("device") for value in brought]
        return arrivals.Rider(stored, self.brings[index], lambda *arrays: list(map(jax.device_put, arrays, there)))

    def sent(self, index: int) -> Sequence[int]:
        """Returns the numbers of those that are sent with a program, or for -1 before all programs."""
        return (
            [n for numbers in self.first for n in numbers] if index < 0 else (*self.after[index], *self.brings[index])
        )

    def dropped(self, index: int) -> Collection[int]:
        """Returns the numbers of those that a program reads and the next `ahead` programs do not."""
        return set(self._reads[index]).difference(*self._reads[index + 1 : index + 1 + self.ahead])

    def sent_for(self, follows: str) -> Mapping[int, Sequence[int]]:
        """Returns the numbers of those that are sent before programs for the run that follows, by the program's index."""
        return self._sent_for.get(follows, {})

    def begin(self, stored: Sequence[Any], follows: str) -> dict[int, Any]:
        """Sends the first copies, and returns them with those that the run before has sent."""
        self._stored, self._follows, self._early = stored, follows, {}
        before, self._source.early = self._source.early, None
        values = before[1].of(stored) if before is not None and before[0] is self else {}
        if self._source.on_disk:
            storage.prefetch([[stored[n] for n in numbers] for numbers in self._in_order(values)])
        for numbers in self.first:
            self._fetch(numbers, values)
        return values

    def before(self, index: int, values: dict[int, Any]) -> Sequence[Any]:
        """Sends the copies that belong before a program, and returns the arrays that it copies."""
        self._fetch(self.after[index], values)
        sent = self.sent_for(self._follows).get(index, ())
        if self._follows == STEP:  # no later program brings them once more
            self._early.update({n: values[n] for n in sent if n in values})
        self._fetch(sent, self._early)
        if self._source.on_disk:
            values.update(zip(self._reads[index], storage.arrived([values[n] for n in self._reads[index]])))
        return [self._stored[number] for number in self.brings[index]]

    def end(self) -> None:
        """Keeps the copies for the run that follows."""
        self._source.early = self, _Early(self._stored, self._early)
        self._stored, self._early, self._has_run = (), {}, True

    def _fetch(self, numbers: Sequence[int], values: dict[int, Any]) -> None:
        missing = [number for number in numbers if number not in values]
        if missing:
            loading = storage.load([self._stored[n] for n in missing], [self._values[n].sharding for n in missing])
            # cuDNN builds its attention in a CUDA graph when a program is first run, and fails if copies begin meanwhile.
            values.update(zip(missing, loading if self._has_run else storage.arrived(loading)))

    def _after_copies(self, frozen: Collection[int]) -> dict[int, Sequence[int]]:
        """Returns the same for the next step: those that are frozen, after the last copies of this one."""
        own = [index for index in range(len(self._reads)) if self.sent(index)]
        begin = max(own) + 1 if own else len(self._reads) - len(self.first)
        return dict(enumerate(([n for n in numbers if n in frozen] for numbers in self.first), begin))

    def _in_order(self, held: Collection[int]) -> Iterator[list[int]]:
        """Returns the numbers that a run fetches together, in the order of the fetches. `held` are on the device before it."""
        for numbers in self.first:
            yield [number for number in numbers if number not in held]
        for index, numbers in enumerate(self.after):
            yield list(numbers)
            yield list(self.sent_for(self._follows).get(index, ()))


class _Early:
    """Copies of weights that a run has sent for the next. The next may get other arguments: each is of one array, and goes with it.

    Args:
      stored: the leaves of the arguments.
      copies: of some of them, by number.
    """

    def __init__(self, stored: Sequence[Any], copies: Mapping[int, jax.Array]):
        self._copies = held = dict(copies)
        self._of = {n: weakref.ref(stored[n], lambda _, n=n: held.pop(n, None)) for n in copies}  # type: ignore[misc]

    def of(self, stored: Sequence[Any]) -> dict[int, jax.Array]:
        """Returns the copies of arrays that are among these leaves, by number."""
        return {n: self._copies[n] for n, own in self._of.items() if own() is stored[n]}


def _copies(
    reads: Sequence[Sequence[int]], small: Collection[int], ahead: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns which copies are sent before all programs, and for each program those sent before it and those that it makes.

    Args:
      reads: the numbers of the arguments in host memory that each program reads.
      small: the numbers of those that programs copy.
      ahead: programs between the sending of a copy and its use.
    """
    held: set[int] = set()
    first, after, brings = [], [], []
    for numbers in reads[:ahead]:
        first.append(tuple(n for n in numbers if n not in held))
        held.update(numbers)
    for index, numbers in enumerate(reads):
        missing = [n for n in (reads[index + ahead] if index + ahead < len(reads) else ()) if n not in held]
        held.update(missing)
        held -= set(numbers) - {n for soon in reads[index + 1 : index + 1 + ahead] for n in soon}
        after.append(tuple(n for n in missing if n not in small))
        brings.append(tuple(n for n in missing if n in small))
    return first, after, brings
