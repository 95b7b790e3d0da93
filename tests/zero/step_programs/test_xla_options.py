"""Checks which options a step is compiled with. This module tests zerojax.zero.step_programs.xla_options."""

import compile_only
import jax
import jax.export

import zerojax
from zerojax import xla_flags
from zerojax.zero.step_programs import xla_options

KINDS = ("all_gather", "all_reduce", "reduce_scatter")


def test_gpus_have_options_that_xla_knows_and_cpus_none():
    gpus = zerojax.make_mesh(devices=compile_only.devices())
    options = xla_options.for_mesh(gpus, gathered=2**28, summed=2**29, kept=2**26)
    merged = {kind: options.pop(f"xla_gpu_{kind}_combine_threshold_bytes") for kind in KINDS}
    for count, kind in ((2**28, "all_gather"), (2**29, "all_reduce"), (2**26, "reduce_scatter")):
        assert count < merged[kind] < 2 * count
    assert options == dict(xla_options.OPTIONS["gpu"])
    assert options.keys() >= xla_options.EXCHANGES.keys()
    assert xla_options.for_mesh(gpus, exchanges=True).items() >= xla_options.EXCHANGES.items()
    cpus = zerojax.make_mesh()
    assert xla_options.for_mesh(cpus) == xla_options.for_blocks(cpus) == xla_options.for_fp8(cpus) == {}
    assert xla_options.for_fp8(gpus).items() <= xla_options.for_blocks(gpus).items()
    options |= xla_options.for_blocks(gpus)
    with compile_only.optimized():  # an option that XLA does not know is an error
        leaf = jax.ShapeDtypeStruct((8,), "float32", sharding=zerojax.batch_sharding(gpus))
        jax.jit(lambda x: x + 1).lower(leaf).compile(compiler_options=options)


def test_small_blocks_leave_xlas_own_bounds():
    options = xla_options.for_mesh(zerojax.make_mesh(devices=compile_only.devices()), gathered=10, summed=20, kept=2)
    assert {options[f"xla_gpu_{kind}_combine_threshold_bytes"] for kind in KINDS} == {30 << 20}


def test_one_device_has_no_collectives_to_overlap():
    assert xla_options.for_mesh(zerojax.make_mesh(devices=compile_only.devices()[:1])) == {}


def test_a_flag_that_the_user_set_is_left_alone(monkeypatch):
    mesh = zerojax.make_mesh(devices=compile_only.devices())
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_gpu_experimental_collective_start_as_early_as_possible=false --xla_dump_to=/tmp/x"
    )
    options = xla_options.for_mesh(mesh, but=xla_flags.names())
    assert "xla_gpu_experimental_parallel_collective_overlap_limit" in options
    assert "xla_gpu_experimental_collective_start_as_early_as_possible" not in options
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_gather_combine_threshold_bytes=1")
    options = xla_options.for_mesh(mesh, gathered=2**28, but=xla_flags.names())
    assert "xla_gpu_all_gather_combine_threshold_bytes" not in options
    assert xla_options.for_blocks(mesh, but=["xla_gpu_enable_triton_gemm"]) == {"xla_gpu_dot_merger_threshold_mb": 0}
