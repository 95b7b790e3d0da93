"""Divides runs of rows into tiles. This module makes the table from which each program of `grouped` reads its group and its rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Table(NamedTuple):
    """What each tile of rows computes, int32[T] each. The rows after the last group are tiles too: they are set to 0.

    Attributes:
      group_T: its group.
      start_T: its first row.
      real_T: how many of its rows are a group's.
      count_T: how many of its rows it writes; 0 for a tile that is not needed.
      skip_T: how many of these, at its start, are of the group before, and not written.
    """

    group_T: jax.Array
    start_T: jax.Array
    real_T: jax.Array
    count_T: jax.Array
    skip_T: jax.Array


def table(sizes_G: jax.Array, rows: int, tile: int, aligned: int = 1) -> Table:
    """Returns the tiles of all groups, in order. T = rows / tile + G + 1 holds any sizes; tiles that are not needed come last.

    A tile begins at a multiple of `aligned` (at most 8), which takes one more tile of some groups.
    """
    groups = sizes_G.shape[0]
    sizes = sizes_G.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - jnp.sum(sizes))
    ends = jnp.cumsum(sizes)
    begins = (ends - sizes) // aligned * aligned
    tiles = jnp.where(sizes > 0, -((begins - ends) // tile), 0)
    ends_of_tiles = jnp.cumsum(tiles)
    number_T = jnp.arange(rows // tile + (groups + 1) * min(aligned, 2), dtype=jnp.int32)
    # A comparison with all groups: XLA's search is a loop of kernels.
    own_T = jnp.minimum(jnp.sum(ends_of_tiles <= number_T[:, None], axis=1, dtype=jnp.int32), groups)
    start_T = begins[own_T] + (number_T - (ends_of_tiles - tiles)[own_T]) * tile
    count_T = jnp.clip(ends[own_T] - start_T, 0, tile)
    skip_T = jnp.maximum((ends - sizes)[own_T] - start_T, 0)
    return Table(jnp.minimum(own_T, groups - 1), start_T, jnp.where(own_T < groups, count_T, 0), count_T, skip_T)
