"""Checks the launcher over real ssh. This module tests scripts/ssh_hosts.py: hosts of network namespaces, where the machine allows them."""

import importlib.util
import pathlib
import shlex
import subprocess
import sys
import threading
import time

import launches
import programs
import pytest

from zerojax.cluster import attempt

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "ssh_hosts.py"
SPEC = importlib.util.spec_from_file_location("ssh_hosts", SCRIPT)
ssh_hosts = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ssh_hosts)

pytestmark = pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=f"this machine {ssh_hosts.why_not()}")


@pytest.fixture(scope="module")
def made():
    with ssh_hosts.hosts(2, 1) as opened:
        yield opened


def options(made) -> dict:
    return {"hosts": launches.nodes(*made.names), "ssh_options": shlex.split(made.ssh_options)}


def test_processes_start_on_hosts_with_names_of_their_own_and_find_process_0(capfd, made, monkeypatch):
    monkeypatch.setenv("GREETING", 'it\'s "quoted" $HOME')
    program = """
import os, socket, sys
host, port = os.environ["ZEROJAX_COORDINATOR"].split(":")
if os.environ["RANK"] == "0":
    with socket.create_server((host, int(port))) as server:
        server.accept()[0].sendall(b"x")
else:
    for _ in range(100):
        try:
            socket.create_connection((host, int(port))).recv(1)
            break
        except OSError:
            __import__("time").sleep(0.1)
    else:
        sys.exit(1)
print(socket.gethostname(), os.environ["GREETING"], *sys.argv[1:])
"""
    done = launches.launch(capfd, program, "a b", "$x;*", **options(made))
    assert done.status == 0, done.err
    words = [done.lines(rank, made.names[rank])[-1].split(" ", 1) for rank in range(2)]
    assert [name[-5:] for name, _ in words] == ["host0", "host1"]
    assert {rest for _, rest in words} == {'it\'s "quoted" $HOME a b $x;*'}


def test_a_host_that_is_cut_off_is_named_and_its_processes_end(capfd, made, tmp_path, monkeypatch):
    monkeypatch.setattr(attempt, "LOST_SECONDS", 4.0)
    monkeypatch.setattr(attempt, "PING_SECONDS", 0.5)
    program = f"""
import os, pathlib, subprocess, sys, time
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""

    def strike():
        launches.wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        made.cut(1)

    striker = threading.Thread(target=strike)
    striker.start()
    began = time.monotonic()
    done = launches.launch(capfd, program, grace_seconds=0.5, **options(made))
    striker.join()
    assert done.status == 1 and f"host {made.names[1]} is lost (no word for" in done.err
    assert time.monotonic() - began < launches.LIMIT
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    launches.wait_until(lambda: not any(map(launches.is_alive, pids)))  # the one that is cut off by its own clock
    made.mend(1)
    assert launches.launch(capfd, "print('back')", **options(made)).status == 0


def test_no_process_outlives_a_launcher_that_is_killed(made, tmp_path):
    program = f"""
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path({str(tmp_path)!r}, "saved" + os.environ["RANK"]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""
    words = ["--hostfile", str(made.hostfile), "--ssh_options", made.ssh_options, "--", sys.executable, "-c", program]
    command = [sys.executable, "-m", "zerojax.commands.launch", *words]
    with subprocess.Popen(command, env=programs.environment(JAX_PLATFORMS="cpu")) as launcher:
        launches.wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        launcher.kill()
    pids = [int(launches.wait_until((tmp_path / str(rank)).read_text)) for rank in range(2)]
    launches.wait_until(lambda: not any(map(launches.is_alive, pids)))
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_a_key_that_is_refused_is_told_in_the_words_of_ssh(capfd, made):
    done = launches.launch(
        capfd,
        "",
        hosts=launches.nodes(made.names[0]),
        ssh_options=["-F", "none", "-i", "/dev/null", "-o", "StrictHostKeyChecking=no"],
    )
    assert done.status == 1 and f"host {made.names[0]} cannot be used: " in done.err and "Permission denied" in done.err
