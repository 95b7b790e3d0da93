"""Compares what a run writes with the free bytes of its disks. This module refuses a run that does not fit, before it compiles.

Counted are the checkpoints that WORKDIR holds at once, an export, which is complete before it replaces an earlier one, and files of
offloaded state. What lies on one file system is added up. Where several hosts share one, its files count once, and offload to it those of
one host.
"""

import functools
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp

from zerojax import display, files, tree
from zerojax.errors import UserError
from zerojax.interop import huggingface
from zerojax.models import family as family_lib
from zerojax.trainer import program as program_lib
from zerojax.trainer import settings as settings_lib
from zerojax.zero.host import budget, storage

# Orbax compresses: of random numbers in float32 7% goes, in bf16 21%. So a run is refused only for less than this of its bytes.
_COMPRESSED = 0.75


class Need(NamedTuple):
    """What a run writes into a folder: in words, its bytes at least, and what makes it less."""

    folder: pathlib.Path
    what: str
    nbytes: float
    way_out: str


def check(program: program_lib.Program, folder: pathlib.Path, *, step: int, saved: int) -> None:
    """Checks that the disks have room. All processes must call it.

    Args:
      program: the run's.
      folder: its WORKDIR, which need not exist.
      step: the one that it begins with.
      saved: checkpoints that are there.

    Raises:
      UserError: they have not, or a folder cannot be written. The line names the needed and the free bytes, the folder, and the way out.
    """
    by_disk: dict[int, list[Need]] = {}
    for need in _needs(program, folder, step, saved):
        place = files.nearest(need.folder)
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(
                f"{need.folder}: {place} is not writable for this user; give write access or {need.way_out}"
            )
        by_disk.setdefault(os.stat(place).st_dev, []).append(need)
    for needs in by_disk.values():
        place, needed = needs[0].folder, sum(need.nbytes for need in needs)
        free = shutil.disk_usage(files.nearest(place)).free
        if free < needed:
            what, ways = " and ".join(need.what for need in needs), " or ".join(need.way_out for need in needs)
            raise UserError(
                f"{place}: {what} take at least {display.human(needed)}, and its disk has {display.human(free)} free; free some, {ways}"
            )


def most_saved(config: settings_lib.Config, step: int, saved: int) -> int:
    """Returns how many more checkpoints than now a run may hold at once: the new one is complete before the oldest goes, and those of the
    lowest evaluation loss may be older."""
    if step >= config.steps:
        return 0
    keep = config.checkpoint
    due = _times(keep.every, step, config.steps - 1) + keep.at_end
    if config.evaluate.patience:
        due += _times(config.evaluate.every, step, config.steps - 1)
    best = 0 if _unranked(config) else keep.keep_best
    return min(due, max(1, keep.keep_last + best + 1 - saved))


# why checkpoints before the last step have no loss of an evaluation, which ends no run either
_unranked = functools.partial(settings_lib.why_unread, place="evaluate.patience")


def _times(every: int, after: int, to: int) -> int:
    return to // every - after // every if every else 0


def _needs(program: program_lib.Program, folder: pathlib.Path, step: int, saved: int) -> Iterator[Need]:
    config = program.config
    if count := most_saved(config, step, saved):
        each = _COMPRESSED * _nbytes(program.logical_abstract_state)
        fewer = (
            f" or lower config.checkpoint.keep_last{'' if _unranked(config) else ' or keep_best'}" if count > 1 else ""
        )
        what = f"{count} checkpoints" if count > 1 else "a checkpoint"
        yield Need(folder, what, count * each, f"choose another --workdir{fewer}")
    if config.export.format != "none":
        yield Need(folder / "export", "the export", _exported(program), 'set config.export.format="none"')
    if step < config.steps and storage.on_disk(program.partition):
        held = storage.disk_bytes(program.partition) * budget.processes_here()
        where = pathlib.Path(program.partition.offload.nvme_path).absolute()
        yield Need(where, "offloaded state", held, "choose another config.offload.nvme_path")


def _exported(program: program_lib.Program) -> int:
    """Returns the bytes of the exported tensors."""
    config, weights = program.config, program.weights
    if config.export.format == "peft":
        return _nbytes(program.trained_part(program.partition.abstract_state).params)
    stored = jnp.bfloat16 if weights.source is None else weights.source.dtype
    dtype = jnp.dtype(huggingface.DTYPES.get(config.export.dtype, stored))
    leaves = tree.flatten(family_lib.abstract_params(weights.family.parts, weights.model))
    return dtype.itemsize * sum(tree.size(leaf) for _, leaf in leaves)


def _nbytes(abstract: tree.PyTree) -> int:
    return sum(tree.nbytes(leaf) for _, leaf in tree.flatten(abstract))
