"""Says with which options XLA compiles a step that says its own collectives. This module holds them by platform.

XLA's scheduler hides a collective behind what it believes the collective takes, which on GPUs of one host is far less than it does take
beside matrix products, and lets one be under way at a time. A matrix product holds every processor until it ends, so a collective that
starts beside the last product before its use is waited for in full. With these options collectives start as early as they may, several
at a time; the order that `chain` gives a step bounds how early.

For the same reason each collective waits for a product to end before it starts, and a layer has as few ends as products. So a block's
weights are gathered by one collective and their gradients summed by one, where XLA would merge small ones alone.
Measured: docs/benchmarks/gpu.md.
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


# XLA merges collectives of one kind up to this many bytes of results, unless told otherwise.
_MERGED = 30 << 20
# Room beside a block's own weights for small ones outside of blocks; `chain` keeps blocks apart.
_ROOM = 9 / 8


def for_mesh(mesh: Mesh, *, gathered: int = 0, summed: int = 0, kept: int = 0) -> dict[str, Any]:
    """Returns the options for a step on these devices, but for those that XLA_FLAGS sets: the user has the last word.

    Args:
      mesh: the devices.
      gathered: bytes of the largest block's weights, whole.
      summed: bytes of its gradients, whole.
      kept: bytes of its gradients that a device keeps where they are split.
    """
    platform = {"cuda": "gpu"}.get(mesh.devices.flat[0].platform, mesh.devices.flat[0].platform)
    if mesh.size == 1 or platform not in OPTIONS:
        return {}
    merged = {"all_gather": gathered, "all_reduce": summed, "reduce_scatter": kept}
    options = dict(OPTIONS[platform])
    options |= {
        f"xla_gpu_{kind}_combine_threshold_bytes": max(round(count * _ROOM), _MERGED) for kind, count in merged.items()
    }
    said = set(re.findall(r"--([a-z0-9_]+)", os.environ.get("XLA_FLAGS", "")))
    return {name: value for name, value in options.items() if name not in said}
