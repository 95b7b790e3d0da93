"""Shards a train state. This module holds the one call that a user needs to shard a state of their own."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from zerojax import roles, signatures, tree, xla_flags
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero import stages
from zerojax.zero.host import create
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.sharded_batch import arguments
from zerojax.zero.update import padding
from zerojax.zero.weights import layer_stacks
from zerojax.zero.weights import partition as partition_lib

_partition_state = signatures.checked(stages.partition_state)  # whose options `shard_train_state` takes unseen


def _partitioned(state: State, mesh: Mesh, **options: Any) -> partition_lib.Partition:
    """Returns the partition of a state to train. Warns of axes over which nothing is sharded."""
    partition = _partition_state(state, mesh=mesh, **options)
    for axis, size in stages.unused_axes(partition):
        warnings.warn(
            f"mesh: {axis} is {size}, and no weight is sharded over `{axis}`, so its devices repeat each other's work unless the loss "
            f'divides it; name weights in overrides, as in overrides=[("kernel", PartitionSpec(None, "{axis}"))], or make_mesh({axis}=1)',
            stacklevel=3,
        )
    return partition


def shard_train_state(
    state_or_init: State | Callable[..., State],
    *init_args: Any,
    mesh: Mesh,
    stage: int = 3,
    trainable: str = "",
    **options: Any,
) -> tuple[Any, partition_lib.Partition]:
    """Shards a train state by ZeRO stage, in one call.

    Args:
      state_or_init: a function that returns the state, or a concrete state. A function is evaluated abstractly and compiled with sharded
        outputs, so no unsharded state ever exists. The leaves of a concrete state are copied to their shardings.
      *init_args: arguments of the init function; arrays are traced, others (a config, a size) are passed unchanged.
      mesh: from `make_mesh`.
      stage: 0 to 3.
      trainable: a regex over paths of weights below `params`, such as "lora|head"; weights whose path does not match are frozen, with no
        gradient and no update. If the state has `tx`, `params` and `opt_state`, its optimizer state is reduced to that of the trainable
        weights: `tx.init` of params with `optax.MaskedNode()` in place of the frozen ones. A state of another kind must omit the
        optimizer state of frozen weights. Empty: all weights are trained.
      **options: `overrides`, `min_size`, `indivisible`, `roles` and `offload` of `partition_state`.

    Returns:
      The sharded state, of the same tree type, and the `Partition` that train steps are built from.

    Raises:
      UserError: `partition_state` refuses the state, NNX modules share a variable, or JAX's `jit` is disabled.

    >>> state, partition = shard_train_state(init, jax.random.key(0), mesh=make_mesh(), stage=3)
    """
    xla_flags.check_settings(xla_flags.NO_JIT)
    if callable(state_or_init) and jax.tree_util.all_leaves([state_or_init]):
        traced, init = _close_over_settings(state_or_init, init_args, trainable)
        abstract_state, options = _traced(init, traced, options)
        partition = _partitioned(abstract_state, mesh, stage=stage, trainable=trainable, **options)
        if partition.pipeline:
            leaves = pipeline_state.created(
                lambda *args: padding.pad(init(*args), partition.on_device),
                traced,
                partition.abstract_state,
                partition.pipeline,
                keep=create.begin(partition),
            )
            whole = partition.abstract_state if partition.offload else abstract_state
            return jax.tree.unflatten(jax.tree.structure(whole), leaves), partition
        if partition.offload:
            whole = partition.abstract_state
            leaves = create.from_init(
                lambda *args: padding.pad(init(*args), partition.on_device), traced, whole, create.begin(partition)
            )
            return jax.tree.unflatten(jax.tree.structure(partition.abstract_state), leaves), partition
        # Returns leaves, because an init function that makes its own optimizer returns another tree type at each call.
        init_leaves = jax.jit(
            lambda *args: jax.tree.leaves(padding.pad(init(*args), partition)),
            out_shardings=jax.tree.leaves(partition.shardings),
        )
        with arguments.in_own_mesh(partition.mesh):
            return jax.tree.unflatten(jax.tree.structure(abstract_state), init_leaves(*traced)), partition
    if init_args:
        raise UserError("shard_train_state: init arguments need an init function, and the first argument is a state")
    state = _trained(_checked(state_or_init), trainable)
    partition = _partitioned(state, mesh, stage=stage, trainable=trainable, **options)
    if partition.offload:
        stored, keep = jax.tree.leaves(padding.pad(state, partition.on_device)), create.begin(partition)
        leaves = create.from_leaves(stored, partition.abstract_state, keep, _copy_to)
        return jax.tree.unflatten(jax.tree.structure(partition.abstract_state), leaves), partition
    return jax.tree.map(_copy_to, padding.pad(state, partition), partition.shardings), partition


def partition_of_init(
    init: Callable[..., State], *init_args: Any, mesh: Mesh, stage: int = 3, trainable: str = "", **options: Any
) -> partition_lib.Partition:
    """Returns the partition of the state that `shard_train_state` would make with these arguments, and makes nothing."""
    traced, closed = _close_over_settings(init, init_args, trainable)
    abstract_state, options = _traced(closed, traced, options)
    return _partitioned(abstract_state, mesh, stage=stage, trainable=trainable, **options)


def _traced(init: Callable[..., State], traced: list, options: Mapping[str, Any]) -> tuple[State, dict[str, Any]]:
    """Returns the abstract state that an init function makes, and options with the dims of it that count layers."""
    program, abstract_state = jax.make_jaxpr(init, return_shape=True)(*traced)
    return abstract_state, {"layer_dims": layer_stacks.counts(program, abstract_state), **options}


def _checked(state: State) -> State:
    """Returns the state; refuses leaves that are no arrays, and an NNX variable held twice, because a pytree would duplicate it."""
    path_by_id: dict[int, str] = {}
    tree.undeleted(tree.with_arrays_alone(state))
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda n: isinstance(n, nnx.Variable)):
        if not isinstance(node, nnx.Variable):
            continue
        name = tree.path_string(path)
        if path_by_id.setdefault(id(node), name) != name:
            raise UserError(
                f"state: {path_by_id[id(node)]} and {name} are one nnx.Variable, which a pytree would hold twice; "
                "pass nnx.split(state) or nnx.state(state), which hold it once, or a copy, jax.tree.map(jnp.copy, params)"
            )
    return state


def _trained(state: State, trainable: str) -> State:
    """Returns a train state whose optimizer state is that of its trainable weights only."""
    parts = ("tx", "params", "opt_state")
    if not trainable or not all(hasattr(state, name) for name in (*parts, "replace")):
        return state
    own_opt_state = jax.eval_shape(state.tx.init, trained_params(state.params, trainable))
    leaves = dict(tree.flatten(state.opt_state))
    try:
        return state.replace(opt_state=tree.map_with_path(lambda path, _: leaves[path], own_opt_state))
    except KeyError as error:
        raise UserError(
            f"trainable: the state's tx.init makes opt_state/{error.args[0]}, which the state does not have; create the optimizer state "
            "with this tx"
        ) from error


def trained_params(params: PyTree, trainable: str) -> PyTree:
    """Returns params with `optax.MaskedNode()` in place of those that `trainable` freezes."""
    if not trainable:
        return params
    role_of = stages.leaf_roles({"params": params}, trainable=trainable)

    def keep(path: str, leaf: Leaf) -> Leaf:
        return optax.MaskedNode() if role_of[f"params/{path}"] == roles.FROZEN else leaf

    return tree.map_with_path(keep, params)


def _copy_to(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    # Copied first, because device_put shares a buffer that already has the sharding, and donation deletes it: for the caller's state, and
    # for a second leaf that is the same array (averaged weights that begin as the weights).
    return jax.device_put(leaf.copy() if isinstance(leaf, jax.Array) else leaf, sharding)


def _close_over_settings(init: Callable[..., Any], args: tuple, trainable: str) -> tuple[list, Callable[..., Any]]:
    """Returns the arguments that are arrays, and `init` as a function of these only; see `_trained`."""
    is_traced = [all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(arg)) for arg in args]

    def closed(*traced: Any) -> State:
        arrays = iter(traced)
        state = init(*[next(arrays) if is_array else arg for is_array, arg in zip(is_traced, args)])
        return _trained(_checked(state), trainable)

    return [arg for is_array, arg in zip(is_traced, args) if is_array], closed
