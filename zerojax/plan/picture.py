"""Draws a plan's memory. This module writes one PNG."""

import os

from zerojax import display, roles
from zerojax.plan import step_plan


def draw(plan: step_plan.Plan, path: str | os.PathLike) -> None:
    """Draws memory by role, and temporaries in program order, as a PNG."""
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
    right.set_xlabel("instruction, in program order")
    right.set_title("temporaries", fontsize=9)
    figure.savefig(path, dpi=130)
