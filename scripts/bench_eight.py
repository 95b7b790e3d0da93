"""Measures zerojax on all GPUs of this machine, and beside it torchtitan 0.3.0 and DeepSpeed 0.19.8, one after the other.

    python scripts/bench_eight.py FOLDER --peers PEERS --site SITE                the parts of PARTS in their order
    python scripts/bench_eight.py FOLDER --parts 8b titan-8b lean --limit_s 570
    python scripts/bench_eight.py FOLDER --dry                                    prints the commands, and runs nothing

torchtitan runs by docs/benchmarks/raw/peer_titan3.py. PEERS holds peer_ds.py, whose settings docs/benchmarks/raw/peers_4xh200.txt states;
SITE holds the packages that both need. A part that is done in FOLDER is not run again, so the same command continues after its limit. All
parts share a compilation cache: `8b` starts cold and `8b-again` warm. A part is not started when less time than it should take is left.
One that fails or runs over is ended with all of its processes, and the next one starts. Each part's figures are printed as it ends;
FOLDER holds its output.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import bench_child  # in this folder

ROOT = bench_child.ROOT
FREE = 3000  # MiB in use on a GPU below which the part before has left it

TITAN, DEEPSPEED = "peer_titan3.py", "peer_ds.py"


@dataclasses.dataclass(frozen=True)
class Part:
    """One part: what runs, the seconds that it should take, and those after which it is ended.

    Attributes:
      words: settings of bench_train.py; for a peer, its script and the script's words.
    """

    seconds: float
    most: float
    words: Sequence[str]
    is_peer: bool = False


# Seconds as measured on eight H200s, or estimated from them (fp8, float8, lora, host, titan-1b).
PARTS = {
    "8b": Part(125, 200, ["8b"]),
    "titan-8b": Part(80, 150, [TITAN, "8B", "2", "8192", "selective", "15"], is_peer=True),
    "lean": Part(107, 180, ["8b-lean"]),
    "titan-8b-full": Part(80, 150, [TITAN, "8B", "2", "8192", "full", "15"], is_peer=True),
    "8b-again": Part(72, 120, ["8b"]),
    "1b": Part(53, 100, ["1b"]),
    # With 8b, lean and 1b these are six settings whose planned memory is compared with the measured.
    "plans": Part(150, 240, ["1b-stage1", "1b-stage2-lean", "1b-accum4"]),
    "deepspeed-8b": Part(70, 150, [DEEPSPEED, *"--model 8b --bs 2 --seq 8192 --stage 3 --steps 5".split()], True),
    "titan-1b": Part(60, 120, [TITAN, "1B", "8", "4096", "selective", "15"], is_peer=True),
    # nothing recomputed, and nothing offloaded but where the name says so
    "8b-rich": Part(85, 180, ["8b-rich"]),
    "8b-fp8": Part(130, 220, ["8b-fp8"]),
    "titan-8b-float8": Part(100, 180, [TITAN, "8B", "2", "8192", "selective", "15", "float8"], is_peer=True),
    "lora": Part(90, 180, ["8b-lora"]),
    "host": Part(130, 220, ["8b-host"]),
    "8b-fp8-offload": Part(130, 220, ["8b-fp8-offload"]),
    "8b-fp8-again": Part(80, 150, ["8b-fp8"]),
}


def command(name: str, options: argparse.Namespace, left: float) -> list[str]:
    """Returns the command of a part that may run for `left` seconds."""
    part = PARTS[name]
    if part.is_peer:
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={options.gpus}"]
        return [
            *run,
            *"--local-ranks-filter 0 --role rank --tee 3".split(),
            str((ROOT / "docs/benchmarks/raw" if part.words[0] == TITAN else options.peers) / part.words[0]),
            *part.words[1:],
        ]
    words = f"--processes {options.gpus} --steps 12 --limit_s {left:.0f} --workdir {shlex.quote(str(options.folder / name))}"
    return [sys.executable, str(ROOT / "scripts" / "bench_train.py"), *shlex.split(words), "--settings", *part.words]


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment of a part. NVLink multicast is off, because not every machine offers it."""
    added = {"NCCL_NVLS_ENABLE": "0"}
    if PARTS[name].is_peer:
        added |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": str(options.site or "")}
    else:
        flags = f"--xla_gpu_experimental_use_collective_kernels= {os.environ.get('XLA_FLAGS', '')}"
        added |= {"XLA_FLAGS": flags.strip(), "JAX_COMPILATION_CACHE_DIR": str(options.folder / "cache")}
    return {**os.environ, **added}


def run(name: str, options: argparse.Namespace, left: float) -> str:
    """Runs a part for up to `left` seconds, and returns its status."""
    log = options.folder / f"{name}.out"
    with open(log, "w") as out:
        process = bench_child.start(command(name, options, left), environment(name, options), out)
        try:
            code = process.wait(
                timeout=left + 15 * (not PARTS[name].is_peer)
            )  # bench_train ends its own runs at its limit
            return "ok" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            return "ended: time is up"
        finally:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends a part's processes: torch.distributed.run and bench_train end those that they started when they are told to."""
    for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def figures(log: pathlib.Path) -> list[str]:
    """Returns the lines of a part's output with figures, or its last lines if there are none."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace")).splitlines() if log.exists() else []
    shown = [
        line for line in lines if line.startswith("| ") or any(word in line for word in ("tps: ", "RESULT", "GB/s"))
    ]
    return (shown or lines)[-12:]


def wait_for_gpus(seconds: float = 20) -> None:
    """Waits until the part before has left the memory of all GPUs, and says so if it does not."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    end = time.monotonic() + seconds
    while True:
        used = [int(word) for word in _output(query).split() if word.isdecimal()]
        if max(used, default=0) < FREE:
            return
        if time.monotonic() > end:
            return print(f"GPUs still hold {used} MiB", flush=True)
        time.sleep(1)


def main(arguments: Sequence[str]) -> int:
    """Runs the parts and returns the exit status: 1 if one did not succeed."""
    options = _options(arguments)
    done_file = options.folder / "done.json"
    if options.dry:
        for name in options.parts:
            part = PARTS[name]
            print(
                f"{name}: some {part.seconds} s, at most {part.most}: {shlex.join(command(name, options, part.most))}"
            )
        return 0
    began = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "gpus.txt").write_text(_described())
    done = json.loads(done_file.read_text()) if done_file.exists() else {}
    for name in options.parts:
        left = options.limit_s - (time.monotonic() - began)
        if done.get(name, {}).get("status") == "ok":
            print(f"== {name}: done before", flush=True)
            continue
        if left < PARTS[name].seconds:
            print(f"== {name}: not started, {left:.0f} s are left of some {PARTS[name].seconds}", flush=True)
            continue
        shutil.rmtree(options.folder / name, ignore_errors=True)  # a run would resume in an old folder
        wait_for_gpus(min(20, left - PARTS[name].seconds))
        start = time.monotonic()
        status = run(name, options, min(PARTS[name].most, options.limit_s - (start - began)))
        seconds = time.monotonic() - start
        done[name] = {"status": status, "seconds": round(seconds)}
        done_file.write_text(json.dumps(done, indent=1) + "\n")
        print(
            "\n".join([f"== {name}: {status}, {seconds:.0f} s", *figures(options.folder / f"{name}.out")]), flush=True
        )
    return 0 if all(done.get(name, {}).get("status") == "ok" for name in options.parts) else 1


def _described() -> str:
    commands = (
        "nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv",
        "nvidia-smi topo -m",
        "lscpu",
        "free -g",
    )
    return "\n".join(_output(line.split()) for line in commands)


def _output(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{words}: {error}\n"


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=_absolute, help="for all files; on a disk of the machine")
    parser.add_argument(
        "--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--peers", type=_absolute, help="the folder of peer_ds.py; without it DeepSpeed is not run")
    parser.add_argument(
        "--site", type=_absolute, help="the folder of the peers' packages; without it and --peers no peers are run"
    )
    parser.add_argument("--gpus", type=int, default=0, help="0: all of this machine")
    parser.add_argument("--limit_s", type=float, default=570, help="seconds until all parts are ended")
    parser.add_argument("--dry", action="store_true", help="print the commands only")
    options = parser.parse_args(arguments)
    absent = {DEEPSPEED} if options.peers is None else set()
    absent |= {TITAN} if options.peers is None and options.site is None else set()
    options.parts = [name for name in options.parts if not (PARTS[name].is_peer and absent & {*PARTS[name].words})]
    options.gpus = options.gpus or _output(["nvidia-smi", "--list-gpus"]).count("GPU ") or 8
    return options


def _absolute(text: str) -> pathlib.Path:
    return pathlib.Path(text).absolute()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no part stays alive
    sys.exit(main(sys.argv[1:]))
