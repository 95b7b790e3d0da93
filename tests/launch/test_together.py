"""Checks that processes wait for each other, and that none hangs. This module tests zerojax.launch.together."""

import subprocess
import sys

import programs
import pytest

import zerojax
from zerojax.launch import together

BLOCK = """
import sys, time, jax
from zerojax.launch import devices, together
devices.emulate_cpu_devices(1)
jax.distributed.initialize("127.0.0.1:PORT", 2, int(sys.argv[1]), initialization_timeout=60)
own, path, fails = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with together.main_process_first():
    if own == 0:
        time.sleep(0.5)
        open(path, "w").write("made")
    if fails == str(own):
        raise ValueError("no such dataset\\nmore")
    assert open(path).read() == "made"
together.wait_for_everyone()
print("done", own)
"""


@pytest.mark.parametrize("fails", [*(pytest.param(who, marks=pytest.mark.long) for who in ("none", "0")), "1"])
def test_the_main_process_is_first_and_one_that_fails_ends_the_others_with_a_line(tmp_path, fails):
    program = BLOCK.replace("PORT", str(programs.free_port()))
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(index), str(tmp_path / "made"), fails],
            env=programs.environment(JAX_PLATFORMS="cpu"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    ended = [process.communicate(timeout=programs.LIMIT) for process in started]
    if fails == "none":
        assert [out.splitlines()[-1] for out, _ in ended] == ["done 0", "done 1"], ended
        return
    failed = int(fails)
    assert "Traceback" in ended[failed][1] and "ValueError: no such dataset" in ended[failed][1]
    other = ended[1 - failed][1]
    assert f"zerojax: process {failed} failed in main_process_first: ValueError: no such dataset\n" in other
    assert "Traceback" not in other and started[1 - failed].returncode == 1


def test_one_process_does_not_wait():
    assert zerojax.main_process_first is together.main_process_first
    with zerojax.main_process_first():
        zerojax.wait_for_everyone()
