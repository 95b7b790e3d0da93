"""Sums up a run's steps. This module keeps what the run card tells of them: the hash of the losses, the median time and the skipped steps.

The losses' hash is a chain of SHA-256, so that a checkpoint can hold it and a resumed run can go on with it:

    h(0) = "",   h(n) = SHA-256(h(n - 1), the four bytes of the nth loss as a little-endian float32)
"""

import dataclasses
import hashlib
import math
import re
import statistics
import struct
from collections.abc import Mapping
from typing import Any, Self

WARM_UP = 2  # steps of each start that are slower
_NAN = struct.pack("<f", math.nan)


@dataclasses.dataclass
class LossCurve:
    """The losses of the steps `first` to `last`, as a hash in hex; "" before the first loss."""

    first: int = 1
    last: int = 0
    sha256: str = ""

    def add(self, step: int, loss: float) -> None:
        """Adds the loss of a step, a float32 number, to the hash."""
        bits = _NAN if math.isnan(loss) else struct.pack("<f", loss)
        self.sha256 = hashlib.sha256(bytes.fromhex(self.sha256) + bits).hexdigest()
        self.last = step


class Tally:
    """What a run has measured so far.

    Attributes:
      curve: the losses since the beginning of the run, or since the checkpoint of a version that kept no hash.
      skipped: steps skipped since then because their gradients overflowed.
      loss, eval_loss: the last ones; None before.
    """

    def __init__(self, start: int = 0) -> None:
        """Begins after step `start`."""
        self.curve, self.skipped = LossCurve(start + 1, start), 0
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self._start = start
        self._seconds: list[float] = []

    @classmethod
    def resumed(cls, start: int, saved: Mapping[str, Any] | None) -> Self:
        """Returns the tally of a run that begins after step `start`, with the `meta` of its checkpoint, if there is one."""
        found, before = cls(start), (saved or {}).get("tally")
        if _is_valid(before, start):
            assert isinstance(before, Mapping)
            found.curve = LossCurve(before["first_step"], start, before["losses_sha256"])
            found.skipped = before["skipped_steps"]
        return found

    def as_meta(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON: the same on all processes."""
        return {
            "first_step": self.curve.first,
            "last_step": self.curve.last,
            "losses_sha256": self.curve.sha256,
            "skipped_steps": self.skipped,
        }

    def add(self, step: int, loss: float, seconds: float, *, is_skipped: bool = False, is_timed: bool = True) -> None:
        """Adds a step. `is_timed` is False if something else took part of its `seconds`."""
        self.curve.add(step, loss)
        self.loss = loss
        self.skipped += is_skipped
        if is_timed and step > self._start + WARM_UP:
            self._seconds.append(seconds)

    def timing(self, tokens: int) -> dict[str, Any]:
        """Returns the median step of this start, without its first two steps. `tokens` are those of a step."""
        median = statistics.median(self._seconds) if self._seconds else None
        return {
            "timed_steps": len(self._seconds),
            "step_seconds": median,
            "tokens_per_second": tokens / median if median else None,
        }


def _is_valid(before: Any, start: int) -> bool:
    """Returns whether a checkpoint's tally can be continued after step `start`."""
    return (
        isinstance(before, Mapping)
        and before.get("last_step") == start
        and all(isinstance(before.get(name), int) for name in ("first_step", "skipped_steps"))
        and isinstance(before.get("losses_sha256"), str)
        and re.fullmatch("([0-9a-f]{64})?", before["losses_sha256"]) is not None
    )
