"""Lets one of two processes of this machine stand still in each phase of a run, and prints when the launcher names it.

    python scripts/hang_launch.py                                              9 phases, some 70 s each
    python scripts/hang_launch.py --phases step,evaluation --limit_s 300       on two GPUs, if there are some

The main thread of process 1 waits for a lock that nobody releases, when it begins the phase (`import`: when it imports optax). It must be
named, with its phase and its stack, within 60 s. The run is then killed. The status is 1 if a hang was not named in time.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import bench_child  # in this folder

ROOT = pathlib.Path(__file__).parents[1]
NAMED_SECONDS, GIVE_UP_SECONDS = 60.0, 240.0
PHASES = ("import", "start", "data", "compile", "restore", "step", "evaluation", "checkpoint", "results")
SETTINGS = (
    "model.preset=test model.num_layers=1 model.remat=none seq_len=64 global_batch_size=8 log_every=1 steps=12 optimizer.warmup_steps=0 "
    "evaluate.every=8 evaluate.batches=2 checkpoint.every=8 sample.length=8 emulate_devices=1 export.format=huggingface"
)
# On the path of the processes: process 1 stands still where PHASE begins for the TIMES-th time.
SITE = """
import os, pathlib, sys, threading

def hang():
    pathlib.Path({hung!r}).touch()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

class Finder:
    left = {times}

    def find_spec(self, name, path, target=None):
        if name == "optax" and {phase!r} == "import":
            hang()
        if name == "zerojax.trainer.loop":  # `watch` is there by now
            from zerojax.launch import watch
            at = watch.at

            def hangs_at(phase, step=None):
                at(phase, step)
                if phase == {phase!r}:
                    Finder.left -= 1
                    if not Finder.left:
                        hang()

            watch.at = hangs_at

if os.environ.get("RANK") == "1" and "ZEROJAX_HEARTBEAT" in os.environ:
    sys.meta_path.insert(0, Finder())
"""


def try_phase(phase: str, folder: pathlib.Path) -> bool:
    """Runs until process 1 is named. Returns whether that was in time."""
    (folder / "site").mkdir(parents=True)
    hung = folder / "hung"
    times = 6 if phase in ("step", "data") else 1  # the first steps load programs
    (folder / "site" / "sitecustomize.py").write_text(SITE.format(hung=str(hung), phase=phase, times=times))
    env = {**os.environ, "PYTHONPATH": bench_child.python_path(folder / "site")}
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
    config = [f"--config.{word}" for word in SETTINGS.split()] + [f"--config.data.dir={folder.parent / 'datasets'}"]
    command = [
        sys.executable,
        "-m",
        "zerojax.commands.launch",
        "--num_gpus=2",
        "--",
        sys.executable,
        "-m",
        "zerojax.train",
    ]
    command += ["--config=configs/base.py", *config, f"--workdir={folder / 'run'}"]
    with open(folder / "out", "w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(GIVE_UP_SECONDS, process.send_signal, [signal.SIGQUIT])
    timer.start()
    said, named = [], None
    for line in process.stderr:
        said.append(line.rstrip())
        if "rank 1 on" in line and named is None:
            named = time.time() - hung.stat().st_mtime if hung.exists() else None
            threading.Timer(2.0, process.send_signal, [signal.SIGQUIT]).start()  # after the stack
    process.wait()
    timer.cancel()
    is_well = named is not None and named < NAMED_SECONDS and "in hang" in "".join(said)
    line = next((line for line in said if "rank 1 on" in line), f"not named; the launcher said: {said[-5:]}")
    print(f"{phase}: {'?' if named is None else f'{named:.1f}'} s, {'ok' if is_well else 'WRONG'}: {line}", flush=True)
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--limit_s", type=float, default=1e9, help="no further phase after so many seconds")
    given = parser.parse_args()
    began, folder = time.monotonic(), pathlib.Path(tempfile.mkdtemp(prefix="hangs-"))
    wrong = 0
    for phase in given.phases.split(","):
        if time.monotonic() - began < given.limit_s:
            wrong += not try_phase(phase, folder / phase)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
