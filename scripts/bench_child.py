"""Starts processes of benchmarks. This module runs a case in one of its own, shows its lines as they come, and ends it if it runs over."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULT = "result "  # begins the line that holds a case's figures as JSON


def python_path(*folders: pathlib.Path) -> str:
    """Returns the PYTHONPATH of a process that imports this project, `folders`, and what this process imports."""
    return os.pathsep.join(filter(None, [str(ROOT), *map(str, folders), os.environ.get("PYTHONPATH")]))


def run(name: str, words: Sequence[str], limit_s: float) -> dict[str, Any] | None:
    """Runs `python words` for up to `limit_s` seconds and returns its figures; None if it failed or was ended.

    Each line that it prints is shown at once, with the case's name and the seconds since its start.
    """
    began, found, last = time.monotonic(), None, ""
    process = start([sys.executable, "-u", *words], {**os.environ, "PYTHONPATH": python_path()})
    timer = threading.Timer(max(0.0, limit_s), _kill, [process])
    timer.start()
    try:
        with process.stdout as lines:
            for line in lines:
                if line.startswith(RESULT):
                    found = json.loads(line.removeprefix(RESULT))
                print(f"[{name} {time.monotonic() - began:.1f} s] {line.rstrip()}", flush=True)
                last = line.strip() or last
        code = process.wait()
    finally:
        timer.cancel()
        _kill(process)
    if code and found is None:
        seconds = time.monotonic() - began
        why = f"ended after {seconds:.0f} s: --limit_s" if seconds >= limit_s else f"failed: {last[-300:]}"
        print(f"{name}: {why}", flush=True)
    return found


def start(words: Sequence[str], environ: Mapping[str, str], stdout: Any = subprocess.PIPE) -> subprocess.Popen:
    """Starts a command from the root of the repository, in a session of its own, so that it can be ended with what it started."""
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def tell(figures: dict[str, Any]) -> None:
    """Prints a case's figures, in its own process, for `run` to read."""
    print(RESULT + json.dumps(figures), flush=True)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
