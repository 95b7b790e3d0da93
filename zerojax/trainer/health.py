"""Checks that a run is healthy. This module judges each step by its metrics, and ends a run with the name of its last good checkpoint."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.update import loss_scale


@dataclasses.dataclass(frozen=True)
class Flaw:
    """The reason why a step is bad, whether it was skipped, and whether it overflowed at the smallest loss scale."""

    why: str
    is_skipped: bool
    is_exhausted: bool = False


class Health:
    """Counts the skipped steps, and remembers the last good step.

    Attributes:
      last_good: the last step whose loss and gradients were finite.
      skipped: steps skipped so far because their gradients overflowed.
    """

    def __init__(
        self, params: PyTree, saver: checkpointer.Checkpointer, *, start: int, learning_rate: float, min_scale: float
    ):
        """Begins after step `start`. `params` is the weight tree, abstract or not. Errors quote `learning_rate` and `min_scale`."""
        self.last_good, self.skipped = start, 0
        self._start = start
        self._params, self._saver = params, saver
        self._learning_rate, self._min_scale = learning_rate, min_scale

    def flaw(self, numbers: Mapping[str, float]) -> Flaw | None:
        """Returns the flaw of a step with these metrics, or None if the step is good."""
        overflow = loss_scale.overflow(numbers, self._params)
        if overflow is not None:
            return Flaw(overflow, is_skipped=True, is_exhausted=bool(numbers["is_exhausted"]))
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(numbers[name])), None)
        return Flaw(f"{bad} is {numbers[bad]}", is_skipped=False) if bad else None

    def count(self, step: int, flaw: Flaw | None) -> None:
        """Counts a step as good or as skipped.

        Raises:
          UserError: the run cannot continue after this step.
        """
        if flaw is None:
            self.last_good = step
        elif flaw.is_exhausted:
            way_out = f"lower config.loss_scale.min_scale (now {self._min_scale:g})"
            raise self.end(step, f"{flaw.why}, which is the smallest", way_out)
        elif flaw.is_skipped:
            self.skipped += 1
        else:
            raise self.end(step, flaw.why)

    def check(self, step: int, state: State) -> None:
        """Checks the state after a step, which is about to be saved. All processes call it with the same state.

        Raises:
          UserError: a leaf holds a number that is not finite.
        """
        leaf = first_not_finite(state)
        if leaf is not None:
            raise self.end(step, f"{leaf} is not finite after it, so the state is not saved")

    def end(self, step: int, why: str, way_out: str = "") -> UserError:
        """Returns the error to raise. A checkpoint is good if the step after it had a finite loss."""
        self._saver.wait()
        good = max((saved for saved in self._saver.steps() if saved < self.last_good), default=None)
        kept = "no checkpoint before it is good" if good is None else f"the last good checkpoint is of step {good}"
        lower = f"lower config.optimizer.learning_rate (now {self._learning_rate}) and start over"
        if self._start and self.last_good == self._start:  # this run has taken no step that could be to blame
            lower = f"the state was restored from step {self._start}: move that step away to resume from an earlier one"
        return UserError(
            f"step {step}: {why}; {kept} in {self._saver.directory}; {way_out and way_out + ', or '}{lower}, or check the data"
        )

    def summary(self) -> str | None:
        """Returns a line about the skipped steps, or None if there were none."""
        if not self.skipped:
            return None
        rest = (
            "" if self.last_good else "; no step was taken, because config.loss_scale starts too high for so few steps"
        )
        return f"{self.skipped} steps were skipped, since their gradients overflowed{rest}"


def first_not_finite(state: State) -> str | None:
    """Returns the path of the first floating leaf that holds a NaN or an infinity, or None if there is none.

    Each device reduces its own shards, without collectives, and processes then compare what they found. Leaves of one shape, dtype and
    sharding share a compiled program. Leaves in host memory are copied to their devices one at a time, and shards on a disk are read one
    at a time.
    """
    floats = [(path, leaf) for path, leaf in tree.flatten(state) if jnp.issubdtype(tree.dtype_of(leaf), jnp.floating)]
    verdicts = jax.device_get([_verdicts(leaf) for _, leaf in floats])
    first = next((at for at, found in enumerate(verdicts) if not all(found)), len(floats))
    if jax.process_count() > 1:
        first = int(multihost_utils.process_allgather(np.array(first)).min())
    return floats[first][0] if first < len(floats) else None


def _verdicts(leaf: Leaf) -> list[Any]:
    """Returns whether all numbers of each of this process's shards are finite, as bool[] or bool[1]."""
    if not isinstance(leaf, jax.Array):  # on a disk
        return [np.isfinite(shard.data).all() for shard in leaf.addressable_shards if shard.replica_id == 0]
    default = next(iter(leaf.devices())).default_memory().kind
    if leaf.sharding.memory_kind in (None, default):
        return _by_device(leaf)
    on_device = jax.device_put(leaf, leaf.sharding.with_memory_kind(default))
    return jax.block_until_ready(_by_device(on_device))  # so that the devices hold one leaf at a time


def _by_device(leaf: jax.Array) -> list[jax.Array]:
    """Returns whether the numbers on each of this process's devices are finite."""
    mesh, spec = (leaf.sharding.mesh, leaf.sharding.spec) if isinstance(leaf.sharding, NamedSharding) else (None, None)
    return [shard.data for shard in _all_finite(leaf, mesh, spec).addressable_shards]


@functools.partial(jax.jit, static_argnames=("mesh", "spec"))
def _all_finite(leaf: jax.Array, mesh: jax.sharding.Mesh | None, spec: P | None) -> jax.Array:
    """Returns bool[devices] for an array on a mesh, and bool[1] for one without."""

    def of_shard(shard: jax.Array) -> jax.Array:
        return jnp.isfinite(shard).all()[None]

    if mesh is None:
        return of_shard(leaf)
    return jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names), check_vma=False)(leaf)
