"""Chooses between the kernels of `pallas_kernels` and their twins. This module holds that table."""

import jax
from jax.sharding import Mesh

from pallas_kernels import update
from zerojax.errors import UserError

# What "auto" means, by kind of device and of update; everything else is "jnp". Figures: docs/benchmarks/optimizer.md.
AUTO = {("gpu", "coded"): "pallas", ("gpu", "plain"): "grouped"}
IMPLEMENTATIONS = ("auto", *update.IMPLEMENTATIONS)
_GPUS = ("gpu", "cuda", "rocm")


def choose(implementation: str, kind: str, mesh: Mesh | None) -> str:
    """Returns what "auto" means for arrays on a mesh, or, where none is told, on the one device there is."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    platform = "gpu" if platform in _GPUS else platform
    if implementation in ("pallas", "grouped") and platform != "gpu":
        raise UserError(
            f"implementation: {implementation!r} is compiled for GPUs, and this is a {platform}; use 'auto' or 'jnp'"
        )
    if implementation != "auto":
        return implementation
    if mesh is None and jax.device_count() > 1:
        return "jnp"  # arrays may be split in ways that are not known here, and XLA splits no kernel
    return AUTO.get((platform, kind), "jnp")
