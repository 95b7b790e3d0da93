"""Runs a function of the params forward only, as a program for each block. This module cuts it once for each shape of its arrays."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from zerojax import tree
from zerojax.tree import PyTree
from zerojax.zero.gradients import forward_only
from zerojax.zero.step_programs import arrivals, blocks, cut, programs
from zerojax.zero.step_programs import schedule as schedule_lib
from zerojax.zero.weights import partition as partition_lib


def mean_by_kind(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    *,
    compiler_options: Mapping[str, Any] | None = None,
    **how: Any,
) -> "Forward":
    """Returns `forward_only.mean(loss_fn, partition, **how)` as programs, one for each kind of block, whatever the depth.

    Each also gathers the weights of the next block; see `cut.ahead`.
    """
    mean = forward_only.mean(loss_fn, partition, runner=blocks.ForwardAheadBlocks, **how)
    return Forward(mean, arrivals.ArgumentSource(), compiler_options, in_order=cut.ahead)


class Forward:
    """`run(params, arrays)` as programs.

    Args:
      run: a function of `explicit` with `blocks.ForwardBlocks`.
      source: stores params, which arrive while programs are sent.
      compiler_options: XLA's, for each program.
      in_order: as of `programs.cut`.
    """

    def __init__(
        self,
        run: Callable[[Any, Any], Any],
        source: arrivals.ArgumentSource,
        compiler_options: Mapping[str, Any] | None = None,
        *,
        in_order: Callable[..., Any] = list,
    ):
        self._run, self._source, self._options, self._in_order = run, source, compiler_options, in_order
        self._schedules: dict[Any, schedule_lib.Schedule] = {}

    def __call__(self, params: PyTree, arrays: PyTree) -> Any:
        """Sends the programs to the device, and returns their result."""
        return self.schedule(params, arrays)(params, arrays)

    def schedule(self, params: PyTree, arrays: PyTree) -> schedule_lib.Schedule:
        """Returns the programs for params and arrays that may be abstract."""
        leaves, structure = jax.tree.flatten(arrays)
        key = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._schedules:
            used = jax.tree.map(self._source.used, tree.abstract(params))
            paths = [f"params/{path}" for path, _ in tree.flatten(used)]
            late = {number: path for number, path in enumerate(paths) if path in self._source.paths}
            found = programs.cut(
                self._run,
                used,
                tree.abstract(arrays),
                late=late,
                source=self._source,
                compiler_options=self._options,
                in_order=self._in_order,
            )
            self._schedules[key] = schedule_lib.Schedule(found)
        return self._schedules[key]
