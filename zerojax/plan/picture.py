"""Draws a plan's memory, when the stages of a pipeline run, and the foretold time of a step. This module writes one PNG."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax import display, files, roles
from zerojax.clock import kernels, walk
from zerojax.errors import UserError
from zerojax.plan import pipelines, step_plan
from zerojax.zero.pipeline import order as order_lib

NAMES = dict(zip(order_lib.PASSES, ("forward", "backward", "weights' gradients")))
COLORS = dict(zip(order_lib.PASSES, ("tab:blue", "tab:orange", "tab:green")))
# The color of a role, in the bar of the peak and over the program.
_ROLES = {
    roles.PARAMS: "tab:blue",
    roles.MASTER: "navy",
    roles.MOMENTS: "tab:cyan",
    roles.REST: "silver",
    roles.GRADIENTS: "tab:green",
    roles.GATHERED: "gold",
    roles.COLLECTIVE_BUFFERS: "tab:pink",
    roles.TEMPORARIES: "tab:gray",
    roles.ACTIVATIONS: "tab:red",
    roles.ACTIVATION_GRADIENTS: "tab:purple",
    roles.LOSS: "tab:brown",
    roles.UPDATE: "tab:olive",
    roles.OTHER: "black",
}
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
_NEAR = 0.25  # the part of the device's memory from which on a peak is drawn below its limit; a smaller bar could not be read
_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # where a legend lies outside of the data
_BELOW = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.15), "ncols": 6}


def check(path: str) -> None:
    """Checks, before a step is compiled, that `draw` can write a picture there.

    Raises:
      UserError: the path is a folder, cannot be written, or ends as no picture's name.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    files.check_replaceable(path, "--picture")
    forms, form = FigureCanvasBase.get_supported_filetypes(), pathlib.Path(path).suffix.removeprefix(".").lower()
    if form and form not in forms:
        raise UserError(
            f"--picture {path}: no picture is written as .{form}; name a PNG file, or one of {', '.join(sorted(forms))}"
        )


def draw(plan: step_plan.Plan, path: str | os.PathLike[str]) -> None:
    """Draws memory by role, and temporaries in program order or the schedule of a pipeline, and below them when kernels, collectives and
    copies of one program run by the clock, as a PNG."""
    from matplotlib.figure import Figure  # imported here because it takes half a second

    timed = [plan.foretold] if plan.foretold is not None and plan.foretold.spans else []
    figure = Figure(figsize=(12, 7.5 if timed else 4.5), layout="constrained")
    rows = (4.5, 3.0)[: 1 + len(timed)]
    above, *below = figure.subfigures(len(rows), 1, height_ratios=rows, squeeze=False).flat
    left, right = above.subplots(1, 2, width_ratios=(1, 3))
    for part, found in zip(below, timed):
        _draw_time(part.subplots(), found)
    _draw_peak(left, plan)
    if plan.pipeline is not None:
        _draw_schedule(right, plan.pipeline)
    else:
        _draw_temporaries(right, plan)
    figure.savefig(path, dpi=130)


def legend(axes: Any, colors: Mapping[str, str], **where: Any) -> None:
    """Adds a legend of colors by name, beside what is labelled in `axes` already."""
    from matplotlib.patches import Patch

    labelled, _ = axes.get_legend_handles_labels()
    patches = [Patch(color=color, label=name) for name, color in colors.items()]
    axes.legend(handles=[*labelled, *patches], fontsize=7, **where)


def _draw_peak(axes: Any, plan: step_plan.Plan) -> None:
    """Draws one bar of the peak by role, and the limit of the device where it is near."""
    scale, unit = display.byte_unit(plan.peak)
    bottom, colors = 0.0, {}
    for row in plan.memory:
        size = (row.assigned or 0) / scale
        if row.role not in (roles.HOST, roles.DISK) and size > 0.001 * plan.peak / scale:
            axes.bar(["peak"], [size], bottom=[bottom], color=_ROLES[row.role])
            bottom += size
            colors[f"{row.role}: {display.human(row.assigned or 0)}"] = _ROLES[row.role]
    title = f"peak {display.human(plan.peak)}"
    if plan.target.memory:
        limit = plan.target.memory.value
        title += f",\n{plan.peak / limit:.2%} of the device's {display.human(limit)}"
        if plan.peak > _NEAR * limit:
            axes.axhline(limit / scale, color="black", linestyle="--", linewidth=1, label="the device's memory")
    axes.set_ylabel(f"{unit} on a device")
    axes.set_title(title, fontsize=9)
    legend(axes, dict(reversed(colors.items())), **_BESIDE)  # as they lie on each other


def _draw_temporaries(axes: Any, plan: step_plan.Plan) -> None:
    """Draws the temporaries by role in program order, where the compiler tells them, and where they are the most."""
    curve = plan.buffers.curve
    if plan.stream is not None and plan.stream.by_block is not None:
        _draw_programs(axes, plan.stream.by_block.used)
        return
    axes.set_xlabel("instruction, in program order")
    if curve is None:
        axes.set_title("temporaries: this compiler does not tell them by instruction", fontsize=9)
        return
    most = max(map(sum, zip(*curve.by_role.values())), default=0)
    scale, unit = display.byte_unit(most)
    shown = {role: column for role, column in curve.by_role.items() if max(column, default=0) > 0.001 * most}
    heights = [[count / scale for count in column] for column in shown.values()]
    if shown:
        axes.stackplot(curve.positions, heights, colors=[_ROLES[role] for role in shown])
    axes.plot(plan.buffers.peak_position, most / scale, "kv", markersize=5, label=f"the most: {display.human(most)}")
    axes.set_xlim(0, max(1, plan.buffers.length))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{unit} on a device")
    axes.set_title("temporaries", fontsize=9)
    legend(axes, {role: _ROLES[role] for role in reversed(shown)}, **_BESIDE)


def _draw_programs(axes: Any, used: Sequence[int]) -> None:
    """Draws the bytes on a device while each program of a pass block by block runs."""
    scale, unit = display.byte_unit(max(used))
    axes.bar(range(len(used)), [nbytes / scale for nbytes in used], width=1.0, color=_ROLES[roles.TEMPORARIES])
    axes.set_xlabel("program of a pass, in the order of sending")
    axes.set_ylabel(f"{unit} on a device")
    axes.set_title(
        f"memory while each program runs, without groups of the update; the most: {display.human(max(used))}",
        fontsize=9,
    )


def _draw_time(axes: Any, found: walk.StepTime) -> None:
    """Draws a row for the kernels, one for each kind of link, and one for copies in each direction. Of a loop one run is drawn."""
    scale, unit = display.time_unit(found.seconds)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in found.spans:
        for stream in span.links or (walk.KERNELS,):
            bars.setdefault((stream, span.kind), []).append((span.begin / scale, (span.end - span.begin) / scale))
    rows = [stream for stream in _STREAMS if any(stream == own for own, _ in bars)]
    for (stream, kind), intervals in bars.items():
        axes.broken_barh(intervals, (rows.index(stream) - 0.4, 0.8), color=_WORK[kind])
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, found.seconds / scale)
    axes.set_xlabel(unit)
    drawn = {kind for _, kind in bars}
    legend(axes, {kind: color for kind, color in _WORK.items() if kind in drawn}, **_BELOW)
    waits = ", ".join(
        f"{part} {found.parts[part] / scale:,.1f} {unit}" for part in (walk.EXPOSED, walk.WAITS) if found.parts[part]
    )
    title = f"foretold step of {found.seconds / scale:,.1f} {unit}{': ' if waits else ''}{waits}"
    has_loop = any(span.times > 1 for span in found.spans)
    axes.set_title(title + ("; of a loop its first run is drawn" if has_loop else ""), fontsize=9)


def _draw_schedule(axes: Any, found: pipelines.Pipelined) -> None:
    """Draws a bar for each pass, a row for each group of devices; a bar has the number of its micro-batch where there is room."""
    scale, unit = display.time_unit(found.line.total) if found.is_foretold else (1.0, "operations of a stage")
    for group, ops in enumerate(found.order.of_device):
        for op in ops:
            begin, end = found.line.start[op] / scale, found.line.end[op] / scale
            shade = 1.0 - 0.5 * (op.stage // found.order.devices) / found.order.chunks  # later chunks are paler
            axes.barh(group, end - begin, left=begin, height=0.8, color=COLORS[op.kind], alpha=shade, edgecolor="white")
            if len(ops) <= _NUMBERED:
                axes.text((begin + end) / 2, group, str(op.micro), ha="center", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_yticks(range(found.order.devices))
    axes.set_ylabel("group of devices")
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    legend(axes, {NAMES[kind]: COLORS[kind] for kind in found.order.passes}, **_BELOW)
    axes.set_title(f"{found.order.name}: passes of micro-batches, bubble {found.line.bubble:.1%}", fontsize=9)
