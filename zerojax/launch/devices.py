"""Chooses the devices of a run: accelerators if this machine has any, else emulated CPU devices. This module starts no JAX backend.

Only `start` and `describe` list JAX's devices, which starts a backend.
"""

import glob
import importlib.metadata
import importlib.util
import os
import pkgutil
from collections.abc import Mapping

import jax

from zerojax import errors, xla_flags
from zerojax.errors import UserError

MOST_EMULATED = 1024
# part of a JAX plugin's name -> (device files, one of which exists if the hardware does; the variable that can hide the devices)
DEVICE_FILES = {
    "cuda": (("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/dxg"), "CUDA_VISIBLE_DEVICES"),
    "rocm": (("/dev/kfd", "/dev/dxg"), "HIP_VISIBLE_DEVICES"),
    "tpu": (("/dev/accel*", "/dev/vfio/[0-9]*"), "TPU_VISIBLE_CHIPS"),
}

# JAX's settings for the search of errors, with which no run ends -> their values
_GUARDS = [f"jax_transfer_guard{way}" for way in ("", "_host_to_device", "_device_to_device", "_device_to_host")]
REFUSED = {
    **xla_flags.NO_JIT,
    "jax_numpy_rank_promotion": ("raise",),
    "jax_numpy_dtype_promotion": ("strict",),
    **dict.fromkeys(_GUARDS, ("disallow", "disallow_explicit")),
}


def emulate_cpu_devices(count: int) -> bool:
    """Makes JAX emulate `count` CPU devices in this process if it would find no accelerator.

    Starts no backend. An earlier count, by XLA_FLAGS=--xla_force_host_platform_device_count=N or by `jax_num_cpu_devices`, takes
    precedence.

    Returns:
      Whether computation will run on (emulated) CPU devices.

    Raises:
      UserError: JAX's backends have started, so the number of devices is fixed, or the count is out of range.
    """
    if not 1 <= count <= MOST_EMULATED:
        raise UserError(
            f"emulate_devices: must be from 1 to {MOST_EMULATED}, and is {count}: each has threads of its own"
        )
    try:
        if not pass_over_absent():
            return False
        counted = xla_flags.num_cpu_devices() or jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
        if counted == -1:
            jax.config.update("jax_num_cpu_devices", count)
        # By default XLA's pool has a thread a device. With more than 32 programs in flight a launch waits in its thread for a program to
        # end. Such launches take the threads of a collective that all devices must join, and the run hangs or is aborted.
        os.environ.setdefault(xla_flags.CPU_THREADS, str(2 * max(count, counted)))
    except RuntimeError as error:
        raise UserError(
            f"devices: JAX has started, so it cannot emulate {count} CPU devices; call emulate_cpu_devices "
            "before any computation or listing of devices, or set JAX_NUM_CPU_DEVICES"
        ) from error
    return True


def pass_over_absent() -> bool:
    """Keeps JAX from loading plugins whose hardware is absent. Starts no backend.

    Without a GPU, a CUDA plugin logs a traceback before JAX falls back to the CPU, and then cannot compile for absent GPUs.

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


def start() -> None:
    """Starts JAX's backend.

    Raises:
      UserError: JAX_PLATFORMS names what JAX does not find here, or a setting of JAX is one of REFUSED.
    """
    xla_flags.check_settings(REFUSED)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion of JAX: it names a plugin that failed
        if not (asked := jax.config.jax_platforms):  # type: ignore[attr-defined]
            raise
        why = "its plugin did not start"
        if isinstance(error, RuntimeError):
            why = errors.first_line(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        raise UserError(
            f"JAX_PLATFORMS: is {asked!r}, and JAX finds no such devices here: {why}; unset it, or set it to cpu"
        ) from error


def describe() -> str:
    """Returns the devices and processes as text: "8 x cpu (emulated), 1 process"."""
    emulated = " (emulated)" if jax.default_backend() == "cpu" and jax.local_device_count() > 1 else ""
    processes = jax.process_count()
    kind = jax.devices()[0].device_kind
    return f"{jax.device_count()} x {kind}{emulated}, {processes} process{'es' if processes > 1 else ''}"


def _plugins() -> list[str]:
    """Lists the accelerator plugins that JAX would load: by entry point, by namespace package, and libtpu."""
    names = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    if spec := importlib.util.find_spec("jax_plugins"):
        names += [module.name for module in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [*names, "libtpu"] if importlib.util.find_spec("libtpu") else names


def _has_hardware(plugin: str, environ: Mapping[str, str]) -> bool:
    """Returns whether `plugin` would find a device. A plugin that is not in DEVICE_FILES counts as one that would."""
    for kind, (files, visible) in DEVICE_FILES.items():
        if kind in plugin.lower():
            return environ.get(visible) not in ("", "-1") and any(glob.glob(pattern) for pattern in files)
    return True
