"""Ties a folder to one run. This module saves the resolved config with the results, and refuses to resume with a different one."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from zerojax import files
from zerojax.errors import UserError

CONFIG_FILE = "config.json"

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
