"""Measures training: runs each setting with the trainer, and prints its speed and memory.

    python scripts/bench_train.py --settings 1b 8b --processes 8 --repeat 3 --limit_s 540
    python scripts/bench_train.py --run "lean: configs/llama3_1b.py model.remat=full micro_batch_size=4" --run "plain: configs/llama3_1b.py"

A setting is a config file and words: `key=value` changes the config, `processes=8` starts one process per GPU, and NAME=value sets an
environment variable (XLA_FLAGS is appended to the variable's value). By default a run trains on random tokens, evaluates and saves
nothing, and logs every step. Each run is its own process, since a device's peak memory counts from the start of the process. A failed
run is a row of the table. Settings take turns when repeated, so that drift affects all of them.

A step's time runs from the arrival of the previous step's metrics to the arrival of its own, as in metrics.jsonl. The first two steps and
the last are not counted. --workdir holds a folder and a log for each run, and bench.json with every step of every run.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import bench_child  # in this folder
import bench_report

from zerojax.trainer.checks import memory_guard

ROOT = bench_report.ROOT
TAIL = 300  # last characters of a failed run's output
ONE_B, EIGHT_B = "configs/llama3_1b.py", "configs/llama3_8b.py"
SETTINGS = {
    "tiny": "configs/zero3.py",
    "1b": ONE_B,
    "1b-1gpu": f"{ONE_B} CUDA_VISIBLE_DEVICES=0 processes=1",
    "1b-lean": f"{ONE_B} model.remat=full",
    "1b-rich": f"{ONE_B} model.remat=none micro_batch_size=2",
    "1b-accum4": f"{ONE_B} micro_batch_size=2 grad_accum=4",
    "1b-stage0": f"{ONE_B} zero.stage=0",
    "1b-stage0-small": f"{ONE_B} zero.stage=0 micro_batch_size=4",
    "1b-stage1": f"{ONE_B} zero.stage=1",
    "1b-stage2": f"{ONE_B} zero.stage=2",
    "1b-stage2-lean": f"{ONE_B} zero.stage=2 model.remat=full",
    "8b": EIGHT_B,
    "8b-rich": f"{EIGHT_B} model.offload= model.recompute=",
    "8b-fp8": "configs/llama3_8b_fp8.py",
    "8b-fp8-offload": r"configs/llama3_8b_fp8.py model.offload=layer_(1?\d|2[0-7])/mlp/up",
    "8b-offload": rf"{EIGHT_B} model.recompute= model.offload=layer_(1?\d|2[0-7])/mlp/up",
    "8b-recompute": f"{EIGHT_B} model.offload= model.recompute=layer_.*/mlp/up",
    "8b-lean": "configs/llama3_8b_lean.py",
    "8b-4layers": f"{EIGHT_B} model.num_layers=4 model.offload= model.recompute=",
    "qwen3.5-9b-4layers": f"{EIGHT_B} model.preset=qwen3_5_9b model.num_layers=4 model.offload= model.recompute=",
    "8b-32k": "configs/llama3_8b_lean.py seq_len=32768 micro_batch_size=1",
    "8b-gathered": f"{EIGHT_B} model.by_columns= model.offload= model.recompute=",
    "8b-leanest": "configs/llama3_8b_lean.py model.remat=full model.recompute=",
    "8b-host": f"{EIGHT_B} offload.optimizer=host model.offload= model.recompute=",
    "8b-lora": "configs/lora_llama3_8b.py export.format=none",
}
GROUPS = {
    "plan-one": ("1b", "1b-lean", "1b-rich", "1b-accum4", "1b-stage0-small", "8b-4layers"),
    "plan-several": ("1b-stage0", "1b-stage1", "1b-stage2-lean", "1b-accum4", "8b", "8b-lean"),
}
DEFAULTS = {
    "log_every": "1",
    "data.name": "random",
    "data.eval_split": "",
    "evaluate.every": "0",
    "checkpoint.every": "0",
    "checkpoint.at_end": "False",
    "sample.length": "0",
}
OUT_OF_MEMORY, TOO_LATE = "out of memory", "stopped: time is up"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row: a config file, its overrides, environment variables, and the number of processes."""

    name: str
    config: str
    overrides: Mapping[str, str]
    environ: Mapping[str, str]
    processes: int


def main(arguments: Sequence[str]) -> int:
    """Runs the settings and returns the exit status: 1 if no run succeeded."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        settings = chosen(options.settings, options.run, options.processes)
    except ValueError as error:
        parser.error(str(error))
    folder = options.workdir or ROOT / "runs" / time.strftime("bench-%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--workdir: {folder} is not empty; name a new folder, since a run would resume in an old one")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    runs: dict[str, list[dict]] = {setting.name: [] for setting in settings}
    for turn in range(options.repeat):
        for setting in settings:
            left = options.limit_s - (time.monotonic() - began)
            if likely_seconds(runs, setting.name) > left:
                found: dict[str, Any] = {"status": bench_report.NOT_STARTED}
            else:
                found = run(setting, folder / f"{setting.name}-{turn}", options.steps, left)
            runs[setting.name].append(found)
            print(f"{setting.name}, run {turn + 1} of {options.repeat}: {bench_report.outcome(found)}", flush=True)
            write(folder / "bench.json", arguments, settings, runs)
    print("\n" + bench_report.table({name: bench_report.summary(found) for name, found in runs.items()}))
    print(f"\neach step of each run: {folder / 'bench.json'}")
    return 0 if any(found["status"] == bench_report.OK for several in runs.values() for found in several) else 1


def chosen(names: Sequence[str], free: Sequence[str], processes: int) -> list[Setting]:
    """Returns the named settings, and those given as "name: words".

    Raises:
      ValueError: a name is unknown or repeated, or a word has no known form.
    """
    given = []
    for name in names:
        members = GROUPS.get(name, (name,))
        if members == (name,) and name not in SETTINGS:
            raise ValueError(f"--settings: {name!r} is not known; known: {', '.join([*SETTINGS, *GROUPS])}")
        given += [(member, SETTINGS[member]) for member in members]
    for text in free:
        name, colon, words = text.partition(":")
        if not colon or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f'--run: must be "name: config.py key=value ...", and is {text!r}')
        given.append((name, words))
    if len({name for name, _ in given}) < len(given):
        raise ValueError("--settings, --run: two settings have the same name; rename one")
    if not given:
        raise ValueError("nothing to run; give --settings or --run")
    return [parse(name, words, processes) for name, words in given]


def split(words: str) -> list[str]:
    r"""Splits words as a shell does, but keeps backslashes, as in the regex layer_\d+."""
    lexer = shlex.shlex(words, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return list(lexer)


def parse(name: str, words: str, processes: int = 1) -> Setting:
    """Parses a setting's words. Raises ValueError if a word has no known form."""
    config, *rest = split(words) or [""]
    if not config.endswith(".py"):
        raise ValueError(
            f"{name}: a setting begins with a config file, such as configs/zero3.py, and not with {config!r}"
        )
    overrides, environ = {}, {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[\w.]+", key):
            raise ValueError(f"{name}: {word!r} must be key=value, as in zero.stage=2")
        if key == "processes":
            if not value.isdecimal() or value == "0":
                raise ValueError(f"{name}: processes must be a number above 0, and is {value!r}")
            processes = int(value)
        elif key.isupper():
            environ[key] = value
        else:
            overrides[key] = value
    return Setting(name, config, overrides, environ, processes)


def command(setting: Setting, folder: pathlib.Path, steps: int) -> list[str]:
    """Returns the command of a run of the trainer."""
    config = pathlib.Path(setting.config)
    short = {
        "steps": str(steps),
        "optimizer.warmup_steps": str(steps // 2),
        "data.dir": str(folder.parent / "datasets"),
    }
    flags = [f"--config.{key}={value}" for key, value in {**DEFAULTS, **short, **setting.overrides}.items()]
    where = config if config.is_absolute() or not config.exists() else config.resolve()
    train = [sys.executable, "-m", "zerojax.train", "--config", str(where), "--workdir", str(folder), *flags]
    if setting.processes == 1:
        return train
    several = ["--num_gpus", str(setting.processes), "--log_dir", str(folder.with_suffix(".logs"))]
    return [sys.executable, "-m", "zerojax.commands.launch", *several, "--", *train]


def environment(setting: Setting, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a run. The setting's XLA_FLAGS follow the inherited ones, since XLA takes the last value of a flag.

    Without a folder for them no run keeps compiled programs: the first step is that of a first start.
    """
    flags = " ".join(filter(None, [environ.get("XLA_FLAGS"), setting.environ.get("XLA_FLAGS")]))
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    found = {**environ, **setting.environ, **({"XLA_FLAGS": flags} if flags else {}), "PYTHONPATH": path}
    return found if "JAX_COMPILATION_CACHE_DIR" in found else {"JAX_ENABLE_COMPILATION_CACHE": "0", **found}


def likely_seconds(runs: Mapping[str, Sequence[Mapping]], name: str) -> float:
    """Returns a run's expected seconds: those of the setting's last run, or else of the shortest successful run."""
    own = [found["seconds"] for found in runs[name] if "seconds" in found]
    others = [found["seconds"] for several in runs.values() for found in several if found["status"] == bench_report.OK]
    return own[-1] if own else min(others, default=0.0)


def run(setting: Setting, folder: pathlib.Path, steps: int, limit: float) -> dict[str, Any]:
    """Runs a setting once, for up to `limit` seconds, and returns its figures and its status."""
    words, status, last = command(setting, folder, steps), "", ""
    found: dict[str, Any] = {"command": shlex.join(words)}
    began = time.monotonic()
    process = bench_child.start(words, environment(setting, os.environ))
    timer = threading.Timer(limit, _end, [process, setting])
    timer.start()
    try:
        with process.stdout, open(folder.with_suffix(".log"), "w") as log:
            for line in process.stdout:
                log.write(line)
                last = line.strip() or last
                if re.search(r"(^|\] )step 1/", line):
                    found["first_step_s"] = time.monotonic() - began
                if memory_guard.SHORT in line and not status:
                    status = OUT_OF_MEMORY
                    _end(process, setting)  # else it would search for settings that fit
        code = process.wait()
    finally:
        timer.cancel()
        _end(process, setting)
    found["seconds"] = time.monotonic() - began
    is_late = found["seconds"] >= limit
    found["status"] = status or (bench_report.OK if code == 0 else TOO_LATE if is_late else f"failed: {last[-TAIL:]}")
    return found | bench_report.measured(folder)


def _end(process: subprocess.Popen, setting: Setting) -> None:
    """Kills a run. On SIGQUIT the launcher kills its processes, which have their own sessions."""
    if setting.processes > 1 and process.poll() is None:
        process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def write(
    path: pathlib.Path, arguments: Sequence[str], settings: Sequence[Setting], runs: Mapping[str, Sequence[Mapping]]
) -> None:
    """Writes all that is known so far."""
    rows = {
        setting.name: {
            "setting": dataclasses.asdict(setting),
            "summary": bench_report.summary(runs[setting.name]) if runs[setting.name] else None,
            "runs": runs[setting.name],
        }
        for setting in settings
    }
    path.write_text(json.dumps({**bench_report.provenance(arguments), "settings": rows}, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    known = ", ".join([*SETTINGS, *GROUPS])
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME", help=f"named settings: {known}")
    parser.add_argument("--run", action="append", default=[], metavar="NAME: WORDS", help="a custom setting")
    parser.add_argument("--repeat", type=_positive, default=1, help="runs of each setting")
    parser.add_argument(
        "--steps", type=_positive, default=12, help="optimizer steps per run; the first 2 and the last are not counted"
    )
    parser.add_argument(
        "--processes", type=_positive, default=1, help="1: one process with all devices; else one process per GPU"
    )
    parser.add_argument("--limit_s", type=float, default=86400, help="seconds until all runs are ended")
    parser.add_argument("--workdir", type=pathlib.Path, help="a new folder for all files; default runs/bench-TIME")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0, and is {text!r}")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no run stays alive
    sys.exit(main(sys.argv[1:]))
