"""The file of a run card. This module finds it for a run, a checkpoint or a path, and reads and replaces it.

Its last field is the checksum of the others; cards of older code have none.
"""

import json
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from zerojax import bounded, files
from zerojax.checkpoint import checksums
from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError

FILE = step_files.CARD
SCHEMA = 1
RUNNING, FINISHED, STOPPED, FAILED, KILLED = "running", "finished", "stopped", "failed", "killed"


def read(place: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the run card of a run's folder, of a checkpoint's folder, or in a file.

    Raises:
      UserError: there is none, or it is damaged, altered or of a newer version. The line names the file.
    """
    files.check_path(place, "RUN")
    path = pathlib.Path(place)
    path = path / FILE if path.is_dir() else path
    damaged = "is not JSON; name the card of another checkpoint of the run"
    with files.reading(path, "give this user read access", damaged):
        try:
            found = bounded.parse_json(bounded.read_bytes(path))
        except FileNotFoundError as error:
            way_out = "name the folder of a run, or of a checkpoint, that took a step"
            raise UserError(f"{path}: there is no run card; {way_out}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, int):
        raise UserError(f"{path}: is not a run card (it has no schema); name the folder of a run")
    if schema != SCHEMA:
        raise UserError(f"{path}: has schema {schema}, and this version reads {SCHEMA}; use the version that wrote it")
    if checksums.is_altered(found):
        raise UserError(f"{path}: is altered (its checksum differs); name the card of another checkpoint of the run")
    return found


def read_if_there(folders: list[pathlib.Path]) -> dict[str, Any] | None:
    """Returns the card of the first folder that holds a sound one, or None. Warns of one that is not sound."""
    for folder in folders:
        try:
            return read(folder)
        except UserError as error:
            if os.path.lexists(folder / FILE):
                warnings.warn(f"{error}; this run goes on without what it tells of earlier starts", stacklevel=1)
    return None


def text(card: Mapping[str, Any]) -> str:
    """Returns a card as the text of its file. JSON has no NaN and no infinity, so these become text."""
    plain = _plain(card)
    return json.dumps({**plain, checksums.CRC32: checksums.of_values(plain)}, indent=1, allow_nan=False) + "\n"


def write(folder: pathlib.Path, card: Mapping[str, Any]) -> None:
    """Replaces the card of a run's folder, at once.

    Raises:
      UserError: the disk is full or cannot be written.
    """
    with files.writing(folder / FILE):
        files.replace(folder / FILE, text(card))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
