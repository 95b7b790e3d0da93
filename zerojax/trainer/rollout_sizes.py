"""What an engine holds that draws answers in training. This module says its model, its sizes and its bytes, before it is made."""

import dataclasses
from typing import Any

import jax

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.inference.engine import programs
from zerojax.models import family as family_lib
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero.weights import partition as partition_lib


def model_of(program: program_lib.Program) -> Any:
    """Returns the engine's config of the model, whose caches hold the experts of tokens if they are replayed."""
    is_replayed = program.config.grpo.replay
    return program.model.changed(mixture={"remembers_choices": True}) if is_replayed else program.model


def bytes_of(
    program: program_lib.Program, model: Any, partition: partition_lib.Partition, params: PyTree
) -> tuple[int, int]:
    """Returns the bytes on a device of the weights that the engine reads, and of its caches.

    Args:
      program: of the run.
      model: the config that the engine has.
      partition: how the weights are sharded.
      params: them, as ShapeDtypeStructs with their shardings.
    """
    sizes, ways, mesh = sizes_of(program), mesh_lib.size(partition.mesh, mesh_lib.SUMMED), partition.mesh
    inputs = sizes["max_inputs"] if program.family.is_encoder_decoder else 0
    shape = programs.Shape(-(-sizes["slots"] // ways) * ways, sizes["max_len"], inputs)
    axes = mesh_lib.SUMMED if ways > 1 else ()
    model = dataclasses.replace(model, attention="xla")  # caches are the same by any kernel
    how = {"placements": partition.placements, "dtype": program.config.policy.compute_dtype}
    made = programs.Programs(program.family, model, mesh, shape, family_lib.SpecialTokens(), None, axes, **how)
    held, caches = (sum(map(tree.shard_bytes, jax.tree.leaves(found))) for found in (params, made.abstract(params)[0]))
    return held, caches


def sizes_of(program: program_lib.Program) -> dict[str, Any]:
    """Returns the sizes of the engine's caches."""
    is_pair, config = program.family.is_encoder_decoder, program.config
    length = config.data.answer_len + 1 if is_pair else config.seq_len + 1
    return {"slots": program.sizes.global_batch_size, "max_len": length, "max_inputs": config.seq_len}
