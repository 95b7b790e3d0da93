"""Checks that a signal stops all processes. This module tests zerojax.launch.signals on one process; test_processes.py has several."""

import signal

import jax
import pytest

from zerojax.launch import signals


def test_the_first_signal_asks_and_an_interrupt_after_it_interrupts():
    for first in signals.StopSignal.SIGNALS:
        with signals.StopSignal() as stop:
            assert not stop.requested and not stop.agreed()
            signal.raise_signal(first)
            assert stop.requested and stop.agreed()
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_former_handlers_are_restored():
    before = [signal.getsignal(number) for number in signals.StopSignal.SIGNALS]
    with signals.StopSignal():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in signals.StopSignal.SIGNALS] == before


def test_one_process_agrees_with_itself():
    assert signals.agreed(True) and not signals.agreed(False)


@pytest.mark.parametrize("guard", ["allow", "disallow"])
def test_the_reduction_over_devices_is_any(guard):
    with jax.transfer_guard(guard):
        assert [bool(jax.device_get(signals._any(stop))) for stop in (False, True)] == [False, True]
