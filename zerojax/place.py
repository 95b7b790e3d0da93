"""Puts a train state where its partition says. This module is the one call that shards somebody's own state."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax import partition as partition_lib
from zerojax import tree
from zerojax.errors import UserError


def shard_train_state(
    state_or_init: Any, *init_args: Any, mesh: Mesh, stage: int = 3, **options: Any
) -> tuple[Any, partition_lib.Partition]:
    """Shards a train state by ZeRO stage, in one call.

    Args:
      state_or_init: a function that returns the state (then nothing unsharded ever exists: it is evaluated abstractly, placed, and
        compiled with sharded outputs), or a concrete state (then each leaf is moved to its place).
      *init_args: arguments of the init function.
      mesh: from `make_mesh`.
      stage: 0 to 3.
      **options: `overrides`, `min_size`, `indivisible` and `roles` of `partition_state`.

    Returns:
      The sharded state, of the same tree type, and the `Partition` that train steps are built from.

    >>> state, partition = shard_train_state(init, jax.random.key(0), mesh=make_mesh(), stage=3)
    """
    if callable(state_or_init) and jax.tree_util.all_leaves([state_or_init]):
        partition = partition_lib.partition_state(
            jax.eval_shape(state_or_init, *init_args), mesh=mesh, stage=stage, **options
        )
        init = jax.jit(lambda *args: pad(state_or_init(*args), partition), out_shardings=partition.shardings)
        return init(*init_args), partition
    if init_args:
        raise UserError("shard_train_state: init arguments go with an init function, and a state was given")
    partition = partition_lib.partition_state(state_or_init, mesh=mesh, stage=stage, **options)
    return jax.device_put(pad(state_or_init, partition), partition.shardings), partition


def pad(state: Any, partition: partition_lib.Partition) -> Any:
    """Adds the zeros that `indivisible="pad"` asked for; other leaves pass through."""

    def extend(path: str, leaf: Any) -> Any:
        padding = partition.leaves[path].padding
        return jnp.pad(leaf, [(0, extra) for extra in padding]) if padding else leaf

    return tree.map_with_path(extend, state)


def unpad(state: Any, partition: partition_lib.Partition) -> Any:
    """Removes what `pad` added."""

    def cut(path: str, leaf: Any) -> Any:
        return leaf[tuple(slice(n) for n in partition.leaves[path].shape)] if partition.leaves[path].padding else leaf

    return tree.map_with_path(cut, state)
