"""Gives every test 8 emulated CPU devices, and compiles with few optimizations. Both must be set before jax starts.

Most tests spend most of their time compiling. Without LLVM's optimizations and XLA's fusion emitters a train step compiles in a
quarter of the time. Shardings do not change.
"""

import contextlib
import gc
import itertools
import os
import signal
import threading

import rough

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_ENABLE_COMPILATION_CACHE", None)  # which pytest-xdist hands to its workers from below
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {rough.XLA_FLAGS}"
os.environ.update(rough.JAX)

import pytest
import runs
from jax.interpreters import mlir

from zerojax.data import source

PROGRAMS_OF_A_CONTEXT = 50
DRAWN_SHARDED = [runs.ROOT / "tests" / "trainer" / name for name in ("test_state.py", "test_weights.py")]
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = (
    "0"  # of child processes: nothing goes to the user's folder. JAX is imported here.
)
gc.disable()  # until tests are collected: what they load stays


def share_contexts():
    """Lets programs that the main thread lowers share an MLIR context, as many at a time as bound what it keeps.

    JAX makes one for each program, which takes 6 ms, more than to lower a small program. Other threads keep to that.
    """
    make, counts, shared = mlir.make_ir_context, itertools.count(), []

    def context():
        if threading.current_thread() is not threading.main_thread():
            return make()
        if next(counts) % PROGRAMS_OF_A_CONTEXT == 0:
            shared[:] = [make()]
        return shared[0]

    make.__globals__["make_ir_context"] = context


share_contexts()

# Tests send signals, and pytest may have been started with some ignored, as by nohup. It lives through them as before, and what it starts
# does not ignore them.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_addoption(parser):
    parser.addoption(
        "--programs", help="a folder of compiled programs that outlives the tests; without it they compile all"
    )


def pytest_collection_finish():
    """Lets Python's garbage collector start seldom and skip what is loaded. Each trace would start it a dozen times."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="session")
def stdlib_dir(tmp_path_factory):
    """Prepares python_stdlib once for all runs, in under a second and 3.5 MB on disk."""
    data_dir = tmp_path_factory.mktemp("datasets")
    source.prepare("python_stdlib", data_dir)
    return data_dir


CACHED = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory, pytestconfig):
    """Compiles each program of this test worker once."""
    folder = pytestconfig.getoption("--programs") or tmp_path_factory.mktemp("programs")
    with runs.jax_settings(jax_compilation_cache_dir=str(folder), **CACHED):
        yield


@pytest.fixture(scope="module", autouse=True)
def draws(request):
    """Draws first weights on one device, but for the tests of what draws them."""
    with contextlib.nullcontext() if request.path in DRAWN_SHARDED else runs.drawn_once():
        yield


@pytest.fixture(scope="session")
def compiled_dir(tmp_path_factory):
    """Returns the folder of compiled programs of all small runs, which all test workers share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def cache_dir(compiled_dir):
    """Compiles each program of the small runs once. A second run of the same shapes takes a second, not ten."""
    with runs.jax_settings(jax_compilation_cache_dir=str(compiled_dir), **CACHED):
        yield compiled_dir


@pytest.fixture(scope="session")
def commands(tmp_path_factory, compiled_dir):
    """Starts `python -m zerojax.train` quickly."""
    with runs.open_commands(tmp_path_factory.mktemp("commands"), compiled_dir) as opened:
        yield opened
