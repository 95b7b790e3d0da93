"""Gives every test 8 emulated CPU devices, and compiles roughly. Both must be asked for before jax starts.

Compiling is most of the time of most tests. Without LLVM's optimizations and XLA's fusion emitters a train step compiles in a
quarter of the time; sharding is decided the same.
"""

import os

import rough

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {rough.XLA_FLAGS}"
os.environ.update(rough.JAX)

import pytest
import runs

from zerojax.data import source


@pytest.fixture(scope="session")
def stdlib_dir(tmp_path_factory):
    """Prepares python_stdlib once for all runs: under a second, 3.5 MB on disk."""
    data_dir = tmp_path_factory.mktemp("datasets")
    source.prepare("python_stdlib", data_dir)
    return data_dir


@pytest.fixture(scope="session")
def compiled_dir(tmp_path_factory):
    """Keeps the compiled programs of all small runs, for all worker processes of these tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cache_dir(compiled_dir):
    """Compiles each program of the small runs once: a second run of the same shapes takes a second, not ten."""
    with runs.jax_settings(
        jax_compilation_cache_dir=str(compiled_dir),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield compiled_dir


@pytest.fixture(scope="session")
def commands(tmp_path_factory, compiled_dir):
    """Starts `python -m zerojax.train` quickly."""
    with runs.open_commands(tmp_path_factory.mktemp("commands"), compiled_dir) as opened:
        yield opened
