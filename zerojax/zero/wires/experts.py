"""Sends no expert: each device uses those that live there, and tokens are sent (`ops.expert_parallel`). This module is the wire of their
matrices, the weights whose spec names `expert`.

ZeRO shards a device's own experts over what is left of data and context, and gathers them over that alone. Their gradient is complete but
for the sum over those devices: what others computed has come with their tokens' gradients.
"""

import dataclasses
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import signatures, specs
from zerojax.errors import UserError
from zerojax.ops import expert_parallel
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib


@dataclasses.dataclass(frozen=True)
class ToExperts(gather.Plain):
    """The wire of matrices of which each device has those of its experts; see `placement.Wire`.

    Weights whose spec names `expert` have it; a row of `make_train_step(wires=)` gives those that its regex finds other numbers.

    Attributes:
      load: the rows for which one exchange has room, over those of a balanced router. It decides memory and bytes; more rows take further
        rounds, and none is dropped (`ops.expert_parallel`).
      parts: tokens travel in as many parts, one beside the matmuls of another, where they divide; 1: all at once.
    """

    load: float = expert_parallel.LOAD
    parts: int = 1
    sends_rest: ClassVar[bool] = False

    def one_program(self, pattern: str) -> None:
        return None

    def marked(
        self, partition: partition_lib.Partition, pattern: str, blocks: str, reduce_dtype: DTypeLike | None
    ) -> partition_lib.Partition:
        for name, number, hint in (("expert_parts", self.parts, int), ("expert_load", self.load, float)):
            if not signatures.is_of(number, hint):
                raise UserError(f"{name}: must be {signatures.words(hint)}, and is {signatures.shown(number)}")
        if self.parts < 1:
            raise UserError(f"expert_parts: must be at least 1, all tokens at once, and is {self.parts}")
        if not self.load >= 1:
            raise UserError(f"expert_load: must be at least 1, the load of a balanced router, and is {self.load}")
        chosen = [path for path in _of_experts(partition) if re.search(pattern, path)]
        if pattern and not chosen:
            raise UserError(
                f"wires: {pattern!r} of a ToExperts finds no weight whose spec names `expert`; pass overrides such as "
                '("experts/(gate|up|down)$", PartitionSpec("expert")) to shard_train_state, or omit the row'
            )
        return partition.with_wires(dict.fromkeys(chosen, self))

    def around(self) -> AbstractContextManager[None]:
        return expert_parallel.used()

    def read_as(self, first: str, path: str) -> bool:
        expert_parallel.take_as(first, path)
        return True

    def send(
        self, shard: jax.Array, known: object, placement: placement.Placement, dtype: DTypeLike | None
    ) -> expert_parallel.Stack:
        return self._share(gather.all_gather(shard, placement, dtype), placement)

    def differentiated(self, sent: expert_parallel.Stack, dtype: DTypeLike | None) -> jax.Array:
        assert isinstance(sent.shard, jax.Array)
        return sent.shard

    def used(
        self, path: str, sent: expert_parallel.Stack, differentiated: jax.Array
    ) -> AbstractContextManager[jax.Array]:
        return nullcontext(expert_parallel.add(path, dataclasses.replace(sent, shard=differentiated)))

    def outside(
        self,
        path: str,
        weight: gather.ShardAndSink,
        placement: placement.Placement,
        dtype: DTypeLike | None,
        reduction: gather.Reduction,
    ) -> jax.Array:
        return expert_parallel.add(
            path, self._share(gather.gather_shard(weight, placement, dtype, reduction), placement)
        )

    def _share(self, shard: jax.Array, placement: placement.Placement) -> expert_parallel.Stack:
        spec, mesh = placement.used.spec, placement.used.mesh
        assert isinstance(mesh, Mesh)
        axes = tuple(axis for axis in mesh_lib.EXPERT if axis in specs.axes(spec))
        own, loops = (specs.only(spec, mesh_lib.COMPILER),), mesh_lib.platform(mesh) != "cpu"
        return expert_parallel.Stack(shard, axes, own, self.load, self.parts, loops)


TO_EXPERTS = ToExperts()


def check(partition: partition_lib.Partition, reduce_dtype: DTypeLike | None) -> None:
    """Warns of an axis `expert` that no weight has.

    Raises:
      UserError: the compiler inserts the collectives, or experts are not a stack's first dim.
    """
    paths = _of_experts(partition)
    if paths and reduce_dtype is None:
        raise UserError(
            f"expert: is sharded by the spec of {min(paths)}, and tokens travel by explicit collectives; pass reduce_dtype=jnp.float32, or "
            "a mesh without `expert`"
        )
    for path in paths:
        spec = partition.placements[path].used.spec
        if not specs.axes(P(*spec[1:])).isdisjoint(mesh_lib.EXPERT):
            raise UserError(
                f"expert: the override of {path} shards a dim after the first, and the first counts experts; name `expert` there, make "
                "layers of nn.scan or nn.vmap in a loop, or omit `expert`"
            )
    ways = mesh_lib.size(partition.mesh, mesh_lib.EXPERT)
    if ways > 1 and not paths:
        warnings.warn(
            f"expert: has no effect, because no override names it on a mesh with expert={ways}; pass overrides such as "
            '("experts/(gate|up|down)$", PartitionSpec("expert")) to shard_train_state',
            stacklevel=3,
        )


def _of_experts(partition: partition_lib.Partition) -> list[str]:
    """Returns the paths of weights of which a device has some experts' matrices."""
    return [path for path, weight in partition.placements.items() if weight.is_experts]
