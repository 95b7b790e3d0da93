"""Resumes a run from a checkpoint. This module restores the saved state, padded or not, and the position in the data."""

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
from zerojax.optim import pieces
from zerojax.train_state import State
from zerojax.trainer import config as config_lib
from zerojax.trainer import metrics, steps, workdir
from zerojax.trainer import program as program_lib
from zerojax.trainer import state as state_lib
from zerojax.tree import PyTree
from zerojax.zero.host import create as offload_create
from zerojax.zero.host import storage
from zerojax.zero.pipeline import state as pipeline_state
from zerojax.zero.weights import partition as partition_lib
from zerojax.zero.wires import unsent

IMPORTED = "imported"  # in `meta`: where a state that another program trained comes from
# A run may resume with or without one, as the checkpoint may have one or not
OPTIONAL = ("loss_scale", "fp8", "last_norm", unsent.FIELD)


FINGERPRINTS = {  # name -> (what it is of, what to do about another)
    "text": ("training text", "restore that text in config.data.dir"),
    "base": ("model in config.init_from", "restore that folder"),
    "teacher": ("model in config.distill.teacher", "restore that folder"),
    "reward": ("model in config.grpo.reward", "restore that folder"),
    "tokenizer": ("tokenizer", "set config.data.tokenizer to the one it was trained with"),
}


def meta(program: program_lib.Program, fingerprints: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the `meta` saved with a state: the initial loss scale, unpadded shapes, and what the run may not change.

    That is its config and the fingerprints of its data. A checkpoint that another program trained has neither: `fingerprints` is None.
    """
    found: dict[str, Any] = {"padded": padded_shapes(program.partition), "first_loss_scale": _first_scale(program)}
    if layout := _layout_of_unsent(program):
        found[unsent.FIELD] = layout
    if fingerprints is None:
        return found
    return {**found, "config": config_lib.to_dict(program.config), "fingerprints": dict(fingerprints)}


@dataclasses.dataclass(frozen=True)
class Start:
    """The step at which a run begins, and the `meta` of the checkpoint that it resumes from; None for a new run."""

    step: int
    saved: Mapping[str, Any] | None


def find(
    program: program_lib.Program,
    saver: checkpointer.Checkpointer,
    streams: feed.Feed,
    fingerprints: Mapping[str, str],
    folder: pathlib.Path,
) -> Start:
    """Finds the newest checkpoint of a run in `folder`, and moves the data to its position; see `check`.

    Raises:
      UserError: the run cannot resume from it, or is past `steps` already. The line names the way out.
    """
    done = saver.latest_step()
    if done is None:
        return Start(0, None)
    config = program.config
    if done > config.steps:
        longer = "raise config.epochs" if config.epochs else f"set --config.steps={done} or more"
        raise UserError(
            f"{config.length}: the run in {folder} is at step {done} already; {longer}, or choose another --workdir"
        )
    saved = check(program, saver, done, streams)
    _check_same_run(program, saver.directory / str(done), saved, fingerprints)
    if processes.is_primary() and (folder / metrics.FILE).exists():
        metrics.read(folder)  # reports an invalid line before compiling
    return Start(done, saved)


def notes(
    program: program_lib.Program, saver: checkpointer.Checkpointer, start: Start, folder: pathlib.Path
) -> list[str]:
    """Returns lines about what a run that resumes should know."""
    if start.saved is None:
        return []
    lines = []
    if not saver.has_checksums(start.step):
        lines.append(
            f"checkpoint {start.step} was saved without checksums: only the sizes of its files could be checked"
        )
    if "fingerprints" not in start.saved and IMPORTED not in start.saved:
        what = "whether the text and the tokenizer are still the same"
        lines.append(f"checkpoint {start.step} was saved without fingerprints of its data: {what} could not be checked")
    if rescales(program, start.saved):
        lines.append("the loss scale is reset: config.loss_scale has another initial scale than before")
    if _drops_unsent(program, start.saved):
        why = "the mesh or config.wire differs" if _layout_of_unsent(program) else "config.wire.error_feedback is off"
        lines.append(f"what packed wires had left unsent of gradients at step {start.step} is dropped: {why}")
    logged, path = start.saved.get("logged"), folder / metrics.FILE
    if logged is not None and processes.is_primary() and path.exists():
        found = sum("loss" in record and record["step"] <= start.step for record in metrics.read(folder))
        if found < logged:
            lines.append(
                f"{path}: holds {found} of the {logged} steps logged up to step {start.step}; restore it if there is a copy"
            )
    return lines


def check(
    program: program_lib.Program, saver: checkpointer.Checkpointer, step: int, streams: feed.Feed
) -> Mapping[str, Any]:
    """Checks that this run can resume from a checkpoint before it compiles or allocates, and moves the data to its position.

    Returns:
      The checkpoint's `meta`. Reading it again would check all files of the step again, possibly thousands.

    Raises:
      UserError: the checkpoint is damaged or of another model.
    """
    saved = saver.meta(step)
    before = saved.get("padded", {})
    now = {path: list(leaf.shape) for path, leaf in _logical_leaves(program.partition)}  # unpadded
    if not isinstance(before, Mapping) or not all(isinstance(shape, list) for shape in before.values()):
        raise step_files.damaged(saver.directory, step, "meta: padded is not a table of shapes")
    for path, shape in before.items():
        if now.get(path, shape) != shape:
            raise UserError(
                f"{saver.directory}/{step}: {path} was saved with shape {tuple(shape)}, and this config's model has "
                f"{tuple(now[path])}; use the config it was saved with"
            )
    position = saver.check(step, program.logical_abstract_state, _resizable(program, saved), OPTIONAL)
    if IMPORTED not in saved:  # a state from elsewhere has no position in these data
        _check_batch(program, position)
        streams.move_to(position)
    return saved


def _check_batch(program: program_lib.Program, position: Any) -> None:
    """Raises a UserError if a position in the data is that of another batch, as where it is derived from the mesh. Damaged ones pass."""
    row = position.get("0") if isinstance(position, Mapping) else None
    before, now = row.get("num_rows") if isinstance(row, Mapping) else None, program.sizes.global_batch_size
    if isinstance(before, int) and before != now:
        raise UserError(
            f"config.global_batch_size: the checkpoint is of a run with {before} sequences a step, and this run has {now}; "
            f"set --config.global_batch_size={before} --config.micro_batch_size=0, or choose another --workdir"
        )


def state(program: program_lib.Program, saver: checkpointer.Checkpointer, step: int, saved: Mapping[str, Any]) -> State:
    """Returns the state saved at `step` with this run's shardings. `saved` is the result of `check`.

    Raises:
      UserError: the checkpoint is damaged or of another model.
    """
    keep = offload_create.begin(program.partition)
    wanted, placed = program.logical_abstract_state, program.partition.pipeline
    like = pipeline_state.spread(wanted, placed)
    logical, _ = saver.restore(step, like, _resizable(program, saved), OPTIONAL, keep=keep)
    logical = pipeline_state.settled(logical, wanted, placed, keep)
    if _drops_unsent(program, saved):
        logical = logical.replace(**{unsent.FIELD: getattr(wanted, unsent.FIELD)})
    return state_lib.restored(program, logical, keep, rescales=rescales(program, saved))


def rescales(program: program_lib.Program, saved: Mapping[str, Any]) -> bool:
    """Returns whether this config's initial loss scale differs from that of the run that saved the checkpoint."""
    before, now = saved.get("first_loss_scale"), _first_scale(program)
    return None not in (before, now) and before != now


def _layout_of_unsent(program: program_lib.Program) -> str:
    """Returns `unsent.layout` of this run's wires."""
    return unsent.layout(steps.as_sent(program.config, program.family, program.partition))


def _drops_unsent(program: program_lib.Program, saved: Mapping[str, Any]) -> bool:
    """Returns whether a checkpoint holds what packed wires did not send, of other wires than this run's."""
    before = saved.get(unsent.FIELD, "")
    return bool(before) and before != _layout_of_unsent(program)


def padded_shapes(partition: partition_lib.Partition) -> dict[str, list[int]]:
    """Returns the unpadded shape of each padded leaf, by its path in a checkpoint."""
    return {path: list(leaf.shape) for path, leaf in _logical_leaves(partition) if leaf.padding}


def logical_params(program: program_lib.Program, state: State) -> PyTree:
    """Returns the float32 weights without padding."""
    own = program.weights.of_model(logical_lib.to_logical(state).params)
    params = pipeline_state.spread(own, program.partition.pipeline)
    logical = jax.tree.map(pieces.join, params, is_leaf=pieces.is_pieces)
    padded = padded_shapes(program.partition)

    def cut(path: str, leaf: jax.Array) -> jax.Array:
        shape = padded.get(f"params/{path}")
        return storage.to_device(leaf)[tuple(map(slice, shape))] if shape else leaf

    return tree.map_with_path(cut, logical)


def _check_same_run(
    program: program_lib.Program, path: pathlib.Path, saved: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> None:
    """Raises a UserError if a checkpoint was saved with other settings, other text or another tokenizer. Older ones lack these."""
    now = config_lib.to_dict(program.config)
    place = workdir.difference(saved.get("config", now), now)
    if place is not None:
        raise UserError(
            f"{path}: was saved with config.{place.name}={place.before!r}, and this run has {place.now!r}; "
            "use the same value to resume, or another --workdir"
        )
    for name, before in saved.get("fingerprints", {}).items():
        if name in FINGERPRINTS and fingerprints.get(name, before) != before:
            what, way_out = FINGERPRINTS[name]
            raise UserError(
                f"{path}: was saved with another {what} (fingerprint {before}, now {fingerprints[name]}); "
                f"{way_out}, or choose another --workdir"
            )


def _logical_leaves(partition: partition_lib.Partition) -> list[tuple[str, partition_lib.Decision]]:
    """Returns the sharding decision for each leaf of a checkpoint."""
    whole = partition.on_device
    decided = tree.map_with_path(lambda path, _: whole.leaves[path], whole.abstract_state)
    return tree.flatten(logical_lib.to_logical(decided))


def _first_scale(program: program_lib.Program) -> list[float] | None:
    """Returns the settings of the initial loss scale, or None if there is no loss scale."""
    settings = program.config.loss_scale
    return None if program.loss_scale is None else [float(settings.static), float(settings.init_scale)]


def _resizable(program: program_lib.Program, saved: Mapping[str, Any]) -> frozenset[str]:
    """Returns the paths of leaves that are padded in this run or in the checkpoint."""
    return frozenset(saved.get("padded", {}).keys() | padded_shapes(program.partition).keys())
