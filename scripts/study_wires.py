"""Compares losses of training with packed wires and without, over seeds. This script trains on emulated devices, two hosts of four.

    python scripts/study_wires.py --steps 3000 --seeds 5 --folder /tmp/wires

It prints each run's mean loss over the last tenth of its steps, the difference of each seed, and the mean of the differences.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys

from zerojax.trainer import metrics

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ("zero3", "packed_wires")


def loss_of(folder: pathlib.Path, config: str, steps: int, seed: int) -> float:
    """Trains a config unless `folder` has it, and returns the mean loss over the last tenth of the steps."""
    workdir = folder / f"{config}_{steps}_{seed}"
    flags = {"steps": steps, "seed": seed, "log_every": 1, "evaluate.every": 0, "checkpoint.every": 0}
    given = [f"--config.{name}={value}" for name, value in flags.items()]
    command = ["-m", "zerojax.train", "--config", f"configs/{config}.py", "--workdir", str(workdir), *given]
    if not (workdir / "run.json").exists():
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    losses = [line["loss"] for line in metrics.read(workdir) if "loss" in line]
    return statistics.mean(losses[-max(1, steps // 10) :])


def main() -> None:
    """Reads the arguments, and prints a line a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("wires"))
    given = parser.parse_args()
    differences = []
    for seed in range(given.seeds):
        plain, packed = (loss_of(given.folder, config, given.steps, seed) for config in CONFIGS)
        differences.append(packed - plain)
        print(f"seed {seed}: plain {plain:.4f}, packed {packed:.4f}, difference {packed - plain:+.4f}", flush=True)
    print(f"mean difference over {given.seeds} seeds: {statistics.mean(differences):+.4f}")


if __name__ == "__main__":
    main()
