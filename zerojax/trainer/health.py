"""Checks that a run is healthy. This module judges each step by its metrics, and ends a run with the name of its last good checkpoint."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.zero import loss_scale


@dataclasses.dataclass(frozen=True)
class Flaw:
    """The reason why a step is bad, whether it was skipped, and whether it overflowed at the smallest loss scale."""

    why: str
    is_skipped: bool
    is_exhausted: bool = False


class Health:
    """Counts the skipped steps, and remembers the last good step.

    Attributes:
      last_good: the last step whose loss and gradients were finite.
      skipped: steps skipped so far because their gradients overflowed.
    """

    def __init__(
        self, params: Any, saver: checkpointer.Checkpointer, *, start: int, learning_rate: float, min_scale: float
    ):
        """Begins after step `start`. `params` is the weight tree, abstract or not. Errors quote `learning_rate` and `min_scale`."""
        self.last_good, self.skipped = start, 0
        self._params, self._saver = params, saver
        self._learning_rate, self._min_scale = learning_rate, min_scale

    def flaw(self, numbers: Mapping[str, float]) -> Flaw | None:
        """Returns the flaw of a step with these metrics, or None if the step is good."""
        overflow = loss_scale.overflow(numbers, self._params)
        if overflow is not None:
            return Flaw(overflow, is_skipped=True, is_exhausted=bool(numbers["is_exhausted"]))
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(numbers[name])), None)
        return Flaw(f"{bad} is {numbers[bad]}", is_skipped=False) if bad else None

    def count(self, step: int, flaw: Flaw | None) -> None:
        """Counts a step as good or as skipped.

        Raises:
          UserError: the run cannot continue after this step.
        """
        if flaw is None:
            self.last_good = step
        elif flaw.is_exhausted:
            way_out = f"lower config.loss_scale.min_scale (now {self._min_scale:g})"
            raise self.end(step, f"{flaw.why}, which is the smallest", way_out)
        elif flaw.is_skipped:
            self.skipped += 1
        else:
            raise self.end(step, flaw.why)

    def end(self, step: int, why: str, way_out: str = "") -> UserError:
        """Returns the error to raise. A checkpoint is good if the step after it had a finite loss."""
        self._saver.wait()
        good = max((saved for saved in self._saver.steps() if saved < self.last_good), default=None)
        kept = "no checkpoint before it is good" if good is None else f"the last good checkpoint is of step {good}"
        return UserError(
            f"step {step}: {why}; {kept} in {self._saver.directory}; "
            f"{way_out and way_out + ', or '}lower config.optimizer.learning_rate (now {self._learning_rate}) and start over, "
            "or check the data"
        )

    def summary(self) -> str | None:
        """Returns a line about the skipped steps, or None if there were none."""
        if not self.skipped:
            return None
        rest = (
            ""
            if self.last_good
            else "; no step was taken, because config.loss_scale.init_scale is too high for so few steps"
        )
        return f"{self.skipped} steps were skipped, since their gradients overflowed{rest}"
