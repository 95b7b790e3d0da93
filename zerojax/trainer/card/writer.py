"""Writes the run card of a run while it runs. This module knows how the run began, how each start of it ended, and what is known now."""

import contextlib
import datetime
import pathlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from zerojax import errors
from zerojax.errors import UserError
from zerojax.launch import ending
from zerojax.trainer import run_totals as tally_lib
from zerojax.trainer.card import document

_SIGNALLED = range(129, 160)  # statuses of a process that a signal ended


class Card:
    """The card of one start of a run. A context manager: an error that leaves its block, and the end of the process, end the card.

    A start that is refused before `begin` leaves the card of the run as it was.
    """

    def __init__(self, folder: pathlib.Path, *, steps: int, tally: tally_lib.Tally, enabled: bool) -> None:
        """Takes the run's folder, its last step and what it has measured. Writes nothing unless `enabled`."""
        self._folder, self._steps, self._tally, self._enabled = folder, steps, tally, enabled
        self._start = tally.curve.last
        self._fixed: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}  # losses of the checkpoint that the run resumes from
        self._parts: list[dict[str, Any]] = []
        self._measure: Callable[[], Mapping[str, Any]] = dict
        self._forget: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        self._forget = ending.before_end(self._interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._forget()
        if isinstance(error, Exception):
            line = str(error) if isinstance(error, UserError) else errors.kind_and_line(error)
            self._end_quietly(document.FAILED, line)

    def begin(self, fixed: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]], saved: pathlib.Path) -> None:
        """Writes the card before the first step.

        Args:
          fixed: fields that no step changes.
          measure: returns the fields that every step changes, beyond those of the tally.
          saved: the folder of the checkpoint that the run resumes from. Its card tells of earlier starts if the run's is lost.
        """
        at_start = document.read_if_there([saved]) if self._enabled else None
        before = document.read_if_there([self._folder, saved]) if self._enabled else None
        self._fixed, self._measure = dict(fixed), measure
        self._last = {name: (at_start or {}).get(name) for name in ("loss", "eval_loss")}
        self._parts = [_over(part) for part in _parts(before)]
        here = {name: fixed[name] for name in ("processes", "devices") if name in fixed}
        self._parts.append({"first_step": self._start + 1, "began": _now(), **here})
        self._write(document.RUNNING, "")

    def checkpoint(self) -> str:
        """Writes the card of a run whose state is about to be saved, and returns its text, "" where this process writes none."""
        return self._write(document.RUNNING, "")

    def end(self, status: str, line: str = "") -> None:
        """Writes the card of a run that ends, with the reason unless it is finished.

        Raises:
          UserError: the disk is full or cannot be written.
        """
        if self._fixed is not None:
            self._write(status, line)
            self._fixed = None
            return
        before = document.read_if_there([self._folder]) if self._enabled else None
        if before is not None and before.get("status") != status:  # no step was left to take
            parts = _parts(before)
            parts = [*parts[:-1], *map(_over, parts[-1:])]
            eval_loss = _either(self._tally.eval_loss, before.get("eval_loss"))
            card = {**before, "status": status, "line": line, "eval_loss": eval_loss, "parts": parts}
            document.write(self._folder, card)

    def _end_quietly(self, status: str, line: str) -> None:
        """Ends a card that has begun. The error that ends the run matters more than one of the card."""
        if self._fixed is not None:
            with contextlib.suppress(Exception):
                self.end(status, line)

    def _interrupted(self, status: int, line: str) -> None:
        """Ends the card just before this process ends by `ending.leave`, on a signal or after another process ended."""
        how = document.STOPPED if status in _SIGNALLED else document.FAILED
        self._end_quietly(how, line.removeprefix("zerojax: ") or f"ended with status {status}")

    def _write(self, status: str, line: str) -> str:
        if not self._enabled or self._fixed is None:
            return ""
        curve, now = self._tally.curve, _now()
        self._parts[-1] |= {"last_step": curve.last, "written": now, "status": status, "line": line}
        card = {
            "schema": document.SCHEMA,
            "status": status,
            "line": line,
            "step": curve.last,
            "steps": self._steps,
            "written": now,
            "loss": _either(self._tally.loss, self._last["loss"]),
            "eval_loss": _either(self._tally.eval_loss, self._last["eval_loss"]),
            "losses": {"first_step": curve.first, "last_step": curve.last, "sha256": curve.sha256},
            **self._measure(),
            "skipped_steps": self._tally.skipped,
            "resumes": len(self._parts) - 1,
            **self._fixed,
            "parts": self._parts,
        }
        document.write(self._folder, card)
        return document.text(card)


def _either(now: Any, before: Any) -> Any:
    return before if now is None else now


def _parts(card: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the earlier starts that a card lists."""
    found = (card or {}).get("parts")
    return [dict(part) for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []


def _over(part: dict[str, Any]) -> dict[str, Any]:
    """Returns an earlier start. One that still ran when it was last written was killed."""
    return part | {"status": document.KILLED} if part.get("status") == document.RUNNING else part


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
