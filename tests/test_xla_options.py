"""Checks which options a step is compiled with. This module tests zerojax.xla_options."""

import compile_only
import jax

import zerojax
from zerojax import xla_options


def test_gpus_have_options_that_xla_knows_and_cpus_none():
    gpus = zerojax.make_mesh(devices=compile_only.devices())
    options = xla_options.for_mesh(gpus)
    assert options == dict(xla_options.OPTIONS["gpu"])
    assert xla_options.for_mesh(zerojax.make_mesh()) == {}
    with compile_only.optimized():  # an option that XLA does not know is an error
        leaf = jax.ShapeDtypeStruct((8,), "float32", sharding=zerojax.batch_sharding(gpus))
        jax.jit(lambda x: x + 1).lower(leaf).compile(compiler_options=options)


def test_one_device_has_no_collectives_to_place():
    assert xla_options.for_mesh(zerojax.make_mesh(devices=compile_only.devices()[:1])) == {}


def test_a_flag_that_the_user_set_is_left_alone(monkeypatch):
    monkeypatch.setenv(
        "XLA_FLAGS", "--xla_gpu_experimental_collective_start_as_early_as_possible=false --xla_dump_to=/tmp/x"
    )
    assert list(xla_options.for_mesh(zerojax.make_mesh(devices=compile_only.devices()))) == [
        "xla_gpu_experimental_parallel_collective_overlap_limit"
    ]
