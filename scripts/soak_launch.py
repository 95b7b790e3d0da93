"""Disturbs runs of `zerojax launch` over real ssh until they end, and compares their losses with those of an undisturbed run.

    python scripts/soak_launch.py --faults 50 --hosts 2 --devices 4
    python scripts/soak_launch.py --faults 20 --steps 3000 --spread --kinds "kill,kill 0,stop,cut,disk" --out soak.json
    python scripts/soak_launch.py --local --devices 0 --faults 8 --steps 10000 --spread --kinds "kill,kill 0,stop,term"

This script needs root: the hosts are network namespaces (scripts/ssh_hosts.py). With --local they are processes of this machine, and
only a full disk needs root. Faults: kill -9 of a process, of process 0, of an agent, of an ssh client; kill -STOP of a process; the cut
of a host's network; a full disk; SIGTERM to a process; a main thread that sleeps for ever, at once or when it next begins to read data,
to evaluate or to save; and, if asked for by `--kinds gone`, a host that is cut until the run goes on without it. Agents, ssh clients and
networks are of hosts, so --local leaves them out, and a full disk too unless --kinds names it. Each fault must be named
within 60 s, the run must resume by itself (after a full disk by the same command, once there is space), no process may be left, and the
losses must be equal bit for bit (within RTOL after `gone`). Each fault is one line; the status is 1 if any went wrong. With --spread one
run has all faults, at even distances. --out writes them, the seconds until the next new step, what the host memory of processes grew by,
and the seconds of a step early and late.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import bench_child  # in this folder
import numpy as np
import ssh_hosts

ROOT = pathlib.Path(__file__).parents[1]
NAMED_SECONDS, RESUMED_SECONDS = 60.0, 240.0
HANGS = ("hang", "hang data", "hang evaluation", "hang checkpoint")
DISK = "disk"
KINDS = ("kill", "kill 0", "stop", "cut", "agent", "ssh", "term", DISK, *HANGS)
GONE, RTOL = "gone", 2e-3  # another number of devices sums in another order, and the difference grows with the steps
OF_HOSTS = ("cut", "agent", "ssh", GONE)  # which --local has not
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
DISK_MB = 256  # of the file system of all runs
SAMPLE_SECONDS = 1.0  # between two looks at the memory
SETTLED = 50  # steps after its first evaluation and save, from which on a process's memory is judged
LIMITS = "quiet=60,step=60"  # seconds after which a hang that was named ends the run; the default is 240


class Local:
    """Processes of this machine in place of hosts; `names` has its name for each of them."""

    def __init__(self, count: int):
        self.names = ["localhost"] * count
        self.launch_words = ["--num_gpus", str(count)]

    def mend_all(self) -> None:
        """Does nothing: no link is ever cut."""


Machines = Local | ssh_hosts.Hosts


class Run:
    """A launch in the background, and what its launcher says."""

    def __init__(
        self, made: Machines, folder: pathlib.Path, devices: int, steps: int, *options: str, settings: str = ""
    ):
        self.folder, self.said = folder, []
        words = f"{SETTINGS} {settings}".split()
        config = [f"--config.{word}" for word in words]
        said = dict(word.split("=", 1) for word in words)
        self.settled = SETTLED + max(int(said["evaluate.every"]), int(said["checkpoint.every"]))
        train = [sys.executable, "-m", "zerojax.train", "--config=configs/base.py", *config, f"--config.steps={steps}"]
        train += [f"--workdir={folder}", *([f"--config.emulate_devices={devices}"] if devices else [])]
        train += [f"--config.data.dir={folder.parent / 'datasets'}"]
        self.hang = folder.parent / "site" / "phase"
        self.hang.parent.mkdir(exist_ok=True)
        (self.hang.parent / "sitecustomize.py").write_text(HANG.format(file=str(self.hang)))
        launch = [sys.executable, "-m", "zerojax.commands.launch", *made.launch_words]
        env = {**os.environ, "PYTHONPATH": bench_child.python_path(self.hang.parent)}
        if devices:
            env["JAX_PLATFORMS"] = "cpu"
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
        self._command, self._env = [*launch, *options, "--", *train], env
        self.memory: list[tuple[str, int, int, int]] = []  # (what, pid, step, bytes)
        self.start()
        threading.Thread(target=self._watch_memory, daemon=True).start()

    def start(self) -> None:
        """Starts the command, again if it has ended."""
        with open(f"{self.folder}.out", "a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdout=log, stderr=subprocess.PIPE, text=True
            )
        threading.Thread(target=self._listen, args=[self.process], daemon=True).start()

    def _listen(self, process: subprocess.Popen) -> None:
        for line in process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    def _watch_memory(self) -> None:
        while True:
            step = self.step()
            named = {pid: f"process {rank}" for rank, pid in self.processes().items()}
            for pid, what in {**named, self.process.pid: "launcher"}.items():
                with contextlib.suppress(OSError):  # it has ended
                    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
                    # One that has ended, and whose parent does not know yet, has no such line.
                    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")]
                    self.memory += [(what, pid, step, size) for size in sizes]
            time.sleep(SAMPLE_SECONDS)

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


def strike(run: Run, made: Machines, kind: str, chance: random.Random) -> tuple[str, str]:
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
    if kind == DISK:
        with filler(run).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        return "a full disk", r"No space left|disk is full|free some space"
    assert isinstance(made, ssh_hosts.Hosts)
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


def disturb(run: Run, made: Machines, kinds: list[str], chance: random.Random, every: int = 0) -> list[dict]:
    """Does harm after harm while the run lasts, or every so many steps. Returns what each fault did."""
    found, count = [], 0
    while kinds and not run.is_over():
        due = max(run.step() + 3, (count + 1) * every)
        wait_for(lambda at=due: run.is_over() or run.step() > at, 3600 if every else RESUMED_SECONDS)
        time.sleep(chance.random() * 2)
        if run.is_over() or len(run.processes()) < len(made.names):
            continue
        count += 1
        found.append(strike_and_wait(run, made, kinds.pop(), chance))
    return found


def strike_and_wait(run: Run, made: Machines, kind: str, chance: random.Random) -> dict:
    """Does harm, and waits until it is named and the run resumes. Returns what it did; `is_right` tells whether all went well."""
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
    if kind == DISK:
        wait_for(run.is_over, NAMED_SECONDS)
        filler(run).unlink()
        run.start()
    resumed = named and wait_for(resumes, RESUMED_SECONDS)
    if kind == GONE:
        wait_for(lambda: run.is_over() or run.step() > step + 10, RESUMED_SECONDS)
        made.mend_all()
    left = [pid for pid in old if pathlib.Path(f"/proc/{pid}").exists()]
    reached = run.step()  # which the old processes may have logged after the blow
    went_on = resumed and wait_for(lambda: run.is_over() or run.step() > reached, RESUMED_SECONDS)
    seconds = time.monotonic() - began
    verdict = "ok" if went_on and not left else f"WRONG named={bool(named)} resumed={bool(resumed)} left={left}"
    when = (
        f"named after {named[0] - began:.1f} s"
        if named
        else f"not named; said: {[line for _, line in run.said[heard:]]}"
    )
    print(f"{what} at step {step}: {when}, next new step after {seconds:.1f} s, {verdict}", flush=True)
    times = {"named_s": named and round(named[0] - began, 1), "next_step_s": round(seconds, 1)}
    return {"kind": kind, "what": what, "step": step, **times, "is_right": verdict == "ok"}


def filler(run: Run) -> pathlib.Path:
    """Returns the file that takes all space of the runs' disk."""
    return run.folder.parent / "filler"


def growth(memory: list[tuple[str, int, int, int]], settled: int) -> dict[str, dict[str, float]]:
    """Returns by how many bytes a step the memory of a process grew: a line with one slope, and an intercept for each process.

    Args:
      memory: (what, pid, step, bytes) of each look. Those of the first `settled` steps of a trainer are left out.
    """
    found = {}
    for kind in ("launcher", "process"):
        by_pid: dict[int, list[tuple[int, int]]] = {}
        for what, pid, step, nbytes in memory:
            if what.startswith(kind):
                by_pid.setdefault(pid, []).append((step, nbytes))
        after = settled if kind == "process" else 0
        points = [[(x, y) for x, y in looks if x >= looks[0][0] + after] for looks in by_pid.values()]
        lives = [np.asarray(looks, float) - np.mean(looks, 0) for looks in points if len(looks) > 2]
        if lives and (spread := sum((life[:, 0] ** 2).sum() for life in lives)):
            slope = sum((life[:, 0] * life[:, 1]).sum() for life in lives) / spread
            rest = sum(((life[:, 1] - slope * life[:, 0]) ** 2).sum() for life in lives)
            freedom = sum(map(len, lives)) - len(lives) - 1
            error = (rest / freedom / spread) ** 0.5 if freedom > 0 else float("inf")
            largest = max(y for looks in by_pid.values() for _, y in looks)
            found[kind] = {
                "bytes_per_step": round(slope, 1),
                "standard_error": round(error, 1),
                "lives": len(lives),
                "looks": sum(map(len, lives)),
                "largest_bytes": largest,
            }
    return found


def one_run(
    given: argparse.Namespace,
    made: Machines,
    folder: pathlib.Path,
    expected: dict,
    todo: list[str],
    chance: random.Random,
) -> tuple[list[str], dict]:
    """Disturbs a run until it ends. Returns what went wrong, and what --out writes."""
    is_refit = GONE in todo
    more = ["--min_nodes=1", "--rejoin_seconds=15"] if is_refit else []
    more += ["--max_restarts=1000", f"--log_dir={folder}.logs", f"--limits={LIMITS}"]
    run = Run(made, folder, given.devices, given.steps, *more, settings=given.set)
    every = given.steps // (len(todo) + 1) if given.spread else 0
    faults = disturb(run, made, todo, chance, every)
    wrong = [fault["what"] for fault in faults if not fault["is_right"]]
    status = run.process.wait(3600)
    same = is_same(losses(run.folder), expected, RTOL if is_refit else 0.0)
    orphans = wait_for(lambda: not pids(str(run.folder)), 10) is None
    words = ("equal within RTOL" if is_refit else "equal bit for bit") if same else "DIFFER"
    outcome = f"losses {words}, {'ORPHANS' if orphans else 'no orphans'}"
    print(f"{folder.name}: status {status}, {outcome}", flush=True)
    if status or not same or orphans:
        wrong.append(f"{folder}: {[line for _, line in run.said[-20:]]}")
    about = {"status": status, "losses": words, "orphans": orphans, "faults": faults}
    return wrong, {**about, **of_life(run)}


def of_life(run: Run) -> dict:
    """Returns what the memory and the steps of a run were like. `looks` has (process, step, MB), a hundred of them or less."""
    looks = [(what, step, nbytes // 10**6) for what, _, step, nbytes in run.memory if what != "launcher"]
    every = max(1, -(-len(looks) // 100))
    return {"memory": growth(run.memory, run.settled), "step_ms": step_ms(run.folder), "looks": looks[::every]}


def step_ms(folder: pathlib.Path) -> dict[str, float]:
    """Returns the median milliseconds of a step in the first and in the last fifth of a run, without its first fiftieth."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines if "loss" in line and "step_seconds" in line]
    part = max(1, len(seconds) // 5)
    found = {"first fifth": seconds[len(seconds) // 50 : part], "last fifth": seconds[-part:]}
    return {name: round(statistics.median(some) * 1e3, 3) for name, some in found.items() if some}


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
    parser.add_argument("--devices", type=int, default=4, help="emulated on each host; 0: its GPUs")
    parser.add_argument("--local", action="store_true", help="processes of this machine in place of hosts")
    parser.add_argument("--set", default="", help="settings of the run beside the soak's own, as NAME=VALUE NAME=VALUE")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--kinds", help=f"of faults, with commas between (all): {', '.join((*KINDS, GONE))}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spread", action="store_true", help="all faults in one run, at even distances")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of what was found")
    parser.add_argument("--limit_s", type=float, default=1e9, help="no further run after so many seconds")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not given.local and (why := ssh_hosts.why_not()):
        sys.exit(f"soak_launch: this machine {why}")
    chance, began, wrong = random.Random(given.seed), time.monotonic(), []
    kinds = kinds_of(given.kinds, is_local=given.local)
    given.kinds = ",".join(kinds)
    todo = [kinds[index % len(kinds)] for index in range(given.faults)]
    chance.shuffle(todo)
    folder, runs = pathlib.Path(tempfile.mkdtemp(prefix="soak-")), []
    print(f"the runs are in {folder}, and stay there", flush=True)
    machines = contextlib.nullcontext(Local(given.hosts)) if given.local else ssh_hosts.hosts(given.hosts, 1)
    with disk_of(folder) if DISK in kinds else contextlib.nullcontext(), machines as made:
        calm = Run(made, folder / "calm", given.devices, given.steps, settings=given.set)
        if calm.process.wait():
            sys.exit(f"the undisturbed run failed: {calm.said}")
        expected, about = losses(calm.folder), of_life(calm)
        about["seconds"] = round(time.monotonic() - began, 1)
        print(f"calm: {json.dumps({**about, 'looks': len(about['looks'])})}", flush=True)
        while todo and time.monotonic() - began < given.limit_s:
            failed, found = one_run(given, made, folder / f"run{len(todo)}", expected, todo, chance)
            wrong += failed
            runs.append(found)
            print(f"{given.faults - len(todo)} faults in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{given.faults - len(todo)} faults, {len(wrong)} wrong" + "".join(f"\n  {line}" for line in wrong))
    if given.out:
        names = ("hosts", "devices", "local", "steps", "kinds", "seed", "spread", "set")
        settings = {name: getattr(given, name) for name in names}
        found = {"settings": settings, "undisturbed": about, "wrong": len(wrong), "runs": runs}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


def kinds_of(asked: str | None, *, is_local: bool) -> list[str]:
    """Returns the kinds of faults, or ends the script where one is not known or not possible."""
    possible = [kind for kind in (*KINDS, GONE) if not (is_local and kind in OF_HOSTS)]
    if not asked:
        return [kind for kind in possible if kind != GONE and not (is_local and kind == DISK)]
    for kind in asked.split(","):
        if kind not in possible:
            sys.exit(f"soak_launch: --kinds: {kind!r} is none of {', '.join(possible)}{' (with --local)' * is_local}")
        if is_local and kind == DISK and os.geteuid():
            sys.exit("soak_launch: --kinds: a full disk needs root, which mounts a small one")
    return asked.split(",")


@contextlib.contextmanager
def disk_of(folder: pathlib.Path):
    """Gives a folder a file system of DISK_MB of its own."""
    ssh_hosts.run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", str(folder))
    try:
        yield
    finally:
        ssh_hosts.run("umount", "--lazy", str(folder))


if __name__ == "__main__":
    sys.exit(main())
