"""Disturbs runs of `zerojax launch` over real ssh until they end, and compares their losses with those of an undisturbed run.

    python scripts/soak_launch.py --faults 50 --hosts 2 --devices 4

This script needs root: the hosts are network namespaces (scripts/ssh_hosts.py). Faults: kill -9 of a process, of process 0, of an agent, of
an ssh client; kill -STOP of a process; the cut of a host's network; SIGTERM to a process; a main thread that sleeps for ever, at once or
when it next begins to read data, to evaluate or to save; and, if asked for by `--kinds gone`, a host that is cut until the run goes on
without it. Each fault must be named within 60 s, the run must resume by itself, no process may be left, and the losses must be equal bit
for bit (within RTOL after `gone`). Each fault is one line; the status is 1 if any went wrong.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import bench_child  # in this folder
import ssh_hosts

ROOT = pathlib.Path(__file__).parents[1]
NAMED_SECONDS, RESUMED_SECONDS = 60.0, 240.0
HANGS = ("hang", "hang data", "hang evaluation", "hang checkpoint")
KINDS = ("kill", "kill 0", "stop", "cut", "agent", "ssh", "term", *HANGS)
GONE, RTOL = "gone", 2e-3  # another number of devices sums in another order, and the difference grows with the steps
SETTINGS = (
    "model.preset=test model.num_layers=1 model.remat=none precision=fp32 seq_len=32 global_batch_size=24 log_every=1 "
    "optimizer.learning_rate=0.01 optimizer.schedule=constant optimizer.warmup_steps=2 evaluate.every=7 evaluate.batches=2 "
    "sample.length=0 checkpoint.every=5"
)
# On the processes' path: SIGUSR2 lets the main thread sleep for ever, when it begins the phase that the file names, or at once.
HANG = """
import pathlib, signal, time

def hang(*_):
    from zerojax.launch import watch
    phase, at = pathlib.Path({file!r}).read_text(), watch.at

    def hangs_at(name, step=None):
        at(name, step)
        if name == phase:
            sleep()

    watch.at = hangs_at
    if not phase:
        sleep()

def sleep():
    pathlib.Path({file!r}).unlink()
    time.sleep(1e6)

signal.signal(signal.SIGUSR2, hang)
"""
LIMITS = "quiet=60,step=60"  # seconds after which a hang that was named ends the run; the default is 240


class Run:
    """A launch in the background, and what its launcher says."""

    def __init__(self, made: ssh_hosts.Hosts, folder: pathlib.Path, devices: int, steps: int, *options: str):
        self.folder, self.said = folder, []
        config = [f"--config.{word}" for word in SETTINGS.split()]
        train = [sys.executable, "-m", "zerojax.train", "--config=configs/base.py", *config, f"--config.steps={steps}"]
        train += [f"--config.emulate_devices={devices}", f"--workdir={folder}"]
        train += [f"--config.data.dir={folder.parent / 'datasets'}"]
        self.hang = folder.parent / "site" / "phase"
        self.hang.parent.mkdir(exist_ok=True)
        (self.hang.parent / "sitecustomize.py").write_text(HANG.format(file=str(self.hang)))
        launch = [
            sys.executable,
            "-m",
            "zerojax.commands.launch",
            "--hostfile",
            str(made.hostfile),
            "--ssh_options",
            made.ssh_options,
        ]
        env = {**os.environ, "PYTHONPATH": bench_child.python_path(self.hang.parent), "JAX_PLATFORMS": "cpu"}
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
        log = open(folder.with_suffix(".out"), "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*launch, *options, "--", *train], cwd=ROOT, env=env, stdout=log, stderr=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    def step(self) -> int:
        """Returns the last step in the log."""
        found = losses(self.folder)
        return max(found, default=0)

    def processes(self) -> dict[int, int]:
        """Returns {rank: pid} of the trainers that run now."""
        found = {}
        for pid in pids(str(self.folder), "zerojax.train"):
            with contextlib.suppress(OSError, StopIteration):  # it may be about to end
                words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                rank = next(word for word in words if word.startswith("ZEROJAX_PROCESS_ID="))
                found[int(rank.partition("=")[2])] = pid
        return found

    def is_over(self) -> bool:
        return self.process.poll() is not None


def pids(*words: str) -> list[int]:
    """Returns the processes whose command holds all words, but for launchers."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace").replace("\0", " ")
            if all(word in command for word in words) and "commands.launch" not in command:
                found.append(int(path.parent.name))
    return found


def losses(folder: pathlib.Path) -> dict[int, tuple[float, float]]:
    """Returns {step: (loss, gradient norm)}."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if "loss" in values:
                    found[values["step"]] = (values["loss"], values["grad_norm"])
    return found


def wait_for(is_so, seconds: float):
    """Returns what is true within `seconds`, or None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := is_so():
            return found
        time.sleep(0.1)
    return None


def strike(run: Run, made: ssh_hosts.Hosts, kind: str, chance: random.Random) -> tuple[str, str]:
    """Does harm. Returns what was done, and a regex of the words that must name it."""
    ranks = run.processes()
    rank = 0 if kind == "kill 0" else chance.choice(sorted(ranks))
    host = made.names[rank]  # one process a host
    where = f"rank {rank} on {re.escape(host)}"
    lost = f"host {re.escape(host)} is lost"
    if kind in ("kill", "kill 0"):
        os.kill(ranks[rank], signal.SIGKILL)
        return f"kill -9 of rank {rank}", f"{where}.* ended with SIGKILL"
    if kind == "term":
        os.kill(ranks[rank], signal.SIGTERM)
        return f"SIGTERM to rank {rank}", f"{where} got a signal: the run is stopped and saved"
    if kind == "stop":
        os.kill(ranks[rank], signal.SIGSTOP)
        return f"kill -STOP of rank {rank}", f"{where}.* is stopped"
    if kind in HANGS:
        phase = kind.removeprefix("hang").strip()
        run.hang.write_text(phase)
        os.kill(ranks[rank], signal.SIGUSR2)
        where += f", step \\d+ \\({phase or '.*'}\\) (gives no sign of life|stands still|has )"
        return f"hang of rank {rank} ({phase or 'at once'})", where
    if kind in ("cut", GONE):
        made.cut(rank)
        return f"network cut of {host}", lost
    if kind == "agent":
        stat = pathlib.Path(f"/proc/{ranks[rank]}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        return f"kill -9 of the agent of {host}", f"{lost}|{where}.* ended with SIGKILL"
    (client,) = [
        pid for pid in pids("ssh -T", f" {host} ") if "sshd" not in pathlib.Path(f"/proc/{pid}/comm").read_text()
    ][:1]
    os.kill(client, signal.SIGKILL)
    return f"kill -9 of the ssh client of {host}", lost


def disturb(run: Run, made: ssh_hosts.Hosts, kinds: list[str], chance: random.Random) -> list[str]:
    """Does harm after harm while the run lasts. Returns the faults that went wrong."""
    wrong = []
    while kinds and not run.is_over():
        before = run.step()
        wait_for(lambda at=before: run.is_over() or run.step() > at + 3, RESUMED_SECONDS)
        time.sleep(chance.random() * 2)
        if run.is_over() or len(run.processes()) < len(made.names):
            continue
        if fault := strike_and_wait(run, made, kinds.pop(), chance):
            wrong.append(fault)
    return wrong


def strike_and_wait(run: Run, made: ssh_hosts.Hosts, kind: str, chance: random.Random) -> str:
    """Does harm, and waits until it is named and the run resumes. Returns what went wrong, or ""."""
    heard, step = len(run.said), run.step()
    old = set(run.processes().values())
    began = time.monotonic()
    what, words = strike(run, made, kind, chance)
    if kind in HANGS:  # the process takes the file away when it hangs
        wait_for(lambda: not run.hang.exists() or run.is_over(), RESUMED_SECONDS)
        began = time.monotonic()

    def hears() -> tuple[float, str] | None:
        return next((said for said in run.said[heard:] if re.search(words, said[1])), None)

    def resumes() -> bool:
        now = set(run.processes().values())
        return run.is_over() or (len(now) == len(made.names) - (kind == GONE) and not old & now)

    named = wait_for(hears, NAMED_SECONDS)
    if kind != GONE:
        made.mend_all()
    resumed = named and wait_for(resumes, RESUMED_SECONDS)
    if kind == GONE:
        wait_for(lambda: run.is_over() or run.step() > step + 10, RESUMED_SECONDS)
        made.mend_all()
    left = [pid for pid in old if pathlib.Path(f"/proc/{pid}").exists()]
    verdict = "ok" if resumed and not left else f"WRONG named={bool(named)} resumed={bool(resumed)} left={left}"
    when = (
        f"named after {named[0] - began:.1f} s"
        if named
        else f"not named; said: {[line for _, line in run.said[heard:]]}"
    )
    print(f"{what} at step {step}: {when}, {verdict}", flush=True)
    return "" if verdict == "ok" else what


def one_run(
    given: argparse.Namespace,
    made: ssh_hosts.Hosts,
    folder: pathlib.Path,
    expected: dict,
    todo: list[str],
    chance: random.Random,
) -> list[str]:
    """Disturbs a run until it ends. Returns what went wrong."""
    is_refit = GONE in todo
    more = ["--min_nodes=1", "--rejoin_seconds=15"] if is_refit else []
    more += ["--max_restarts=1000", f"--log_dir={folder}.logs", f"--limits={LIMITS}"]
    run = Run(made, folder, given.devices, given.steps, *more)
    wrong = disturb(run, made, todo, chance)
    status = run.process.wait(3600)
    same = is_same(losses(run.folder), expected, RTOL if is_refit else 0.0)
    orphans = wait_for(lambda: not pids(str(run.folder)), 10) is None
    words = ("equal within RTOL" if is_refit else "equal bit for bit") if same else "DIFFER"
    outcome = f"losses {words}, {'ORPHANS' if orphans else 'no orphans'}"
    print(f"{folder.name}: status {status}, {outcome}", flush=True)
    if status or not same or orphans:
        wrong.append(f"{folder}: {[line for _, line in run.said[-20:]]}")
    return wrong


def is_same(found: dict, expected: dict, rtol: float) -> bool:
    """Returns whether two runs have the same steps with the same numbers."""
    pairs = [
        (a, b) for step, numbers in found.items() for a, b in zip(numbers, expected.get(step, (float("nan"),) * 2))
    ]
    return found.keys() == expected.keys() and all(abs(a - b) <= rtol * abs(b) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4, help="emulated on each host")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit_s", type=float, default=1e9, help="no further run after so many seconds")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if why := ssh_hosts.why_not():
        sys.exit(f"soak_launch: this machine {why}")
    chance, began, wrong = random.Random(given.seed), time.monotonic(), []
    kinds = given.kinds.split(",")
    todo = [kinds[index % len(kinds)] for index in range(given.faults)]
    chance.shuffle(todo)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    with ssh_hosts.hosts(given.hosts, 1) as made:
        calm = Run(made, folder / "calm", given.devices, given.steps)
        if calm.process.wait():
            sys.exit(f"the undisturbed run failed: {calm.said}")
        expected = losses(calm.folder)
        while todo and time.monotonic() - began < given.limit_s:
            wrong += one_run(given, made, folder / f"run{len(todo)}", expected, todo, chance)
            print(f"{given.faults - len(todo)} faults in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{given.faults - len(todo)} faults, {len(wrong)} wrong" + "".join(f"\n  {line}" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
