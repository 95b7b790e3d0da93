"""Checks which plugins are believed to have hardware, and what JAX is told. This module tests zerojax.accelerators."""

import os
import subprocess
import sys

import pytest
import runs

from zerojax.launch import accelerators


@pytest.mark.parametrize(
    "plugin, environ, there, expected",
    [
        ("xla_cuda13", {}, "/dev/nvidia[0-9]*", True),
        ("xla_cuda13", {}, "/dev/kfd", False),
        ("xla_cuda13", {"CUDA_VISIBLE_DEVICES": "1"}, "/dev/nvidia[0-9]*", True),
        ("xla_cuda13", {"CUDA_VISIBLE_DEVICES": ""}, "/dev/nvidia[0-9]*", False),
        ("xla_cuda13", {"CUDA_VISIBLE_DEVICES": "-1"}, "/dev/nvidia[0-9]*", False),
        ("xla_rocm7", {}, "/dev/kfd", True),
        ("libtpu", {}, "/dev/accel*", True),
        ("libtpu", {}, "/dev/nvidiactl", False),
        ("a_chip_of_tomorrow", {}, "", True),
    ],
)
def test_a_plugin_has_hardware_where_its_device_files_are_and_are_not_hidden(
    plugin, environ, there, expected, monkeypatch
):
    monkeypatch.setattr(accelerators.glob, "glob", lambda pattern: [pattern] if pattern == there else [])
    assert accelerators._has_hardware(plugin, environ) == expected


@pytest.mark.parametrize(("platforms", "said"), [("", "True"), ("cpu", "True cpu"), ("cuda,cpu", "False cuda,cpu")])
def test_without_hardware_jax_is_kept_from_plugins_unless_it_was_told(platforms, said):
    if any(accelerators._has_hardware(plugin, os.environ) for plugin in accelerators._plugins()):
        pytest.skip("there is an accelerator here")
    program = (
        "from zerojax import accelerators; import jax\n"
        "print(accelerators.pass_over_absent(), jax.config.jax_platforms or '')"
    )
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"} | {
        "PYTHONPATH": str(runs.ROOT)
    }
    environ |= {"JAX_PLATFORMS": platforms} if platforms else {}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=runs.LIMIT
    )
    told = "cpu" if accelerators._plugins() and not platforms else ""
    assert done.stdout.strip() == f"{said} {told}".strip()
