"""Shares arrays out among a kernel's programs. This module cuts arrays into tiles, and gathers small arrays into one launch.

A launch takes one large leaf, or a group of small ones: each program works on one tile of one leaf, found by its number, so that a
group costs one launch and no copy. Tiles whose elements all exist are worked on unmasked, ragged ends by programs of their own: masks
keep the compiler from reading 16 bytes at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import blockwise

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
        down, right = program // self.across, program % self.across
        row, col = down * self.height, right * self.width
        rows = row + jax.lax.broadcasted_iota(jnp.int32, (self.height, 1), 0)
        cols = col + jax.lax.broadcasted_iota(jnp.int32, (1, self.width), 1)
        return (pl.ds(row, self.height), pl.ds(col, self.width)), (pl.ds(row, self.height), right), rows, cols

    def mask(self, rows: jax.Array, cols: jax.Array) -> jax.Array:
        """Says which elements of a tile exist."""
        return (rows < self.rows) & (cols < self.cols)


def flat(size: int, elements: int) -> Tiles:
    """Returns the tiles of an array seen as one row."""
    return Tiles(1, size, 1, min(elements, pl.next_power_of_2(size)))


def in_blocks(shape: Sequence[int], elements: int) -> Tiles:
    """Returns tiles one block wide, of an array whose last dim is cut into blocks."""
    size, block = math.prod(shape), blockwise.BLOCK
    rows, cols = (size // block, block) if shape[-1] % block == 0 else (size // shape[-1], shape[-1])
    return Tiles(rows, cols, min(elements // block, pl.next_power_of_2(rows)), block)


def run(tiles: Sequence[Tiles], work: Callable[[int, jax.Array, bool], None]) -> None:
    """Calls `work(number of the array, number of its tile, masked)` once in each program of a kernel."""
    program = pl.program_id(0)
    first = 0
    segments = []
    for number, tile in enumerate(tiles):
        # In a group each part costs compile time: an array has one, masked where its end is ragged.
        whole = tile.whole if len(tiles) == 1 or tile.whole == tile.programs else 0
        for start, stop, masked in ((0, whole, False), (whole, tile.programs, True)):
            if start < stop:
                segments.append((first + start, first + stop, number, first, masked))
        first += tile.programs
    if len(segments) == 1:
        work(0, program, segments[0][-1])
        return
    for start, stop, number, before, masked in segments:

        @pl.when((program >= start) & (program < stop))
        def _(number: int = number, before: int = before, masked: bool = masked) -> None:
            work(number, program - before, masked)
