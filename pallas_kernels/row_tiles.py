"""Divides runs of rows into tiles. This module makes the tables from which each program of `grouped` reads its group and its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Table(NamedTuple):
    """What each tile of rows computes, int32[T] each. The rows after the last group are tiles too: they are set to 0.

    Attributes:
      group_T: its group.
      start_T: its first row.
      real_T: how many of its rows are a group's.
      count_T: how many of its rows it writes; 0 for a tile that is not needed. Such tiles come last.
    """

    group_T: jax.Array
    start_T: jax.Array
    real_T: jax.Array
    count_T: jax.Array


def table(sizes_G: jax.Array, rows: int, tile: int) -> Table:
    """Returns the tiles of all groups, in order. T = rows / tile + G + 1 holds any sizes."""
    groups = sizes_G.shape[0]
    sizes = sizes_G.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - jnp.sum(sizes))
    ends = jnp.cumsum(sizes)
    tiles = -(-sizes // tile)
    ends_of_tiles = jnp.cumsum(tiles)
    number_T = jnp.arange(rows // tile + groups + 1, dtype=jnp.int32)
    # A comparison with all groups: XLA's search is a loop of kernels.
    own_T = jnp.minimum(jnp.sum(ends_of_tiles <= number_T[:, None], axis=1, dtype=jnp.int32), groups)
    start_T = (ends - sizes)[own_T] + (number_T - (ends_of_tiles - tiles)[own_T]) * tile
    count_T = jnp.clip(ends[own_T] - start_T, 0, tile)
    return Table(jnp.minimum(own_T, groups - 1), start_T, jnp.where(own_T < groups, count_T, 0), count_T)


def largest_first(sizes_G: jax.Array, rows: int, most: int) -> tuple[Table, jax.Array]:
    """Returns as few tiles of at most `most` rows as there can be, and their number, int32[]. T = rows / most + G + 1.

    Those of a group have equal sizes. The largest come first, so that programs which take them in turns end together. Sums and ranks are
    comparisons of all with all, which XLA fuses into three kernels.
    """
    groups = sizes_G.shape[0]
    sizes = sizes_G.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - jnp.sum(sizes))
    number = jnp.arange(groups + 1)
    is_earlier = number[None] < number[:, None]
    starts = jnp.sum(jnp.where(is_earlier, sizes, 0), axis=1)
    tiles = -(-sizes // most)
    each = -(-sizes // jnp.maximum(tiles, 1))
    is_before = (each[None] > each[:, None]) | ((each[None] == each[:, None]) & is_earlier)
    first = jnp.sum(jnp.where(is_before, tiles, 0), axis=1)
    nth_TG = jnp.arange(rows // most + groups + 1)[:, None] - first
    is_own_TG = (nth_TG >= 0) & (nth_TG < tiles)

    def pick(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_own_TG, values, 0), axis=1, dtype=jnp.int32)

    count_TG = jnp.clip(sizes - nth_TG * each, 0, each)
    listed = Table(
        pick(jnp.minimum(number, groups - 1)),
        pick(starts + nth_TG * each),
        pick(jnp.where(number < groups, count_TG, 0)),
        pick(count_TG),
    )
    return listed, jnp.sum(tiles)


def by_size(sizes_G: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sizes, the ends, and the numbers of the groups, the largest first: int32[G] each."""
    sizes = sizes_G.astype(jnp.int32)
    number = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    is_earlier = number[None] < number[:, None]
    ends = sizes + jnp.sum(jnp.where(is_earlier, sizes, 0), axis=1)
    is_before = (sizes[None] > sizes[:, None]) | ((sizes[None] == sizes[:, None]) & is_earlier)
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return sizes, ends, jnp.sum(jnp.where(rank[None] == number[:, None], number, 0), axis=1, dtype=jnp.int32)
