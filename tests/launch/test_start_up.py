"""Checks the parts that make a run start faster. This module tests zerojax.launch.start_up."""

import gc
import importlib
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from zerojax.launch import start_up


def test_the_trainer_starts_without_importing_slow_libraries_and_the_library_without_the_plan_and_the_reader_of_programs():
    slow = ("torch", "tensorboardX", "tensorflow", "matplotlib.figure")
    code = (
        "import sys; from zerojax import *; print([name for name in sys.modules if name.startswith(('zerojax.hlo', 'zerojax.plan'))])\n"
        f"import zerojax.train; print([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]


def test_the_import_of_tensorboardx_adds_no_variable_while_threads_of_a_step_read_them(monkeypatch):
    monkeypatch.setenv("CRC32C_SW_MODE", "")  # so that the end of the test removes what is set here
    monkeypatch.delenv("CRC32C_SW_MODE")
    start_up.settle_environment()
    before = dict(os.environ)
    importlib.reload(importlib.import_module("tensorboardX.crc32c"))
    assert dict(os.environ) == before


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collectors_state_is_restored_after_an_exception(is_on):
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), start_up.without_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


def test_the_collector_gets_back_what_it_was_spared():
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), start_up.collector_restored():
        start_up.spare_collector()
        assert gc.get_freeze_count() > before
        raise KeyError
    assert (gc.get_freeze_count() > 0) == (before > 0), "objects that were spared before stay so"


def test_cycles_are_collected_in_full_by_what_was_made_since_objects_were_spared():
    thresholds = gc.get_threshold()  # conftest.py raises Python's own
    gc.set_threshold(700, 10, 10)
    try:
        with start_up.collector_restored():
            start_up.spare_collector()
            before = gc.get_stats()[-1]["collections"]
            for _ in range(2 * math.prod(threshold + 1 for threshold in gc.get_threshold())):
                cycle: list[object] = []
                cycle.append(cycle)
            assert gc.get_stats()[-1]["collections"] > before
    finally:
        gc.set_threshold(*thresholds)


def test_a_process_that_ends_while_devices_wake_keeps_its_status():
    """A thread that is still inside JAX's client sometimes aborts the process. The processes are forked before JAX starts."""
    code = """
import os, sys
from zerojax.launch import start_up
for status in (0, 2) * 2:
    if (pid := os.fork()) == 0:
        start_up.wake_devices()
        sys.exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "2"] * 2, done.stderr


def test_a_devices_error_does_not_appear_in_the_thread_that_wakes_it(monkeypatch, capfd):
    threads = []

    class Thread(start_up.threading.Thread):
        def start(self):
            super().start()
            threads.append(self)

    def broken(value, device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(start_up.threading, "Thread", Thread)
    monkeypatch.setattr(start_up.jax, "device_put", broken)
    start_up.wake_devices()
    monkeypatch.undo()
    start_up.wake_devices()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err == ""
    assert float(jnp.sum(jax.device_put(jnp.ones(3)))) == 3


@pytest.mark.parametrize("own", [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_run_takes_a_share_of_the_memory_unless_the_user_says_otherwise(monkeypatch, own, mapped):
    monkeypatch.setattr(start_up.os, "environ", dict(own))
    start_up.take_memory(0.92, mapped=mapped)
    chosen = {"XLA_CLIENT_MEM_FRACTION": "0.92"} | ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"} if mapped else {})
    assert start_up.os.environ == (own or chosen)


@pytest.mark.parametrize("own", ["", "/cache"])
def test_what_runs_of_a_user_share_is_in_the_users_cache_folder(monkeypatch, own):
    monkeypatch.setenv("XDG_CACHE_HOME", own)
    monkeypatch.setenv("HOME", "/home/one")
    assert str(start_up.cache_folder()) == (own or "/home/one/.cache") + "/zerojax"
