"""Goes on where a checkpoint ends. This module brings the saved state, and the data, to where a run stood, stored padded or not."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zerojax import checkpoint, precision, tree
from zerojax import partition as partition_lib
from zerojax import program as program_lib
from zerojax import streams as streams_lib
from zerojax.errors import UserError


def check(program: program_lib.Program, saver: checkpoint.Checkpointer, step: int) -> Mapping[str, Sequence[int]]:
    """Looks, before anything is compiled, whether the checkpoint is this model's; returns the shapes of leaves that were saved padded.

    Raises:
      UserError: it is damaged or another model's.
    """
    before, now = saver.meta(step).get("padded", {}), _shapes(program.partition)
    for path, shape in before.items():
        if now.get(path, shape) != shape:
            raise UserError(
                f"{saver.directory}/{step}: {path} was saved with shape {tuple(shape)}, and this config's model has "
                f"{tuple(now[path])}; use the config it was saved with"
            )
    return before


def state(
    program: program_lib.Program,
    saver: checkpoint.Checkpointer,
    step: int,
    streams: streams_lib.Streams,
    *,
    rescales: bool = False,
) -> Any:
    """Returns the state saved at `step`, placed as this run places it, and moves the data there; `rescales` starts its loss scale afresh.

    Raises:
      UserError: the checkpoint is damaged or another model's.
    """
    before = check(program, saver, step)
    resizable = frozenset(before.keys() | padded_shapes(program.partition).keys())
    logical, position = saver.restore(step, program.logical_abstract_state, resizable, optional=("loss_scale",))
    streams.move_to(position)
    return program_lib.restored_state(program, logical, rescales=rescales)


def padded_shapes(partition: partition_lib.Partition) -> dict[str, list[int]]:
    """Returns the unpadded shape of each leaf that is stored padded, by its path in a checkpoint."""
    return {path: list(leaf.shape) for path, leaf in _logical_leaves(partition) if leaf.padding}


def logical_params(program: program_lib.Program, state: Any) -> Any:
    """Returns the float32 weights as the model sees them, without padding."""
    logical = precision.to_logical(state).params
    padded = padded_shapes(program.partition)

    def cut(path: str, leaf: jax.Array) -> jax.Array:
        shape = padded.get(f"params/{path}")
        return leaf[tuple(map(slice, shape))] if shape else leaf

    return tree.map_with_path(cut, logical)


def _shapes(partition: partition_lib.Partition) -> dict[str, list[int]]:
    """Returns every leaf's shape as the model sees it, by its path in a checkpoint."""
    return {path: list(leaf.shape) for path, leaf in _logical_leaves(partition)}


def _logical_leaves(partition: partition_lib.Partition) -> list[tuple[str, partition_lib.Leaf]]:
    """Returns what was decided for each leaf of a checkpoint."""
    decided = tree.map_with_path(lambda path, _: partition.leaves[path], partition.abstract_state)
    return tree.flatten(precision.to_logical(decided))
