"""Compares losses of training with packed wires and without, over seeds. This script trains on emulated devices, which are two hosts.

    python scripts/study_wires.py --steps 3000 --seeds 5 --folder /tmp/wires
    python scripts/study_wires.py --steps 3000 --seeds 5 --folder /tmp/wires --devices 4 seq_len=32 global_batch_size=16 model.num_layers=2

Words after the flags change both configs. It prints each run's mean loss over the last tenth of its steps, the difference of each seed,
and the mean of the differences.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys

from zerojax.trainer import metrics

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ("zero3", "packed_wires")


def loss_of(given: argparse.Namespace, config: str, seed: int) -> float:
    """Trains a config unless `folder` has it, and returns the mean loss over the last tenth of the steps."""
    workdir, steps = given.folder / f"{config}_{given.steps}_{seed}", given.steps
    flags = {"steps": steps, "seed": seed, "log_every": 1, "evaluate.every": 0, "checkpoint.every": 0}
    flags |= {"emulate_devices": given.devices} | dict(word.split("=", 1) for word in given.changes)
    flags |= {"wire.host_devices": given.devices // 2} if config != CONFIGS[0] else {}
    words = [f"--config.{name}={value}" for name, value in flags.items()]
    command = ["-m", "zerojax.train", "--config", f"configs/{config}.py", "--workdir", str(workdir), *words]
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
    parser.add_argument("--devices", type=int, default=8, help="two hosts of half as many")
    parser.add_argument("changes", nargs="*", help="key=value, of both configs")
    given = parser.parse_args()
    differences = []
    for seed in range(given.seeds):
        plain, packed = (loss_of(given, config, seed) for config in CONFIGS)
        differences.append(packed - plain)
        print(f"seed {seed}: plain {plain:.4f}, packed {packed:.4f}, difference {packed - plain:+.4f}", flush=True)
    print(f"mean difference over {given.seeds} seeds: {statistics.mean(differences):+.4f}")


if __name__ == "__main__":
    main()
