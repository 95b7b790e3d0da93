"""Checks how processes join, stop and end. This module tests zerojax.launch.processes."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import launches
import programs
import pytest

from zerojax.errors import UserError
from zerojax.launch import peers, processes, schedulers

PROCESSES, DEVICES = 2, 4

JOIN = f"""
import os, signal, sys, time
from zerojax.launch import devices, processes, signals
import jax, numpy as np
assert devices.emulate_cpu_devices({DEVICES})
processes.initialize(timeout_seconds=60)
process_id = jax.process_index()
"""
SUM = """
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
sharding = jax.NamedSharding(mesh, jax.P("data"))
x = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.arange(mesh.size, dtype="f4")[index])
add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
print(f"psum {float(add(x)[0])} {devices.describe()} {'primary' if processes.is_primary() else 'other'}", flush=True)
processes.barrier("summed")
"""
STOP = """
with signals.StopSignal() as stop:
    for step in range(1000):
        if process_id == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01 * process_id)  # the processes are out of step
        if stop.agreed():
            break
print(f"stopped {step} {signals.agreed(process_id == 1)} {signals.agreed(False)}", flush=True)
"""
FAIL = """
if process_id == 1:
    print("giving up", flush=True)
    processes.leave(7)
processes.barrier("never")
"""


@contextlib.contextmanager
def listener():
    with socket.create_server(("", programs.free_port())) as server:
        yield server.getsockname()[1]


# --- joining


@pytest.mark.parametrize(
    "flags, message",
    [
        (("a:1", 2, None), "--process_id: must be set together with --coordinator, --num_processes"),
        ((None, None, 0), "--coordinator: must be set together with --process_id"),
        (("localhost", 2, 0), "--coordinator: must be HOST:PORT"),
        (("localhost:0", 2, 0), "--coordinator: must be HOST:PORT"),
        (("localhost:65536", 2, 0), "--coordinator: must be HOST:PORT"),
        (("localhost:1", 2, 2), "--process_id: must be below --num_processes=2, and is 2"),
        (("localhost:1", 2, -1), "--process_id: must be "),
    ],
)
def test_inconsistent_flags_are_an_error(flags, message):
    with pytest.raises(UserError) as caught:
        processes.initialize(*flags)
    assert str(caught.value).startswith(message)


def test_an_absent_coordinator_is_named_within_the_time_limit():
    with listener() as port:
        pass  # closed again: nothing answers
    began = time.monotonic()
    with pytest.raises(UserError, match=rf"nothing answers at 127\.0\.0\.1:{port} after 1 s"):
        processes.initialize(f"127.0.0.1:{port}", 2, 1, timeout_seconds=1)
    assert time.monotonic() - began < 10


def test_a_port_in_use_is_named():
    with listener() as port, pytest.raises(UserError, match=rf"--coordinator: port {port} cannot be opened"):
        processes.initialize(f"127.0.0.1:{port}", 2, 0)


def test_a_process_that_waits_long_prints_one_line(capsys):
    with processes._prints_if_waiting("still waiting", 0.01):
        time.sleep(0.3)
    with processes._prints_if_waiting("not printed", 10):
        pass
    assert capsys.readouterr().err == "still waiting\n"


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "none.invalid",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


def test_two_tasks_of_slurm_join_and_leave_by_its_variables_and_the_secret_of_a_file(tmp_path):
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "secret").chmod(0o600)
    port, secret = str(programs.free_port()), {processes.SECRET_FILE_VARIABLE: str(tmp_path / "secret")}
    environ = programs.environment(JAX_PLATFORMS="cpu", JAX_COORDINATOR_PORT=port, **STEP, **secret)
    program = (
        "from zerojax.launch import devices, processes; processes.initialize(timeout_seconds=60); print(devices.describe());"
        "processes.leave(0)"
    )
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**environ, "SLURM_PROCID": task, "SLURM_LOCALID": task},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in "01"
    ]
    assert [task.communicate(timeout=programs.LIMIT)[0] for task in tasks] == ["2 x cpu, 2 processes\n"] * 2


def test_an_interactive_step_of_slurm_is_one_process_and_is_told_so(monkeypatch):
    for name, value in {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert processes.find_cluster() is None
    with pytest.warns(UserWarning, match="this is one process, by SLURM_STEP_NUM_TASKS=1 of Slurm: SLURM_NTASKS=2"):
        processes.initialize()


@pytest.mark.parametrize(
    "flags, is_here",
    [
        ((), True),
        (("127.0.0.1:1234", 2, 1), True),
        (("[::1]:1234", 2, 0), True),
        (("localhost:1234", 2, 0), True),
        (("node1:1234", 1, 0), True),
        (("node1:1234", 2, 0), False),
        (("10.0.0.1:1234", 2, 1), False),
    ],
)
def test_processes_are_known_to_be_here_by_an_address_of_this_host_alone(monkeypatch, flags, is_here):
    for name in set(os.environ) - set(programs.environment()):
        monkeypatch.delenv(name)
    assert processes.are_here(*flags) == is_here
    monkeypatch.setattr(processes.schedulers, "find", lambda: schedulers.Origin("Kubernetes", method="k8s"))
    assert not processes.are_here()


def test_pods_that_jax_cannot_join_are_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(processes.schedulers, "find", lambda: schedulers.Origin("Kubernetes", method="k8s"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(
        UserError, match=r"^launch: this process of Kubernetes could not join the others \(.*\); set --c"
    ):
        processes.initialize()


def test_the_secret_is_of_the_variable_or_else_of_a_file_and_is_not_short(tmp_path):
    path, long = tmp_path / "secret", "0123456789abcdef"
    path.write_text(f"{long}\n")
    path.chmod(0o600)
    variable, file = peers.VARIABLE, processes.SECRET_FILE_VARIABLE
    assert processes.secret({}) == b""
    assert processes.secret({file: str(path)}) == long.encode()
    assert processes.secret({file: "absent", variable: "x" * 16}) == b"x" * 16
    for environ, message in (
        (
            {variable: long[1:]},
            "ZEROJAX_SECRET: has 15 characters, and a secret needs 16 or more; set it to that of `openssl",
        ),
        (
            {file: str(tmp_path / "absent")},
            r"absent: cannot be read \(No such file or directory\); name a file with the key",
        ),
        ({file: str(tmp_path)}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            processes.secret(environ)
    for content, message in ((b"\xff", "is no text"), (b" \n", "secret: has 0 characters, and a secret needs 16")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            processes.secret({file: str(path)})


@pytest.mark.parametrize("secret", ["", "0123456789abcdef"])
def test_process_0_tells_that_others_can_reach_it_and_need_no_secret(secret, monkeypatch):
    monkeypatch.setenv(peers.VARIABLE, secret)
    monkeypatch.setenv(processes.BIND_VARIABLE, f"0.0.0.0:{programs.free_port()}")
    with contextlib.ExitStack() as stack:
        if not secret:
            stack.enter_context(
                pytest.warns(UserWarning, match="whoever reaches node0:1 can end this run or take part")
            )
        with pytest.raises(UserError, match="1 did not join"):
            processes.initialize("node0:1", 2, 0, timeout_seconds=0)


LAUNCHED = {
    "ZEROJAX_COORDINATOR": "node0:1234",
    "ZEROJAX_NUM_PROCESSES": "4",
    "ZEROJAX_PROCESS_ID": "3",
    "ZEROJAX_FULL_PROCESSES": "8",
    "ZEROJAX_ATTEMPT": "2",
    "ZEROJAX_RUN_ID": "abc",
}


def test_the_launcher_provides_all_settings_and_flags_come_first(monkeypatch):
    assert processes.launched({}) is None and processes.run_id() == ""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    cluster = processes.Cluster("node0:1234", 4, 3)
    assert processes.launched() == processes.Launched(cluster, full_processes=8, attempt=2, run_id="abc")
    assert processes.find_cluster() == cluster and processes.run_id() == "abc"
    assert processes.find_cluster("other:1", 2, 0) == processes.Cluster("other:1", 2, 0)
    monkeypatch.setenv("ZEROJAX_NUM_PROCESSES", "1")
    monkeypatch.setenv("ZEROJAX_PROCESS_ID", "0")
    assert processes.find_cluster() is None  # one process needs no other


@pytest.mark.parametrize("name, value", [("ATTEMPT", "x"), ("ATTEMPT", None), ("PROCESS_ID", "4")])
def test_variables_that_are_not_the_launchers_are_an_error(name, value):
    environ = {**LAUNCHED, f"ZEROJAX_{name}": value}
    with pytest.raises(UserError, match=r"ZEROJAX_|--process_id"):
        processes.launched({key: value for key, value in environ.items() if value is not None})


# --- one process


def test_a_single_process_does_not_wait_and_is_the_primary_one():
    processes.barrier("alone")
    assert processes.is_primary()


# --- several processes


@pytest.fixture
def plain(monkeypatch):
    """Removes the settings of our tests from the environment of started processes."""
    for name in set(os.environ) - set(programs.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(programs.ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_two_processes_sum_over_all_devices_and_stop_at_the_same_step(capfd, plain):
    done = launches.launch(capfd, JOIN + SUM + STOP, processes=PROCESSES)
    assert done.status == 0, done.out + done.err
    total = PROCESSES * DEVICES
    stops = set()
    for index, rank in enumerate(("primary", "other")):
        lines = done.lines(index)
        summed = f"psum {total * (total - 1) / 2} {total} x cpu (emulated), {PROCESSES} processes {rank}"
        assert summed in lines, done.out
        stops |= {line for line in lines if line.startswith("stopped")}
    assert stops == {"stopped 6 True False"}


def test_a_program_that_does_not_call_leave_ends_in_silence(capfd, plain):
    # What is registered first runs last: no thread may serve tasks that Python destroys.
    last = "import atexit, threading; atexit.register(lambda: print([t.name for t in threading.enumerate()], flush=True))\n"
    done = launches.launch(capfd, last + JOIN + "time.sleep(process_id)", processes=PROCESSES)
    assert (done.status, done.err) == (0, "")
    for index in range(PROCESSES):
        (line,) = done.lines(index)
        assert "MainThread" in line and "peers" not in line


def test_a_process_that_failed_ends_at_once_and_the_rest_with_it(capfd, plain):
    began = time.monotonic()
    done = launches.launch(capfd, JOIN + FAIL, grace_seconds=1)
    assert "giving up" in done.lines(1)
    assert done.status == 7 and time.monotonic() - began < programs.LIMIT / 4


def test_processes_that_do_not_come_are_named():
    with listener() as port:
        pass
    program = (
        f"from zerojax.launch import processes; processes.initialize('127.0.0.1:{port}', 3, 0, timeout_seconds=0.1)"
    )
    done = programs.python(program, JAX_PLATFORMS="cpu")
    assert "--num_processes: of 3 processes, 1, 2 did not join within 0.1 s" in done.stderr and done.returncode == 1
    assert "Check failure" not in done.stderr


@pytest.mark.parametrize(
    "host, variable, expected",
    [
        ("127.0.0.1", None, ("127.0.0.1", 7)),
        ("localhost", None, ("localhost", 7)),
        ("127.0.0.1", "[::]:9", (None, 9)),
        ("127.0.0.1", "10.0.0.1:9", ("10.0.0.1", 9)),
        # a name that this host's own files give a loopback address
        ("node0", None, (["127.0.1.1", "10.0.0.7"], 7)),
        ("node0 without a route", None, (None, 7)),
    ],
)
def test_process_0_listens_where_it_was_told_and_nowhere_else(host, variable, expected, monkeypatch):
    monkeypatch.setattr(processes, "_outward_address", lambda: None if "route" in host else "10.0.0.7")
    if variable:
        monkeypatch.setenv(processes.BIND_VARIABLE, variable)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1" if host[0] != "n" else "127.0.1.1", 7))]
    )
    assert processes._bind_address(host, 7) == expected
