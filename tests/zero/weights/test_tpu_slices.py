"""Checks how a reduce-scatter is divided on slices of TPUs.
This module tests zerojax.zero.weights.tpu_slices, which `gather` takes on TPUs."""

import itertools
import types
from unittest import mock

import numpy as np
import pytest
from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax.zero.weights import tpu_slices


def slice_of(platform, *lengths, order=None, model=1):
    """Returns what a mesh over a slice of TPUs looks like; the first coordinate is the fastest, and along `model` if it is that long."""
    coords = [tuple(reversed(place)) for place in itertools.product(*map(range, reversed(lengths)))]
    devices = [
        types.SimpleNamespace(platform=platform, coords=list(place) if platform == "tpu" else None) for place in coords
    ]
    sizes = {axis.name: {"data": -1, "model": model}.get(axis.name, 1) for axis in mesh_lib.AXES}
    grid = np.asarray([devices[n] for n in order or range(len(devices))]).reshape(*sizes.values())
    mesh = mock.create_autospec(Mesh, instance=True)
    mesh.devices, mesh.shape = grid, dict(zip([axis.name for axis in mesh_lib.AXES], grid.shape))
    return mesh


@pytest.mark.parametrize(
    "mesh, sizes",
    [
        (slice_of("tpu", 2, 2, 4), (4, 4)),
        (slice_of("tpu", 4, 4, 8), (8, 16)),
        (slice_of("tpu", 4, 4, 1), (16,)),
        (slice_of("tpu", 4, 8), (32,)),
        (slice_of("tpu", 2, 2, 2, order=[0, 3, 5, 6, 1, 2, 4, 7]), (8,)),
        (slice_of("gpu", 2, 2, 4), (16,)),
        (slice_of("tpu", 2, 2, 4, model=2), (8,)),  # two dims are left for the state
        (slice_of("tpu", 4, 2, 4, model=2), (4, 4)),
    ],
)
def test_only_slices_of_three_dims_reduce_twice_of_which_the_first_is_over_the_slowest_dim(mesh, sizes):
    assert tpu_slices.scatter_sizes(mesh, mesh_lib.STATE) == sizes
