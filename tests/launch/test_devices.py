"""Checks which plugins count as having hardware, and JAX's settings. This module tests zerojax.launch.devices."""

import os
import subprocess
import sys
import types

import jax
import programs
import pytest
import runs

from zerojax import xla_flags
from zerojax.errors import UserError
from zerojax.launch import devices


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
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [pattern] if pattern == there else [])
    assert devices._has_hardware(plugin, environ) == expected


@pytest.mark.parametrize(
    ("platforms", "printed"),
    [
        ("", "True"),
        pytest.param("cpu", "True cpu", marks=runs.LONG),
        pytest.param("cuda,cpu", "False cuda,cpu", marks=runs.LONG),
    ],
)
def test_without_hardware_jax_loads_no_plugins_unless_the_platforms_are_set(platforms, printed):
    if any(devices._has_hardware(plugin, os.environ) for plugin in devices._plugins()):
        pytest.skip("there is an accelerator here")
    program = (
        "from zerojax.launch import devices; import jax\n"
        "print(devices.pass_over_absent(), jax.config.jax_platforms or '')"
    )
    environ = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"} | {
        "PYTHONPATH": str(runs.ROOT)
    }
    environ |= {"JAX_PLATFORMS": platforms} if platforms else {}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=runs.LIMIT
    )
    added = "cpu" if devices._plugins() and not platforms else ""
    assert done.stdout.strip() == f"{printed} {added}".strip()


COUNT = "from zerojax.launch import devices; import jax; print(devices.emulate_cpu_devices(6), devices.describe())"


def test_without_an_accelerator_cpu_devices_are_emulated_and_nothing_is_logged():
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TPU_VISIBLE_CHIPS": ""}
    for before, variables in (("", hidden), ("from zerojax import *\n", {"JAX_PLATFORMS": "cpu"})):
        done = programs.python(before + COUNT, **variables)
        assert (done.stdout, done.stderr) == ("True 6 x cpu (emulated), 1 process\n", "")


@pytest.mark.parametrize(
    "name, value",
    [
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=3"),
        pytest.param("JAX_NUM_CPU_DEVICES", "3", marks=pytest.mark.long),
    ],
)
def test_a_count_of_devices_already_set_is_kept(name, value):
    assert programs.python(COUNT, JAX_PLATFORMS="cpu", **{name: value}).stdout == "True 3 x cpu (emulated), 1 process\n"


def test_one_cpu_device_is_not_called_emulated():
    program = "from zerojax.launch import devices; devices.emulate_cpu_devices(1); print(devices.describe())"
    assert programs.python(program, JAX_PLATFORMS="cpu").stdout == "1 x cpu, 1 process\n"


def test_a_platform_that_the_user_sets_is_kept():
    program = (
        "from zerojax.launch import devices; import jax\n"
        "print(devices.emulate_cpu_devices(6), jax.config.jax_platforms, jax.config.jax_num_cpu_devices)"
    )
    assert programs.python(program, JAX_PLATFORMS="cuda,cpu").stdout == "False cuda,cpu -1\n"


def test_a_platform_that_jax_does_not_know_is_one_line():
    program = "from zerojax.launch import devices\ndevices.emulate_cpu_devices(2)\ndevices.start()"
    found = programs.python(program, JAX_PLATFORMS="x")
    line = found.stderr.splitlines()[-1]
    assert line.startswith("zerojax.errors.UserError: JAX_PLATFORMS: is 'x', and JAX finds no such devices here: ")
    assert line.endswith("; unset it, or set it to cpu")


@pytest.mark.parametrize("name", devices.REFUSED)
def test_a_setting_of_jax_with_which_nothing_runs_is_one_line(name, monkeypatch):
    config = types.SimpleNamespace(**dict.fromkeys(devices.REFUSED))
    setattr(config, name, devices.REFUSED[name][0])
    monkeypatch.setattr(xla_flags, "jax", types.SimpleNamespace(config=config))
    with pytest.raises(UserError, match=f"^{name.upper()}: is .*; unset it"):
        devices.start()
    assert all(hasattr(jax.config, known) for known in devices.REFUSED)


def test_emulation_after_jax_started_is_an_error():
    program = "import jax; jax.devices()\nfrom zerojax.launch import devices; devices.emulate_cpu_devices(6)"
    done = programs.python(program, JAX_PLATFORMS="cpu")
    assert done.stderr.splitlines()[-1].startswith("zerojax.errors.UserError: devices: JAX has started")


IN_FLIGHT = """
from zerojax.launch import devices
devices.emulate_cpu_devices(8)
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x @ x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))
x = jax.device_put(jnp.ones((8, 128, 128)), jax.NamedSharding(mesh, P("data")))
jax.block_until_ready([summed(x) for _ in range(150)])
print("all ended")
"""


def test_many_programs_with_collectives_may_be_in_flight():
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=10"  # without enough threads XLA aborts after 40 s
    assert programs.python(IN_FLIGHT, JAX_PLATFORMS="cpu", XLA_FLAGS=flags).stdout == "all ended\n"
