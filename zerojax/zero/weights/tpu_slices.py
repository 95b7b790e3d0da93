"""Knows how the devices of a TPU slice are wired. This module divides a reduce-scatter that its compiler would send twice."""

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from zerojax import mesh as mesh_lib
from zerojax import specs


def scatter(grad: jax.Array, dim: int, over: tuple[str, ...], mesh: Mesh | AbstractMesh) -> jax.Array:
    """Returns this device's shard, along `dim`, of the sum over some axes. The first sum is over the most significant part of the index."""
    sizes = scatter_sizes(mesh, over)
    ways = math.prod(sizes)
    block = ways  # devices that hold one part of the gradient, in a row
    for size in sizes:
        run = block // size
        groups = [
            [first + start + n * run for n in range(size)] for first in range(0, ways, block) for start in range(run)
        ]
        grad = jax.lax.psum_scatter(
            grad,
            specs.entry(over),
            scatter_dimension=dim,
            axis_index_groups=groups if len(sizes) > 1 else None,
            tiled=True,
        )
        block = run
    return grad


def scatter_sizes(mesh: Mesh | AbstractMesh, over: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the group sizes of the reduce-scatters that sum a gradient over some axes, one after the other.

    It is one group, but on slices with three dims. There the compiler (libtpu 0.0.52) makes an all-reduce of a reduce-scatter over
    three dims, which sends twice as much. It keeps one over the slowest dim followed by one over the two others; together these send what
    a single one does.
    """
    ways, names = mesh_lib.size(mesh, over), list(mesh.shape)
    dims = [names.index(axis) for axis in over]
    along = np.moveaxis(mesh.devices, dims, range(-len(dims), 0)).reshape(-1, ways)[0]
    coords = [tuple(getattr(device, "coords", None) or ()) for device in along]
    if not coords[0]:
        return (ways,)
    lengths = [len(set(values)) for values in zip(*coords)]
    if sum(length > 1 for length in lengths) < 3:
        return (ways,)
    for dim, length in enumerate(lengths):
        run = ways // length  # devices in a row with one coordinate
        if length > 1 and all(coords[n][dim] == coords[n - n % run][dim] for n in range(ways)):
            return (length, run)
    return (ways,)
