"""Checks what a soak reads from its looks at memory. This module tests scripts/soak_launch.py, and test_ssh_hosts.py its hosts."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "scripts"))

import soak_launch


def looks(pid, first, slope, noise=(0, 0)):
    return [("process 0", pid, step, first + slope * step + noise[step % 2]) for step in range(0, 200, 5)]


def test_growth_is_the_slope_that_processes_share_whatever_each_begins_with():
    lives = looks(1, 10**9, 100) + looks(2, 2 * 10**9, 100)
    found = soak_launch.growth(lives, 50)["process"]
    assert (found["bytes_per_step"], found["standard_error"], found["lives"]) == (100, 0, 2)
    assert found["looks"] == 60 and found["largest_bytes"] == 2 * 10**9 + 100 * 195
    noisy = soak_launch.growth(looks(1, 10**9, 0, noise=(0, 2**20)), 50)["process"]
    assert abs(noisy["bytes_per_step"]) < 2 * noisy["standard_error"]


def test_the_first_steps_of_a_process_and_processes_seen_twice_tell_no_slope():
    early = [("process 1", 3, step, 10**8 * step) for step in range(60)]
    assert soak_launch.growth(early, 60) == {}
    assert soak_launch.growth([*early, *looks(4, 0, 7)], 60)["process"]["bytes_per_step"] == 7
    assert (
        soak_launch.growth([("launcher", 5, step, 50 * step) for step in range(9)], 60)["launcher"]["bytes_per_step"]
        == 50
    )


@pytest.mark.parametrize(("change", "is_same"), [(0.0, True), (1e-9, False)])
def test_losses_are_compared_bit_for_bit(change, is_same):
    expected = {1: (2.0, 1.0), 2: (1.5, 0.9)}
    found = {1: (2.0, 1.0), 2: (1.5 + change, 0.9)}
    assert soak_launch.is_same(found, expected, 0.0) == is_same and not soak_launch.is_same(
        {1: (2.0, 1.0)}, expected, 0.0
    )


def test_faults_of_hosts_are_left_out_or_refused_where_there_are_none():
    local = soak_launch.kinds_of(None, is_local=True)
    assert {"kill", "stop", "hang"} <= set(local) and not {"cut", "agent", "ssh", "gone", "disk"} & set(local)
    assert soak_launch.kinds_of(None, is_local=False) == list(soak_launch.KINDS)
    assert soak_launch.kinds_of("kill 0,gone", is_local=False) == ["kill 0", "gone"]
    for asked, is_local in (("kill,cut", True), ("gone", True), ("kil", False)):
        with pytest.raises(SystemExit, match=f"{asked.split(',')[-1]!r} is none of kill, kill 0, stop"):
            soak_launch.kinds_of(asked, is_local=is_local)
