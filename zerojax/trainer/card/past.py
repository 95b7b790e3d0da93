"""Losses of a past run, kept to be compared with on other machines. This module writes, finds and reads their files.

A file holds the settings that differ from the defaults, the loss and the gradient norm of each step, and the machine and the versions that
gave them. Its last field is the checksum of the others. Files that the package ships are in `FOLDER`, known by name: "cpu", of a dense
model, "cpu_experts", and "h200_bf16", of the dense one in bf16 on a GPU.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from zerojax import bounded, errors, files
from zerojax.checkpoint import checksums
from zerojax.errors import UserError
from zerojax.trainer import settings as settings_lib

FOLDER = pathlib.Path(__file__).parent / "pasts"
SCHEMA = 1
DIGITS = 9  # of a number: a float32 has no more


@dataclasses.dataclass(frozen=True)
class PastRun:
    """What a run gave.

    Attributes:
      config: {place: value} of the settings that differ from the defaults.
      losses, norms: of each step.
      devices, versions: as in a run card.
      settings: the names of the settings of `zerojax verify` that gave these losses, within its tolerance.
    """

    config: Mapping[str, Any]
    losses: list[float]
    norms: list[float]
    devices: Mapping[str, Any]
    versions: Mapping[str, str]
    settings: list[str]

    @property
    def flags(self) -> list[str]:
        """The flags of a run with these settings."""
        return ["--config=base", *(f"--config.{place}={value}" for place, value in self.config.items())]

    @property
    def machine(self) -> str:
        """The machine in words."""
        return f"{self.devices['count']} x {self.devices['kind']}, jax {self.versions.get('jax', '?')}"


def differing(config: settings_lib.Config) -> dict[str, Any]:
    """Returns {place: value} of the settings that differ from the defaults."""
    found = {}
    for place, declared in settings_lib.table().items():
        value: Any = config
        for name in place.split("."):
            value = getattr(value, name)
        if declared.default is not None and value != declared.default:
            found[place] = list(value) if isinstance(value, tuple) else value
    return found


def names() -> list[str]:
    """Returns the names of the files that the package ships."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def write(path: str, past: PastRun) -> None:
    """Replaces a file.

    Raises:
      UserError: it cannot be written.
    """
    rounded = {name: [float(f"{number:.{DIGITS}g}") for number in getattr(past, name)] for name in ("losses", "norms")}
    values = {"schema": SCHEMA, **dataclasses.asdict(past), **rounded}
    values[checksums.CRC32] = checksums.of_values(values)
    with files.writing(path):
        files.replace(path, json.dumps(values, indent=1) + "\n")


def read(place: str) -> PastRun:
    """Reads a file, or one that the package ships, by its name.

    Raises:
      UserError: there is none, or it is damaged, altered, or of another version. The line names it.
    """
    path = FOLDER / f"{place}.json" if place in names() else pathlib.Path(place)
    with files.reading(path, "give this user read access", "is not JSON; write it again with --save"):
        try:
            found = bounded.parse_json(bounded.read_bytes(path))
        except FileNotFoundError as error:
            known = errors.choose(place, names())
            raise UserError(
                f"--against: {place!r} is no file, and not shipped; {known}, or write one with --save"
            ) from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise UserError(f"{path}: holds no losses of a past run that this version reads; write it again with --save")
    if checksums.CRC32 not in found or checksums.is_altered(found):
        raise UserError(f"{path}: is altered (its checksum differs); write it again with --save")
    fields: dict[str, Any] = {field.name: found.get(field.name) for field in dataclasses.fields(PastRun)}
    past = PastRun(**fields)
    if not past.losses or len(past.losses) != len(past.norms) or not all(map(math.isfinite, past.losses)):
        raise UserError(f"{path}: lacks losses or norms of some steps; write it again with --save")
    return past
