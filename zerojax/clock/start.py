"""Foretells how long a run takes to its first step. This module knows the size of a program and of a host, and no rates of a GPU.

    compile     FIXED + EACH x lines of the compiled program          with an empty compilation cache
    first step  compile + ALONE + BESIDE x GPUs of a host + bytes of the host's pinned memory / PINNED

The figures were set by hand between the first steps of measured runs: `scripts/foretell.py --start` prints those and the errors
(docs/benchmarks/clock.md). Machines differ: the same step of 1B took 12 to 23 s to compile.
"""

from typing import NamedTuple

FIXED, EACH = 7.0, 0.6e-3  # seconds
ALONE = 9.0  # seconds: Python's imports, CUDA, data, the state's arrays
BESIDE = 2.5  # seconds: NCCL's connections, and processes that share CPUs
PINNED = 3e9  # bytes a second


class StartTimes(NamedTuple):
    """Seconds of compiling, and those from the start of the processes to the end of the first step."""

    compile: float
    first_step: float


def foretold(lines: int, devices: int, pinned: float = 0.0) -> StartTimes:
    """Returns the times of a run that finds nothing in the compilation cache.

    Args:
      lines: of the compiled program's text.
      devices: of one host.
      pinned: bytes of host memory that the step uses, on each device.
    """
    compiled = FIXED + EACH * lines
    return StartTimes(compiled, compiled + ALONE + BESIDE * devices + devices * pinned / PINNED)
