"""Shows the progress of a run. This module draws a bar on a terminal and prints lines elsewhere."""

import math
import sys
import time
from typing import TextIO

import rich.console
import rich.progress

SILENT_SECONDS = 60.0  # without a terminal, a line is printed at least as often, whatever `log_every` is


class Progress:
    """Shows a bar on a terminal, or else a line every `log_every` steps and once a minute. Shows nothing unless `enabled`."""

    def __init__(
        self, steps: int, *, start: int = 0, log_every: int = 1, enabled: bool = True, out: TextIO | None = None
    ) -> None:
        """Takes the total number of `steps` and the number done at the `start`. `out` defaults to stdout."""
        self._steps, self._log_every, self._enabled = steps, log_every, enabled
        self._out = out or sys.stdout
        self._first: int | None = None  # the first step seen, which is slower
        self._taken = 0.0  # seconds of the steps since
        # between these steps: their number, seconds, and those of the longest
        self._pauses, self._paused, self._longest = 0, 0.0, 0.0
        self._shown_at = 0.0  # when the last line was printed
        self._bar: rich.progress.Progress | None = None
        console = rich.console.Console(file=self._out)
        if enabled and (console.is_terminal or console.is_jupyter):
            columns = rich.progress.BarColumn(24), rich.progress.MofNCompleteColumn(), "{task.fields[text]}"
            self._bar = rich.progress.Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=steps, completed=start, text="starting")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, *, seconds: float, paused: float = 0.0, **values: float) -> None:
        """Shows that `step` is done, with `values` by name, as in loss=3.2, tokens_per_second=1.2e5.

        The step took `seconds`. Before it the run `paused`, to evaluate or to save.
        """
        if not self._enabled:
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._shown_at = step, now
        else:
            self._taken, self._paused = self._taken + seconds, self._paused + paused
            self._pauses, self._longest = self._pauses + (paused > 0), max(self._longest, paused)
        words = [f"{name} {_short(value)}" for name, value in values.items()]
        text = "  ".join([*words, f"eta {self._eta(step)}"])
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif step % self._log_every == 0 or step == self._steps or now - self._shown_at >= SILENT_SECONDS:
            self._shown_at = now
            self.print(f"step {step}/{self._steps}  {text}")

    def print(self, text: str) -> None:
        """Prints `text` unchanged above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            print(text, file=self._out, flush=True)

    def _eta(self, step: int) -> str:
        """Returns the time to the last step as h:mm:ss, from the mean step since the first one seen, and from the pauses.

        The longest pause is left out, as in the first of them programs are compiled.
        """
        first = step if self._first is None else self._first
        if step == first:
            return "?"
        pause = (self._paused - self._longest) / max(1, self._pauses - 1)
        seconds = round((self._taken + self._pauses * pause) / (step - first) * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _short(value: float) -> str:
    """Returns four digits: 3.142, 1.2e-05, 12.35k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < math.inf:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
