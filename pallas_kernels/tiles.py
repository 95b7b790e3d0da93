"""Shares arrays out among a kernel's programs. This module cuts arrays into tiles, and gathers small arrays into one launch.

Each program of a launch works on one tile of one leaf, found by its number, so that many leaves cost one launch and no copy. Of a large
leaf launched alone, tiles whose elements all exist are worked on unmasked, and ragged ends by programs of their own: masks keep the
compiler from reading 16 bytes at a time. Among several leaves a switch leads to the reads and the writes of a program's own, and all share
what lies between. What so short a kernel waits for is its instructions, each run for the first time; where elements lie is therefore
found before the switch, and its branches, which differ in pointers and sizes alone, are one to the compiler: it makes a table of those.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import blockwise

# make(number of the array, whether some of the tile's elements may not exist) -> arrays
Make = Callable[[int, bool], Any]
# choose(make): what `make` returns for the program's own array.
Choose = Callable[[Make], Any]

MOST_ELEMENTS = 2**31 - 2**20  # kernels count elements in int32; larger arrays take the twin


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
      elements: elements of a tile of a large array; a power of 2, and a multiple of blockwise.BLOCK.
      num_warps, num_stages: Triton's.
      small: arrays of fewer elements are small: `group_elements` make a tile of theirs.
      group: most arrays of a launch. Compiling takes more than twice as long for twice as many.
      joins: large arrays that make whole tiles share launches too: faster where memory binds, over 10% slower where instructions do.
      step: most elements that a program reads at a time, where it can take a tile in steps; a power of 2.
    """

    elements: int = 1024
    num_warps: int = 8
    num_stages: int = 1
    small: int = 2**20
    group: int = 32
    group_elements: int = 1024
    joins: bool = False
    step: int = 2**20

    @property
    def params(self) -> pltriton.CompilerParams:
        """Returns the compiler's parameters; without them JAX may choose another compiler."""
        return pltriton.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)

    def gathers(self, sizes: Sequence[int]) -> bool:
        """Says whether arrays that are launched together are several small ones; those of a group are all small or all large."""
        return len(sizes) > 1 and sizes[0] < self.small

    def tile_of(self, sizes: Sequence[int]) -> int:
        """Returns the elements of a tile where arrays of these sizes are launched together."""
        most = self.group_elements if self.gathers(sizes) else self.elements
        return max(blockwise.BLOCK, min(most, pl.next_power_of_2(max(sizes))))


INTERPRETED = Launch(
    elements=2**20, group=4, group_elements=2**20
)  # the interpreter copies all arrays for each program


def groups(sizes: Sequence[int], launch: Launch) -> list[tuple[int, ...]]:
    """Returns the numbers of the arrays of each launch: small ones together, large ones alone or, if `joins`, whole ones together."""
    by_size = sorted(range(len(sizes)), key=lambda number: sizes[number])
    large = [number for number in by_size if sizes[number] >= launch.small]
    whole = [number for number in large if launch.joins and sizes[number] % launch.elements == 0]
    small = by_size[: len(sizes) - len(large)]
    alone = [(number,) for number in large if number not in whole]
    return alone + [
        tuple(some[start : start + launch.group])
        for some in (whole, small)
        for start in range(0, len(some), launch.group)
    ]


def fits(size: int) -> bool:
    """Says whether a kernel can take an array of that many elements."""
    return 0 < size <= MOST_ELEMENTS


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one array, seen as rows and columns."""

    rows: int
    cols: int
    height: int
    width: int

    @property
    def across(self) -> int:
        """Returns the tiles of one row."""
        return -(-self.cols // self.width)

    @property
    def programs(self) -> int:
        """Returns the number of tiles."""
        return -(-self.rows // self.height) * self.across

    @property
    def whole(self) -> int:
        """Returns how many of the first tiles have elements only that exist."""
        if self.cols % self.width == 0:
            return self.rows // self.height * self.across
        return self.cols // self.width if self.is_flat else 0

    @property
    def ragged(self) -> bool:
        """Says whether some tiles reach over the array's end."""
        return self.whole < self.programs

    @property
    def is_flat(self) -> bool:
        """Says whether the array is one row, and its tiles too."""
        return self.rows == self.height == 1

    def at(self, own: jax.Array) -> "Spot":
        """Returns where a tile lies; arrays of one group give the same elements and scales."""
        if self.is_flat:
            cols = own * self.width + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
            return Spot(jnp.zeros((1, 1), jnp.int32), cols, cols, jnp.full((1,), own))
        down, right = own // self.across, own % self.across
        rows = down * self.height + jax.lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        cols = right * self.width + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return Spot(rows, cols, rows * self.cols + cols, rows[:, 0] * self.across + right)

    def masks(self, spot: "Spot", masked: bool = True) -> tuple[Any, Any]:
        """Returns which elements of a tile, and which of its rows' scales, are there; None for all, where they are not `masked`."""
        if not masked:
            return None, None
        if self.is_flat or self.cols == self.width:
            there = spot.elements < self.rows * self.cols
        else:  # rows do not follow each other in a tile, and the numbers of those past the last may exceed int32
            there = (spot.rows < self.rows) & (spot.cols < self.cols)
        return there, spot.scales < self.rows * self.across


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where a tile lies in its array.

    Attributes:
      rows, cols: int32 [height, 1] and [1, width].
      elements: the numbers of its elements, int32 [height, width], and `scales` of its rows' scales, int32 [height].
    """

    rows: jax.Array
    cols: jax.Array
    elements: jax.Array
    scales: jax.Array


def flat(size: int, elements: int) -> Tiles:
    """Returns the tiles of an array seen as one row."""
    return Tiles(1, size, 1, elements)


def in_blocks(shape: Sequence[int], elements: int) -> Tiles:
    """Returns tiles one block wide, of an array whose last dim is cut into blocks."""
    size, block = math.prod(shape), blockwise.BLOCK
    rows, cols = (size // block, block) if shape[-1] % block == 0 else (size // shape[-1], shape[-1])
    return Tiles(rows, cols, elements // block, block)


def run(tiles: Sequence[Tiles], program: jax.Array, work: Callable[[jax.Array, Choose], None]) -> None:
    """Calls `work(own, choose)` once, in the program of that number; tiles of a group are of one size.

    `own` is the number of the program's tile in its array, and choose(make) what `make` returns for that array.
    """
    if len(tiles) > 1:
        array, own = _find(tiles, program)
        ragged = [tile.ragged for tile in tiles]
        work(own, lambda make: jax.lax.switch(array, [functools.partial(make, *each) for each in enumerate(ragged)]))
        return
    whole, programs = tiles[0].whole, tiles[0].programs

    def work_on(masked: bool) -> None:
        work(program, lambda make: make(0, masked))

    if whole in (0, programs):
        work_on(whole == 0)
        return
    pl.when(program < whole)(lambda: work_on(False))
    pl.when(program >= whole)(lambda: work_on(True))


def runs(tiles: Sequence[Tiles]) -> Iterator[range]:
    """Yields, for each run of arrays of as many tiles, the programs that have the first tile of one of them."""
    start = 0
    for count, alike in itertools.groupby(tile.programs for tile in tiles):
        stop = start + count * len(list(alike))
        yield range(start, stop, count)
        start = stop


def _find(tiles: Sequence[Tiles], program: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the number of a program's array, and of its tile there: a division for each run of arrays of as many tiles."""
    array = own = program
    first = 0
    for programs in runs(tiles):
        there = program - programs.start
        across = jax.lax.div(there, jnp.int32(programs.step))
        found = first + across, there - across * programs.step
        array, own = (jnp.where(program >= programs.start, new, old) for new, old in zip(found, (array, own)))
        first += len(programs)
    return array, own


def load(ref: Any, numbers: jax.Array, mask: jax.Array | None, evict: str | None = None) -> jax.Array:
    """Reads elements of an array by number; what the mask leaves out is 0. `evict` says how long the L2 cache should keep them."""
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return pltriton.load(ref.at[numbers], mask=mask, other=other, eviction_policy=evict)
