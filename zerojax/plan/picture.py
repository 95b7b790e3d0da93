"""Draws a plan's memory, and when the stages of a pipeline run. This module writes one PNG."""

import os
from typing import Any

from zerojax import display, roles
from zerojax.plan import pipelines, step_plan
from zerojax.zero.pipeline import order as order_lib

NAMES = dict(zip(order_lib.PASSES, ("forward", "backward", "weights' gradients")))
COLORS = dict(zip(order_lib.PASSES, ("tab:blue", "tab:orange", "tab:green")))
_NUMBERED = 64  # passes of a group, above which their numbers are not readable


def draw(plan: step_plan.Plan, path: str | os.PathLike) -> None:
    """Draws memory by role, and temporaries in program order or the schedule of a pipeline, as a PNG."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
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
