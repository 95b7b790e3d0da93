"""Plots a run's loss curves. This module turns a list of records into one PNG."""

import math
import os
import pathlib
from typing import TYPE_CHECKING

from zerojax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, BLUE, ORANGE, GREEN, GRID = "#333333", "#2a6fb0", "#d9661f", "#3f8f5b", "#e3e3e3"
# panel -> series: (key of a record, its label, colour, line style, marker)
LOSSES = (("loss", "training", BLUE, "-", ""), ("eval_loss", "evaluation", ORANGE, "-", "o"))
GRAD_NORM = ("grad_norm", "gradient norm", GREEN, "-", "")
LEARNING_RATE = ("learning_rate", "learning rate", INK, "--", "")


def plot_losses(records: list[dict], path: str | os.PathLike[str]) -> None:
    """Writes a PNG: training and evaluation loss over steps above, gradient norm and learning rate below.

    Args:
      records: as `metrics.read` returns them. A missing value is skipped; None leaves a gap in the line.
      path: of the PNG.

    Raises:
      UserError: no record has a loss, or the file cannot be written.
    """
    if not any(_points(records, series[0])[0] for series in LOSSES):
        raise UserError(f"{path}: no record has a loss or eval_loss to plot; run at least log_every steps")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second, so not at the start of a run
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for series in LOSSES:
        _draw(upper, records, series)
    upper.legend(frameon=False)
    right = lower.twinx()
    for axes, series in ((lower, GRAD_NORM), (right, LEARNING_RATE)):
        _draw(axes, records, series)
        axes.set_ylabel(series[1], color=series[2])
    upper.set_ylabel("loss (nats a token)", color=INK)
    lower.set_xlabel("step", color=INK)
    for axes in (upper, lower, right):
        _style(axes)
    right.grid(False)
    try:
        figure.savefig(pathlib.Path(path), format="png")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _points(records: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of `key`, with NaN for None."""
    pairs = [(record["step"], record[key]) for record in records if key in record]
    steps = [step for step, _ in pairs]
    return steps, [math.nan if value is None else value for _, value in pairs]


def _draw(axes: "Axes", records: list[dict], series: tuple[str, str, str, str, str]) -> None:
    """Draws one series, if the records hold it."""
    key, label, color, line, marker = series
    steps, values = _points(records, key)
    if steps:
        marker = marker or ("o" if len(steps) == 1 else "")  # one point makes no line
        axes.plot(steps, values, line, color=color, label=label, marker=marker, markersize=4, linewidth=1.2)


def _style(axes: "Axes") -> None:
    """Draws a light grid and no frame."""
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
