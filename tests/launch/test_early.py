"""Checks that a command can be stopped while it starts. This module tests zerojax.launch.early in child processes."""

import pathlib
import signal
import subprocess
import sys
import time

import programs
import pytest

from zerojax.launch import early


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    (line,) = (line for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if line[:7] == "SigCgt:")
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number, status, ignored", [(signal.SIGINT, 130, ""), (signal.SIGTERM, 143, "INT HUP")])
def test_a_command_that_is_stopped_during_its_imports_ends_in_one_line(number, status, ignored):
    shell = [f"trap '' {ignored}; exec \"$@\"" if ignored else 'exec "$@"', "sh"]
    command = ["sh", "-c", *shell, sys.executable, "-m", "zerojax.train", "--config=none"]
    with subprocess.Popen(
        command, cwd=programs.ROOT, env=programs.environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + programs.LIMIT
        while not catches(process.pid, signal.SIGTERM) and time.monotonic() < deadline:
            time.sleep(0.001)
        if ignored:  # by nohup, or & in a script
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        _, err = process.communicate(timeout=programs.LIMIT)
    assert (process.returncode, err) == (status, f"{early.line(number)}\n")


@pytest.mark.parametrize(
    "line, name",
    [
        ("python -m zerojax.train --config a", "train"),
        ("python -u -m zerojax show train", "show"),
        ("python -mzerojax.commands.launch -- python -m zerojax.train", "launch"),
        ("python /usr/bin/zerojax config --yes", "config"),
        ("python mine.py zerojax show", ""),
        ("python", ""),
    ],
)
def test_only_the_trainer_and_own_programs_promise_to_resume(line, name, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", line.split())
    assert early.command(sys.orig_argv) == name
    assert ("resumes" in early.line(signal.SIGTERM)) == (name in ("", "train"))


@pytest.mark.parametrize(
    ("name", "module"),  # JAX's words for each kind differ
    [("JAX_ENABLE_X64", ["zerojax", "train"]), ("JAX_DEFAULT_MATMUL_PRECISION", ["zerojax.train"])],
)
def test_a_variable_that_jax_refuses_ends_a_command_in_one_line(name, module):
    command = [sys.executable, "-m", *module]
    environment = programs.environment(**{name: "x"})
    ended = subprocess.run(
        command, cwd=programs.ROOT, env=environment, capture_output=True, text=True, timeout=programs.LIMIT
    )
    line = f"zerojax: {name}: is 'x', which JAX refuses; unset this variable\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_a_program_that_imports_the_library_keeps_its_handlers():
    assert signal.getsignal(signal.SIGTERM) is not early._end and not early._is_command()
