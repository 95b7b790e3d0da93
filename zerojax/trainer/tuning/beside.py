"""Models that a run reads and does not train: a teacher, or one that values answers. This module shards their weights as the stage says."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax import display, tree
from zerojax.models import family as family_lib
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.blocks import tensor_parallel
from zerojax.zero.gradients import forward_only


def opened(
    program: program_lib.Program,
    family: family_lib.Family,
    abstract: PyTree,
    read: Callable[[PyTree], PyTree],
    function: Callable[[PyTree, PyTree], Any],
    tell: Callable[[str], object],
    mesh: Mesh | None = None,
) -> tuple[Callable[[Any, Any], Any], PyTree]:
    """Reads a model's weights, and returns f(weights, (batch,)) -> `function(weights, batch)` of rows, to be compiled, and the weights.

    Args:
      program: of the run.
      family: the model's.
      abstract: its weights as ShapeDtypeStructs.
      read: f(abstract leaves with shardings) -> the weights.
      function: takes gathered weights; all arrays of its batch and of its result count rows in their first dim.
      tell: is told the bytes.
      mesh: the devices on which the model is; None: those that train.
    """
    mesh, config = program.mesh if mesh is None else mesh, program.config
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": abstract})}
    overrides, _ = tensor_parallel.overrides(family.parallel.weights, shapes, mesh)
    how: dict[str, Any] = {"stage": config.zero.stage, "min_size": config.zero.min_size, "overrides": overrides}
    partition = stages.partition_state({"params": abstract}, mesh=mesh, **how)
    placed = partition.abstract_state["params"]
    tell(f"takes {display.human(sum(map(tree.shard_bytes, jax.tree.leaves(placed))))} on each device, beside the state")
    dtype = config.policy.compute_dtype
    run = forward_only.by_row(function, partition, compute_dtype=dtype, blocks=family.blocks, heads="")
    return run, read(placed)
