"""Profiles a few steps of a run. This module starts and stops the profiler, and shows the time by phase.

Perfetto and XProf read the trace in WORKDIR/profile. profile.json holds the table by phase, and of a pipeline profile/schedule.png shows
when its stages ran.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.table import Table

from zerojax import display, errors, files
from zerojax.errors import UserError
from zerojax.hlo import syntax
from zerojax.plan import ledger
from zerojax.profile import breakdown, phases, schedule, traces

FOLDER, FILE = "profile", "profile.json"
SCHEMA = 1


class Profiler:
    """Traces the steps `first` to `first + count - 1` into `folder`. A count of 0 traces none.

    A context manager: its exit stops a trace that is in progress. If `enabled` is False, it traces nothing and only reports when a trace
    would begin and end.

    Attributes:
      first: the first traced step.
    """

    def __init__(self, folder: pathlib.Path, first: int, count: int, *, enabled: bool) -> None:
        self._folder, self._enabled = folder, enabled
        self.first, self._last = first, first + count - 1
        self._is_tracing = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()

    @property
    def folder(self) -> pathlib.Path:
        """Returns the folder of the trace."""
        return self._folder / FOLDER

    def is_missed(self, done: int) -> bool:
        """Returns whether the trace should have begun within the first `done` steps."""
        return self.first <= self._last and self.first <= done

    def begins(self, step: int) -> bool:
        """Returns whether the trace begins before `step`."""
        return step == self.first <= self._last

    def holds(self, step: int) -> bool:
        """Returns whether `step` is traced."""
        return self.first <= step <= self._last

    def ends(self, step: int) -> bool:
        """Returns whether the trace ends after `step`."""
        return step == self._last >= self.first

    def start(self) -> None:
        """Starts tracing. Earlier dispatched work should have finished.

        Raises:
          UserError: the profiler does not start.
        """
        if not self._enabled:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's function calls would fill the trace
        try:
            jax.profiler.start_trace(str(self.folder), profiler_options=options)
        except (RuntimeError, OSError) as error:
            raise _failed(error) from error
        self._is_tracing = True

    def stop(self, sent: ledger.Ledger, programs: Sequence[syntax.Module] = ()) -> breakdown.Profile | None:
        """Stops tracing and writes profile.json, and a picture of a pipeline's schedule. Call it after the traced steps have finished.

        Returns None if this process traced nothing.

        Args:
          sent: the ledger of the compiled step (`plan.ledger`).
          programs: as of `breakdown.profile`.

        Raises:
          UserError: the trace cannot be written.
        """
        if not self._is_tracing:
            return None
        self._is_tracing = False
        try:
            jax.profiler.stop_trace()
            path = traces.newest(self.folder)
            kernels = traces.read(path) if path else []
            found = breakdown.profile(kernels, sent, self.first, self._last, programs)
            if ran := schedule.passes(kernels):
                schedule.draw(ran, self.folder / schedule.FILE)
            files.replace(self._folder / FILE, json.dumps(as_json(found), indent=1) + "\n")
        except (RuntimeError, OSError) as error:
            raise _failed(error) from error
        return found


def check(first: int, count: int, steps: int, others: Mapping[str, int]) -> None:
    """Checks that the run includes the steps to trace, and that nothing else runs between them.

    Args:
      first, count: the first step to trace, and how many.
      steps: the number of steps of the run.
      others: the period in steps of other work between steps, by its name.

    Raises:
      UserError: the run ends before the last traced step, or other work runs between traced steps.
    """
    last = first + count - 1
    traced = f"profile: traces steps {first} to {last}"
    if count and last > steps:
        raise UserError(f"{traced}, and `steps` is {steps}; set `steps={last}` or an earlier `first`")
    for name, every in others.items():
        due = next((step for step in range(first, last) if every and step % every == 0), None)
        if due is not None:
            raise UserError(f"{traced}, and {name}={every} interrupts them after step {due}; set `first={due + 1}`")


def table(found: breakdown.Profile) -> Table:
    """Returns the phases as a table."""
    steps = f"step {found.first}" if found.first == found.last else f"steps {found.first} to {found.last}"
    over = f", mean over {found.devices} devices of this process" if found.devices > 1 else ""
    title = f"Time of a step on a device: {steps}{over}"
    rows = display.table(title, ("phase", "ms", "share", "hidden ms", "kernels"))
    for name, share in found.shares.items():
        part = f"{share.owned / found.step_seconds:.1%}" if found.step_seconds else ""
        rows.add_row(name, f"{share.owned * 1e3:.2f}", part, *_hidden(share, name != phases.IDLE))
        for role, of_role in found.collectives.items() if name == phases.COLLECTIVES else ():
            rows.add_row(f"  {role}", f"{of_role.owned * 1e3:.2f}", "", *_hidden(of_role, True), style="dim")
    rows.add_section()
    rows.add_row("total", f"{found.step_seconds * 1e3:.2f}", "", "", "")
    rows.caption = (
        f"hidden: while a phase above runs; {found.named:.0%} of kernel time is matched to instructions of the step"
        if found.devices
        else "the trace has no kernels: on GPUs the profiler may lack permission to read performance counters"
    )
    return rows


def as_json(found: breakdown.Profile) -> dict[str, Any]:
    """Returns a profile as JSON values. docs/configuration.md names every field."""
    return {
        "schema": SCHEMA,
        "first_step": found.first,
        "last_step": found.last,
        "devices": found.devices,
        "step_seconds": found.step_seconds,
        "phases": {name: _share(share) for name, share in found.shares.items()},
        "collectives": {role: _share(share) for role, share in found.collectives.items()},
        "named_share": found.named,
        "largest_kernels": [dataclasses.asdict(kernel) for kernel in found.kernels],
    }


def _hidden(share: phases.Share, has_kernels: bool) -> tuple[str, str]:
    return (f"{share.hidden * 1e3:.2f}", f"{share.kernels:.4g}") if has_kernels else ("", "")


def _share(share: phases.Share) -> dict[str, float]:
    return {"seconds": share.owned, "hidden_seconds": share.hidden, "kernels": share.kernels}


def _failed(error: Exception) -> UserError:
    return UserError(f"profile: the profiler failed ({errors.first_line(error)}); set `count=0` to train without it")
