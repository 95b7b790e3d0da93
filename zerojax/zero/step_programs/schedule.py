"""Sends the programs of a step in order. This module holds a value from the program that writes it to the last that reads it.

    sent      what program i + 2 waits for, program i, what program i + 3 waits for, program i + 1, ...

The memory of what a program writes is taken when the program is sent, so the sender waits until the device is near. What arrives from
elsewhere is sent some programs ahead (`arrivals`), across the end of a run that is followed by another.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zerojax import tree
from zerojax.tree import PyTree
from zerojax.zero.step_programs import programs as programs_lib
from zerojax.zero.step_programs.arrivals import NOTHING, STEP

# done(index of the program, the numbers that it wrote, all values by number); it may take values that are read no more.
Done = Callable[[int, Sequence[int], dict[int, Any]], None]


class Schedule:
    """Runs a `CutStep`."""

    def __init__(self, cut: programs_lib.CutStep):
        self.cut = cut
        late, numbered = cut.arrivals.late, list(enumerate(cut.programs))
        last = {number: index for index, program in numbered for number in program.reads}
        results = {number for number in cut.results if isinstance(number, int)}
        self._last = {number: index for number, index in last.items() if number not in results or number in late}
        self._dropped = [self._drops(index) for index, _ in numbered]
        self._resident = [n for n in range(cut.arguments) if n not in late and (n in last or n in results)]
        self._smallest = [min(program.writes, key=cut.nbytes, default=-1) for program in cut.programs]
        self._constants: dict[int, jax.Array] | None = None

    def __call__(self, *args: Any, done: Done | None = None, follows: str = NOTHING) -> PyTree:
        """Returns the step's result.

        Args:
          *args: the arguments; those of `cut.arrivals` where they are stored.
          done: called after each program is sent.
          follows: what follows this run, see `arrivals`.
        """
        stored, cut = jax.tree.leaves(args), self.cut
        values: dict[int, Any] = {number: stored[number] for number in self._resident}
        values.update(self._on_device())
        values.update(cut.arrivals.begin(stored, follows))
        del stored
        running: collections.deque[jax.Array] = collections.deque()
        for index, program in enumerate(cut.programs):
            beside = cut.arrivals.before(index, values)
            read = [values[number] for number in program.reads]
            written = program.run(*read, *beside)
            values.update(zip((*program.writes, *program.rider.gives), written))
            if cut.is_serial:
                jax.block_until_ready(written)
            if program.writes:
                running.append(values[self._smallest[index]])
            del read, written, beside
            if done is not None:
                done(index, program.writes, values)
            for number in self._dropped[index]:
                values.pop(number, None)
            if len(running) > cut.arrivals.ahead and not (oldest := running.popleft()).is_deleted():
                jax.block_until_ready(oldest)
        cut.arrivals.end()
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
        arguments = frozenset(held)  # the caller holds these to the end
        ending: collections.deque[set[int]] = collections.deque(maxlen=cut.in_flight)
        held.update(cut.constants, cut.arrivals.sent(-1))
        results, used = {number for number in cut.results if isinstance(number, int)}, []
        early, both = 0, set[int]()  # bytes of what is sent for the next run, and numbers of what stays for it
        for index, program in enumerate(cut.programs):
            held.update(cut.arrivals.sent(index))
            sent = set(cut.arrivals.sent_for(follows).get(index, ()))
            stay = sent & held if follows == STEP else set()
            early += sum(map(cut.nbytes, sent - stay))
            both |= stay
            held.update(program.writes)
            analysis = program.run.memory_analysis()
            here = held.union(both, *ending)
            used.append(sum(map(cut.nbytes, here)) + early + (analysis.temp_size_in_bytes if analysis else 0))
            dropped = held.intersection(self._dropped[index]) - arguments
            held -= dropped
            ending.append(dropped)
            if takes_results:
                held.difference_update(results.intersection(program.writes))
        return used

    def _drops(self, index: int) -> list[int]:
        """Returns what no program after this one reads, and what arrives again for a later one."""
        again = self.cut.arrivals.dropped(index)
        return [n for n in self.cut.programs[index].reads if self.is_last(n, index) or n in again]

    def _on_device(self) -> dict[int, jax.Array]:
        """Returns the constants that programs read."""
        if self._constants is None:
            self._constants = {
                number: _replicated(own, self.cut.values[number].sharding) for number, own in self.cut.constants.items()
            }
        return self._constants


def _replicated(constant: Any, sharding: Any) -> jax.Array:
    if tree.is_key(constant):
        return jax.device_put(constant, sharding)
    return jax.make_array_from_callback(constant.shape, sharding, constant.__getitem__)
