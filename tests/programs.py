"""Runs short Python programs, each in a process of its own. This module keeps what our own tests set away from them."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 120  # seconds; a test that waits longer hangs


def environment(**variables: str) -> dict[str, str]:
    """Returns ours, without what conftest set and any scheduler."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **variables}


def python(program: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=LIMIT)
