"""Arguments of a run that arrive while its programs are sent. This module says what brings them; here nothing does.

A run may begin before all of its arguments are where programs read them. The others are sent some programs ahead of their use, by
themselves or by a program that does so beside its own operations (`Rider`). The classes are identities, for runs that need none of this.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.tree import Leaf

AHEAD = 2  # programs between the sending of an argument and its use; with 1 it has the time of one program

# What follows a run: nothing that is known, a run with the same late arguments, or one with those of them that a step does not change.
NOTHING, PASS, STEP = "", "pass", "step"


class Rider(NamedTuple):
    """What a program does beside the operations of its part."""

    takes: Sequence[Any] = ()  # the abstract arrays that it takes after the values of its part
    gives: tuple[int, ...] = ()  # the numbers of the values that it returns after those of its part
    run: Callable[..., Sequence[Any]] = lambda *arrays: ()  # f(*arrays) -> these values


class Arrivals:
    """The late arguments of a step that is cut into programs. Values, and so arguments, have numbers."""

    late: Collection[int] = frozenset()  # the numbers of the arguments that are not there when a run begins
    ahead: int = AHEAD  # programs between the sending of an argument and its use

    def rider(self, index: int) -> Rider:
        """Returns what a program does beside its part."""
        return Rider()

    def sent(self, index: int) -> Sequence[int]:
        """Returns the numbers of those that are sent with a program, or for -1 before all programs."""
        return ()

    def dropped(self, index: int) -> Collection[int]:
        """Returns the numbers of those that are dropped after a program, and sent again if a later one reads them."""
        return ()

    def sent_for(self, follows: str) -> Mapping[int, Sequence[int]]:
        """Returns the numbers of those that are sent before programs for the run that follows, by the program's index."""
        return {}

    def begin(self, stored: Sequence[Any], follows: str) -> dict[int, Any]:
        """Begins a run, and returns values by number. `stored` are the leaves of its arguments."""
        return {}

    def before(self, index: int, values: dict[int, Any]) -> Sequence[Any]:
        """Adds to `values` what arrives before a program, and returns what its rider takes."""
        return ()

    def end(self) -> None:
        """Ends a run, all of whose programs are sent."""


class ArgumentSource:
    """Stores arguments of a step. This one stores none."""

    paths: Collection[str] = frozenset()  # of those that it stores ("params/layer_0/kernel")

    def used(self, leaf: Leaf) -> Leaf:
        """Returns an abstract argument as programs read it."""
        return leaf

    def arrivals(self, late: Mapping[int, str], reads: Sequence[Sequence[int]], values: Sequence[Any]) -> Arrivals:
        """Returns how its arguments arrive.

        Args:
          late: their paths, by number.
          reads: the numbers of those that each program reads.
          values: the abstract values, by number.
        """
        return Arrivals()
