"""Runs the programs of a step in order, and brings weights from the host or a disk beside them. This module sends programs and copies.

    sent      copies for program i + 2, program i, copies for program i + 3, program i + 1, ...

A copy begins when the programs that were sent before it have ended, because its memory may be theirs. It runs beside the programs that
are sent after it. So copies are sent some programs ahead, across the end of a run that is followed by another: large ones by themselves,
others as results of a program (`programs`). The memory of a copy is taken when it is sent, so the sender waits until the device is near. A
value is dropped after the last program that reads it.

A disk is slower. All reads of a run are asked for in their order when it begins, and go as far ahead as the disk's buffers reach. What was
read is copied to the device when a copy from host memory would be sent.

Between two steps the host is busy with the end of one and the beginning of the next, and sends no program. So the first copies of weights
that a step leaves as they are, frozen ones, are sent for the next step after the last copies of this one, and the link works meanwhile.
"""

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from zerojax.zero.offload import kept
from zerojax.zero.offload import programs as programs_lib

EARLY = 8  # programs before the end of a pass when the first copies for the next are sent: an embedding takes long, and much is free then

# What follows a run: nothing that is known, a run with the same leaves on the host, or one with the same frozen leaves.
NOTHING, PASS, STEP = "", "pass", "step"

# done(index of the program, the numbers that it wrote, all values by number); it may take values that are read no more.
Done = Callable[[int, Sequence[int], dict[int, Any]], None]


class Schedule:
    """Runs a `CutStep`.

    Args:
      cut: the programs.
      frozen: the numbers of the arguments in host memory that are the same in the next step.
    """

    def __init__(self, cut: programs_lib.CutStep, frozen: Collection[int] = ()):
        self.cut, self._has_run = cut, False
        last = {number: index for index, program in enumerate(cut.programs) for number in program.reads}
        results = {number for number in cut.results if isinstance(number, int)}
        self._last = {number: index for number, index in last.items() if number not in results or number in cut.on_host}
        self._host_reads = [[n for n in program.reads if n in cut.on_host] for program in cut.programs]
        self._dropped = [self._drops(index) for index in range(len(cut.programs))]
        read = results.union(*(program.reads for program in cut.programs))
        self._resident = [number for number in range(cut.arguments) if number not in cut.on_host and number in read]
        self._smallest = [min(program.writes, key=cut.nbytes, default=-1) for program in cut.programs]
        self._sent_for = {NOTHING: {}, PASS: self._beside_last(), STEP: self._after_copies(frozen)}
        self._integers: dict[int, jax.Array] | None = None

    def __call__(
        self, *args: Any, done: Done | None = None, early: dict[int, jax.Array] | None = None, follows: str = NOTHING
    ) -> Any:
        """Returns the step's result.

        Args:
          *args: the arguments, those of `cut.on_host` on the host or a disk.
          done: called after each program is sent.
          early: copies from the host that the run before has sent. They are taken, and replaced by those for the run that follows.
          follows: what follows this run.
        """
        stored, cut, early = jax.tree.leaves(args), self.cut, {} if early is None else early
        values: dict[int, Any] = {number: stored[number] for number in self._resident}
        values.update(self._on_device())
        running: collections.deque[jax.Array] = collections.deque()
        is_on_disk = any(kept.is_on_disk(stored[number]) for number in list(cut.on_host)[:1])
        sent_for = self._sent_for[follows]
        if is_on_disk:
            kept.prefetch([[stored[n] for n in numbers] for numbers in self._in_order(early, sent_for)])
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
            if index in sent_for:
                if follows == STEP:  # no later program brings them once more
                    early.update({n: values[n] for n in sent_for[index] if n in values})
                fetch(sent_for[index], early)
            if is_on_disk:
                reads = self._host_reads[index]
                values.update(zip(reads, kept.arrived([values[number] for number in reads])))
            read = [values[number] for number in program.reads]
            written = program.run(*read, *[stored[number] for number in program.brings])
            values.update(zip((*program.writes, *program.brings), written))
            if program.writes:
                running.append(values[self._smallest[index]])
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

    def peak(self, *, takes_results: bool = False, follows: str = NOTHING) -> int:
        """Returns the most bytes of values and temporaries on a device at once; see `used`."""
        return max(self.used(takes_results=takes_results, follows=follows), default=0)

    def used(self, *, takes_results: bool = False, follows: str = NOTHING) -> list[int]:
        """Returns the bytes of values and temporaries on a device while each program runs, without the arguments that no program reads.

        Args:
          takes_results: whether `done` takes each result that is no argument as it comes.
          follows: see `__call__`.
        """
        cut = self.cut
        read = {number for program in cut.programs for number in program.reads}
        held = {n for n in self._resident if n in read}
        held.update(cut.constants, *cut.first)
        results, used = {number for number in cut.results if isinstance(number, int)}, []
        early, both = 0, set[int]()  # bytes of copies for what follows, and weights that stay for it
        for index, program in enumerate(cut.programs):
            held.update(program.after)
            sent = set(self._sent_for[follows].get(index, ()))
            stay = sent & held if follows == STEP else set()
            early += sum(map(cut.nbytes, sent - stay))
            both |= stay
            held.update((*program.brings, *program.writes))
            analysis = program.run.memory_analysis()
            used.append(sum(map(cut.nbytes, held | both)) + early + (analysis.temp_size_in_bytes if analysis else 0))
            held.difference_update(self._dropped[index])
            if takes_results:
                held.difference_update(results.intersection(program.writes))
        return used

    def _beside_last(self) -> dict[int, Sequence[int]]:
        """Returns the numbers whose copies for the next pass are sent before a program, by its index."""
        return dict(enumerate(self.cut.first, max(0, len(self.cut.programs) - EARLY)))

    def _after_copies(self, frozen: Collection[int]) -> dict[int, Sequence[int]]:
        """Returns the same for the next step: those that are frozen, after the last copies of this one."""
        own = [index for index, program in enumerate(self.cut.programs) if program.after or program.brings]
        begin = max(own) + 1 if own else len(self.cut.programs) - len(self.cut.first)
        return dict(enumerate(([n for n in numbers if n in frozen] for numbers in self.cut.first), begin))

    def _in_order(self, held: Collection[int], sent_for: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
        """Returns the numbers that a run fetches together, in the order of the fetches. `held` are on the device before it."""
        for numbers in self.cut.first:
            yield [number for number in numbers if number not in held]
        for index, program in enumerate(self.cut.programs):
            yield list(program.after)
            yield list(sent_for.get(index, ()))

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
                for number, own in self.cut.constants.items()
            }
        return self._integers
