"""Shares arrays out among a kernel's programs. This module cuts arrays into tiles, and gathers small arrays into one launch.

A launch takes one large leaf, or a group of small ones: each program works on one tile of one leaf, found by its number, so that a
group costs one launch and no copy. Of a large leaf, tiles whose elements all exist are worked on unmasked, and ragged ends by programs of
their own: masks keep the compiler from reading 16 bytes at a time. In a group a tree of branches leads to the reads and the writes of a
program's own leaf, and all share what lies between: what such a short kernel waits for is its instructions, each run for the first time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import blockwise

# make(number of the array, number of its tile, whether some of the tile's elements may not exist) -> arrays
Make = Callable[[int, jax.Array, bool], Any]
# choose(make): what `make` returns for the program's own array.
Choose = Callable[[Make], Any]

MOST_ELEMENTS = 2**31 - 2**20  # kernels count elements in int32; larger arrays take the twin


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
      elements: elements a program works on; a power of 2, and a multiple of blockwise.BLOCK.
      num_warps, num_stages: Triton's.
      small: arrays of fewer elements are launched in groups.
      group: most arrays of a group, and `group_elements` what a program of a group works on.
    """

    elements: int = 2048
    num_warps: int = 8
    num_stages: int = 1
    small: int = 2**20
    group: int = 32
    group_elements: int = 1024

    @property
    def params(self) -> pltriton.CompilerParams:
        """Returns the compiler's parameters; without them JAX may choose another compiler."""
        return pltriton.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages)

    def tile_of(self, sizes: Sequence[int]) -> int:
        """Returns the elements of a tile where arrays of these sizes are launched together."""
        most = self.elements if len(sizes) == 1 else self.group_elements
        return max(blockwise.BLOCK, min(most, pl.next_power_of_2(max(sizes))))


INTERPRETED = Launch(
    elements=2**20, group=4, group_elements=2**20
)  # the interpreter copies all arrays for each program


def groups(sizes: Sequence[int], launch: Launch) -> list[tuple[int, ...]]:
    """Returns the numbers of the arrays of each launch: large ones alone, small ones together."""
    large = [(number,) for number, size in enumerate(sizes) if size >= launch.small]
    small = [number for number, size in enumerate(sizes) if size < launch.small]
    return large + [tuple(small[start : start + launch.group]) for start in range(0, len(small), launch.group)]


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
        return self.cols // self.width if self.rows == 1 else 0

    def at(self, program: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
        """Returns a tile's place among elements, and among scales, and its rows [height, 1] and columns [1, width]."""
        down, right = (0, program) if self.rows == self.height == 1 else (program // self.across, program % self.across)
        row, col = down * self.height, right * self.width
        rows = row + jax.lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        cols = col + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return (pl.ds(row, self.height), pl.ds(col, self.width)), (pl.ds(row, self.height), right), rows, cols

    def index(self, program: jax.Array) -> jax.Array:
        """Returns the elements' numbers in the array, uint32 [height, width]; alike for arrays of one group."""
        _, _, rows, cols = self.at(program)
        return (rows * self.cols + cols).astype(jnp.uint32)

    def masks(self, own: jax.Array, masked: bool) -> tuple[Any, Any]:
        """Returns which elements of a tile, and which of its rows, are there; None for all.

        Args:
          own: the tile's number.
          masked: whether some may not exist.
        """
        if not masked:
            return None, None
        _, _, rows, cols = self.at(own)
        return (rows < self.rows) & (cols < self.cols), rows[:, 0] < self.rows


def flat(size: int, elements: int) -> Tiles:
    """Returns the tiles of an array seen as one row."""
    return Tiles(1, size, 1, elements)


def in_blocks(shape: Sequence[int], elements: int) -> Tiles:
    """Returns tiles one block wide, of an array whose last dim is cut into blocks."""
    size, block = math.prod(shape), blockwise.BLOCK
    rows, cols = (size // block, block) if shape[-1] % block == 0 else (size // shape[-1], shape[-1])
    return Tiles(rows, cols, elements // block, block)


def run(tiles: Sequence[Tiles], work: Callable[[Choose], None]) -> None:
    """Calls `work(choose)` in each program of a kernel, once; tiles of a group are of one size."""
    program = pl.program_id(0)
    if len(tiles) > 1:
        starts = [0, *itertools.accumulate(tile.programs for tile in tiles[:-1])]
        work(functools.partial(_choose, tiles, starts, program, 0, len(tiles)))
        return
    whole, programs = tiles[0].whole, tiles[0].programs

    def work_on(masked: bool) -> None:
        work(lambda make: make(0, program, masked))

    if whole in (0, programs):
        work_on(whole == 0)
        return
    pl.when(program < whole)(lambda: work_on(False))
    pl.when(program >= whole)(lambda: work_on(True))


def _choose(
    tiles: Sequence[Tiles], starts: Sequence[int], program: jax.Array, first: int, stop: int, make: Make
) -> Any:
    """Calls `make` for the array among [first, stop) that has the program's tile: a tree of branches finds it."""
    if stop - first == 1:
        return make(first, program - starts[first], tiles[first].whole < tiles[first].programs)
    middle = (first + stop) // 2
    here = functools.partial(_choose, tiles, starts, program)
    return jax.lax.cond(program < starts[middle], lambda: here(first, middle, make), lambda: here(middle, stop, make))


def load(ref: Any, place: Any, mask: jax.Array | None) -> jax.Array:
    """Reads a place of an array; what the mask leaves out is 0."""
    if mask is None:
        return pltriton.load(ref.at[place])
    return pltriton.load(ref.at[place], mask=mask, other=jnp.zeros((), ref.dtype))
