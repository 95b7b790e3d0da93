"""What a client is told of a run, and what it does. This module holds the two types that all clients share."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run, as its first process opens it.

    Attributes:
      project, name: of the run, as people find it there.
      folder: where the client keeps its files.
      run_id: of the run to continue; "" for a new one.
      is_chosen: whether the user gave the id. If not, it is that of an earlier start, and may be gone.
      settings: the config's values by dotted place.
    """

    project: str
    name: str
    folder: pathlib.Path
    run_id: str
    is_chosen: bool
    settings: Mapping[str, Any]


class Client(Protocol):
    """An opened run. Any method may raise anything."""

    run_id: str  # by which a later start continues it

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Writes a step's numbers, which were measured at `seconds` of the clock."""

    def close(self, *, is_failed: bool) -> None:
        """Sends what is left and ends the run."""
