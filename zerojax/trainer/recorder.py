"""Records each step. This module logs, shows and checks a step's metrics one step late, so that no device waits."""

import collections
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zerojax.train_state import State
from zerojax.trainer import health as health_lib
from zerojax.trainer import metrics, progress, timing
from zerojax.trainer import run_totals as tally_lib
from zerojax.zero.update import loss_scale

# In a step's line, where a step has them. The loss of rewarded answers is about 0 whatever was learnt.
LATELY = 5  # steps whose median tells tokens_per_second: a busy host reads the results of two steps at once
BEFORE_STEP = ("rollout_seconds", "reward_seconds", "log_prob_seconds")  # phases of a step that makes its batch first
TRAIN_WAITS = "train_wait_seconds"  # that one in place of these, where other devices make the batch
SHOWN = ("loss", "reward", "reward_margin", "grad_norm", "tokens_per_second")


class Recorder:
    """Records steps in order, with the time of each.

    The caller owns the log and the display, and closes them.

    Attributes:
      logged: the steps logged since the beginning of the run, or None if an older checkpoint does not hold it.
      tally: what the run card tells of the steps.
    """

    def __init__(
        self,
        log: metrics.MetricsLog,
        shown: progress.Progress,
        health: health_lib.Health,
        *,
        tokens: int,
        is_logged: Callable[[int], bool],
        logged: int | None = 0,
        tally: tally_lib.Tally | None = None,
    ):
        """Writes steps with `is_logged(step)` or a flaw to `log`, after `logged` earlier ones. A step trains on `tokens` tokens."""
        self.logged, self.tally = logged, tally or tally_lib.Tally()
        self._log, self._shown, self._health = log, shown, health
        self._tokens, self._is_logged = tokens, is_logged
        self._reader = timing.LateReader()
        self._after: dict[int, Callable[[], None]] = {}
        self._hear: list[Callable[[Mapping[str, float]], None]] = []
        self._own = timing.OwnTime()
        self._clock = 0.0  # the arrival time of the previous step's metrics, or the end of what came after it
        self._paused = 0.0  # seconds of that
        self._lately = collections.deque[float](maxlen=LATELY)
        self.peak_at_start: int | None = None  # bytes of device memory, before the first step
        # The phase of a profiled step that differs most from its foretold time
        self.differs: dict[str, Any] | None = None

    def say(self, text: str) -> None:
        """Prints a line above the display."""
        self._shown.print(text)

    def after(self, step: int, action: Callable[[], None]) -> None:
        """Runs `action` when `step` is recorded."""
        self._after[step] = action

    def listen(self, hear: Callable[[Mapping[str, float]], None]) -> None:
        """Calls `hear` with the metrics of each step that is recorded."""
        self._hear.append(hear)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs numbers of a step that is recorded."""
        self._log.write(step, numbers)

    def note(self, step: int, name: str, value: object, shown: str) -> None:
        """Logs a JSON value under a name, and `shown`, in Markdown, in TensorBoard."""
        self._log.note(step, name, value, shown)

    def open(self, *, is_over: bool, is_unevaluated: bool = False) -> None:
        """Removes lines after the last step from the log, and its evaluation if that is to be repeated. Opens the log unless the run is
        over."""
        self._log.resume_at(self.tally.curve, is_unevaluated=is_unevaluated)
        if not is_over:
            self._log.open()

    def begin(self) -> None:
        """Starts the clocks and reads the device's memory, before the first step."""
        self.peak_at_start = metrics.device_memory().get("device_peak_bytes")
        self._own = timing.OwnTime()
        self._clock = time.perf_counter()

    def resume(self) -> None:
        """Restarts the step's clock, so that work between two steps does not count for the next step."""
        now = time.perf_counter()
        self._paused, self._clock = self._paused + now - self._clock, now

    def away(self) -> contextlib.AbstractContextManager[None]:
        """Excludes the time inside the block from `host_seconds`."""
        return self._own.away()

    def push(self, step: int, numbers: dict[str, Any]) -> None:
        """Starts to read a step's metrics, which are scalars on devices, and records the previous step."""
        numbers = numbers | {"host_seconds": self._own.lap()}
        with self._own.away():
            reading = self._reader.push(step, numbers)
        self._record(reading)

    def flush(self) -> None:
        """Waits for the last pushed step and records it."""
        self._record(self._reader.flush())

    def settle(self, state: State) -> None:
        """Waits until all dispatched steps are done and recorded."""
        jax.block_until_ready(state)
        self.flush()
        self.resume()

    def evaluated(self, step: int, loss: float) -> None:
        """Records an evaluation.

        Raises:
          UserError: the loss is not finite.
        """
        self._log.write(step, {"eval_loss": loss})
        self.tally.eval_loss = loss
        if not math.isfinite(loss):
            raise self._health.end(step + 1, f"eval_loss is {loss}")
        self.say(f"step {step}: evaluation loss {loss:.4f} on held-out text")
        self.resume()

    def check(self, step: int, state: State) -> None:
        """Records all pushed steps, and checks the state after `step`, which is about to be saved.

        Raises:
          UserError: a loss, a gradient norm or the state is not finite.
        """
        self.flush()
        self._health.check(step, state)

    def saved(self) -> None:
        """Flushes the log to disk after a checkpoint is saved."""
        self._log.flush()
        self.resume()

    def _record(self, read: timing.Reading | None) -> None:
        """Logs a step's metrics. Ends the run if they are not finite and the step was not skipped."""
        if read is None:
            return
        step, values, arrived = read
        seconds, self._clock = arrived - self._clock, arrived
        self._lately.append(seconds)
        numbers = {name: value for name, value in values.items() if name not in loss_scale.VERDICT}
        numbers = metrics.without_absent(numbers)
        numbers["tokens_per_second"] = self._tokens / statistics.median(self._lately)
        numbers["step_seconds"] = seconds
        apart = numbers.get(TRAIN_WAITS, sum(numbers.get(name, 0.0) for name in BEFORE_STEP))
        if apart or TRAIN_WAITS in numbers:
            numbers["train_seconds"] = seconds - apart
            numbers["train_tokens_per_second"] = self._tokens / max(seconds - apart, 1e-9)
        flaw = self._health.flaw(values)
        is_skipped = flaw is not None and flaw.is_skipped
        self.tally.add(step, values["loss"], seconds, is_skipped=is_skipped, is_timed="profiled" not in values)
        if flaw or self._is_logged(step):
            self._log.write(step, numbers | metrics.device_memory())
            self.logged = None if self.logged is None else self.logged + 1
        if flaw and is_skipped:
            self.say(f"step {step}: skipped, {flaw.why}")
        self._health.count(step, flaw)
        for hear in self._hear:
            hear(values)
        shown = [*SHOWN, *sorted(name for name in numbers if name.startswith(metrics.LOSS_OF))]
        paused, self._paused = self._paused, 0.0
        chosen = {name: numbers[name] for name in shown if name in numbers}
        self._shown.update(step, seconds=seconds, paused=paused, **chosen)
        if action := self._after.pop(step, None):
            action()
