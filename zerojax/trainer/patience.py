"""Ends a run early. This module counts the evaluations since the lowest held-out loss.

The count is saved with each checkpoint, so that a run that resumes ends at the step at which it would have ended without a stop.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

META = "patience"  # in `meta`: the lowest loss so far, and the evaluations since


@dataclasses.dataclass
class EarlyStop:
    """Counts evaluations without a lower loss."""

    most: int  # the number of them that ends the run; 0 never ends it
    lowest: float = math.inf  # the lowest held-out loss so far
    since: int = 0  # the evaluations after it

    @classmethod
    def resumed(cls, most: int, saved: Mapping[str, Any] | None) -> "EarlyStop":
        """Returns the count that a checkpoint's `meta` holds, or a new one."""
        found = (saved or {}).get(META)
        return cls(most) if found is None else cls(most, float(found["lowest"]), int(found["since"]))

    def count(self, loss: float | None) -> bool:
        """Counts an evaluation; None is none. Returns whether its loss is the lowest so far."""
        if loss is None or not self.most:
            return False
        is_lowest = loss < self.lowest
        self.lowest, self.since = (loss, 0) if is_lowest else (self.lowest, self.since + 1)
        return is_lowest

    @property
    def is_over(self) -> bool:
        """Returns whether the run is to end."""
        return 0 < self.most <= self.since

    @property
    def line(self) -> str:
        """Returns why the run ends."""
        return f"{self.since} evaluations without a loss below {self.lowest:.4f}: the run ends (config.evaluate.patience={self.most})"

    def as_meta(self) -> dict[str, Any]:
        """Returns what a checkpoint's `meta` holds; nothing before the first evaluation."""
        return {META: {"lowest": self.lowest, "since": self.since}} if self.lowest < math.inf else {}
