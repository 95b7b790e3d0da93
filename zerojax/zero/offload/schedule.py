"""Runs the programs of a step in order, and brings weights from the host or a disk beside them. This module sends programs and copies.

    sent      copies for program i + 2, program i, copies for program i + 3, program i + 1, ...

A copy begins when the programs that were sent before it have ended, because its memory may be theirs. It runs beside the programs that
are sent after it. So copies are sent some programs ahead, across the end of a run that is followed by another: large ones by themselves,
others as results of a program (`programs`). The memory of a copy is taken when it is sent, so the sender waits until the device is near. A
value is dropped after the last program that reads it.

A disk is slower. All reads of a run are asked for in their order when it begins, and go as far ahead as the disk's buffers reach. What was
read is copied to the device when a copy from host memory would be sent.
"""

import collections
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax

from zerojax.zero.offload import kept
from zerojax.zero.offload import programs as programs_lib

EARLY = 8  # programs before the end of a run when the first copies for the next are sent: an embedding takes long, and much is free then

# done(index of the program, the numbers that it wrote, all values by number); it may take values that are read no more.
Done = Callable[[int, Sequence[int], dict[int, Any]], None]


class Schedule:
    """Runs a `CutStep`.

    Args:
      cut: the programs.
    """

    def __init__(self, cut: programs_lib.CutStep):
        self.cut, self._has_run = cut, False
        last = {number: index for index, program in enumerate(cut.programs) for number in program.reads}
        results = {number for number in cut.results if isinstance(number, int)}
        self._last = {number: index for number, index in last.items() if number not in results or number in cut.on_host}
        self._host_reads = [[n for n in program.reads if n in cut.on_host] for program in cut.programs]
        self._dropped = [self._drops(index) for index in range(len(cut.programs))]
        self._integers: dict[int, jax.Array] | None = None

    def __call__(
        self, *args: Any, done: Done | None = None, early: dict[int, jax.Array] | None = None, goes_on: bool = False
    ) -> Any:
        """Returns the step's result.

        Args:
          *args: the arguments, those of `cut.on_host` on the host or a disk.
          done: called after each program is sent.
          early: copies from the host that the run before has sent. They are taken, and replaced by those for the run that follows.
          goes_on: whether a run with the same leaves on the host follows.
        """
        stored, cut, early = jax.tree.leaves(args), self.cut, {} if early is None else early
        values: dict[int, Any] = {n: leaf for n, leaf in enumerate(stored) if n not in cut.on_host}
        values.update(self._on_device())
        running: collections.deque[jax.Array] = collections.deque()
        is_on_disk = any(kept.is_on_disk(stored[number]) for number in list(cut.on_host)[:1])
        if is_on_disk:
            kept.prefetch([[stored[n] for n in numbers] for numbers in self._in_order(early, goes_on)])
        values.update(early)
        early.clear()

        def fetch(numbers: Sequence[int], values: dict[int, Any]) -> None:
            missing = [number for number in numbers if number not in values]
            if missing:
                loading = kept.load([stored[n] for n in missing], [cut.values[n].sharding for n in missing])
                # cuDNN builds its attention in a CUDA graph when a program is first run, and fails if copies begin meanwhile.
                values.update(zip(missing, loading if self._has_run else kept.arrived(loading)))

        for numbers in cut.first:
            fetch(numbers, values)
        for index, program in enumerate(cut.programs):
            fetch(program.after, values)
            if goes_on:
                fetch(self._of_next(index), early)
            if is_on_disk:
                reads = self._host_reads[index]
                values.update(zip(reads, kept.arrived([values[number] for number in reads])))
            read = [values[number] for number in program.reads]
            written = program.run(*read, *[stored[number] for number in program.brings])
            values.update(zip((*program.writes, *program.brings), written))
            if program.writes:
                running.append(min(written[: len(program.writes)], key=_size))
            del read, written
            if done is not None:
                done(index, program.writes, values)
            for number in self._dropped[index]:
                values.pop(number, None)
            if len(running) > cut.ahead and not (oldest := running.popleft()).is_deleted():
                jax.block_until_ready(oldest)
        self._has_run = True
        found = [values[result] if isinstance(result, int) else result for result in cut.results]
        return jax.tree.unflatten(cut.structure, found)

    def is_last(self, number: int, index: int) -> bool:
        """Returns whether no program after this one reads a value, and it is no result."""
        return self._last.get(number) == index

    def peak(self, *, takes_results: bool = False, goes_on: bool = False) -> int:
        """Returns the most bytes of values and temporaries on a device at once; see `used`."""
        return max(self.used(takes_results=takes_results, goes_on=goes_on), default=0)

    def used(self, *, takes_results: bool = False, goes_on: bool = False) -> list[int]:
        """Returns the bytes of values and temporaries on a device while each program runs, without the arguments that no program reads.

        Args:
          takes_results: whether `done` takes each result that is no argument as it comes.
          goes_on: see `__call__`.
        """
        cut = self.cut
        read = {number for program in cut.programs for number in program.reads}
        held = {n for n in range(cut.arguments) if n not in cut.on_host and n in read}
        held.update(cut.integers, *cut.first)
        results, used, early = {number for number in cut.results if isinstance(number, int)}, [], 0
        for index, program in enumerate(cut.programs):
            held.update((*program.after, *program.brings, *program.writes))
            early += sum(map(cut.nbytes, self._of_next(index))) if goes_on else 0
            analysis = program.run.memory_analysis()
            used.append(sum(map(cut.nbytes, held)) + early + (analysis.temp_size_in_bytes if analysis else 0))
            held.difference_update(self._dropped[index])
            if takes_results:
                held.difference_update(results.intersection(program.writes))
        return used

    def _of_next(self, index: int) -> Sequence[int]:
        """Returns the numbers whose copies for the run that follows are sent before a program."""
        place = index - max(0, len(self.cut.programs) - EARLY)
        return self.cut.first[place] if 0 <= place < len(self.cut.first) else ()

    def _in_order(self, held: Collection[int], goes_on: bool) -> Iterator[list[int]]:
        """Returns the numbers that a run fetches together, in the order of the fetches. `held` are on the device before it."""
        for numbers in self.cut.first:
            yield [number for number in numbers if number not in held]
        for index, program in enumerate(self.cut.programs):
            yield list(program.after)
            yield list(self._of_next(index)) if goes_on else []

    def _drops(self, index: int) -> list[int]:
        """Returns what no program after this one reads, and weights that are read again only after `ahead` more programs."""
        soon = {n for reads in self._host_reads[index + 1 : index + 1 + self.cut.ahead] for n in reads}
        reads = self.cut.programs[index].reads
        return [n for n in reads if self.is_last(n, index) or (n in self.cut.on_host and n not in soon)]

    def _on_device(self) -> dict[int, jax.Array]:
        """Returns the integers that programs read."""
        if self._integers is None:
            self._integers = {
                number: jax.make_array_from_callback(own.shape, self.cut.values[number].sharding, own.__getitem__)
                for number, own in self.cut.integers.items()
            }
        return self._integers


def _size(value: jax.Array) -> int:
    return value.size
