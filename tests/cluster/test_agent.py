"""Checks that no process outlives its launcher or agent. This module tests zerojax.cluster.agent with real kills."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import launches
import programs
import pytest
from launches import launch, nodes

from zerojax.cluster import agent

# Starts a child that ignores SIGTERM, and names both processes in the folder of its first argument.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
signal.signal(signal.SIGTERM, lambda *_: ((folder / f"saved{rank}").touch(), sys.exit()))
(folder / f"tmp{rank}").write_text(f"{os.getppid()} {os.getpid()} {child.pid}")
(folder / f"tmp{rank}").rename(folder / f"pids{rank}")
"""


def pids(folder: pathlib.Path, rank: int) -> list[int]:
    path = folder / f"pids{rank}"
    return list(map(int, launches.wait_until(lambda: path.exists() and path.read_text()).split()))


def test_processes_of_a_killed_launcher_save_and_end_on_every_host(tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    (tmp_path / "hosts").write_text("localhost slots=1\nnode-b slots=1\n")
    words = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--",
        sys.executable,
        "-c",
        FAMILY + "time.sleep(100)",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "zerojax.commands.launch", *words]
    with subprocess.Popen(
        command, env=programs.environment(JAX_PLATFORMS="cpu"), stdout=subprocess.DEVNULL
    ) as launcher:
        every = pids(tmp_path, 0) + pids(tmp_path, 1)
        launcher.kill()
    launches.wait_until(lambda: not any(map(launches.is_alive, every)))
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_processes_of_a_killed_agent_are_killed_with_their_children(capfd, tmp_path):
    done = launch(capfd, FAMILY + "os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)", str(tmp_path), processes=1)
    assert done.status == 1 and "host localhost is lost (" in done.err
    every = pids(tmp_path, 0)
    launches.wait_until(lambda: not any(map(launches.is_alive, every)))
    assert not (tmp_path / "saved0").exists()


def test_the_guard_knows_a_process_before_it_starts_anything(tmp_path):
    """An agent that is killed at once, before it does anything else, leaves no child of its processes."""
    code = (
        "import os, signal, sys, time; from zerojax.cluster import agent; folder = sys.argv[1]\n"
        "order = dict(rank=0, env={'RANK': '0'}, argv=[sys.executable, *sys.argv[2:], folder])\n"
        "shared = dict(log_dir='', attempt=0, cwd=folder, host='a')\n"
        "agent.Process(order, shared, folder, agent.guard(folder + '/own'), print)\n"
        "while not os.path.exists(folder + '/pids0'): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "-c", FAMILY + "time.sleep(100)"]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    launches.wait_until(lambda: not any(map(launches.is_alive, pids(tmp_path, 0))))


def test_children_of_a_process_that_ended_end_too_and_its_output_is_complete(capfd, tmp_path):
    began = time.monotonic()
    done = launch(capfd, FAMILY + "print('x' * 100_000); print('last', end='')", str(tmp_path), processes=1)
    assert done.status == 0 and time.monotonic() - began < launches.LIMIT / 4
    assert done.lines(0)[-1] == "last" and sum(map(len, done.lines(0))) == 100_004
    launches.wait_until(lambda: not launches.is_alive(pids(tmp_path, 0)[2]))


def test_lines_of_connections_are_printed_and_not_quoted_as_the_last_words_of_a_process(capfd):
    done = launch(
        capfd, "print('cause\\n[Gloo] Rank 0 is connected to 1 peer ranks.'); raise SystemExit(3)", processes=1
    )
    assert done.lines(0)[-1].startswith("[Gloo]") and "cause" in done.err and "[Gloo]" not in done.err


def test_an_agent_leaves_no_files(capfd):
    done = launch(capfd, "import os; print(os.environ['ZEROJAX_HEARTBEAT'])", processes=1)
    launches.wait_until(lambda: not os.path.exists(os.path.dirname(done.lines(0)[0])))


def test_the_gpus_of_a_host_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr(agent.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert agent.gpus({}) == ["0", "1"]
    assert agent.gpus({"CUDA_VISIBLE_DEVICES": "1, GPU-7"}) == ["1", "GPU-7"]
    assert agent.gpus({"CUDA_VISIBLE_DEVICES": ""}) == agent.gpus({"JAX_PLATFORMS": "cpu"}) == []


def test_time_in_which_the_agent_was_stopped_does_not_count(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(agent.time, "monotonic", lambda: clock[0])
    patience = agent.Patience()
    patience.see("a")
    for clock[0] in (1.0, 2.0, 1000.0):
        found = patience.see("a")
    assert found == 2 + 5 * agent.TICK_SECONDS
    assert patience.see("b") == 0


@pytest.mark.parametrize(
    "used, idle, unmoved",
    [
        ({}, 3, 3),
        ({"cpu_seconds": 0.1}, 0, 3),  # as a thread that waits for a GPU
        ({"pages": 100, "cpu_seconds": 0.1}, 0, 0),
        ({"bytes": 1 << 20}, 3, 0),
        ({"pages": 10, "bytes": 1 << 15, "cpu_seconds": 0.01}, 3, 3),
    ],
)
def test_a_pulse_is_what_was_used_since_the_look_before(monkeypatch, used, idle, unmoved):
    clock = [0.0]
    monkeypatch.setattr(agent.time, "monotonic", lambda: clock[0])
    pulse, now = agent.Pulse(), agent.Usage(5.0, 1000, 1 << 20, frozenset({1}))
    pulse.feel(now, 1.0)
    pulse.seconds()
    for clock[0] in (1.0, 2.0, 3.0):
        now = now._replace(**{name: getattr(now, name) + more for name, more in used.items()})
        pulse.feel(now, 1.0)
        found = pulse.seconds()
    assert found == (idle, unmoved)
    pulse.wants_cpu()
    assert pulse.seconds() == (0, unmoved)
    pulse.feel(now._replace(pids=frozenset({1, 2})), 1.0)
    assert pulse.seconds() == (0, 0)


def test_what_a_process_uses_is_counted_with_its_children():
    work = "import os; data = bytearray(1 << 24); open(os.devnull, 'wb').write(data)\nwhile True: pass"
    program = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {work!r}]); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            used = launches.wait_until(
                lambda: (now := agent.usage({process.pid})[process.pid]).cpu_seconds > 0.2 and now
            )
            assert process.pid in used.pids and len(used.pids) == 2
            assert used.pages * 4096 > 1 << 24 and used.bytes > 1 << 24
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    launches.wait_until(lambda: agent.usage({process.pid}) == {process.pid: agent.Usage(0, 0, 0, frozenset())})


def test_it_imports_the_standard_library_alone():
    source = pathlib.Path(agent.__file__).read_text()
    names = {
        line.split()[1].strip(",").split(".")[0]
        for line in source.splitlines()
        if line.startswith(("import ", "from "))
    }
    assert names <= sys.stdlib_module_names


def test_signals_of_its_session_do_not_end_it(capfd, tmp_path):
    program = (
        FAMILY
        + "os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getppid(), signal.SIGINT); time.sleep(0.5); print('well')"
    )
    done = launch(capfd, program, str(tmp_path), processes=1)
    assert done.status == 0 and done.lines(0) == ["well"]


def test_sigterm_to_an_agent_goes_to_its_processes(capfd, tmp_path):
    program = FAMILY + "os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)"
    done = launch(capfd, program, str(tmp_path), processes=1)
    assert done.status == 0 and (tmp_path / "saved0").exists()


def test_hosts_are_named_in_files_of_their_own(capfd, tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    launch(capfd, "print('hi')", hosts=nodes("localhost", "node-b"), log_dir=str(tmp_path / "logs"))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["localhost_0.log", "node-b_1.log"]
