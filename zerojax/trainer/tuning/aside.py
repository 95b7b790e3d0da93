"""Copies weights to the devices that draw answers while the others train. This module sends what a step has changed.

A weight is gathered in the compute dtype on the devices that train, sent to the others, and freed. The programs that gather are sent before
the step that writes over the weights, and run after the step before it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from zerojax import tree
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree

# Bytes of a device that gathered weights may take. A large model is sent in parts, each when the one before has arrived.
AT_ONCE = 2**28


class WeightCopies:
    """The copies of a state's weights on `program.rollout_mesh`.

    Attributes:
      params: the copies; () before the first.
      version: the step after which the weights were like them.
    """

    def __init__(self, program: program_lib.Program):
        self.params: PyTree = ()
        self.version = -1
        self._program = program
        self._abstract = dict(tree.flatten(program.copies(program.rollouts)))

    def renew(self, params: PyTree, version: int) -> None:
        """Sends weights, those that are not trained only once, and frees the former copies. What is sent arrives later."""
        held, sent, taken = dict(tree.flatten(self.params)), list[jax.Array](), 0
        placements = self._program.partition.placements

        def copy(path: str, leaf: jax.Array) -> jax.Array:
            nonlocal taken
            if path in held and not placements[f"params/{path}"].trainable:
                return held[path]
            if path in held:
                held[path].delete()
            wanted = self._abstract[path]
            where = NamedSharding(self._program.mesh, wanted.sharding.spec)
            if taken > AT_ONCE:
                jax.block_until_ready(sent)
                sent.clear()
                taken = 0
            if (leaf.shape, leaf.dtype, leaf.sharding) != (wanted.shape, wanted.dtype, where):
                leaf = _gather(wanted.shape, wanted.dtype, where)(leaf)
                taken += tree.shard_bytes(leaf)
            sent.append(jax.device_put(leaf, wanted.sharding))
            return sent[-1]

        self.params, self.version = tree.map_with_path(copy, params), version


@functools.lru_cache(maxsize=1024)
def _gather(shape: tuple[int, ...], dtype: Any, where: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Returns f(weight) -> the same without padding, in another dtype and sharding."""
    return jax.jit(lambda leaf: leaf[tuple(map(slice, shape))].astype(dtype), out_shardings=where)
