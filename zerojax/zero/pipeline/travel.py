"""Moves arrays between the groups of a pipeline whose devices belong to several processes. This module makes the programs that send.

`jax.device_put` between the devices of two processes needs a transfer server of its own on CPU, and hung there at the receiver when tried.
A collective permutation over the devices of both groups runs wherever collectives run: on GPUs it is a send and a receive of NCCL. All
processes of the two groups call the same program, so all must come to it in one order. The sender's loop is that order: each process walks
over the whole schedule, runs its own groups' passes, and joins each transfer that begins or ends on them.

A group that is not here has arrays without shards: they have a shape and a sharding, so a state is the same tree in each process.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.tree import Leaf


def is_here(mesh: Mesh) -> bool:
    """Returns whether this process has devices of a mesh, or all processes are this one, which then may compile for absent devices."""
    return jax.process_count() == 1 or bool(NamedSharding(mesh, P()).addressable_devices)


def absent(like: Leaf) -> jax.Array:
    """Returns an array of devices of other processes; `like` has its shape, dtype and sharding."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, [], dtype=like.dtype)


class Travel:
    """Moves arrays between groups.

    Args:
      mesh: of all groups.
      groups: the mesh of each.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[Mesh]):
        self._mesh, self._groups = mesh, groups
        self.here = [is_here(group) for group in groups]
        self.is_one = all(self.here)
        self._hops: dict[Any, Callable[..., Any]] = {}

    def hop(self, x: Sequence[Any], likes: Sequence[Any], source: int, target: int) -> list[Any]:
        """Returns arrays of a group on another one, or `None`s where that is not here. Processes that have neither return at once.

        Args:
          x: the arrays; `None`s where the source is not here.
          likes: abstract, with the sharding on some group.
          source, target: the numbers of the groups.
        """
        shardings = [NamedSharding(self._groups[target], like.sharding.spec) for like in likes]
        if self.is_one:
            return jax.device_put(list(x), shardings)  # one call for all
        if not likes or not (self.here[source] or self.here[target]):
            return [None] * len(likes)
        ends = [self._groups[source], self._groups[target]]
        names = (mesh_lib.PIPE, *ends[0].axis_names)
        pair = Mesh(
            np.stack([end.devices for end in ends]), names, axis_types=(ends[0].axis_types[0], *ends[0].axis_types)
        )
        stacked: list[Any] = [_stacked(pair, ends, own, like, 0) for own, like in zip(x, likes)]
        key = (source, target, *((own.shape, own.dtype, own.sharding.spec) for own in stacked))
        if key not in self._hops:
            specs = [own.sharding.spec for own in stacked]
            send = functools.partial(jax.lax.ppermute, axis_name=mesh_lib.PIPE, perm=[(0, 1)])
            run = jax.shard_map(
                functools.partial(jax.tree.map, send), mesh=pair, in_specs=(specs,), out_specs=specs, check_vma=False
            )
            self._hops[key] = jax.jit(run)
        sent = self._hops[key](stacked)
        if mesh_lib.platform(self._mesh) == "cpu":  # as the sender waits for programs
            jax.block_until_ready(sent)
        if not self.here[target]:
            return [None] * len(likes)
        found = []
        for own, like, sharding in zip(sent, likes, shardings):
            parts = [shard.data[0] for shard in own.addressable_shards if shard.device in sharding.device_set]
            found.append(jax.make_array_from_single_device_arrays(like.shape, sharding, parts))
        return found

    def shared(self, x: Sequence[Any], likes: Sequence[Any], homes: Sequence[int]) -> list[jax.Array]:
        """Returns small arrays of some groups, replicated over all devices."""
        if not likes:
            return []
        stacked = [_stacked(self._mesh, self._groups, *own) for own in zip(x, likes, homes)]
        return _picked(tuple(homes), tuple(NamedSharding(self._mesh, P()) for _ in likes))(stacked)

    def spread(self, x: Any, like: Leaf, home: int, sharding: NamedSharding) -> jax.Array:
        """Returns an array of a group with a sharding over all devices."""
        return _picked((home,), (sharding,))([_stacked(self._mesh, self._groups, x, like, home)])[0]

    def settled(self, x: jax.Array, like: Leaf, home: int) -> jax.Array:
        """Returns an array over all devices on the group of `like`, which is `home`."""
        spec = like.sharding.spec
        whole = jax.device_put(x, NamedSharding(self._mesh, spec))
        own = {shard.device: shard.data for shard in whole.addressable_shards}
        parts = [own[device] for device in self._groups[home].devices.flat if device in own]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts, dtype=like.dtype)


@functools.lru_cache
def _picked(homes: tuple[int, ...], shardings: tuple[NamedSharding, ...]) -> Callable[..., Any]:
    return jax.jit(lambda xs: [x[home] for x, home in zip(xs, homes)], out_shardings=list(shardings))


def _stacked(mesh: Mesh, groups: Sequence[Mesh], x: Any, like: Leaf, home: int) -> jax.Array:
    """Returns arrays of groups with a leading dim that counts these: `x` at `home`, and zeros."""
    sharding = NamedSharding(mesh, P(mesh_lib.PIPE, *like.sharding.spec))
    known = {} if x is None else {shard.device: shard.data for shard in x.addressable_shards}
    own = {device: known[device] for device in groups[home].devices.flat if device in known}
    shape = (1, *like.sharding.shard_shape(like.shape))
    parts = [
        own[device][None] if device in own else jnp.zeros(shape, like.dtype, device=device)
        for device in sharding.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays((len(groups), *like.shape), sharding, parts)
