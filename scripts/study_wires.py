"""Compares losses of training with packed wires and without, over seeds. This script trains on emulated devices, which are two hosts.

    python scripts/study_wires.py --folder /tmp/wires --limit 560 --devices 4 seq_len=32 global_batch_size=16 model.num_layers=2

It starts the runs of all seeds side by side, each on its share of the cores that this process may use. At the limit the runs save and
stop, and the same command continues them. Words after the flags change all configs. The last table has each seed's mean loss over the last
tenth of the steps that all its runs have done, and the differences to the run whose wires are not packed.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

from zerojax.trainer import metrics

ROOT = pathlib.Path(__file__).parents[1]
PACKED = "packed_wires"
PLAIN = "plain"
KINDS = {PLAIN: ("zero3", {}), "packed": (PACKED, {}), "feedback": (PACKED, {"wire.error_feedback": True})}
GRACE = 30.0  # seconds in which a stopped run saves
OWN = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # of the runs: emulated devices, also where there are GPUs


def command(given: argparse.Namespace, kind: str, seed: int) -> list[str]:
    """Returns the command of one run, which also resumes it."""
    config, changes = KINDS[kind]
    flags = {"steps": given.steps, "seed": seed, "log_every": 1, "evaluate.every": 0, "checkpoint.every": 0}
    flags |= {"sample.length": 0, "emulate_devices": given.devices} | changes
    flags |= {"wire.host_devices": given.devices // 2} if config == PACKED else {}
    words = [f"--config.{name}={value}" for name, value in flags.items()]
    words += [f"--config.{word}" for word in given.changes]
    own = ["-m", "zerojax.train", "--config", f"configs/{config}.py", "--workdir", str(workdir(given, kind, seed))]
    return [sys.executable, *own, *words]


def workdir(given: argparse.Namespace, kind: str, seed: int) -> pathlib.Path:
    """Returns the folder of one run."""
    return given.folder / f"{kind}_{given.steps}_{seed}"


def losses(given: argparse.Namespace, kind: str, seed: int) -> list[float]:
    """Returns the loss of each step that a run has done."""
    folder = workdir(given, kind, seed)
    return [line["loss"] for line in metrics.read(folder) if "loss" in line] if (folder / metrics.FILE).exists() else []


def train(given: argparse.Namespace) -> None:
    """Trains what is left of all runs, until the limit."""
    end = time.monotonic() + given.limit - GRACE
    runs = [(kind, seed) for seed in range(given.seeds) for kind in given.kinds]
    left = [run for run in runs if len(losses(given, *run)) < given.steps]
    cores = sorted(os.sched_getaffinity(0))
    slots = min(len(left), given.at_once or len(cores))
    running: dict[int, tuple[subprocess.Popen, tuple[str, int]]] = {}
    while (left or running) and time.monotonic() < end:
        for slot in range(slots):
            if slot not in running and left:
                kind, seed = left.pop(0)
                workdir(given, kind, seed).mkdir(parents=True, exist_ok=True)
                with (workdir(given, kind, seed) / "log.txt").open("a") as log:
                    process = subprocess.Popen(
                        command(given, kind, seed), cwd=ROOT, env={**os.environ, **OWN}, stdout=log, stderr=log
                    )
                # Threads of XLA's are started later, and inherit it.
                os.sched_setaffinity(process.pid, cores[slot::slots] or cores)
                running[slot] = process, (kind, seed)
        for slot, (process, run) in list(running.items()):
            if process.poll() is not None:
                del running[slot]
                if process.returncode:
                    print(f"{run}: ended with {process.returncode}; see {workdir(given, *run)}/log.txt", flush=True)
        time.sleep(0.5)
    for process, _ in running.values():
        process.send_signal(signal.SIGTERM)
    for process, run in running.values():
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{run}: did not save within {GRACE:.0f} s")


def show(given: argparse.Namespace) -> None:
    """Prints the table of what has been done."""
    others = [kind for kind in given.kinds if kind != PLAIN]
    print(f"{'seed':>6} {'steps':>6} {PLAIN:>9}" + "".join(f" {kind:>9} {'more':>9}" for kind in others))
    more: dict[str, list[float]] = {kind: [] for kind in others}
    for seed in range(given.seeds):
        found = {kind: losses(given, kind, seed) for kind in (PLAIN, *others)}
        steps = min(map(len, found.values()))
        if not steps:
            print(f"{seed:>6} {steps:>6}")
            continue
        means = {kind: statistics.mean(own[steps - max(1, steps // 10) : steps]) for kind, own in found.items()}
        for kind in others:
            more[kind].append(means[kind] - means[PLAIN])
        shown = "".join(f" {means[kind]:9.4f} {more[kind][-1]:+9.4f}" for kind in others)
        print(f"{seed:>6} {steps:>6} {means[PLAIN]:9.4f}{shown}")
    for name, of_all in (("mean", statistics.mean), ("spread", lambda own: statistics.stdev(own) if own[1:] else 0.0)):
        print(f"{name:>6} {'':>16}" + "".join(f" {'':>9} {of_all(more[k]):+9.4f}" for k in others if more[k]))
    left = sum(len(losses(given, kind, seed)) < given.steps for seed in range(given.seeds) for kind in given.kinds)
    print(f"{left} runs are not done; the same command continues them" if left else "all runs are done")


def main(words: list[str] | None = None) -> None:
    """Reads the arguments, trains, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("wires"))
    parser.add_argument("--devices", type=int, default=8, help="two hosts of half as many")
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds, in which stopped runs save too")
    parser.add_argument("--at_once", type=int, default=0, help="runs side by side; 0: one a core")
    parser.add_argument("changes", nargs="*", help="key=value, of all configs")
    given = parser.parse_args(words)
    given.folder = given.folder.absolute()
    train(given)
    show(given)


if __name__ == "__main__":
    main()
