"""Ties a folder to one run. This module saves the resolved config with the results, and refuses to resume with a different one."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from zerojax import files
from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError
from zerojax.trainer import metrics

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
LOST = {  # file -> what follows if a run has checkpoints and lacks it
    CONFIG_FILE: "nothing shows whether the settings are those of the checkpoints",
    metrics.FILE: "the metrics up to the checkpoint are lost",
}

# Settings that may change when a run resumes: where and how it computes, but not what. `steps` may grow.
FREE = (
    "steps",
    "log_every",
    "emulate_devices",
    "micro_batch_size",
    "grad_accum",
    "precision",
    "reduce_dtype",
    "loss_scale",
    "mesh",
    "zero",
    "model.remat",
    "model.recompute",
    "model.offload",
    "model.attention",
    "data.dir",
    "data.eval_split",
    "evaluate",
    "checkpoint",
    "sample",
    "export",
    "profile",
)


def check(workdir: str | os.PathLike, config: Mapping[str, Any]) -> None:
    """Compares `config`, as nested plain dicts, with the config of the folder's last run.

    Raises:
      UserError: the folder cannot be read or written, or its run has other settings. The line names the first difference.
    """
    folder = pathlib.Path(workdir)
    step_files.check_path(folder.absolute())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / CONFIG_FILE).exists():
            return
        saved = json.loads((folder / CONFIG_FILE).read_text())
    except OSError as error:
        raise UserError(f"--workdir {folder}: cannot be used ({error.strerror}); choose another folder") from error
    except ValueError as error:
        raise UserError(f"{folder / CONFIG_FILE}: is not JSON; restore it, or choose another --workdir") from error
    if not isinstance(saved, Mapping):
        raise UserError(f"{folder / CONFIG_FILE}: is not a saved config; restore it, or choose another --workdir")
    before, now = _flat(saved), _flat(json.loads(json.dumps(config)))
    for place in sorted(before.keys() | now.keys()):
        is_free = any(place == free or place.startswith(free + ".") for free in FREE)
        if not is_free and before.get(place) != now.get(place):
            raise UserError(
                f"--workdir {folder}: was started with config.{place}={before.get(place)!r}, and this run has "
                f"{now.get(place)!r}; use the same value to resume, or another --workdir"
            )


def lost(workdir: str | os.PathLike) -> list[str]:
    """Returns a line for each file that the folder's run wrote and that is missing now."""
    folder = pathlib.Path(workdir)
    if not step_files.steps(folder / CHECKPOINTS):
        return []
    missing = [name for name in LOST if not (folder / name).exists()]
    return [
        f"{folder / name}: is missing beside checkpoints: {LOST[name]}; restore it if there is a copy"
        for name in missing
    ]


def save(workdir: str | os.PathLike, config: Mapping[str, Any]) -> None:
    """Writes the resolved config atomically.

    Raises:
      UserError: the folder cannot be written.
    """
    path = pathlib.Path(workdir) / CONFIG_FILE
    with files.writing(path, "make room, or choose another --workdir"):
        files.replace(path, json.dumps(config, indent=2) + "\n")


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns {"mesh.data": -1, ...}."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
