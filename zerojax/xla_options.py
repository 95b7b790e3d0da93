"""Says with which options XLA compiles the trainer's step. This module holds them by platform.

XLA's scheduler hides a collective behind what it believes the collective takes, which on GPUs of one host is far less than it does take
beside matrix products, and lets one be under way at a time. A matrix product holds every processor until it ends, so a collective that
starts beside the last product before its use is waited for in full. With these options collectives start as early as they may, several
at a time; the order that `chain` gives a step bounds how early. Measured: docs/benchmarks/gpu.md.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

# Known to jax 0.10.2, 0.11 and 0.12.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    },
}


def for_mesh(mesh: Mesh) -> dict[str, Any]:
    """Returns the options for a step on these devices, but for those that XLA_FLAGS sets: the user has the last word."""
    platform = {"cuda": "gpu"}.get(mesh.devices.flat[0].platform, mesh.devices.flat[0].platform)
    if mesh.size == 1:
        return {}
    said = set(re.findall(r"--([a-z0-9_]+)", os.environ.get("XLA_FLAGS", "")))
    return {name: value for name, value in OPTIONS.get(platform, {}).items() if name not in said}
