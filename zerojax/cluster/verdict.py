"""Judges heartbeats. This module names the process that holds up a run: one that is stopped or hangs, and the one furthest behind.

The processes of a run wait for each other in every step. If one hangs, all stand still soon, each in its own phase. So only those
furthest behind are looked at, and of these only such as do not wait for others.

Such a process is *quiet* while it gives no sign of life: it begins no step or phase, touches no new page of memory, reads and writes
nothing, and uses no CPU. CPU does not count in steps, evaluations and the like on a host with GPUs, since a thread that waits for a GPU
may use CPU all the time. A quiet process is named soon, since nothing that is merely slow is quiet; the run goes on, since a file system
or a GPU may yet answer. The run ends after a limit.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.errors import UserError
from zerojax.launch import watch

SILENT, QUIET = "silent", "quiet"
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
    watch.ANSWER: 3600.0,  # each length of prompts is compiled when it is first asked
    SILENT: 40.0,
    QUIET: 240.0,  # in any phase but a step, whose limit is its own; less than the time in which processes must join
}
NAMED_SECONDS, NAMED_FACTOR = 40.0, 1.5  # quiet for so long, and for more than in this phase before: named
STEP_FACTOR, STEP_LEAST = 10.0, 45.0
FIRST_STEPS, FIRST_STEP_SECONDS = 2, 1800.0  # they load programs and connect devices
HOST_PHASES = ("", watch.START, watch.DATA, watch.COMPILE)  # in which no thread waits for a GPU
REPEATED = (watch.STEP, watch.EVALUATE, watch.CHECKPOINT)  # of which all are alike, so that a long one is noticed
STOPPED_SECONDS = 10.0  # without a heartbeat, if the kernel says that the process is stopped
BUSY_START = 300.0  # without a heartbeat before the first phase: imports of large libraries hold the interpreter


class Beat(NamedTuple):
    """What is known of a process.

    Attributes:
      rank, host: which one.
      phase, step: where it last said it was; "" and 0 if it never did.
      advances: how often it said so.
      silent: seconds without a heartbeat.
      still: seconds since the last advance.
      quiet: seconds without a sign of life.
      worked: CPU seconds since the last advance.
      state: the kernel's state of it.
      stack: of its main thread.
      has_beat: whether it has heartbeats.
      waits: whether it waits for other processes.
    """

    rank: int
    host: str
    phase: str
    step: int
    advances: int
    silent: float
    still: float
    quiet: float
    worked: float
    state: str
    stack: tuple[str, ...]
    has_beat: bool
    waits: bool

    @property
    def is_stopped(self) -> bool:
        return self.state[:1] in tuple("Tt")

    def place(self) -> str:
        """Returns who and where it is: "rank 3 on worker-1, step 12 (evaluation)"."""
        where = f", step {self.step} ({self.phase})" if self.phase else ""
        return f"rank {self.rank} on {self.host}{where}"


class Blame(NamedTuple):
    """The guilty process, and what it does wrong."""

    beat: Beat
    why: str


def beat(host: str, said: Mapping[str, Any], *, has_gpus: bool = False) -> Beat:
    """Returns a heartbeat from an agent's frame."""
    phase = str(said.get("phase", ""))
    unmoved, idle = float(said["unmoved"]), float(said["idle"])
    return Beat(
        rank=said["rank"],
        host=host,
        phase=phase,
        step=int(said.get("step", 0)),
        advances=int(said.get("advances", 0)),
        silent=float(said["silent"]),
        still=float(said["still"]),
        quiet=unmoved if has_gpus and phase not in HOST_PHASES else min(unmoved, idle),
        worked=float(said.get("worked", 0.0)),
        state=str(said.get("state", "")),
        stack=tuple(said.get("stack", ())),
        has_beat="count" in said,
        waits=bool(said.get("waits")),
    )


class Judge:
    """Judges the heartbeats of one attempt."""

    def __init__(self, limits: Mapping[str, float] = LIMITS):
        self._limits = limits
        self._longest: dict[str, float] = {}  # phase -> seconds between two advances
        self._calmest: dict[str, float] = {}  # phase -> seconds without a sign of life, after which there was one
        self._before: dict[int, Beat] = {}
        self._late: Beat | None = None  # the quietest that was looked at last
        self._named: tuple[int, int] | None = None  # step and advances of the process that was named
        self._done: dict[tuple[int, str], int] = {}  # rank and phase -> times since the start

    def judge(self, beats: Iterable[Beat]) -> Blame | None:
        """Returns the guilty process, or None if all are well. Processes without heartbeats are judged only if others have some."""
        told = list(beats)
        for one in told:
            limit = self._silence(one)
            if limit and one.silent > limit:
                how = "is stopped" if one.is_stopped else "gives no sign of life"
                return Blame(one, f"{how} for {one.silent:.0f} s")
        self._learn(told)
        late = furthest_behind(told)
        if not late:
            return None
        quiet, still = min(one.quiet for one in late), min(one.still for one in told)
        if quiet > self._quiet_limit(told, late[0]):
            return Blame(late[0], f"gives no sign of life for {quiet:.0f} s")
        if still > self._still_limit(late):
            return Blame(late[0], f"stands still for {late[0].still:.0f} s, and all others with it")
        return None

    def suspect(self, beats: Iterable[Beat]) -> Blame | None:
        """Returns the process for which all have waited for too long, once for each wait. It may go on yet."""
        told = list(beats)
        late = furthest_behind(told)
        if not late or (late[0].step, late[0].advances) == self._named:
            return None
        one, end = late[0], self._still_limit(late)
        quiet, still = (min(getattr(each, name) for each in late) for name in ("quiet", "still"))
        if quiet > max(NAMED_SECONDS, NAMED_FACTOR * self._calmest.get(one.phase, 0.0)):
            why, end = f"gives no sign of life for {quiet:.0f} s" + _where(one), min(end, self._quiet_limit(told, one))
        elif one.phase == watch.DATA and one.step and still > self._usual(watch.STEP):
            why = f"has waited for data for {still:.0f} s"
        elif end > still > self._usual(one.phase) and one.phase in self._longest:
            why = f"has not moved on for {still:.0f} s; before, it took {self._longest[one.phase]:.0f} s at most"
        else:
            return None
        self._named = (one.step, one.advances)
        return Blame(one, why + (f"; the run ends after {end:.0f} s" if end < math.inf else ""))

    def _quiet_limit(self, told: Sequence[Beat], late: Beat) -> float:
        """Returns how long the process furthest behind may be quiet. A program that never says where it is may be for ever."""
        is_judged = late.phase != watch.STEP and any(one.phase for one in told)
        return (is_judged and self._limits[QUIET]) or math.inf

    def _still_limit(self, late: Sequence[Beat]) -> float:
        """Returns how long all processes may stand still: the most patient limit among the phases of those furthest behind."""
        return max(self._limit(one) if one.phase else math.inf for one in late)

    def _usual(self, phase: str) -> float:
        """Returns how long a phase that has been seen may take before it is odd."""
        return max(STEP_LEAST, STEP_FACTOR * self._longest.get(phase, 0.0))

    def _silence(self, one: Beat) -> float:
        limit = self._limits[SILENT]
        if not one.has_beat:
            return 0.0
        if one.is_stopped:
            return min(limit, STOPPED_SECONDS)
        return max(limit, BUSY_START) if limit and one.phase in ("", watch.START) else limit

    def _limit(self, one: Beat) -> float:
        limit = self._limits.get(one.phase, self._limits[watch.RESULTS])
        if one.phase != watch.STEP or limit:
            return limit or math.inf
        return self._usual(watch.STEP) if watch.STEP in self._longest else FIRST_STEP_SECONDS

    def _learn(self, told: Sequence[Beat]) -> None:
        """Notes how long phases last, but for the first ones, and how long a process was quiet that was not hung after all."""
        for one in told:
            before = self._before.get(one.rank)
            if before is not None and before.phase in REPEATED and one.advances > before.advances:
                key = (one.rank, before.phase)
                done = self._done[key] = self._done.get(key, 0) + max(1, one.step - before.step)
                if done > FIRST_STEPS:
                    self._longest[before.phase] = max(self._longest.get(before.phase, 0.0), before.still + 1)
            self._before[one.rank] = one
        if late := furthest_behind(told):
            before, self._late = self._late, min(late, key=lambda one: one.quiet)
            if before is not None and self._late.quiet < before.quiet:
                self._calmest[before.phase] = max(self._calmest.get(before.phase, 0.0), before.quiet)


def furthest_behind(beats: Iterable[Beat]) -> list[Beat]:
    """Returns the processes that the others wait for, the likeliest cause first; none if none has heartbeats or has something to do.

    They have advanced the least. Of those, the ones that wait for other processes are left out, unless all do. Processes that wait for
    devices cannot be told from one that hangs. But they have the same stack, as they wait at the same place, and they have worked before.
    """
    told = [one for one in beats if one.phase != watch.IDLE]
    if not any(one.has_beat for one in told):
        return []
    least = min((one.has_beat, one.step, one.advances) for one in told)
    late = [one for one in told if (one.has_beat, one.step, one.advances) == least]
    late = [one for one in late if not one.waits] or late
    alike = collections.Counter(one.stack for one in late)
    return sorted(late, key=lambda one: (alike[one.stack], round(one.worked, 1), -one.quiet, -one.still, one.rank))


def _where(one: Beat) -> str:
    """Returns what the kernel says of a process that is quiet."""
    return " (it waits for a disk or a file system)" if one.state[:1] == "D" else ""


def read_limits(text: str) -> dict[str, float]:
    """Returns LIMITS with the changes that "step=300,compile=7200" states; 0 means no limit, and for step one from the steps so far.

    Raises:
      UserError: a phase is unknown or repeated, or a value is no number of seconds.
    """
    found, named = dict(LIMITS), set[str]()
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.partition("=")
        if name not in LIMITS or not equals:
            raise UserError(f"--limits: {part!r} must be PHASE=SECONDS, with PHASE one of {', '.join(LIMITS)}")
        if name in named:
            raise UserError(f"--limits: {name} has two values; give it one")
        if not re.fullmatch(r"(\d+\.?\d*|\.\d+)", value, re.ASCII):
            raise UserError(f"--limits: {name} must be a number of seconds, 0 or more, and is {value!r}")
        named.add(name)
        found[name] = float(value)
    return found
