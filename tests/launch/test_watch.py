"""Checks the heartbeat of a process. This module tests zerojax.launch.watch."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import timeit

import launches

from zerojax.cluster import agent
from zerojax.launch import watch

PROGRAM = f"""{launches.BEATS}
def working():
    watch.at("data", 7)
    print(os.environ.get("ZEROJAX_HEARTBEAT"), flush=True)
    time.sleep(60)
working()
"""


def test_a_heartbeat_tells_phase_step_and_stack_and_a_signal_dumps_all_threads(tmp_path):
    path = tmp_path / "beat"
    env = {**os.environ, "ZEROJAX_HEARTBEAT": str(path), "RANK": "0", "ZEROJAX_ATTEMPT": "0"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"None\n"  # its children would write the same file
            said = launches.wait_until(lambda: (found := read(path)).get("step") == 7 and found)
            assert said["phase"] == "data" and said["pid"] == process.pid and "in working" in said["stack"][0]
            launches.wait_until(lambda: read(path)["count"] > said["count"])
            assert path.stat().st_size == watch.BEAT_BYTES
            process.send_signal(agent.STACK_SIGNAL)
            dump = launches.wait_until((tmp_path / "beat.stack").read_text)
            assert "in working" in launches.wait_until(lambda: "in working" in (text := dump_of(tmp_path)) and text), (
                dump
            )
            process.send_signal(signal.SIGSTOP)
            launches.wait_until(lambda: agent._state(process.pid)[0] == "T")
            assert read(path)["stack"]
        finally:
            process.kill()


def read(path: pathlib.Path) -> dict:
    try:
        return json.loads(path.read_bytes().split(b"\n")[0])
    except (OSError, ValueError):
        return {}


def dump_of(folder: pathlib.Path) -> str:
    return (folder / "beat.stack").read_text()


def test_both_sides_agree_on_the_signal_and_the_size():
    assert (watch.STACK_SIGNAL, watch.BEAT_BYTES) == (agent.STACK_SIGNAL, agent.BEAT_BYTES)


def test_without_a_launcher_there_is_no_heartbeat_and_phases_cost_nothing(monkeypatch):
    monkeypatch.delenv(watch.VARIABLE, raising=False)
    watch.begin()
    monkeypatch.setattr(watch, "_position", None)
    assert timeit.timeit(lambda: watch.at(watch.STEP, 3), number=1000) < 0.1
    assert watch._position == (1000, "step", 3)
