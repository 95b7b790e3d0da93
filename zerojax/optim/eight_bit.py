"""Keeps moments in 8 bits a value and one float32 scale a block. This module knows their form as a pytree, and where scales lie.

The layout depends on the weight's shape alone, so that a checkpoint restores into any mesh: codes have the weight's shape and are
split as it is; scales have its shape with the last dim counted in blocks of 256 (the last one ragged), and are split on the same dims.
Where the last dim is split and shards do not end at blocks, scales stay whole along it, and an update exchanges the largest magnitude
of each shard's part of a block. The code itself is `pallas_kernels.blockwise` (arXiv:2110.02861).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import blockwise
from zerojax import specs as specs_lib
from zerojax import tree

SMALLEST = 4096  # elements of a weight below which 8 bits save nothing worth their noise
BYTES = 1 + 4 / blockwise.BLOCK  # of a value, with its part of the block's float32 scale
NARROWEST = 8  # values of a row, whose scale is 4 bytes


class Quantized(NamedTuple):
    """One weight's moment: codes int8 (mu) or uint8 (nu) [..., n], scales float32 [..., ceil(n / 256)]."""

    codes: Any
    scales: Any


def takes(shape: Sequence[int]) -> bool:
    """Says whether a weight of that shape has 8-bit moments: vectors (norms, biases), small and very narrow weights keep float32."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST and shape[-1] >= NARROWEST


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight.

    >>> scales_shape((4096, 11000))
    (4096, 43)
    """
    return (*shape[:-1], -(-shape[-1] // blockwise.BLOCK))


def zeros(shape: Sequence[int], dtype: Any) -> Quantized:
    """Returns a moment of zeros; the dtype is int8 or uint8."""
    return Quantized(jnp.zeros(shape, dtype), jnp.zeros(scales_shape(shape), jnp.float32))


def shared_axes(spec: P, shape: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that split the last dim inside a block; none where every shard ends at a block's end."""
    names = specs_lib.names(spec[len(shape) - 1]) if len(spec) == len(shape) else ()
    names = tuple(name for name in names if mesh.shape[name] > 1)
    ways = math.prod(mesh.shape[name] for name in names)
    return names if shape[-1] // ways % blockwise.BLOCK and ways > 1 else ()


def scales_spec(spec: P, shape: Sequence[int], mesh: Mesh) -> P:
    """Returns how the scales of a weight of that shape and spec are split."""
    return specs_lib.trimmed(list(spec)[:-1]) if shared_axes(spec, shape, mesh) else spec


def moments(state: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns, for the path of every codes and scales in a state, the path of their moment and the weight's shape."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda n: isinstance(n, Quantized)):
        if isinstance(node, Quantized):
            place = tree.path_string(path)
            for inner, _ in tree.flatten(node):
                found[f"{place}/{inner}"] = (place, tuple(node.codes.shape))
    return found
