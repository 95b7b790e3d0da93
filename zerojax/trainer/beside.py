"""Models that a run reads and does not train: a teacher, or one that values answers. This module shards their weights as the stage says.

They are there from the first batch to the last, beside the state.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax import display, errors, tree
from zerojax.data.pairs import rewards, tasks
from zerojax.interop import folder as folder_lib
from zerojax.models import family as family_lib
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.blocks import tensor_parallel
from zerojax.zero.gradients import forward_only
from zerojax.zero.weights import partition as partition_lib


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
    partition = _partition(program, family, abstract, program.mesh if mesh is None else mesh)
    tell(f"takes {display.human(_bytes_of(partition))} on each device, beside the state")
    dtype = program.config.policy.compute_dtype
    run = forward_only.by_row(function, partition, compute_dtype=dtype, blocks=family.blocks, heads="")
    return run, read(partition.abstract_state["params"])


def abstract_of(program: program_lib.Program, opened: Any) -> PyTree:
    """Returns the weights of a model of `interop.folder` as ShapeDtypeStructs in the run's compute dtype."""
    found = family_lib.abstract_params(opened.family.parts, opened.model)
    return tree.of_dtype(found, program.config.policy.compute_dtype)


def nbytes(program: program_lib.Program) -> int:
    """Returns the bytes of these models on each device that trains."""
    config, teacher = program.config, program.weights.teacher
    found = 0
    if teacher is not None:
        abstract = teacher.abstract(config.policy.compute_dtype)
        found += _bytes_of(_partition(program, teacher.family, abstract, program.mesh))
    if config.data.task == tasks.GRPO and program.rollout_mesh is None and rewards.is_folder(config.grpo.reward):
        with errors.below("config.grpo.reward: "):
            opened = folder_lib.open_folder(config.grpo.reward)
        found += _bytes_of(_partition(program, opened.family, abstract_of(program, opened), program.rollouts.mesh))
    return found


def _partition(
    program: program_lib.Program, family: family_lib.Family, abstract: PyTree, mesh: Mesh
) -> partition_lib.Partition:
    """Returns how a model's weights are sharded over a mesh."""
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": abstract})}
    overrides, _ = tensor_parallel.overrides(family.parallel.weights, shapes, mesh)
    zero = program.config.zero
    how: dict[str, Any] = {"stage": zero.stage, "min_size": zero.min_size, "overrides": overrides}
    return stages.partition_state({"params": abstract}, mesh=mesh, **how)


def _bytes_of(partition: partition_lib.Partition) -> int:
    return sum(map(tree.shard_bytes, jax.tree.leaves(partition.abstract_state["params"])))
