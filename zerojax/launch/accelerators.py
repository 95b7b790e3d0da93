"""Knows which accelerators' plugins are installed and whose hardware is here. This module starts no backend."""

import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Mapping

import jax

# part of a JAX plugin's name -> device files, of which one exists where its hardware does; what can hide them
DEVICE_FILES = {
    "cuda": (("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg"), "CUDA_VISIBLE_DEVICES"),
    "rocm": (("/dev/kfd", "/dev/dxg"), "HIP_VISIBLE_DEVICES"),
    "tpu": (("/dev/accel*", "/dev/vfio/[0-9]*"), "TPU_VISIBLE_CHIPS"),
}


def pass_over_absent() -> bool:
    """Keeps JAX from plugins whose hardware is not here; starts no backend.

    A CUDA plugin without a GPU logs a traceback before JAX takes the CPU, and refuses to compile for absent GPUs afterwards.

    Returns:
      Whether computation will run on CPU devices.

    Raises:
      RuntimeError: JAX's backends have started.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms:
        return platforms.split(",")[0] == "cpu"
    plugins = _plugins()
    if any(_has_hardware(plugin, os.environ) for plugin in plugins):
        return False
    if plugins:
        jax.config.update("jax_platforms", "cpu")
    return True


def _plugins() -> list[str]:
    """Lists the accelerator plugins that JAX would load: by entry point, by namespace package, and libtpu."""
    names = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    if spec := importlib.util.find_spec("jax_plugins"):
        names += [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [*names, "libtpu"] if importlib.util.find_spec("libtpu") else names


def _has_hardware(plugin: str, environ: Mapping[str, str]) -> bool:
    """Says whether `plugin` would find a device; one that the table does not know is believed."""
    for kind, (files, visible) in DEVICE_FILES.items():
        if kind in plugin.lower():
            return environ.get(visible) not in ("", "-1") and any(glob.glob(pattern) for pattern in files)
    return True
