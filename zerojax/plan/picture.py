"""Draws a plan's memory, when the stages of a pipeline run, and the foretold time of a step. This module writes one PNG."""

import os
from typing import Any

from zerojax import display, roles
from zerojax.clock import kernels, walk
from zerojax.plan import pipelines, step_plan
from zerojax.zero.pipeline import order as order_lib

NAMES = dict(zip(order_lib.PASSES, ("forward", "backward", "weights' gradients")))
COLORS = dict(zip(order_lib.PASSES, ("tab:blue", "tab:orange", "tab:green")))
# Rows of a step's time, and the colors of what runs in them.
_STREAMS = (walk.KERNELS, walk.NEAR, walk.FAR, *kernels.COPIES)
_WORK = {
    kernels.MATMUL: "tab:blue",
    kernels.ATTENTION: "tab:cyan",
    kernels.ELEMENTWISE: "tab:gray",
    kernels.COLLECTIVE: "tab:red",
    kernels.TO_HOST: "tab:purple",
    kernels.FROM_HOST: "tab:brown",
}
_NUMBERED = 64  # passes of a group, above which their numbers are not readable


def draw(plan: step_plan.Plan, path: str | os.PathLike) -> None:
    """Draws memory by role, and temporaries in program order or the schedule of a pipeline, and below them when kernels, collectives and
    copies of one program run by the clock, as a PNG."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    timed = [plan.foretold] if plan.foretold is not None and plan.foretold.spans else []
    figure = Figure(figsize=(11, 7 if timed else 4.5), layout="constrained")
    rows = (4.5, 2.5)[: 1 + len(timed)]
    above, *below = figure.subfigures(len(rows), 1, height_ratios=rows, squeeze=False).flat
    left, right = above.subplots(1, 2, width_ratios=(1, 2))
    for part, found in zip(below, timed):
        _draw_time(part.subplots(), found)
    scale = 2.0**30
    bottom = 0.0
    for row in plan.memory:
        size = (row.assigned or 0) / scale
        if row.role != roles.HOST and size > 0.001 * plan.peak / scale:
            left.bar(["peak"], [size], bottom=[bottom], label=f"{row.role} {size:.2f}")
            bottom += size
    if plan.target.memory:
        left.axhline(
            plan.target.memory.value / scale, color="black", linestyle="--", linewidth=1, label="device memory"
        )
    left.set_ylabel("GiB on a device")
    left.set_title(f"peak {display.human(plan.peak)}", fontsize=9)
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if plan.buffers.curve is not None:
        curve = plan.buffers.curve
        heights = [[count / scale for count in column] for column in curve.by_role.values()]
        right.stackplot(curve.positions, heights, labels=list(curve.by_role))
        right.legend(fontsize=7, loc="upper left")
        right.axvline(plan.buffers.peak_position, color="black", linewidth=0.6)
    if plan.pipeline is not None:
        _draw_schedule(right, plan.pipeline)
    else:
        right.set_xlabel("instruction, in program order")
        right.set_title("temporaries", fontsize=9)
    figure.savefig(path, dpi=130)


def _draw_time(axes: Any, found: walk.StepTime) -> None:
    """Draws a row for the kernels, one for each kind of link, and one for copies in each direction. Of a loop one run is drawn."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in found.spans:
        for stream in span.links or (walk.KERNELS,):
            bars.setdefault((stream, span.kind), []).append((span.begin * 1e3, (span.end - span.begin) * 1e3))
    rows = [stream for stream in _STREAMS if any(stream == own for own, _ in bars)]
    for (stream, kind), intervals in bars.items():
        axes.broken_barh(intervals, (rows.index(stream) - 0.4, 0.8), color=_WORK[kind])
    for kind in dict.fromkeys(kind for _, kind in bars):
        axes.bar([0], [0], color=_WORK[kind], label=kind)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0.0, -0.25), ncols=len(_WORK))
    waits = ", ".join(
        f"{part} {found.parts[part] * 1e3:,.1f} ms" for part in (walk.EXPOSED, walk.WAITS) if found.parts[part]
    )
    axes.set_title(f"foretold step of {found.seconds * 1e3:,.1f} ms{': ' if waits else ''}{waits}", fontsize=9)


def _draw_schedule(axes: Any, found: pipelines.Pipelined) -> None:
    """Draws a bar for each pass, a row for each group of devices; a bar has the number of its micro-batch where there is room."""
    scale, unit = (1e3, "ms") if found.is_foretold else (1.0, "operations of a stage")
    for group, ops in enumerate(found.order.of_device):
        for op in ops:
            begin, end = found.line.start[op] * scale, found.line.end[op] * scale
            shade = 1.0 - 0.5 * (op.stage // found.order.devices) / found.order.chunks  # later chunks are paler
            axes.barh(group, end - begin, left=begin, height=0.8, color=COLORS[op.kind], alpha=shade, edgecolor="white")
            if len(ops) <= _NUMBERED:
                axes.text((begin + end) / 2, group, str(op.micro), ha="center", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_yticks(range(found.order.devices))
    axes.set_ylabel("group of devices")
    axes.set_xlabel(unit)
    for kind in found.order.passes:
        axes.bar([0], [0], color=COLORS[kind], label=NAMES[kind])
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0.0, -0.12), ncols=3)
    axes.set_title(f"{found.order.name}: passes of micro-batches, bubble {found.line.bubble:.1%}", fontsize=9)
