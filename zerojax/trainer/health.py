"""Says whether a run is sound. This module judges each step by its numbers, and ends a run with the name of its last good checkpoint."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.zero import loss_scale


@dataclasses.dataclass(frozen=True)
class Flaw:
    """What is wrong with a step: whether it was skipped, and whether it overflowed at the smallest loss scale."""

    why: str
    is_skipped: bool
    is_exhausted: bool = False


class Health:
    """Counts the steps that were skipped, and remembers the last good one.

    Attributes:
      last_good: the last step whose loss and gradients were finite.
      skipped: steps skipped so far, since their gradients overflowed.
    """

    def __init__(
        self, params: Any, saver: checkpointer.Checkpointer, *, start: int, learning_rate: float, min_scale: float
    ):
        """Begins after step `start`; `params` is the tree of weights, abstract or not; the rates are the config's, for errors."""
        self.last_good, self.skipped = start, 0
        self._params, self._saver = params, saver
        self._learning_rate, self._min_scale = learning_rate, min_scale

    def flaw(self, numbers: Mapping[str, float]) -> Flaw | None:
        """Returns what is wrong with a step of these metrics; None where nothing is."""
        overflow = loss_scale.overflow(numbers, self._params)
        if overflow is not None:
            return Flaw(overflow, is_skipped=True, is_exhausted=bool(numbers["is_exhausted"]))
        bad = next((name for name in ("loss", "grad_norm") if not math.isfinite(numbers[name])), None)
        return Flaw(f"{bad} is {numbers[bad]}", is_skipped=False) if bad else None

    def count(self, step: int, flaw: Flaw | None) -> None:
        """Counts a step as good or as skipped.

        Raises:
          UserError: the run cannot go on after it.
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
        """Returns the error to raise; weights are good that gave the step after them a finite loss."""
        self._saver.wait()
        good = max((saved for saved in self._saver.steps() if saved < self.last_good), default=None)
        kept = "no checkpoint before it is good" if good is None else f"the last good checkpoint is of step {good}"
        return UserError(
            f"step {step}: {why}; {kept} in {self._saver.directory}; "
            f"{way_out and way_out + ', or '}lower config.optimizer.learning_rate (now {self._learning_rate}) and start anew, "
            "or look at the data"
        )

    def summary(self) -> str | None:
        """Returns a line about the steps that were skipped, if any were."""
        if not self.skipped:
            return None
        rest = "" if self.last_good else ", and none was taken: config.loss_scale starts too high for so few steps"
        return f"{self.skipped} steps were skipped, since their gradients overflowed{rest}"
