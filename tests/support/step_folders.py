"""Writes folders like those of complete steps. This module needs no arrays and no Orbax."""

import json
import pathlib

from zerojax.checkpoint import files as step_files


def write_step(directory: pathlib.Path, step: int, loss: float | None = None) -> pathlib.Path:
    """Writes the files of a complete step: three items, their sizes and checksums. Returns its folder."""
    unfinished = directory / f"{step}.{step_files.UNFINISHED}-1"
    for name in (*step_files.NEEDED, "state/metadata", *step_files.LATE):
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_text(json.dumps({"eval_loss": loss}))
    step_files.read_back(directory, step)
    unfinished.rename(directory / str(step))
    step_files.seal(directory, step)
    return directory / str(step)
