"""Divides arrays among the programs of a kernel. This module cuts arrays into tiles, and puts several small arrays into one launch.

Each program of a launch computes one tile of one leaf, found by the program's index. Many leaves thus cost one launch and no copy. For a
large leaf launched alone, one set of programs handles full tiles without masks and another handles ragged ends, because masks prevent the
compiler from reading 16 bytes at a time. For several leaves a `switch` selects the program's own reads and writes, and all programs share
the code between them. Short kernels are bound by instruction-cache misses. Positions are therefore computed before the switch. Its branches
then differ only in pointers and sizes, and the compiler turns them into one table.
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

# make(index of the array, whether the tile may reach over the array's end) -> arrays
Make = Callable[[int, bool], Any]
# choose(make) -> the result of `make` for the program's own array.
Choose = Callable[[Make], Any]

MOST_ELEMENTS = 2**31 - 2**20  # kernels count elements in int32; larger arrays take the twin


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
      elements: elements of a tile of a large array; a power of 2, and a multiple of blockwise.BLOCK.
      num_warps, num_stages: Triton's.
      small: arrays of fewer elements are small; their tiles have `group_elements`.
      group: the maximum of arrays in a launch. Twice as many take more than twice as long to compile.
      joins: large arrays of full tiles share launches too. This is faster if memory is the bound, and over 10% slower if instructions are.
      step: the maximum of elements that a program reads at a time, if it can process a tile in steps; a power of 2.
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
        """Returns whether a launch has several small arrays; the arrays of a launch are all small or all large."""
        return len(sizes) > 1 and sizes[0] < self.small

    def tile_of(self, sizes: Sequence[int]) -> int:
        """Returns the elements of a tile if arrays of these sizes are launched together."""
        most = self.group_elements if self.gathers(sizes) else self.elements
        return max(blockwise.BLOCK, min(most, pl.next_power_of_2(max(sizes))))


# The interpreter copies all arrays for each program
INTERPRETED = Launch(elements=2**20, group=4, group_elements=2**20)


def groups(sizes: Sequence[int], launch: Launch) -> list[tuple[int, ...]]:
    """Returns the indices of the arrays of each launch: small ones share launches, large ones are alone unless they join."""
    by_size = sorted(range(len(sizes)), key=lambda number: sizes[number])
    large = [number for number in by_size if sizes[number] >= launch.small]
    joined = [number for number in large if launch.joins and sizes[number] % launch.elements == 0]
    small = by_size[: len(sizes) - len(large)]
    alone = [(number,) for number in large if number not in joined]
    return alone + [
        tuple(some[start : start + launch.group])
        for some in (joined, small)
        for start in range(0, len(some), launch.group)
    ]


def fits(size: int) -> bool:
    """Returns whether a kernel can take an array of that many elements."""
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
    def full(self) -> int:
        """Returns how many of the first tiles are full: all of their elements exist."""
        if self.cols % self.width == 0:
            return self.rows // self.height * self.across
        return self.cols // self.width if self.is_flat else 0

    @property
    def ragged(self) -> bool:
        """Returns whether some tiles reach over the array's end."""
        return self.full < self.programs

    @property
    def is_flat(self) -> bool:
        """Returns whether the array and its tiles are one row."""
        return self.rows == self.height == 1

    def at(self, own: jax.Array) -> "Spot":
        """Returns the position of a tile; arrays of one launch have the same elements and scales."""
        if self.is_flat:
            cols = own * self.width + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
            return Spot(jnp.zeros((1, 1), jnp.int32), cols, cols, jnp.full((1,), own))
        down, right = own // self.across, own % self.across
        rows = down * self.height + jax.lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        cols = right * self.width + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return Spot(rows, cols, rows * self.cols + cols, rows[:, 0] * self.across + right)

    def masks(self, spot: "Spot", masked: bool = True) -> tuple[Any, Any]:
        """Returns which elements of a tile, and which scales of its rows, exist; None, None if not `masked`."""
        if not masked:
            return None, None
        if self.is_flat or self.cols == self.width:
            exist = spot.elements < self.rows * self.cols
        else:  # rows of a tile are not contiguous, and indices past the last row may exceed int32
            exist = (spot.rows < self.rows) & (spot.cols < self.cols)
        return exist, spot.scales < self.rows * self.across


@dataclasses.dataclass(frozen=True)
class Spot:
    """The position of a tile in its array, as indices.

    Attributes:
      rows, cols: int32 [height, 1] and [1, width].
      elements: of its elements, int32 [height, width].
      scales: of the scales of its rows, int32 [height].
    """

    rows: jax.Array
    cols: jax.Array
    elements: jax.Array
    scales: jax.Array


def flat(size: int, elements: int) -> Tiles:
    """Returns the tiles of an array seen as one row."""
    return Tiles(1, size, 1, elements)


def in_blocks(shape: Sequence[int], elements: int) -> Tiles:
    """Returns tiles that are one block wide, for an array whose last dim is divided into blocks."""
    size, block = math.prod(shape), blockwise.BLOCK
    rows, cols = (size // block, block) if shape[-1] % block == 0 else (size // shape[-1], shape[-1])
    return Tiles(rows, cols, elements // block, block)


def run(tiles: Sequence[Tiles], program: jax.Array, work: Callable[[jax.Array, Choose], None]) -> None:
    """Calls `work(own, choose)` once, in the program of that index; tiles of a launch have one size.

    `own` is the index of the program's tile in its array, and choose(make) is the result of `make` for that array.
    """
    if len(tiles) > 1:
        array, own = _find(tiles, program)
        ragged = [tile.ragged for tile in tiles]
        work(own, lambda make: jax.lax.switch(array, [functools.partial(make, *each) for each in enumerate(ragged)]))
        return
    full, programs = tiles[0].full, tiles[0].programs

    def work_on(masked: bool) -> None:
        work(program, lambda make: make(0, masked))

    if full in (0, programs):
        work_on(full == 0)
        return
    pl.when(program < full)(lambda: work_on(False))
    pl.when(program >= full)(lambda: work_on(True))


def runs(tiles: Sequence[Tiles]) -> Iterator[range]:
    """Yields, for each run of arrays with equally many tiles, the programs of their first tiles."""
    start = 0
    for count, alike in itertools.groupby(tile.programs for tile in tiles):
        stop = start + count * len(list(alike))
        yield range(start, stop, count)
        start = stop


def _find(tiles: Sequence[Tiles], program: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the index of a program's array and of its tile there, with one division for each of `runs`."""
    array = own = program
    first = 0
    for programs in runs(tiles):
        there = program - programs.start
        across = jax.lax.div(there, jnp.int32(programs.step))
        found = first + across, there - across * programs.step
        array, own = (jnp.where(program >= programs.start, new, old) for new, old in zip(found, (array, own)))
        first += len(programs)
    return array, own


def load(ref: jax.Ref, numbers: jax.Array, mask: jax.Array | None, evict: str | None = None) -> jax.Array:
    """Reads elements of an array by index; masked elements are 0. `evict` is the L2 cache's eviction policy for them."""
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return pltriton.load(ref.at[numbers], mask=mask, other=other, eviction_policy=evict)
