"""Computes the log-probabilities of all pairs under the weights that a run starts from. This module keeps them in a file of the run.

A run that resumes reads the file, since its weights are others then.
"""

import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from zerojax import files
from zerojax.data.pairs import rows, splits
from zerojax.errors import UserError
from zerojax.inference import generate
from zerojax.launch import processes, watch
from zerojax.models import family as family_lib
from zerojax.trainer import preferences
from zerojax.trainer import program as program_lib
from zerojax.tree import PyTree
from zerojax.zero.offload import fetched_params

FILE = "reference.npz"


def restore(pairs: splits.Splits, folder: pathlib.Path) -> None:
    """Reads the log-probabilities that an earlier start of a run has written.

    Raises:
      UserError: the file is lost, damaged or of other pairs.
    """
    path = folder / FILE
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            for name, split in _splits(pairs):
                if (
                    found["pairs"] != pairs.fingerprint + pairs.of_held_out
                    or found[name].shape != split.reference.shape
                ):
                    raise ValueError("it is of other pairs")
                split.reference[:] = found[name]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: the log-probabilities of the first weights cannot be read ({error}), and the run is past these; restore the file, or "
            "choose another --workdir"
        ) from error


def make(program: program_lib.Program, pairs: splits.Splits, params: PyTree, folder: pathlib.Path) -> None:
    """Computes the log-probabilities, puts them into the rows and writes the file. All processes must call it, with the first weights."""
    log_probs, held = _program(program), program.forward.params(params)
    size = program.sizes.global_batch_size // program.forward.passes
    for _, split in _splits(pairs):
        for at in range(0, len(split), size):
            watch.at(watch.EVALUATE)
            made = [split.arrays(number) for number in range(at, at + size)]
            batch = {name: np.stack([row[name] for row in made]) for name in made[0]}
            found = np.asarray(log_probs(held, generate.sharded_rows(batch, program.forward.partition.mesh)))
            split.reference[at : at + size] = found[: len(split) - at]
    if processes.is_primary():
        with files.writing(folder / FILE, "choose another --workdir"), files.replacing(folder / FILE) as new:
            arrays: dict[str, Any] = {name: split.reference for name, split in _splits(pairs)}
            with open(new, "wb") as file:
                np.savez(file, pairs=pairs.fingerprint + pairs.of_held_out, **arrays)


def _splits(pairs: splits.Splits) -> Iterator[tuple[str, rows.Pairs]]:
    for name, split in (("train", pairs.train), ("held_out", pairs.held_out)):
        if isinstance(split, rows.Pairs):
            yield name, split


def _program(program: program_lib.Program) -> Callable[[PyTree, dict[str, jax.Array]], jax.Array]:
    """Returns (params, batch) -> float32[pairs, answers]."""
    family, model = program.family, program.model
    how = family_lib.gathering(family, model, program.config.policy.compute_dtype)

    def of_pairs(params: PyTree, batch: dict[str, jax.Array]) -> jax.Array:
        return preferences.log_probs(family, model, params, batch)

    return fetched_params.on_all(of_pairs, program.forward.partition, **how)
