"""Runs short Python programs, each in its own process. This module removes the settings of our tests from their environment."""

import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 120  # seconds; a test that waits longer hangs


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without the variables of conftest and of schedulers."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def python(program: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=LIMIT)


def free_port() -> int:
    """Returns a port that is free, and that no outgoing connection of this machine is given."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
