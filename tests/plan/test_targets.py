"""Checks the devices that programs are compiled for. This module tests zerojax.plan.targets and zerojax.plan.gpu_configs."""

import dataclasses
import importlib.util
import re
import types

import compile_only
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.plan import targets

GPUS = [name for name, target in targets.TARGETS.items() if target.kind == "gpu"]
TPUS = [name for name, target in targets.TARGETS.items() if target.kind == "tpu"]


@pytest.mark.parametrize("name", GPUS + TPUS)
def test_every_figure_has_a_source_and_only_the_h200_is_measured(name):
    target = targets.TARGETS[name]
    figures = [target.memory, target.memory_bandwidth, target.link, *target.matrix_rates.values()]
    assert all(figure.value > 0 and figure.source for figure in figures)
    assert (target.memory.source == targets.MEASURED) == (name == "h200")
    assert target.name == name
    others = [figure.source for figure in figures] if name != "h200" else []
    assert all("not measured" in source for source in others)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(st.sampled_from(GPUS), st.text(alphabet="0128x- ", max_size=6))
def test_a_malformed_topology_is_an_error_of_one_line(name, topology):
    hypothesis.assume(not re.fullmatch(r"([1-9]\d*x)?[1-9]\d*", topology))
    with pytest.raises(UserError, match="needs hosts x devices, such as 1x8") as caught:
        targets.devices(name, topology)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, topology", [("v5p", "4x4"), ("v5e", "4x4x4"), ("v6e", "0x4"), ("v6e", "")])
def test_a_slice_has_the_dims_of_its_kind(name, topology):
    with pytest.raises(UserError, match=rf"a {name} slice has \d dims of chips"):
        targets.devices(name, topology)


@pytest.mark.parametrize(
    "found, required, line",
    [
        ("0.0.52", 'libtpu==0.0.42.*; extra == "tpu"', "libtpu is 0.0.52, and jax .* requires 0.0.42"),
        ("0.0.42.1", 'libtpu==0.0.42.*; extra == "tpu"', "^$"),
        ("0.0.42", 'libtpu==0.0.42.*; extra == "tpu"', "^$"),
        ("0.0.421", 'libtpu==0.0.42.*; extra == "tpu"', "libtpu is 0.0.421"),
        ("0.0.52", "numpy>=2.0", "^$"),
    ],
)
def test_a_tpu_compiler_of_another_version_than_jaxs_is_told(monkeypatch, found, required, line):
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: found)
    monkeypatch.setattr(targets.importlib.metadata, "requires", lambda name: ["scipy", required])
    assert re.search(line, targets._other_libtpu())


@pytest.mark.parametrize("name, extra", [("h200", "plan-gpu"), ("a100", "plan-gpu"), ("v5p", "plan-tpu")])
def test_a_missing_compiler_names_the_extra_to_install(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"target {name}: .* is missing; pip install 'zerojax\[{extra}\]'$"):
        targets.devices(name, "4x4x8" if name == "v5p" else "1x8")


def test_the_error_for_an_unknown_target_lists_the_targets():
    with pytest.raises(UserError, match=r"must be one of h200, .*v6e, cpu, here, and is 'h20'"):
        targets.devices("h20", "1x8")


def test_cpu_and_here_are_the_devices_of_this_machine():
    assert targets.devices("cpu") == targets.devices("here") == jax.devices()
    assert targets.devices("cpu", "1x8") == targets.devices("here", "2x4") == jax.devices()
    assert targets.devices("here", "4") == jax.devices()[:4]
    assert targets.get("here").kind == targets.get("cpu").kind == "cpu"


@pytest.mark.parametrize("name, way_out", [("cpu", "JAX_NUM_CPU_DEVICES=16"), ("here", "choose fewer")])
def test_more_devices_than_exist_are_an_error(name, way_out):
    with pytest.raises(UserError, match=rf"2x8 needs 16 devices, and {name} has 8; .*{way_out}"):
        targets.devices(name, "2x8")


def test_compile_only_gpus_exist_beside_the_cpus_in_use():
    devices = compile_only.gpus(topology="2x4")
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert {device.device_kind for device in devices} == {"NVIDIA H200"}
    assert jnp.arange(3).sum() == 3 and jax.devices()[0].platform == "cpu"


@pytest.mark.parametrize("name", GPUS)
def test_a_program_compiles_for_each_gpu(name):
    mesh = mesh_lib.make_mesh(devices=compile_only.gpus(name))
    sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    rows = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=sharded)
    with compile_only.optimized():
        matmul = jax.jit(lambda a: a.T @ a, out_shardings=replicated).lower(rows).compile()
    assert "all-reduce" in matmul.as_text()
    assert matmul.memory_analysis().argument_size_in_bytes == 64 * 64 * 2 // 8


def test_other_tests_compile_settings_do_not_change_programs_for_absent_gpus(tmp_path):
    sharded = NamedSharding(mesh_lib.make_mesh(devices=compile_only.gpus()), P("data"))
    rows = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=sharded)
    rough = {"jax_disable_most_optimizations": True, "jax_compilation_cache_dir": str(tmp_path)}
    rough |= {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}

    def compiled(settings):
        with runs.jax_settings(**settings):
            return compile_only.compile_gpu(jax.jit(lambda a: a.T @ a, out_shardings=sharded).lower(rows))

    assert len({compiled(settings) for settings in ({}, rough, rough)}) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, topology, count", [("v5p", "2x2x2", 8), ("v5e", "2x4", 8), ("v6e", "4x4", 16)])
def test_a_program_compiles_for_each_tpu(name, topology, count):
    pytest.importorskip("libtpu")
    devices = targets.devices(name, topology)
    assert len(devices) == count
    assert {device.device_kind for device in devices} == {targets.TARGETS[name].device_kind}
    sharding = NamedSharding(mesh_lib.make_mesh(devices=devices), P("data"))
    rows = jax.ShapeDtypeStruct((count * 8, 128), jnp.bfloat16, sharding=sharding)
    assert "all-reduce" in jax.jit(lambda a: a.T @ a).lower(rows).compile().as_text()
    with pytest.raises(UserError, match=f"target {name}: the compiler of jax .* rejects topology"):
        targets.devices(name, topology.replace("2", "3").replace("4", "5"))


def test_devices_of_one_host_share_the_rate_to_its_memory_and_given_rates_stay():
    h200 = targets.get("h200")
    assert h200.beside(1) == h200
    for devices in (4, 8):
        shared = h200.beside(devices)
        assert shared.host_link.value == shared.host_duplex.value == h200.host_memory.value / devices
    given = dataclasses.replace(h200, host_duplex=targets.Figure(43e9, targets.GIVEN))
    assert given.beside(8).host_duplex.value == 43e9
    h100 = targets.get("h100")
    shared = dataclasses.replace(h100.disk, value=h100.disk.value / 8)
    assert h100.beside(8) == dataclasses.replace(h100, disk=shared)


@pytest.mark.parametrize("reported, usable", [(7 * 2**30, 7 * 2**30), (0, None), (None, None)])
def test_a_device_that_reports_no_limit_has_the_memory_of_its_kind(monkeypatch, reported, usable):
    """The allocator `cuda_async` reports 0 where JAX takes no memory ahead."""
    stats = {} if reported is None else {"bytes_limit": reported}
    device = types.SimpleNamespace(
        device_kind="NVIDIA H200", platform="gpu", memory_stats=lambda: stats, process_index=0
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    found = targets.get(targets.HERE)
    assert found.usable == (usable or targets.get("h200").usable)
    assert found.is_pool == (usable is not None)
