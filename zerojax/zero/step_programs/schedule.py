"""Sends the programs of a step in order. This module holds a value from the program that writes it to the last that reads it.

    sent      what program i + 2 waits for, program i, what program i + 3 waits for, program i + 1, ...

The memory of what a program writes is taken when the program is sent, so the sender waits until the device is near. What arrives from
elsewhere is sent some programs ahead (`arrivals`), across the end of a run that is followed by another.
"""

import collections
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax

from zerojax import tree
from zerojax.tree import PyTree
from zerojax.zero.step_programs import arrivals as arrivals_lib
from zerojax.zero.step_programs import programs as programs_lib
from zerojax.zero.step_programs.arrivals import NOTHING, STEP

# done(index of the program, the numbers that it wrote, all values by number); it may take values that are read no more.
Done = Callable[[int, Sequence[int], dict[int, Any]], None]


class SentProgram(NamedTuple):
    """A program in an order. Values have names; in a `CutStep` they are numbers."""

    run: Callable[..., Sequence[Any]]  # f(*what it reads, *what arrives with it) -> what it writes
    reads: Sequence[Hashable]  # the names of what it takes
    writes: Sequence[Hashable]  # the names of what it returns
    gives: Sequence[Hashable] = ()  # the names of what it returns after these, for later programs to read
    devices: Hashable = 0  # those that run it, one program after the other; None: the sender does not wait for it


class ProgramOrder:
    """Programs in the order in which they are sent.

    Args:
      programs: in this order.
      nbytes: f(name) -> the bytes of a value on one device.
      kept: the names of values that stay to the end of a run.
      again: for each program the names of what arrives again for a later one.
      is_serial: whether each program ends before the next is sent.

    Attributes:
      programs: as the argument.
      last: the last program that reads or writes a value, by its name, if the value does not stay.
      dropped: for each program the names of what it is the last to read, or what arrives again.
      ahead: for each program how many of its devices' before it may run when it is sent, and the same for the end of a run.
    """

    def __init__(
        self,
        programs: Sequence[SentProgram],
        nbytes: Callable[[Any], float],
        kept: Collection[Hashable] = (),
        again: Sequence[Collection[Hashable]] = (),
        *,
        is_serial: bool = False,
    ):
        self.programs, self._is_serial = programs, is_serial
        named = ((name, index) for index, own in enumerate(programs) for name in (*own.reads, *own.writes))
        self.last = {name: index for name, index in named if name not in kept}
        self.dropped = [
            [name for name in dict.fromkeys((*own.reads, *own.writes)) if self.last.get(name) == index]
            for index, own in enumerate(programs)
        ]
        for own, names in zip(self.dropped, again):
            own += set(names).difference(own)
        self._smallest = [min(own.writes, key=nbytes, default=None) for own in programs]
        self.ahead = [arrivals_lib.AHEAD] * (len(programs) + 1)

    def run(
        self,
        values: dict[Any, Any],
        done: Callable[[int, dict[Any, Any]], None] | None = None,
        before: Callable[[int, dict[Any, Any]], Sequence[Any]] | None = None,
    ) -> None:
        """Sends the programs.

        Args:
          values: what they read and none of them writes, by name; in the end what stays.
          done: called with the index of each program that was sent, and the values.
          before: returns what arrives with a program, of the same arguments.
        """
        running: dict[Any, collections.deque[jax.Array]] = collections.defaultdict(collections.deque)
        for index, own in enumerate(self.programs):
            beside = before(index, values) if before is not None else ()
            read = [values[name] for name in own.reads]
            written = own.run(*read, *beside)
            values.update(zip((*own.writes, *own.gives), written))
            if self._is_serial:
                jax.block_until_ready(written)
            near = running[own.devices]
            if own.writes and own.devices is not None:
                near.append(values[self._smallest[index]])
            del read, written, beside
            if done is not None:
                done(index, values)
            for name in self.dropped[index]:
                values.pop(name, None)
            while len(near) > self.ahead[index + 1]:
                if not (oldest := near.popleft()).is_deleted():
                    jax.block_until_ready(oldest)


class _Held(NamedTuple):
    """What a device holds while a program runs."""

    nbytes: int  # of values and temporaries
    numbers: frozenset[int]  # of the values
    dropped: set[int]  # the numbers of those that it is the last to read


class Schedule:
    """Runs a `CutStep`."""

    def __init__(self, cut: programs_lib.CutStep):
        self.cut, late = cut, cut.arrivals.late
        results = {number for number in cut.results if isinstance(number, int)}
        sent = [SentProgram(own.run, own.reads, own.writes, own.rider.gives) for own in cut.programs]
        again = [cut.arrivals.dropped(index) for index in range(len(sent))]
        self.order = ProgramOrder(sent, cut.nbytes, results.difference(late), again, is_serial=cut.is_serial)
        read = results.union(*(own.reads for own in sent))
        self._resident = [n for n in range(cut.arguments) if n not in late and n in read]
        self._constants: dict[int, jax.Array] | None = None
        self.order.ahead = self._programs_ahead()

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
        numbered = None if done is None else lambda index, values: done(index, cut.programs[index].writes, values)
        self.order.run(values, numbered, cut.arrivals.before)
        cut.arrivals.end()
        found = [values[result] if isinstance(result, int) else result for result in cut.results]
        return jax.tree.unflatten(cut.structure, found)

    def is_last(self, number: int, index: int) -> bool:
        """Returns whether no program after this one reads a value, and it is no result."""
        return self.order.last.get(number) == index

    def peak(self, *, taken: Collection[int] = (), follows: str = NOTHING) -> int:
        """Returns the most bytes of values and temporaries on a device at once; see `used`."""
        return max(self.used(taken=taken, follows=follows), default=0)

    def used(self, *, taken: Collection[int] = (), follows: str = NOTHING) -> list[int]:
        """Returns the bytes of values and temporaries on a device while each program runs, without the arguments that no program reads.

        Args:
          taken: the numbers of results that `done` takes as they come.
          follows: see `__call__`.
        """
        held = self._held(taken, follows)
        return [own.nbytes + self._ending(held, index, self.order.ahead[index]) for index, own in enumerate(held)]

    def _held(self, taken: Collection[int], follows: str) -> list["_Held"]:
        """Returns what a device holds while each program runs alone."""
        cut = self.cut
        read = {number for program in cut.programs for number in program.reads}
        held = {n for n in self._resident if n in read}
        arguments = frozenset(held)  # the caller holds these to the end
        held.update(cut.constants, cut.arrivals.sent(-1))
        found: list[_Held] = []
        early, both = 0, set[int]()  # bytes of what is sent for the next run, and numbers of what stays for it
        for index, program in enumerate(cut.programs):
            held.update(cut.arrivals.sent(index))
            sent = set(cut.arrivals.sent_for(follows).get(index, ()))
            stay = sent & held if follows == STEP else set()
            early += sum(map(cut.nbytes, sent - stay))
            both |= stay
            held.update(program.writes)
            analysis = program.run.memory_analysis()
            here, dropped = frozenset(held | both), held.intersection(self.order.dropped[index]) - arguments
            nbytes = sum(map(cut.nbytes, here)) + early + (analysis.temp_size_in_bytes if analysis else 0)
            found.append(_Held(nbytes, here, dropped))
            held -= dropped
            held.difference_update(set(taken).intersection(program.writes))
        return found

    def _ending(self, held: Sequence["_Held"], index: int, ahead: int) -> int:
        """Returns the bytes that programs which may still run read last, when a program is sent."""
        ahead = min(ahead, self.cut.in_flight)
        ending = set[int]().union(*(own.dropped for own in held[max(0, index - ahead) : index])) - held[index].numbers
        return sum(map(self.cut.nbytes, ending))

    def _programs_ahead(self) -> list[int]:
        """Returns for each program how many before it may run when it is sent, and the same for the end of a run.

        What programs in flight read is not free yet. So they are fewer where more would need more memory than the largest program alone.
        """
        most = self.cut.arrivals.ahead
        if not self.cut.in_flight:
            return [most] * (len(self.cut.programs) + 1)
        held = self._held((), NOTHING)
        limit = max(own.nbytes for own in held)
        fits = lambda index, ahead: held[index].nbytes + self._ending(held, index, ahead) <= limit  # noqa: E731
        return [next(n for n in range(most, -1, -1) if fits(index, n)) for index in range(len(held))] + [most]

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
