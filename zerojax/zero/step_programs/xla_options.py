"""Chooses XLA's options for a step: with blocks, in fp8, or block by block. This module holds them by platform.

XLA's scheduler overlaps a collective with as much arithmetic as it expects the collective to take. On GPUs of one machine it expects far
less than a collective takes beside matmuls, and it runs one at a time. A matmul holds every multiprocessor until it ends, so a collective
that starts during the last matmul before its use overlaps with nothing. With these options collectives start as early as possible, several
at a time. The order that `overlap` gives a step bounds how early.

For the same reason each collective waits for the end of a matmul before it starts, and a layer has few matmuls. So one collective gathers
a block's weights and one sums their gradients; by default XLA merges only small ones. Measured: docs/benchmarks/gpu.md.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import xla_flags
from zerojax.zero.blocks import block_settings
from zerojax.zero.weights import partition as partition_lib

# Known to jax 0.10.2, 0.11 and 0.12.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    }
}
# XLA merges no exchanges, and packed gradients have four of each weight of a block.
EXCHANGES: Mapping[str, Any] = {"xla_gpu_experimental_parallel_collective_overlap_limit": 32}


# By default XLA merges collectives of one kind up to this many bytes of results.
_MERGED = 30 << 20
# Room for small weights outside of blocks beside a block's own; `overlap` prevents merges across blocks.
_ROOM = 9 / 8


def of_step(
    partition: partition_lib.Partition,
    blocks: str,
    *,
    compute_dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
    in_fp8: bool,
    exchanges: bool,
) -> dict[str, Any]:
    """Returns the options for a train step: for its matmuls in fp8, and for its collectives; see `for_mesh`."""
    names = xla_flags.names()
    options = for_fp8(partition.mesh, but=names) if in_fp8 else {}
    weights, ways = (
        block_settings.largest_block(partition.placements, blocks),
        mesh_lib.size(partition.mesh, mesh_lib.STATE),
    )
    gathered = weights * jnp.dtype(compute_dtype or jnp.float32).itemsize
    if reduce_dtype is None:
        return options | (_on_gpus(_apart(gathered, ways), partition.mesh, names) if blocks and ways > 1 else {})
    summed = weights * jnp.dtype(reduce_dtype).itemsize
    kept = summed // ways
    return options | for_mesh(
        partition.mesh, gathered=gathered, summed=summed, kept=kept, exchanges=exchanges, but=names
    )


def _apart(summed: int, ways: int) -> dict[str, Any]:
    """Returns the options for collectives that the compiler inserts.

    Nothing orders these, and a merged sum waits with the unsharded gradients of all blocks that it adds up: by default of as many as have
    30 MiB of shards, which is 240 MiB on 8 devices, and 2 GiB on 64.
    """
    return {"xla_gpu_reduce_scatter_combine_threshold_bytes": max(round(summed * _ROOM), _MERGED) // ways}


def for_mesh(
    mesh: Mesh, *, gathered: int = 0, summed: int = 0, kept: int = 0, exchanges: bool = False, but: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the options for a step on these devices.

    Args:
      mesh: the devices.
      gathered: bytes of the largest block's gathered weights.
      summed: bytes of its unsharded gradients.
      kept: bytes of one device's shard of its gradients.
      exchanges: whether gradients are summed by all-to-alls.
      but: names of options to omit, because the user has set them (`xla_flags.names`).
    """
    platform = mesh_lib.platform(mesh)
    if mesh.size == 1 or platform not in OPTIONS:
        return {}
    # A matmul occupies every multiprocessor, so a collective starts only between two. One by one, a layer's eleven wait eleven times.
    merged = {"all_gather": gathered, "all_reduce": summed, "reduce_scatter": kept}
    options = {**OPTIONS[platform], **(EXCHANGES if exchanges else {})}
    options |= {
        f"xla_gpu_{kind}_combine_threshold_bytes": max(round(count * _ROOM), _MERGED) for kind, count in merged.items()
    }
    return {name: value for name, value in options.items() if name not in but}


def for_fp8(mesh: Mesh, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Returns the options for a program with matmuls in fp8; see `for_mesh`.

    On GPUs these become calls of cuBLASLt, which scale their results too. By default they become Triton kernels.
    """
    return _on_gpus({"xla_gpu_enable_triton_gemm": False}, mesh, but)


def for_blocks(mesh: Mesh, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Returns the options for the programs of a step block by block, in fp8 or not; see `for_mesh`.

    By default XLA moves elementwise operations into Triton matmuls. Where cuBLAS is faster it takes them out again, one kernel for each
    matmul that reads their result. It also merges matmuls of one operand (q, k and v), whose weights it must then concatenate, and slices
    the result. These programs run for few tokens, so both cost time. Measured at 14B: docs/benchmarks/plan.md.
    """
    return _on_gpus({"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}, mesh, but)


def _on_gpus(options: Mapping[str, Any], mesh: Mesh, but: Collection[str]) -> dict[str, Any]:
    if mesh_lib.platform(mesh) != "gpu":
        return {}
    return {name: value for name, value in options.items() if name not in but}
