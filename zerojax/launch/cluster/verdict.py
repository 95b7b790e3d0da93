"""Judges heartbeats. This module names the process that holds up a run: one that is stopped or hangs, and the one furthest behind.

The processes of a run wait for each other in every step. If one hangs, all stand still soon, each in its own phase. So a run stands
still only if all its processes do, each for longer than the most patient limit among their phases.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.errors import UserError
from zerojax.launch import watch

SILENT = "silent"
# phase -> seconds without an advance that are too long; `silent`: without a heartbeat
LIMITS: Mapping[str, float] = {
    watch.START: 600.0,  # imports, joining the others
    watch.DATA: 600.0,  # preparing or reading text
    watch.COMPILE: 3600.0,
    watch.RESTORE: 1800.0,
    watch.STEP: 0.0,  # 0: STEP_FACTOR times the longest step so far, at least STEP_LEAST
    watch.EVALUATE: 1800.0,
    watch.CHECKPOINT: 1800.0,
    watch.RESULTS: 3600.0,  # sample, plot, export
    SILENT: 40.0,
}
STEP_FACTOR, STEP_LEAST = 10.0, 45.0
FIRST_STEPS, FIRST_STEP_SECONDS = 2, 1800.0  # they load programs and connect devices
STOPPED_SECONDS = 10.0  # without a heartbeat, if the kernel says that the process is stopped
BUSY_START = 300.0  # without a heartbeat before the first phase: imports of large libraries hold the interpreter
STOPPED = "Tt"  # the kernel's states of a stopped process


class Beat(NamedTuple):
    """What is known of a process: its last phase ("" if it never said one) and step, and how long it has been silent and still."""

    rank: int
    host: str
    phase: str
    step: int
    silent: float
    still: float
    state: str
    stack: tuple[str, ...]
    has_beat: bool

    def place(self) -> str:
        """Returns who and where it is: "rank 3 on worker-1, step 12 (evaluation)"."""
        where = f", step {self.step} ({self.phase})" if self.phase else ""
        return f"rank {self.rank} on {self.host}{where}"


class Blame(NamedTuple):
    """The guilty process, and what it does wrong."""

    beat: Beat
    why: str


def beat(host: str, said: Mapping[str, Any]) -> Beat:
    """Returns a heartbeat from an agent's frame."""
    return Beat(
        rank=said["rank"],
        host=host,
        phase=str(said.get("phase", "")),
        step=int(said.get("step", 0)),
        silent=float(said["silent"]),
        still=float(said["still"]),
        state=str(said.get("state", "")),
        stack=tuple(said.get("stack", ())),
        has_beat="count" in said,
    )


class Judge:
    """Judges the heartbeats of one attempt."""

    def __init__(self, limits: Mapping[str, float] = LIMITS):
        self._limits = limits
        self._longest = 0.0  # seconds of a step
        self._before: dict[int, Beat] = {}
        self._suspected: tuple[int, int] | None = None
        self._done: dict[int, int] = {}  # rank -> steps since the start

    def judge(self, beats: Iterable[Beat]) -> Blame | None:
        """Returns the guilty process, or None if all are well. Processes without heartbeats are not judged."""
        watched = [one for one in beats if one.has_beat]
        for one in watched:
            limit = self._silence(one)
            if limit and one.silent > limit:
                how = "is stopped" if one.state[:1] in tuple(STOPPED) else "gives no sign of life"
                return Blame(one, f"{how} for {one.silent:.0f} s")
        told = [one for one in watched if one.phase]
        self._learn(told)
        if not told or len(told) < len(watched):
            return None
        allowed = max(self._limit(one) for one in told)
        if min(one.still for one in told) <= allowed:
            return None
        guilty = furthest_behind(told)
        return Blame(guilty, f"stands still for {guilty.still:.0f} s, and all others with it")

    def suspect(self, beats: Iterable[Beat]) -> Blame | None:
        """Returns the process for whose data all have waited for longer than steps last, once for each wait. It may go on yet."""
        told = [one for one in beats if one.has_beat and one.phase]
        late = furthest_behind(told) if told else None
        if late is None or late.phase != watch.DATA or not late.step or late.silent > STOPPED_SECONDS:
            return None
        key = (late.rank, late.step)
        if key == self._suspected or min(one.still for one in told) <= max(STEP_LEAST, STEP_FACTOR * self._longest):
            return None
        self._suspected = key
        limit = self._limits[watch.DATA]
        return Blame(
            late,
            f"has waited for data for {late.still:.0f} s" + (f"; the run ends after {limit:.0f} s" if limit else ""),
        )

    def _silence(self, one: Beat) -> float:
        limit = self._limits[SILENT]
        if one.state[:1] in tuple(STOPPED):
            return min(limit, STOPPED_SECONDS)
        return max(limit, BUSY_START) if limit and one.phase in ("", watch.START) else limit

    def _limit(self, one: Beat) -> float:
        limit = self._limits.get(one.phase, self._limits[watch.RESULTS])
        if one.phase != watch.STEP or limit:
            return limit or math.inf
        if not self._longest:
            return FIRST_STEP_SECONDS
        return max(STEP_LEAST, STEP_FACTOR * self._longest)

    def _learn(self, told: Sequence[Beat]) -> None:
        """Counts the steps of each process, and notes the longest but for the first ones."""
        for one in told:
            before = self._before.get(one.rank)
            if before is not None and before.phase == watch.STEP and one.step > before.step:
                done = self._done[one.rank] = self._done.get(one.rank, 0) + one.step - before.step
                if done > FIRST_STEPS:
                    self._longest = max(self._longest, before.still + 1)
            self._before[one.rank] = one


def furthest_behind(beats: Iterable[Beat]) -> Beat:
    """Returns the process that the others wait for: of the lowest step, outside of the step's program, and still the longest."""
    return min(beats, key=lambda one: (one.step, one.phase == watch.STEP, -one.still, one.rank))


def read_limits(text: str) -> dict[str, float]:
    """Returns LIMITS with the changes that "step=300,compile=7200" states; 0 means no limit, and for step one from the steps so far.

    Raises:
      UserError: a phase is unknown, or a value is no number of seconds.
    """
    found = dict(LIMITS)
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in LIMITS or not equals:
            raise UserError(f"--limits: {part!r} must be PHASE=SECONDS, with PHASE one of {', '.join(LIMITS)}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise UserError(f"--limits: {name} must be a number of seconds, 0 or more, and is {value!r}")
    return found
