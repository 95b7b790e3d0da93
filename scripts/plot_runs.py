"""Plots the training losses of several runs in one picture, and prints their last losses.

    for p in fp32 bf16 fp16 bf16_sr; do
      python -m zerojax.train --config configs/zero3.py --config.precision=$p --config.steps=300 --workdir runs/$p
    done
    python scripts/plot_runs.py --out docs/images/precisions.png runs/fp32 runs/bf16 runs/fp16 runs/bf16_sr

Training losses are means over the last 10 steps. Dots are evaluation losses.
"""

import argparse
import pathlib

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zerojax.trainer import metrics

MEAN_OVER = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path, help="workdirs of runs, named after what they show")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="a PNG")
    args = parser.parse_args()
    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, folder in enumerate(args.folders):
        losses, evaluations = read(folder)
        steps, means = zip(*((step, mean(losses, step)) for step in losses if step >= MEAN_OVER))
        axes.plot(steps, means, label=folder.name, color=f"C{number}", linewidth=1.2)
        axes.plot(*zip(*evaluations), "o", color=f"C{number}", markersize=3)
        print(
            f"{folder.name}: training loss {means[-1]:.4f} (last {MEAN_OVER} steps), evaluation loss {evaluations[-1][1]:.4f}"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(color="#e3e3e3")
    axes.legend(frameon=False)
    figure.savefig(args.out)


def read(folder: pathlib.Path) -> tuple[dict[int, float], list[tuple[int, float]]]:
    """Returns {step: training loss} and [(step, evaluation loss)]."""
    records = metrics.read(folder)
    losses = {line["step"]: line["loss"] for line in records if line.get("loss") is not None}
    return losses, [(line["step"], line["eval_loss"]) for line in records if "eval_loss" in line]


def mean(losses: dict[int, float], step: int) -> float:
    """Returns the mean of the last losses up to a step. A skipped step may have no loss."""
    last = [losses[s] for s in range(step - MEAN_OVER + 1, step + 1) if s in losses]
    return sum(last) / len(last)


if __name__ == "__main__":
    main()
