"""Says with which options XLA compiles a step that says its own collectives. This module holds them by platform.

XLA's scheduler hides a collective behind what it believes the collective takes, which on GPUs of one host is far less than it does take
beside matrix products, and lets one be under way at a time. A matrix product holds every processor until it ends, so a collective that
starts beside the last product before its use is waited for in full. With these options collectives start as early as they may, several
at a time; the order that `overlap` gives a step bounds how early.

For the same reason each collective waits for a product to end before it starts, and a layer has as few ends as products. So a block's
weights are gathered by one collective and their gradients summed by one, where XLA would merge small ones alone.
Measured: docs/benchmarks/gpu.md.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from zerojax import mesh as mesh_lib

# Known to jax 0.10.2, 0.11 and 0.12.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
    },
}


# XLA merges collectives of one kind up to this many bytes of results, unless told otherwise.
_MERGED = 30 << 20
# Room beside a block's own weights for small ones outside of blocks; `overlap` keeps blocks apart.
_ROOM = 9 / 8


def for_mesh(
    mesh: Mesh, *, gathered: int = 0, summed: int = 0, kept: int = 0, but: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the options for a step on these devices.

    Args:
      mesh: the devices.
      gathered: bytes of the largest block's weights, whole.
      summed: bytes of its gradients, whole.
      kept: bytes of its gradients that a device keeps where they are split.
      but: names of options to leave out: those that the user has set (`xla_flags.names`), who has the last word.
    """
    platform = mesh_lib.platform(mesh)
    if mesh.size == 1 or platform not in OPTIONS:
        return {}
    merged = {"all_gather": gathered, "all_reduce": summed, "reduce_scatter": kept}
    options = dict(OPTIONS[platform])
    options |= {
        f"xla_gpu_{kind}_combine_threshold_bytes": max(round(count * _ROOM), _MERGED) for kind, count in merged.items()
    }
    return {name: value for name, value in options.items() if name not in but}


def jit(run: Callable[..., Any], options: Mapping[str, Any], **how: Any) -> Any:
    """Returns `jax.jit(run, **how)`, compiled with options for XLA; called while another function is traced, it is compiled as that one is.

    >>> step = jit(lambda x: x + 1, for_mesh(mesh))
    """
    return _WithOptions(run, options, how) if options else jax.jit(run, **how)


class _WithOptions:
    """A `jax.stages.Wrapped`. JAX takes options for a whole program alone; a function that becomes part of another goes without."""

    def __init__(self, run: Callable[..., Any], options: Mapping[str, Any], how: Mapping[str, Any]):
        functools.update_wrapper(self, run)
        self._program = jax.jit(run, compiler_options=dict(options), **how)
        self._part = jax.jit(run, **how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return (self._part if is_traced else self._program)(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._program.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self._program.lower(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # what else a jitted function has
        return getattr(self._program, name)
