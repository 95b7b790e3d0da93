"""Draws when the stages of a pipeline ran, from a trace. This module writes one PNG, with the colors of the plan's picture."""

import os
import re
from collections.abc import Iterable, Mapping

from zerojax.plan import picture
from zerojax.profile import phases, traces
from zerojax.zero.pipeline import order

FILE = "schedule.png"
_PASS = re.compile(rf"jit_stage_(\d+)_({'|'.join(order.PASSES)})\b")  # as `stage_programs` names them
_GAP = 50_000.0  # nanoseconds between kernels of a pass, in which nothing is drawn as missing

Ran = Mapping[tuple[str, str], list[phases.Interval]]  # by device and kind of pass


def passes(kernels: Iterable[traces.Kernel]) -> Ran:
    """Returns in which milliseconds passes of a pipeline ran, since the first of them began; {} if there was none."""
    found: dict[tuple[str, str], list[phases.Interval]] = {}
    for kernel in kernels:
        if named := _PASS.match(kernel.module):
            found.setdefault((kernel.device, named[2]), []).append((kernel.start, kernel.end + _GAP))
    begin = min((start for intervals in found.values() for start, _ in intervals), default=0.0)
    return {
        key: [((start - begin) / 1e6, (end - _GAP - begin) / 1e6) for start, end in phases.union(intervals)]
        for key, intervals in found.items()
    }


def waits(ran: Ran) -> float:
    """Returns the share of the time from the first pass to the end of the last in which devices ran none: the measured bubble."""
    of_devices: dict[str, list[phases.Interval]] = {}
    for (device, _), intervals in ran.items():
        of_devices.setdefault(device, []).extend(intervals)
    busy = sum(phases.length(phases.union(intervals)) for intervals in of_devices.values())
    last = max((end for intervals in ran.values() for _, end in intervals), default=0.0)
    return 1.0 - busy / (last * len(of_devices)) if last else 0.0


def draw(ran: Ran, path: str | os.PathLike[str]) -> None:
    """Draws a row for each device, with bars while a pass ran, as a PNG."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    devices = sorted({device for device, _ in ran}, key=lambda name: (len(name), name))
    figure = Figure(figsize=(11, 1.5 + 0.4 * len(devices)), layout="constrained")
    axes = figure.subplots()
    for (device, kind), intervals in ran.items():
        bars = [(start, end - start) for start, end in intervals]
        axes.broken_barh(bars, (devices.index(device) - 0.4, 0.8), color=picture.COLORS[kind])
    axes.set_yticks(range(len(devices)), devices, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    ran_of = [kind for kind in order.PASSES if any(key[1] == kind for key in ran)]
    colors = {picture.NAMES[kind]: picture.COLORS[kind] for kind in ran_of}
    picture.legend(axes, colors, loc="upper left", bbox_to_anchor=(0.0, -0.2), ncols=3)
    axes.set_title(f"measured passes of the stages; devices wait {waits(ran):.1%} of the time", fontsize=9)
    figure.savefig(path, dpi=130)
