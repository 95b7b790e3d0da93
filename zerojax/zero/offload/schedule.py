"""Runs the programs of a step in order, and brings weights from the host or a disk beside them. This module decides when each copy is sent.

    sent      copies for program i + 2, program i, copies for program i + 3, program i + 1, ...

A copy begins when the programs that were sent before it have ended, because its memory may be theirs. It runs beside the programs that
are sent after it. So copies are sent some programs ahead, across the end of a run that is followed by another. The memory of a copy is
taken when it is sent, so the sender waits until the device is near. A value is dropped after the last program that reads it.

A disk is slower. All reads of a run are asked for in their order when it begins, and go as far ahead as the disk's buffers reach. What was
read is copied to the device when a copy from host memory would be sent.
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from zerojax.zero.offload import kept
from zerojax.zero.offload import programs as programs_lib

AHEAD = 2  # programs between the sending of a copy and its use; with 1 a copy has the time of one program
EARLY = 8  # programs before the end of a run when the first copies for the next are sent: an embedding takes long, and much is free then

# done(index of the program, the numbers that it wrote, all values by number); it may take values that are read no more.
Done = Callable[[int, Sequence[int], dict[int, Any]], None]


class Schedule:
    """Runs a `CutStep`.

    Args:
      cut: the programs.
      on_host: the numbers of the arguments' leaves that are stored on the host or a disk -> their sharding on the device.
      ahead: programs between the sending of a copy and its use.
    """

    def __init__(self, cut: programs_lib.CutStep, on_host: Mapping[int, Any], *, ahead: int = AHEAD):
        self.cut, self._on_host, self._ahead = cut, on_host, ahead
        last = {number: index for index, program in enumerate(cut.programs) for number in program.reads}
        results = {number for number in cut.results if isinstance(number, int)}
        self._last = {number: index for number, index in last.items() if number not in results or number in on_host}
        self._host_reads = [[n for n in program.reads if n in on_host] for program in cut.programs]
        self._has_run = False

    def __call__(
        self, *args: Any, done: Done | None = None, early: dict[int, jax.Array] | None = None, goes_on: bool = False
    ) -> Any:
        """Returns the step's result.

        Args:
          *args: the arguments, those of `on_host` on the host or a disk.
          done: called after each program is sent.
          early: copies from the host that the run before has sent. They are taken, and replaced by those for the run that follows.
          goes_on: whether a run with the same leaves on the host follows.
        """
        stored, early = jax.tree.leaves(args), {} if early is None else early
        values: dict[int, Any] = {n: leaf for n, leaf in enumerate(stored) if n not in self._on_host}
        running: collections.deque[jax.Array] = collections.deque()
        is_on_disk = any(kept.is_on_disk(stored[number]) for number in list(self._on_host)[:1])
        if is_on_disk:
            kept.prefetch([[stored[n] for n in numbers] for numbers in self._in_order(early, goes_on)])
        values.update(early)
        early.clear()

        def fetch(numbers: list[int]) -> kept.Loading:
            loading = kept.load([stored[n] for n in numbers], [self._on_host[n] for n in numbers])
            # cuDNN builds its attention in a CUDA graph when a program is first run, and fails if copies begin meanwhile.
            return loading if self._has_run else kept.arrived(loading)

        for index in range(self._ahead):
            self._fetch(index, values, fetch)
        for index, program in enumerate(self.cut.programs):
            self._fetch_ahead(index, values, early if goes_on else None, fetch)
            if is_on_disk:
                reads = self._host_reads[index]
                values.update(zip(reads, kept.arrived([values[number] for number in reads])))
            written = program.run(*[values[number] for number in program.reads])
            values.update(zip(program.writes, written))
            if written:
                running.append(min(written, key=lambda value: value.nbytes))
            del written
            if done is not None:
                done(index, program.writes, values)
            self._drop(index, values)
            if len(running) > self._ahead and not (oldest := running.popleft()).is_deleted():
                jax.block_until_ready(oldest)
        self._has_run = True
        found = [values[result] if isinstance(result, int) else result for result in self.cut.results]
        return jax.tree.unflatten(self.cut.structure, found)

    def is_last(self, number: int, index: int) -> bool:
        """Returns whether no program after this one reads a value, and it is no result."""
        return self._last.get(number) == index

    def peak(self, *, takes_results: bool = False, goes_on: bool = False) -> int:
        """Returns the most bytes of values and temporaries on a device at once, without the arguments that no program reads.

        Args:
          takes_results: whether `done` takes each result that is no argument as it comes.
          goes_on: see `__call__`.
        """
        read = {number for program in self.cut.programs for number in program.reads}
        values = {n: self.cut.nbytes(n) for n in range(self.cut.arguments) if n not in self._on_host and n in read}
        results, peak = {number for number in self.cut.results if isinstance(number, int)}, 0

        def nbytes(numbers: list[int]) -> list[int]:
            return [self.cut.nbytes(number) for number in numbers]

        early: dict[int, int] = {}
        for index in range(self._ahead):
            self._fetch(index, values, nbytes)
        for index, program in enumerate(self.cut.programs):
            self._fetch_ahead(index, values, early if goes_on else None, nbytes)
            values.update({number: self.cut.nbytes(number) for number in program.writes})
            analysis = program.run.memory_analysis()
            held = sum(values.values()) + sum(early.values())
            peak = max(peak, held + (analysis.temp_size_in_bytes if analysis else 0))
            self._drop(index, values)
            for number in results.intersection(program.writes) if takes_results else ():
                del values[number]
        return peak

    def _fetch_ahead(
        self, index: int, values: dict[int, Any], early: dict[int, Any] | None, fetch: Callable[[list[int]], list[Any]]
    ) -> None:
        """Fetches for the program that is `ahead` of one, and into `early` for one of the first programs of the next run."""
        self._fetch(index + self._ahead, values, fetch)
        of_next = index - max(0, len(self.cut.programs) - EARLY)
        if early is not None and 0 <= of_next < self._ahead:
            self._fetch(of_next, early, fetch)

    def _in_order(self, held: Collection[int], goes_on: bool) -> list[list[int]]:
        """Returns the numbers that a run fetches together, in the order of the fetches. `held` are on the device before it."""
        values: dict[int, Any] = dict.fromkeys(held)
        early: dict[int, Any] = {}
        fetches: list[list[int]] = []

        def note(numbers: list[int]) -> list[int]:
            fetches.append(numbers)
            return numbers

        for index in range(self._ahead):
            self._fetch(index, values, note)
        for index in range(len(self.cut.programs)):
            self._fetch_ahead(index, values, early if goes_on else None, note)
            self._drop(index, values)
        return fetches

    def _fetch(self, index: int, values: dict[int, Any], fetch: Callable[[list[int]], list[Any]]) -> None:
        """Adds the values that a program reads from the host."""
        reads = self._host_reads[index] if index < len(self._host_reads) else []
        if missing := [number for number in reads if number not in values]:
            values.update(zip(missing, fetch(missing)))

    def _drop(self, index: int, values: dict[int, Any]) -> None:
        """Drops what no later program reads, and weights that are read again only after `ahead` more programs."""
        soon = {n for reads in self._host_reads[index + 1 : index + 1 + self._ahead] for n in reads}
        for number in self.cut.programs[index].reads:
            if self.is_last(number, index) or (number in self._on_host and number not in soon):
                values.pop(number, None)
