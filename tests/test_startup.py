"""Tests what makes a run start sooner."""

import gc
import subprocess
import sys
import types
from unittest import mock

import compile_only
import jax
import jax.numpy as jnp
import pytest

from zerojax import startup


def test_the_trainer_starts_without_the_libraries_that_it_needs_later_or_not_at_all():
    slow = ("torch", "tensorboardX", "tensorflow", "matplotlib.figure")
    code = f"import sys, zerojax.train; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_as_it_was_before_whatever_happens(is_on):
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(KeyError), startup.without_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("status", [0, 2])
def test_a_process_that_ends_while_devices_wake_ends_as_it_says(status):
    """A thread left inside JAX's client has the process aborted, now and then."""
    code = f"import sys; from zerojax import startup; startup.wake_devices(); sys.exit({status})"
    ends = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(4)]
    assert [end.returncode for end in ends] == [status] * 4, ends[0].stderr


def test_who_computes_learns_what_is_wrong_with_a_device_and_not_who_woke_it(monkeypatch, capfd):
    threads = []

    class Thread(startup.threading.Thread):
        def start(self):
            super().start()
            threads.append(self)

    def broken(value, device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(startup.threading, "Thread", Thread)
    monkeypatch.setattr(startup.jax, "device_put", broken)
    startup.wake_devices()
    monkeypatch.undo()
    startup.wake_devices()
    for thread in threads:
        thread.join()
    assert capfd.readouterr().err == ""
    assert float(jnp.sum(jax.device_put(jnp.ones(3)))) == 3


def test_a_reservation_holds_what_is_asked_for_and_writes_next_to_nothing():
    nbytes = 3 * 2**30 + 1
    needed = startup.unwritten_on_host(nbytes, compile_only.gpus()[0]).memory_analysis()
    assert nbytes <= needed.host_output_size_in_bytes < nbytes + 2**20
    assert needed.host_temp_size_in_bytes == 0
    assert max(needed.temp_size_in_bytes, needed.argument_size_in_bytes) < 2**20


@pytest.mark.parametrize("needed, is_made", [(0, True), (10**9, False), (None, False)])
def test_each_gpu_gets_its_reservation_unless_it_would_cost_device_memory(monkeypatch, capfd, needed, is_made):
    """CPU devices play the GPUs; what cannot be compiled is not told."""
    gpus = [types.SimpleNamespace(platform="gpu", device=device) for device in jax.devices()[:2]]
    made = []

    def unwritten(nbytes, gpu):
        if needed is None:
            raise RuntimeError("no such memory")
        compiled = mock.Mock(side_effect=lambda row: made.append((nbytes, gpu)))
        compiled.memory_analysis.return_value.temp_size_in_bytes = needed
        return compiled

    monkeypatch.setattr(startup.jax, "local_devices", lambda: gpus)
    monkeypatch.setattr(startup.jax, "device_put", lambda row, gpu: row)
    monkeypatch.setattr(startup, "unwritten_on_host", unwritten)
    startup.reserve_on_host(1000)
    for thread in startup.threading.enumerate():
        if thread.name == "reserve on host":
            thread.join()
    assert made == ([(1000, gpu) for gpu in gpus] if is_made else [])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("nbytes", [0, 1000])
def test_nothing_is_reserved_where_nothing_is_needed_or_no_gpu_is_there(monkeypatch, nbytes):
    monkeypatch.setattr(startup, "unwritten_on_host", lambda *_: pytest.fail("reserved"))
    if not nbytes:
        monkeypatch.setattr(startup.jax, "local_devices", lambda: [types.SimpleNamespace(platform="gpu")])
    startup.reserve_on_host(nbytes)
    assert "reserve on host" not in [thread.name for thread in startup.threading.enumerate()]
