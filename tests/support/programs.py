"""Runs short Python programs, each in its own process. This module removes the settings of our tests from their environment."""

import contextlib
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 120  # seconds; a test that waits longer hangs


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without the variables of conftest and of schedulers. Without a folder for them, commands keep no
    compiled programs: theirs is the user's."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("JAX_", "XLA_", "PJRT_", "SLURM_", "OMPI_"))
    }
    kept |= {} if "JAX_COMPILATION_CACHE_DIR" in variables else {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), **variables}


def python(program: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=LIMIT)


class Ended(NamedTuple):
    """How a program ended."""

    status: int
    out: str
    err: str


_FORKS = """
import gc, json, os, runpy, sys
from zerojax.trainer import command, program
gc.freeze()
for number, words in enumerate(json.loads(sys.argv[1])):
    if (pid := os.fork()) == 0:
        for stream, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv[:] = words
        try:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        os._exit(status)  # Python takes most of a second to delete what it has imported
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def modules(
    commands: Sequence[Sequence[str]],
    *,
    python: str = sys.executable,
    folder: pathlib.Path = ROOT,
    limit: float = LIMIT,
    **variables: str,
) -> list[Ended]:
    """Runs each command (MODULE, ARGUMENT, ...) as `python -m` does, in children of one process that has imported the library."""
    with tempfile.TemporaryDirectory() as files:
        command = [python, "-c", _FORKS, json.dumps(list(map(list, commands))), files]
        done = subprocess.run(
            command, cwd=folder, env=environment(**variables), capture_output=True, text=True, check=True, timeout=limit
        )
        texts = [
            [pathlib.Path(files, f"{n}.{name}").read_text() for name in ("out", "err")] for n in range(len(commands))
        ]
    return [Ended(int(status), *pair) for status, pair in zip(done.stdout.split(), texts, strict=True)]


def free_port() -> int:
    """Returns a port that is free, and that no outgoing connection of this machine is given."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
