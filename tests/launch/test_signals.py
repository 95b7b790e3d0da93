"""Checks that a signal stops all processes. This module tests zerojax.launch.signals on one process; test_processes.py has several."""

import json
import signal
import subprocess
import sys

import jax
import programs
import pytest

from zerojax.launch import signals

RESUMES = "; the same command resumes from the last checkpoint"
ENDS = {  # name -> (whether there is something to save, what happens, exit status, line)
    "interrupted twice": (True, "signal.raise_signal(15); signal.raise_signal(2)", 130, "zerojax: interrupted" + RESUMES),
    "interrupted": (False, "signal.raise_signal(2)", 130, "zerojax: interrupted" + RESUMES),
    "stopped": (False, "signal.raise_signal(15)", 143, "zerojax: stopped by SIGTERM" + RESUMES),
    "hung up": (False, "signal.raise_signal(1)", 129, "zerojax: stopped by SIGHUP" + RESUMES),
    "in C": (False, "os.kill(os.getpid(), 15); stuck()", 143, "zerojax: stopped by SIGTERM" + RESUMES),
    "after training": (True, "stop.ends_at_once('saved'); signal.raise_signal(15)", 143, "zerojax: stopped by a signal: saved"),
    "for another reason": (False, "stop.request('x', 'zerojax: x', 2)", 2, "zerojax: x"),
}  # fmt: skip
FORKS = """
import json, os, signal, sys, threading, time
from zerojax.launch import signals
def stuck():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
for has_state, happens, *_ in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(writer, 2)
        with signals.StopSignal(has_state=has_state) as stop:
            exec(happens)
            time.sleep(60)
    os.close(writer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps([status, os.read(reader, 1000).decode()]))
"""


def test_a_signal_asks_and_a_second_sigterm_has_no_further_effect():
    for first in signals.StopSignal.SIGNALS:
        with signals.StopSignal() as stop:
            assert not stop.requested and not stop.agreed()
            signal.raise_signal(first)
            assert stop.requested and stop.agreed()
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("number", signals.StopSignal.SIGNALS)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(number):
    former = signal.signal(number, signal.SIG_IGN)
    try:
        with signals.StopSignal(has_state=False) as stop:  # a signal that it heard would end this process
            signal.raise_signal(number)
            assert not stop.requested
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, former)


def test_a_process_with_nothing_to_save_ends_at_once_with_a_line():
    command = [sys.executable, "-c", FORKS, json.dumps(list(ENDS.values()))]
    out = subprocess.run(command, env=programs.environment(), capture_output=True, text=True, timeout=50).stdout
    found = dict(zip(ENDS, map(json.loads, out.splitlines()), strict=True))
    assert found == {name: [status, f"{line}\n"] for name, (*_, status, line) in ENDS.items()}


def test_a_request_waits_for_the_step_where_there_is_something_to_save_and_ends_nothing_after_the_training():
    stop = signals.StopSignal()
    stop.request("the pipe", "", 2)
    assert stop.agreed() and stop.cause == "the pipe"
    stop = signals.StopSignal()
    stop.ends_at_once("all is saved")
    stop.request("the pipe", "", 2)
    assert not stop.requested


def test_former_handlers_are_restored():
    before = [signal.getsignal(number) for number in signals.StopSignal.SIGNALS]
    with signals.StopSignal():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in signals.StopSignal.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_one_process_agrees_with_itself():
    assert signals.agreed(True) and not signals.agreed(False)


@pytest.mark.parametrize("guard", ["allow", "disallow"])
def test_the_reduction_over_devices_is_any(guard):
    with jax.transfer_guard(guard):
        assert [bool(jax.device_get(signals._any(stop))) for stop in (False, True)] == [False, True]
