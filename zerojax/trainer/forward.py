"""Where a run evaluates and generates. This module places the weights for programs that need all of them on the same devices.

A step's own placement serves, but for a pipeline: no device of a pipeline sees all layers. Its weights are then copied to a mesh of the
same devices whose axis `data` is as long as `pipe` and `data` together, sharded as at stage 3, for as long as an evaluation takes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.tree import PyTree
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.update import padding
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True)
class ForwardPlacement:
    """How a run computes without gradients."""

    partition: partition_lib.Partition  # how the weights are held then
    trained: partition_lib.Partition  # how the step holds them
    passes: int  # into which a global batch is divided
    loss: Callable[..., Any]  # (params as `partition` holds them, a batch of one pass) -> float32[]

    def params(self, params: PyTree) -> PyTree:
        """Returns the step's params as `partition` holds them: the same arrays, or copies for a pipeline."""
        if self.partition is self.trained:
            return params
        params = pipeline_state.spread(params, self.trained.pipeline)
        held = padding.pad(padding.unpad({"params": params}, self.trained), self.partition)["params"]
        return jax.tree.map(jax.device_put, held, self.partition.shardings.params)


def mesh_of(mesh: Mesh) -> Mesh:
    """Returns the mesh that evaluates: `mesh`, or for a pipeline one of its devices where `data` takes the place of `pipe` and `data`."""
    groups = mesh_lib.groups(mesh)
    if len(groups) == 1:
        return mesh
    names = groups[0].axis_names
    grid = np.concatenate([group.devices for group in groups], axis=names.index(mesh_lib.STATE[0]))
    return Mesh(grid, names, axis_types=groups[0].axis_types)


def passes_of(mesh: Mesh, sizes: config_lib.BatchSizes) -> int:
    """Returns the passes of an evaluated batch: as many as in training, or fewer, so that devices divide the rows of each.

    Raises:
      UserError: they do not divide those of a batch.
    """
    ways, rows = mesh_lib.ways(mesh), sizes.global_batch_size
    fits = [n for n in range(1, sizes.grad_accum + 1) if sizes.grad_accum % n == 0 and rows % (n * ways) == 0]
    if not fits:
        raise UserError(
            f"config.global_batch_size: {rows} sequences do not divide over the {ways} devices, or groups of them, that evaluate beside "
            f"each other in a pipeline; set --config.global_batch_size={rows + -rows % ways}, with config.grad_accum to match"
        )
    return fits[-1]
