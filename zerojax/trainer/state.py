"""Makes the train state of a run, or restores it. This module gives each leaf the sharding and the memory that the partition has for it.

Frozen weights are in no checkpoint: both ways end with them, read or drawn again part by part.
"""

from typing import Any

import jax
import numpy as np
import optax

from zerojax import tree
from zerojax.checkpoint import logical as logical_lib
from zerojax.optim import master_weights, pieces
from zerojax.train_state import State
from zerojax.trainer import program as program_lib
from zerojax.tree import Leaf, PyTree
from zerojax.zero.host import create as offload_create
from zerojax.zero.host import memory_kind, storage
from zerojax.zero.offload import late_norm
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.pipeline import travel
from zerojax.zero.update import padding
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import unsent


def first(program: program_lib.Program) -> State:
    """Returns the initial state, created with the partition's shardings.

    Weights are read or drawn (`weights.Weights`). With offload what is made of a part of the model is made before the next one.
    """
    partition, on_device = program.partition, program.partition.on_device
    keep = offload_create.begin(partition)
    wanted = program.trained_part(partition.abstract_state)
    abstract_params = program.to_logical(on_device.abstract_state).params

    def create(params: PyTree) -> State:
        # The optimizer's state is that of the weights without padding.
        return padding.pad(program.create(padding.unpad({"params": params}, on_device)["params"]), on_device)

    if partition.offload and not partition.pipeline:
        place = {path: number for number, (path, _) in enumerate(tree.flatten(abstract_params))}
        parts = (program.weights.make({name: part}) for name, part in abstract_params.items())
        numbered = ({place[path]: leaf for path, leaf in tree.flatten(part)} for part in parts)
        leaves = offload_create.from_parts(
            create, abstract_params, numbered, wanted, keep, donate=program.copy_dtype is None
        )
        state = jax.tree.unflatten(jax.tree.structure(wanted), leaves)
    elif placed := partition.pipeline:
        params = program.weights.make(abstract_params)
        leaves = pipeline_state.created(create, (), wanted, placed, params, keep=keep)
        state = jax.tree.unflatten(jax.tree.structure(wanted), leaves)
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
        params = program.weights.make(abstract_params)
        state = jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)
    return _with_frozen(program, state, keep)


def restored(program: program_lib.Program, logical: State, keep: storage.Keep, *, rescales: bool = False) -> State:
    """Returns the state from its checkpointed form (see `Program.to_logical`), whose buffers are donated.

    `keep` brought what is offloaded to where it lives (see `host.create.begin`), and so brings the rest of it.

    A loss scale that the checkpoint lacks has abstract leaves and is initialised, and so is what packed wires did not send. With
    `rescales`, a restored loss scale is initialised too, but keeps its count of skipped steps.
    """
    is_lacking = _is_lacking(logical.loss_scale)
    if _is_lacking(logical.fp8):  # its histories begin anew
        logical = logical.replace(fp8=jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), logical.fp8))
    if _is_lacking(logical.last_norm):  # the next step takes its own
        logical = logical.replace(last_norm=np.float32(late_norm.UNKNOWN))
    if _is_lacking(logical.unsent_grads):
        logical = logical.replace(unsent_grads=unsent.first(program.partition))

    def restore(logical: State) -> State:
        state = _with_copy(program, logical, keep).replace(tx=program.tx)
        if not program.loss_scale or not (is_lacking or rescales):
            return state
        skipped = {} if is_lacking else {"skipped_steps": state.loss_scale.skipped_steps}
        return state.replace(loss_scale=program.loss_scale.init()._replace(**skipped))

    logical = logical.replace(loss_scale=()) if is_lacking else logical
    wanted = program.partition.shardings
    # One memory and one set of devices, so that a program may read all
    is_one = not program.partition.offload and not program.partition.pipeline
    if is_one and not partition_lib.has_frozen(logical.params):
        return jax.jit(restore, out_shardings=wanted, donate_argnums=0)(logical)
    state = restore(logical)
    small = ("loss_scale", "fp8", late_norm.FIELD)
    state = state.replace(**{name: jax.device_put(getattr(state, name), getattr(wanted, name)) for name in small})
    return _with_frozen(program, state, keep)


def _with_frozen(program: program_lib.Program, state: State, keep: storage.Keep) -> State:
    """Returns a state of the trained part with the frozen weights. What is offloaded lives there before the next part is made."""
    if not partition_lib.has_frozen(state.params):
        return state
    own, wanted = dict(tree.flatten(state.params)), dict(tree.flatten(program.partition.abstract_state.params))
    for name, part in program.partition.on_device.abstract_state.params.items():
        frozen = tree.map_with_path(lambda path, leaf: optax.MaskedNode() if path in own else leaf, {name: part})
        for path, leaf in tree.flatten(program.weights.make(frozen)):
            own[path] = (
                jax.block_until_ready(keep(leaf, wanted[path])) if memory_kind.is_on_host(wanted[path]) else leaf
            )
    return state.replace(params=tree.map_with_path(lambda path, _: own[path], program.partition.abstract_state.params))


def _is_lacking(field: Any) -> bool:
    """Returns whether a checkpoint lacked a part of a field of the state."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(field))


def _with_copy(program: program_lib.Program, logical: State, keep: storage.Keep) -> State:
    """Returns the state of a checkpoint's form: params are copied from the master weights, if there are any."""
    is_one = not program.partition.offload and not program.partition.pipeline  # program, which shards all copies
    if is_one or program.copy_dtype is None:
        return logical_lib.from_logical(logical, program.copy_dtype)
    wanted = program.partition.abstract_state.params

    def copied(leaf: Leaf, like: PyTree) -> Leaf:
        if not travel.is_here(like.sharding.mesh):
            return travel.absent(like)
        copy = offload_create.copied(leaf, memory_kind.as_on_device(like))
        return keep(copy, like) if memory_kind.is_on_host(like) else copy

    params = jax.tree.map(copied, logical.params, wanted, is_leaf=pieces.is_pieces)
    return logical.replace(
        params=params, opt_state=master_weights.MasterWeightsState(logical.params, logical.opt_state)
    )
