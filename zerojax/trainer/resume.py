"""Goes on where a checkpoint ends. This module brings the saved state, and the data, to where a run stood, stored padded or not."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from zerojax import tree
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import files as step_files
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import feed
from zerojax.errors import UserError
from zerojax.launch import processes
from zerojax.trainer import metrics
from zerojax.trainer import program as program_lib
from zerojax.zero import placement

OPTIONAL = ("loss_scale",)  # a run may go on with one, or without, whatever the saved one did


def meta(program: program_lib.Program) -> dict[str, Any]:
    """Returns what is saved beside a state: the shapes of padded leaves before their padding, and which loss scale the run began with."""
    return {"padded": padded_shapes(program.partition), "first_loss_scale": _first_scale(program)}


@dataclasses.dataclass(frozen=True)
class Start:
    """The step at which a run begins, and the `meta` of the checkpoint that it goes on from; None for a run that is new."""

    step: int
    saved: Mapping[str, Any] | None


def find(
    program: program_lib.Program,
    saver: checkpointer.Checkpointer,
    streams: feed.Feed,
    folder: pathlib.Path,
    *,
    steps: int,
) -> Start:
    """Finds the newest checkpoint of a run of `steps` steps in `folder`, and moves the data there; see `check`.

    Raises:
      UserError: the run cannot go on from it, or has gone further; the line says what to do.
    """
    done = saver.latest_step()
    if done is None:
        return Start(0, None)
    if done > steps:
        raise UserError(
            f"config.steps: is {steps}, and the run in {folder} is at step {done}; set --config.steps={done} "
            "or more, or choose another --workdir"
        )
    saved = check(program, saver, done, streams)
    if processes.is_primary() and (folder / metrics.FILE).exists():
        metrics.read(folder)  # lest a line that is none be found after compiling
    return Start(done, saved)


def check(
    program: program_lib.Program, saver: checkpointer.Checkpointer, step: int, streams: feed.Feed
) -> Mapping[str, Any]:
    """Sees whether this run can go on from a checkpoint, before anything is compiled or allocated, and moves the data there.

    Returns:
      The checkpoint's `meta`. Each reading of one looks at all of a step's files, of which there may be thousands.

    Raises:
      UserError: it is damaged, or another model's.
    """
    saved = saver.meta(step)
    before, now = saved.get("padded", {}), _shapes(program.partition)
    if not isinstance(before, Mapping) or not all(isinstance(shape, list) for shape in before.values()):
        raise step_files.damaged(saver.directory, step, "meta: padded is no table of shapes")
    for path, shape in before.items():
        if now.get(path, shape) != shape:
            raise UserError(
                f"{saver.directory}/{step}: {path} was saved with shape {tuple(shape)}, and this config's model has "
                f"{tuple(now[path])}; use the config it was saved with"
            )
    streams.move_to(saver.check(step, program.logical_abstract_state, _resizable(program, saved), OPTIONAL))
    return saved


def state(program: program_lib.Program, saver: checkpointer.Checkpointer, step: int, saved: Mapping[str, Any]) -> Any:
    """Returns the state saved at `step`, placed as this run places it; `saved` is what `check` returned.

    Raises:
      UserError: the checkpoint is damaged, or another model's.
    """
    logical, _ = saver.restore(step, program.logical_abstract_state, _resizable(program, saved), OPTIONAL)
    return program_lib.restored_state(program, logical, rescales=rescales(program, saved))


def rescales(program: program_lib.Program, saved: Mapping[str, Any]) -> bool:
    """Says whether this run is to begin with another loss scale than the one that the checkpoint's began with."""
    before, now = saved.get("first_loss_scale"), _first_scale(program)
    return None not in (before, now) and before != now


def padded_shapes(partition: placement.Partition) -> dict[str, list[int]]:
    """Returns the unpadded shape of each leaf that is stored padded, by its path in a checkpoint."""
    return {path: list(leaf.shape) for path, leaf in _logical_leaves(partition) if leaf.padding}


def logical_params(program: program_lib.Program, state: Any) -> Any:
    """Returns the float32 weights as the model sees them, without padding."""
    logical = logical_lib.to_logical(state).params
    padded = padded_shapes(program.partition)

    def cut(path: str, leaf: jax.Array) -> jax.Array:
        shape = padded.get(f"params/{path}")
        return leaf[tuple(map(slice, shape))] if shape else leaf

    return tree.map_with_path(cut, logical)


def _shapes(partition: placement.Partition) -> dict[str, list[int]]:
    """Returns every leaf's shape as the model sees it, by its path in a checkpoint."""
    return {path: list(leaf.shape) for path, leaf in _logical_leaves(partition)}


def _logical_leaves(partition: placement.Partition) -> list[tuple[str, placement.Decision]]:
    """Returns what was decided for each leaf of a checkpoint."""
    decided = tree.map_with_path(lambda path, _: partition.leaves[path], partition.abstract_state)
    return tree.flatten(logical_lib.to_logical(decided))


def _first_scale(program: program_lib.Program) -> list[float] | None:
    """Returns what a loss scale begins with, or None where there is none."""
    settings = program.config.loss_scale
    return None if program.loss_scale is None else [float(settings.static), float(settings.init_scale)]


def _resizable(program: program_lib.Program, saved: Mapping[str, Any]) -> frozenset[str]:
    """Returns the paths of leaves that are padded now or were when they were saved."""
    return frozenset(saved.get("padded", {}).keys() | padded_shapes(program.partition).keys())
