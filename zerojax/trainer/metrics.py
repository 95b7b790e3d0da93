"""Records a run's metrics. This module holds the log and its reader.

A line of WORKDIR/metrics.jsonl is {"step": s, "loss": ..., ...}. JSON has no NaN, so a value that is not finite
is written as null, and "not_finite" holds the value: {"step": 3, "loss": null, "not_finite": {"loss": "nan"}}.
"""

import contextlib
import json
import math
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

from zerojax import bounded, files
from zerojax.errors import UserError
from zerojax.trainer import events, run_totals, trackers

FILE = "metrics.jsonl"
_MOST_BYTES = 2**31  # of it, which is read as a whole
TENSORBOARD = "tensorboard"  # the folder of its events
# Of each source of a mixture: its own loss, and its share of the tokens.
LOSS_OF, SHARE_OF = "loss/", "share/"


class MetricsLog:
    """Appends steps to WORKDIR/metrics.jsonl, and to what `config.metrics.to` names; a no-op where `enabled` is False.

    Each line is flushed at once, so a killed process can truncate only the last line.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        enabled: bool,
        tensorboard: bool = True,
        clients: trackers.Outlets | None = None,
    ) -> None:
        """Takes the run's folder, whether WORKDIR/tensorboard is written too, and the clients."""
        self._has_events, self._clients = tensorboard, clients
        self._workdir = pathlib.Path(workdir)
        self._enabled = enabled
        self._first_step: int | None = None  # of this part of a resumed run
        self._lines: Any = None
        self._events: events.Events | None = None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The error that ends the run matters more
        with contextlib.suppress(UserError) if kind else contextlib.nullcontext():
            self.close()
        if self._clients is not None:
            self._clients.close(is_failed=kind is not None)

    def resume_at(self, curve: run_totals.LossCurve, *, is_unevaluated: bool = False) -> None:
        """Removes all lines after the last step of `curve` and a truncated last line, so that no step appears twice.

        With `is_unevaluated` also the evaluation of that step: the run that resumes repeats it, and an earlier one may have done so.
        Warns of losses that are others than those of `curve`, which the checkpoint holds. Call it before the first `write`.

        Raises:
          UserError: the file cannot be read or rewritten.
        """
        path, step = self._workdir / FILE, curve.last
        if not self._enabled:
            return
        self._first_step = step + 1
        if not path.exists():
            return
        kept = [
            record
            for record in read(self._workdir)
            if record["step"] <= step and not (is_unevaluated and record["step"] == step and _is_evaluation(record))
        ]
        if _is_other(kept, curve):
            warnings.warn(
                f"{path}: the losses of steps {curve.first} to {step} are not those of this run, whose hash its checkpoint holds; the run "
                "goes on, and the file may have been altered",
                stacklevel=1,
            )
        with files.writing(path):
            files.replace(path, "".join(map(_line, kept)))

    def open(self) -> None:
        """Opens the files and the clients, which starts their imports. Without this call the first `write` opens the files alone.

        Raises:
          UserError: the disk is full or cannot be written.
        """
        if self._enabled:
            with files.writing(self._workdir / FILE):
                self._opened()
            if self._clients is not None:
                self._clients.open()

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Appends the `values` of `step`.

        Raises:
          UserError: the disk is full or cannot be written. Later calls then write nothing.
        """
        self._append(step, _as_json(values), values)

    def _append(self, step: int, record: Mapping[str, Any], shown: Mapping[str, float | int | str]) -> None:
        if not self._enabled:
            return
        try:
            with files.writing(self._workdir / FILE):
                lines, events_file = self._opened()
                lines.write(_line({"step": step, **record}).encode())
                lines.flush()
                if events_file is not None:
                    events_file.write(step, shown)
            if self._clients is not None:
                numbers = {name: value for name, value in shown.items() if not isinstance(value, str)}
                if numbers:
                    self._clients.write(step, numbers)
        except UserError:
            with contextlib.suppress(UserError):
                self.close()
            raise

    def note(self, step: int, name: str, value: object, shown: str) -> None:
        """Appends a JSON value of `step` under a name, and `shown`, in Markdown, as a text of TensorBoard.

        Raises:
          UserError: as `write`.
        """
        self._append(step, {name: value}, {name: shown})

    def flush(self) -> None:
        """Flushes the event file to disk, so that the log is complete up to a checkpoint.

        Raises:
          UserError: the disk is full.
        """
        if self._events is not None:
            with files.writing(self._workdir / TENSORBOARD):
                self._events.flush()

    def close(self) -> None:
        """Writes pending values and closes the files. A later `write` does nothing.

        Raises:
          UserError: the disk is full.
        """
        self._enabled = False
        opened = [file for file in (self._lines, self._events) if file is not None]
        self._lines = self._events = None
        # The stack closes each file, even if another fails to close
        with files.writing(self._workdir), contextlib.ExitStack() as stack:
            for file in opened:
                stack.callback(file.close)

    def _opened(self) -> tuple[Any, events.Events | None]:
        if self._lines is None:
            if self._has_events:
                with files.writing(self._workdir / TENSORBOARD):
                    self._events = events.Events(self._workdir / TENSORBOARD, self._first_step)
            self._lines = open(self._workdir / FILE, "ab")  # noqa: SIM115
        return self._lines, self._events


def read(workdir: str | os.PathLike[str]) -> list[dict]:
    """Returns the records of WORKDIR/metrics.jsonl in order, without a truncated last line.

    Raises:
      UserError: the file cannot be read, or a line before the last is not a record.
    """
    path = pathlib.Path(workdir) / FILE
    with files.reading(path, "give the workdir of a run"):
        lines = bounded.read_bytes(path, _MOST_BYTES).split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], 1):  # the text after the last newline is empty or truncated
        try:
            record = json.loads(line, parse_constant=lambda name: None)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a line of JSON; remove that line") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f'{path}:{number}: not the record of a "step"; remove that line')
        records.append(record)
    return records


def without_absent(numbers: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics of a step without the losses of sources of which it had no token."""
    return {
        name: value
        for name, value in numbers.items()
        if not name.startswith(LOSS_OF) or numbers.get(SHARE_OF + name.removeprefix(LOSS_OF))
    }


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    """Returns whether a record tells of an evaluation."""
    return any(name.startswith("eval_") or name == "answers" for name in record)


def _is_other(records: list[dict], curve: run_totals.LossCurve) -> bool:
    """Returns whether records hold the loss of each step of a curve, and others than the curve's."""
    losses = {record["step"]: record for record in records if "loss" in record and record["step"] >= curve.first}
    if not curve.sha256 or list(losses) != list(range(curve.first, curve.last + 1)):
        return False
    found = run_totals.LossCurve(curve.first)
    try:
        for step, record in losses.items():
            value = record["loss"]
            found.add(step, float(record["not_finite"]["loss"] if value is None else value))
    except (KeyError, TypeError, ValueError, OverflowError):
        return True
    return found.sha256 != curve.sha256


def device_memory() -> dict[str, int]:
    """Returns the bytes in use on this process's first device, current and peak, or {} if the backend does not report them."""
    import jax  # here, since `zerojax show` reads the log without it

    stats = jax.local_devices()[0].memory_stats() or {}
    names = {"device_bytes_in_use": "bytes_in_use", "device_peak_bytes": "peak_bytes_in_use"}
    return {name: stats[key] for name, key in names.items() if key in stats}


def _as_json(values: Mapping[str, float | int]) -> dict[str, Any]:
    """Returns Python numbers, with None for values that are not finite, and those values by name."""
    plain = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
    broken = {name: str(value) for name, value in plain.items() if not math.isfinite(value)}
    finite = {name: None if name in broken else value for name, value in plain.items()}
    return {**finite, "not_finite": broken} if broken else finite


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
