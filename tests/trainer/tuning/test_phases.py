"""Checks the memory of phases against a device of known numbers. This module tests zerojax.trainer.tuning.phases."""

import time

import pytest

from zerojax.trainer.tuning import phases

KINDS = ("before", "consumed", "peak", "total_peak")


@pytest.fixture
def device(monkeypatch):
    """Returns [bytes in use, peak so far] of the device, which a test may set."""
    numbers = [100, 900]
    monkeypatch.setattr(phases, "device_bytes", lambda: tuple(numbers))
    return numbers


def test_a_peak_that_exceeds_all_before_is_exact(device):
    phase = phases.Phase()
    device[:] = [140, 1500]
    found = phase.end()
    assert [found[f"device_{kind}_bytes"] for kind in KINDS] == [100, 40, 1400, 1500]


def test_a_lower_peak_is_sampled(device):
    phase = phases.Phase()
    device[0] = 700
    time.sleep(10 * phases.SAMPLE_SECONDS)
    device[0] = 60
    found = phase.end()
    assert [found[f"device_{kind}_bytes"] for kind in KINDS] == [100, -40, 600, 700]
    line, _ = phases.lines("epoch 1, training", found)
    assert (
        line == "epoch 1, training: device memory 100 B before, -40 B consumed, 600 B peak above that, 700 B total peak"
    )


def test_host_memory_that_is_held_is_consumed_and_a_device_that_tells_nothing_has_no_number():
    with phases.measured() as found:
        held = bytearray(b"x") * (64 << 20)
    assert len(held) * 0.9 < found["host_consumed_bytes"] <= found["host_peak_bytes"]
    assert not [name for name in found if name.startswith("device")]
    assert phases.unreported(found) == ["the memory of the device is not reported by this backend (cpu)"]
    assert len(phases.lines("x", found)) == 1


def test_a_system_that_tells_nothing_has_no_number(monkeypatch):
    monkeypatch.setattr(phases, "host_bytes", lambda: None)
    assert phases.Phase().end() == {}
