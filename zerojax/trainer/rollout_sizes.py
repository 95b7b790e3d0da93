"""What an engine holds that draws answers in training. This module says its model, sizes and bytes, and its weights, before it is made."""

import dataclasses
from typing import Any, NamedTuple

import jax

from zerojax import display, tree
from zerojax import mesh as mesh_lib
from zerojax.inference.engine import programs
from zerojax.models import family as family_lib
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero import stages
from zerojax.zero.weights import partition as partition_lib

FREE = 0.75  # of a device's free bytes, which copies of weights and the caches may take: what programs compute needs the rest


class Drawing(NamedTuple):
    """What draws answers on the devices that train.

    Attributes:
      copies: how weights are sharded that are copied once a step; None: the engine reads the state's.
      weights, caches: the bytes on each device of these copies, and of keys and values.
      line: which copies they are and why; "" where none are needed.
    """

    copies: partition_lib.Partition | None
    weights: int
    caches: int
    line: str


def held(program: program_lib.Program, model: Any, free: int | None) -> Drawing:
    """Chooses the copies of sharded weights that fit beside the caches.

    Weights that travel packed are gathered where they are used, as in a step, which rounds them.

    Args:
      program: of the run.
      model: the config that the engine has.
      free: the bytes that the state leaves of a device; None: they are not known.
    """
    config, own = program.config, program.partition
    _, caches = bytes_of(program, model, own, own.abstract_state.params)
    if not stages.STAGES[config.zero.stage].params or config_lib.make_wires(config).is_on or program.mesh.size == 1:
        return Drawing(None, 0, caches, "")
    refused = list[str]()
    ways = mesh_lib.size(program.mesh, (*mesh_lib.STATE, *mesh_lib.COMPILER))
    devices = program.mesh.devices.ravel().tolist()
    sharded = mesh_lib.make_mesh(replica=program.mesh.size // ways, data=1, model=ways, devices=devices)
    for how, mesh in (
        ("gathered once a step", program.mesh),
        (f"sharded once a step over {ways} devices (tensor parallelism)", sharded),
    ):
        copies = program.baseline if mesh is program.mesh else program.at_stage_0(mesh)
        weights, caches = bytes_of(program, model, copies, program.copies(copies))
        taken = f"{display.human(weights)} on each device beside {display.human(caches)} of caches"
        if free is None or weights + caches <= free * FREE:
            why = f": {'; '.join(refused)}, and {display.human(free or 0)} are free" if refused else ""
            line = f"answers are drawn by weights {how}, {taken}, freed before the update{why}"
            return Drawing(copies, weights, caches, line)
        refused.append(f"{how} they take {taken}")
    known = f"{'; '.join(refused)}, and {display.human(free or 0)} are free"
    return Drawing(None, 0, caches, f"answers are drawn by weights that are gathered for each token: {known}")


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
