"""What an engine holds that draws answers in training. This module says its model, sizes and bytes, and its weights, before it is made."""

import dataclasses
from typing import Any, NamedTuple

import jax

from zerojax import display, errors, roles, tree
from zerojax import mesh as mesh_lib
from zerojax.inference.engine import programs
from zerojax.models import family as family_lib
from zerojax.trainer import config as config_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.tree import Leaf, PyTree
from zerojax.zero import stages, state_bytes
from zerojax.zero.host import selection
from zerojax.zero.weights import partition as partition_lib

FREE = 0.75  # of a device's free bytes, which copies of weights and the caches may take: what programs compute needs the rest


class Drawing(NamedTuple):
    """What draws answers on the devices that train.

    Attributes:
      copies: how weights are sharded that are copied once a step; None: the engine reads the state's.
      weights, caches: the bytes on each device of these copies, and of keys and values.
      line: which copies they are and why; "" where none are needed.
      fits: whether an engine can be made.
    """

    copies: partition_lib.Partition | None
    weights: int
    caches: int
    line: str
    fits: bool = True


def held(program: program_lib.Program, model: Any, free: int | None) -> Drawing:
    """Chooses the copies of weights that fit beside the caches, where the engine cannot read the state's own or would gather them often.

    Weights that travel packed are gathered where they are used, as in a step, which rounds them.

    Args:
      program: of the run.
      model: the config that the engine has.
      free: the bytes that the state leaves of a device; None: they are not known.
    """
    config, own, mesh = program.config, program.partition, program.mesh
    unread = _unread(program)
    if not unread:
        _, caches = bytes_of(program, model, own, own.abstract_state.params)
        if not stages.STAGES[config.zero.stage].params or config_lib.make_wires(config).is_on or mesh.size == 1:
            return Drawing(None, 0, caches, "")
    sizes, devices = mesh_lib.sizes(mesh), mesh.devices.ravel().tolist()
    ways = mesh.size // sizes["replica"]
    gathered = mesh_lib.make_mesh(sizes["replica"], model=sizes["model"], devices=devices)
    sharded = mesh_lib.make_mesh(sizes["replica"], data=1, model=ways, devices=devices)
    forms = {gathered: "gathered once a step"}
    forms.setdefault(sharded, f"sharded once a step over {ways} devices (tensor parallelism)")
    refused = list[str]()
    for where, how in forms.items():
        copies = program.at_stage_0(where)
        wanted = program.copies(copies)
        weights, caches = bytes_of(program, model, copies, wanted)
        both = zip(*map(jax.tree.leaves, (own.abstract_state.params, wanted)), strict=True)
        weights -= sum(tree.shard_bytes(one) for leaf, one in both if is_same(leaf, one))
        taken = f"{display.human(weights)} on each device beside {display.human(caches)} of caches"
        if free is None or weights + caches <= free * FREE:
            why = f": {'; '.join(refused)}, and {display.human(free or 0)} are free" if refused else ""
            line = f"answers are drawn by weights {how}, {taken}, freed before the update{why}"
            return Drawing(copies, weights, caches, line)
        refused.append(f"{how} they take {taken}")
    known = f"{'; '.join(refused)}, and {display.human(max(free or 0, 0))} are free"
    if not unread:
        return Drawing(None, 0, caches, f"answers are drawn by weights that are gathered for each token: {known}")
    values = " and ".join(f"config.{place}: is {errors.shown(settings_lib.lookup(config, place))}" for place in unread)
    defaults = " ".join(f"--config.{place}={settings_lib.table()[place].default}" for place in unread)
    line = (
        f"{values}, so answers are drawn by copies of the weights, which do not fit: {known}; take more devices, a smaller "
        f"config.global_batch_size, or set {defaults}"
    )
    return Drawing(copies, weights, caches, line, fits=False)


def _unread(program: program_lib.Program) -> list[str]:
    """Returns the settings for which no engine can read the state's own weights; [] if one can."""
    own = program.partition
    whys = {
        "offload.params": selection.are_params_on_host(own),
        "mesh.pipe": own.pipeline is not None,
        "mesh.expert": mesh_lib.size(own.mesh, mesh_lib.EXPERT) > 1,
    }
    return [place for place, is_so in whys.items() if is_so]


def is_same(leaf: Leaf, wanted: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a state's weight is the same array as its copy would be."""
    is_alike = (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
    return is_alike and leaf.sharding.is_equivalent_to(wanted.sharding, len(wanted.shape))


def of_state(program: program_lib.Program) -> int:
    """Returns the bytes of the state on each device; of a pipeline's groups those of the one that holds the most."""
    found = state_bytes.bytes_per_device(program.partition)
    return sum(found.values()) - found[roles.GRADIENTS]


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
