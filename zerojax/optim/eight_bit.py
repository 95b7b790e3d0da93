"""Stores moments as 8-bit codes with one float32 scale a block. This module defines their pytree and the sharding of their scales.

The layout depends on the weight's shape only, so a checkpoint restores into any mesh. Codes have the weight's shape and sharding. Scales
have its shape with the last dim counted in blocks of 256 (the last block may be shorter), and are sharded on the same dims. If the last
dim is sharded and shards do not end at blocks, scales are replicated along it. An update then exchanges the largest magnitude of each
shard's part of a block. The code itself is `pallas_kernels.blockwise` (arXiv:2110.02861).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from pallas_kernels import blockwise
from zerojax import specs as specs_lib
from zerojax import tree
from zerojax.train_state import State

BLOCK = blockwise.BLOCK  # values of the last dim that share a scale
SMALLEST = 4096  # elements; 8 bits save too little for a smaller weight
BYTES = 1 + 4 / blockwise.BLOCK  # of a value, with its share of the block's float32 scale
NARROWEST = 8  # values of a row; its scale takes 4 bytes


class Quantized(NamedTuple):
    """One weight's moment: codes int8 (mu) or uint8 (nu) [..., n], scales float32 [..., ceil(n / 256)]."""

    codes: Any
    scales: Any


def takes(shape: Sequence[int]) -> bool:
    """Returns whether a weight of that shape has 8-bit moments: not for vectors (norms, biases), small and very narrow weights."""
    return len(shape) >= 2 and math.prod(shape) >= SMALLEST and shape[-1] >= NARROWEST


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight.

    >>> scales_shape((4096, 11000))
    (4096, 43)
    """
    return (*shape[:-1], -(-shape[-1] // blockwise.BLOCK))


def zeros(shape: Sequence[int], dtype: DTypeLike) -> Quantized:
    """Returns a moment of zeros; the dtype is int8 or uint8."""
    return Quantized(jnp.zeros(shape, dtype), jnp.zeros(scales_shape(shape), jnp.float32))


def shared_axes(spec: P, shape: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that shard the last dim inside a block; none if every shard ends at the end of a block."""
    names = specs_lib.names(spec[len(shape) - 1]) if len(spec) == len(shape) else ()
    names = tuple(name for name in names if mesh.shape[name] > 1)
    ways = math.prod(mesh.shape[name] for name in names)
    return names if shape[-1] // ways % blockwise.BLOCK and ways > 1 else ()


def scales_spec(spec: P, shape: Sequence[int], mesh: Mesh) -> P:
    """Returns the spec of the scales of a weight of that shape and spec."""
    return specs_lib.trimmed(list(spec)[:-1]) if shared_axes(spec, shape, mesh) else spec


def moments(state: State) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns {path of codes or scales: (path of their moment, shape of the weight)} for a state."""
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda n: isinstance(n, Quantized)):
        if isinstance(node, Quantized):
            moment = tree.path_string(path)
            for inner, _ in tree.flatten(node):
                found[f"{moment}/{inner}"] = (moment, tuple(node.codes.shape))
    return found
