"""Copies a state's weights for the programs that draw answers, once a step. This module copies weight by weight what these read.

A copy is gathered, or sharded in another way, in the compute dtype, from wherever the weight is: on these devices, on others, in host
memory or on a disk. A weight that is the same array is not copied. To devices of `grpo.rollout_devices` the programs that gather are sent
before the step that writes over the weights, and run after the step before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.trainer import program as program_lib
from zerojax.trainer import rollout_sizes
from zerojax.tree import PyTree
from zerojax.zero.host import memory_kind, storage
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.weights import partition as partition_lib

# Bytes of a device that weights on their way may take. A large model is sent in parts, each when the one before has arrived.
AT_ONCE = 2**28


class WeightCopies:
    """The copies of a state's weights, as a partition of stage 0 shards them.

    Attributes:
      params: the copies, and the state's own weights where these are equal; () before the first, and when they are freed.
      version: the step after which the weights were like them; -1 before the first.
    """

    def __init__(self, program: program_lib.Program, partition: partition_lib.Partition):
        self.params: PyTree = ()
        self.version = -1
        self._program = program
        self._wanted = dict(tree.flatten(program.copies(partition)))
        self._made: dict[str, jax.Array] = {}  # those that are not the state's own

    def renew(self, params: PyTree, version: int = 0) -> None:
        """Copies weights, those that are not trained only once, and frees the former copies. What is sent arrives later."""
        sent, taken = list[jax.Array](), 0
        partition = self._program.partition
        kept = {path for path in self._made if f"params/{path}" in partition.frozen}
        storage.prefetch(
            [[leaf] for path, leaf in tree.flatten(params) if path not in kept and storage.is_on_disk(leaf)]
        )

        def copy(path: str, leaf: Any) -> jax.Array:
            nonlocal taken
            if path in kept:
                return self._made[path]
            if path in self._made:
                self._made.pop(path).delete()
            wanted = self._wanted[path]
            if rollout_sizes.is_same(leaf, wanted):
                return leaf
            if taken > AT_ONCE:
                jax.block_until_ready(sent)
                sent.clear()
                taken = 0
            if memory_kind.is_on_host(leaf):
                (leaf,) = storage.arrived(storage.load([leaf], [memory_kind.on_device(leaf.sharding)]))
                taken += tree.shard_bytes(leaf)
            leaf = pipeline_state.spread(leaf, partition.pipeline)
            here, there = leaf.sharding.mesh, wanted.sharding.mesh
            if [*here.devices.flat] != [*there.devices.flat]:
                spec = wanted.sharding.spec
                if NamedSharding(here, spec).shard_shape(wanted.shape) != wanted.sharding.shard_shape(wanted.shape):
                    spec = P()  # only equal shards go from device to device
                leaf = jax.device_put(_placed(leaf, wanted, NamedSharding(here, spec)), NamedSharding(there, spec))
                taken += tree.shard_bytes(leaf)
            # A shard that stays on its device was not copied
            if not {*here.devices.flat}.isdisjoint(there.devices.flat):
                leaf = _program(wanted.shape, wanted.dtype, wanted.sharding)(leaf)
            self._made[path] = _placed(leaf, wanted, wanted.sharding)
            sent.append(self._made[path])
            return sent[-1]

        self.params, self.version = tree.map_with_path(copy, params), version

    def free(self) -> None:
        """Frees the copies."""
        for leaf in self._made.values():
            leaf.delete()
        self.params, self._made = (), {}


def _placed(leaf: jax.Array, wanted: jax.ShapeDtypeStruct, where: NamedSharding) -> jax.Array:
    """Returns a weight without padding, in the dtype of `wanted` and another sharding."""
    if (leaf.shape, leaf.dtype, leaf.sharding) == (wanted.shape, wanted.dtype, where):
        return leaf
    return _program(wanted.shape, wanted.dtype, where)(leaf)


@functools.lru_cache(maxsize=1024)
def _program(shape: tuple[int, ...], dtype: Any, where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda leaf: jnp.copy(leaf[tuple(map(slice, shape))].astype(dtype)), out_shardings=where)
