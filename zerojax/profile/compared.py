"""Compares a profile with the foretold time of the step. This module sums up the clock's spans by the phases of a profile."""

from typing import NamedTuple

from zerojax.clock import kernels, walk
from zerojax.profile import breakdown, phases

_WORK = {kernels.MATMUL: "matmul", kernels.ATTENTION: "attention", kernels.ELEMENTWISE: "elementwise"}


class PhaseDifference(NamedTuple):
    """A phase of a step, and its seconds on a device: as the clock foretold them, and as they were measured."""

    phase: str
    foretold: float
    measured: float


def foretold(found: walk.StepTime) -> dict[str, float]:
    """Returns the foretold seconds of a step by phase (`phases.PHASES`, and IDLE)."""
    seconds = dict.fromkeys((*phases.PHASES, phases.IDLE), 0.0)
    for span in found.spans:
        if span.kind in _WORK:
            seconds[phases.phase("", _WORK[span.kind], span.op_name)] += (span.end - span.begin) * span.times
    # NCCL waits for the slowest device
    seconds[phases.COLLECTIVES] += found.parts[walk.EXPOSED] + found.parts[walk.SLOWEST]
    seconds[phases.COPIES] += found.parts[walk.WAITS]
    seconds[phases.IDLE] += found.parts[walk.GAPS]
    return seconds


def largest(profile: breakdown.Profile, found: walk.StepTime) -> PhaseDifference | None:
    """Returns the phase whose time differs most from the foretold one; None if nothing ran, or no phase is foretold (of a pipeline)."""
    if not profile.shares or not found.spans:
        return None
    expected = foretold(found)
    differences = [
        PhaseDifference(name, expected.get(name, 0.0), share.owned) for name, share in profile.shares.items()
    ]
    return max(differences, key=lambda one: abs(one.measured - one.foretold))


def line(profile: breakdown.Profile, found: walk.StepTime, most: PhaseDifference | None) -> str:
    """Returns a line with the foretold and the measured time of a step, and with the phase that differs most, if there is one."""
    whole = f"a step was foretold to take {found.seconds * 1e3:,.1f} ms on a device and took {profile.step_seconds * 1e3:,.1f}"
    if most is None:
        return whole
    return f"{whole}; most differs {most.phase}: foretold {most.foretold * 1e3:,.1f} ms, measured {most.measured * 1e3:,.1f}"
