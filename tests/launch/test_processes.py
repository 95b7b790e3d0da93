"""Checks how processes join, stop and end. This module tests zerojax.launch.processes and scripts/launch_local.py."""

import contextlib
import pathlib
import signal
import socket
import subprocess
import sys
import time

import programs
import pytest

from zerojax.errors import UserError
from zerojax.launch import processes

ROOT = pathlib.Path(__file__).parents[2]
PROCESSES, DEVICES = 2, 4

JOIN = f"""
import argparse, os, signal, sys, time
from zerojax.launch import devices, processes, signals
import jax, numpy as np
parser = argparse.ArgumentParser()
for flag, kind in (("--coordinator", str), ("--num_processes", int), ("--process_id", int)):
    parser.add_argument(flag, type=kind)
flags = parser.parse_args()
assert devices.emulate_cpu_devices({DEVICES})
processes.initialize(**vars(flags), timeout_seconds=60)
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
        if flags.process_id == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01 * flags.process_id)  # the processes are out of step
        if stop.agreed():
            break
print(f"stopped {step} {signals.agreed(flags.process_id == 1)} {signals.agreed(False)}", flush=True)
"""
FAIL = """
if flags.process_id == 1:
    print("giving up", flush=True)
    processes.leave(7)
processes.barrier("never")
"""


def launcher(program: str, *options: str) -> list[str]:
    script = ROOT / "scripts" / "launch_local.py"
    return [sys.executable, str(script), *options, "--", sys.executable, "-c", program]


def launch_local(program: str, *options: str, **variables: str) -> subprocess.CompletedProcess:
    command, env = launcher(program, *options), programs.environment(**variables)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=programs.LIMIT)


def lines_of(output: str, index: int) -> list[str]:
    prefix = f"[{index}] "
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


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


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),  # the batch script itself, not started by srun
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "a"}, "Slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)
def test_a_scheduler_counts_if_it_started_several_processes(environ, expected):
    assert processes.detect_scheduler(environ) == expected


def test_slurm_provides_all_settings():
    with listener() as port:
        pass
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_PROCID": "0"}
    program = (
        "from zerojax.launch import devices, processes\nprocesses.detect_scheduler = lambda environ: 'Slurm'\n"
        + ("processes.initialize(); import jax; print(jax.distributed.is_initialized(), devices.describe())")
    )
    done = programs.python(program, JAX_PLATFORMS="cpu", SLURM_LOCALID="0", JAX_COORDINATOR_PORT=str(port), **slurm)
    assert done.stdout == "True 1 x cpu, 1 process\n", done.stderr


def test_a_scheduler_that_jax_cannot_join_is_an_error_of_one_line():
    done = programs.python(
        "from zerojax.launch import processes; processes.initialize()", JAX_PLATFORMS="cpu", OMPI_COMM_WORLD_SIZE="2"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("zerojax.errors.UserError: launch: this Open MPI task could not join the others (")


# --- one process


def test_a_single_process_does_not_wait_and_is_the_primary_one():
    processes.barrier("alone")
    assert processes.is_primary()


# --- several processes


def test_two_processes_sum_over_all_devices_and_stop_at_the_same_step():
    done = launch_local(JOIN + SUM + STOP, "--processes", str(PROCESSES), JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    total = PROCESSES * DEVICES
    stops = set()
    for index, rank in enumerate(("primary", "other")):
        lines = lines_of(done.stdout, index)
        summed = f"psum {total * (total - 1) / 2} {total} x cpu (emulated), {PROCESSES} processes {rank}"
        assert summed in lines, done.stdout
        stops |= {line for line in lines if line.startswith("stopped")}
    assert stops == {"stopped 6 True False"}


def test_a_process_that_failed_ends_at_once_and_the_rest_with_it():
    began = time.monotonic()
    done = launch_local(JOIN + FAIL, "--processes", "2", "--grace_seconds", "1", JAX_PLATFORMS="cpu")
    assert "giving up" in lines_of(done.stdout, 1)
    assert done.returncode == 7 and time.monotonic() - began < programs.LIMIT / 4


# --- scripts/launch_local.py

SHOW = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), *sys.argv[1:])"


def test_each_process_gets_its_number_and_the_same_coordinator():
    done = launch_local(SHOW, "--processes", "3", CUDA_VISIBLE_DEVICES="x")
    words = [lines_of(done.stdout, index)[0].split() for index in range(3)]
    assert done.returncode == 0 and len({line[2] for line in words}) == 1
    for index, line in enumerate(words):
        assert line[1] == "--coordinator" and line[2].startswith("127.0.0.1:")
        assert line[0] == "x" and line[3:] == ["--num_processes", "3", "--process_id", str(index)]


@pytest.mark.parametrize("visible, expected", [("4,5,6,7", ["4,5", "6,7"]), (None, ["0,1", "2,3"])])
def test_each_process_sees_gpus_of_its_own(visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = launch_local(SHOW, "--processes", "2", "--gpus_per_process", "2", **variables)
    assert [lines_of(done.stdout, index)[0].split()[0] for index in range(2)] == expected


def test_too_few_gpus_and_no_command_are_errors_of_one_line():
    few = launch_local(SHOW, "--processes", "2", "--gpus_per_process", "2", CUDA_VISIBLE_DEVICES="0,1,2")
    assert few.returncode == 2 and "need 4 GPUs" in few.stderr.splitlines()[-1]
    bare = subprocess.run(
        [*launcher("")[:2], "--processes", "2"], capture_output=True, text=True, timeout=programs.LIMIT
    )
    assert bare.returncode == 2 and "no command" in bare.stderr.splitlines()[-1]


def test_a_failed_process_ends_the_others_and_determines_the_status():
    program = "import sys, time; sys.exit(5) if sys.argv[-1] == '1' else time.sleep(100)"
    done = launch_local(program, "--processes", "3")
    assert done.returncode == 5 and "process 1 ended with status 5" in done.stderr


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace():
    program = (
        "import os, signal, sys, time\n"
        "if sys.argv[-1] == '0': signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(100)\n"
        "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    began = time.monotonic()
    done = launch_local(program, "--processes", "2", "--grace_seconds", "0.5")
    assert done.returncode == 128 + signal.SIGKILL and "process 1 ended with SIGKILL" in done.stderr
    assert lines_of(done.stdout, 0) == ["deaf"] and time.monotonic() - began < programs.LIMIT / 4


def test_with_a_log_dir_only_process_0_is_shown_and_a_failed_one_is_quoted(tmp_path):
    program = "import sys; print('hello from', sys.argv[-1]); sys.exit(int(sys.argv[-1]) * 3)"
    done = launch_local(program, "--processes", "2", "--log_dir", str(tmp_path / "logs"))
    assert lines_of(done.stdout, 1) == [] and done.returncode == 3
    assert (tmp_path / "logs" / "process_1.log").read_text() == "hello from 1\n"
    assert "hello from 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once_and_a_clean_end_is_status_0(number):
    program = (
        "import signal, time\nseen = []\n"
        f"signal.signal({int(number)}, lambda number, frame: seen.append(number))\n"
        "print('ready')\nwhile not seen: time.sleep(0.01)\n"
        "time.sleep(0.3); print('seen', len(seen))"
    )
    command = launcher(program, "--processes", "2")
    with subprocess.Popen(command, env=programs.environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        head = [process.stdout.readline() for _ in range(2)]
        assert sorted(head) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(number)
        rest = process.stdout.read()
        assert process.wait(programs.LIMIT) == 0
    assert sorted(rest.splitlines()) == ["[0] seen 1", "[1] seen 1"]


def test_sigquit_kills_processes_that_would_not_end():
    program = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready')\nwhile True: signal.pause()"
    command = launcher(program, "--processes", "2")
    with subprocess.Popen(
        command, env=programs.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        for _ in range(2):
            assert process.stdout.readline().endswith(b"ready\n")
        process.send_signal(signal.SIGQUIT)
        assert process.wait(10) == 128 + signal.SIGKILL
        assert process.stdout.read() == b""  # which ends when both have gone


def test_processes_of_a_killed_launcher_get_sigterm():
    program = (
        "import signal, sys\n"
        "def end(*_): print('ended', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); signal.pause()"
    )
    with subprocess.Popen(
        launcher(program, "--processes", "2"), env=programs.environment(), stdout=subprocess.PIPE
    ) as process:
        for _ in range(2):
            assert process.stdout.readline().endswith(b"ready\n")
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait(10)
    assert len(children) == 2
    deadline = time.monotonic() + 10
    while any(pathlib.Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a process outlived its launcher"
        time.sleep(0.01)


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
        ("node0", None, (None, 7)),  # a name that this host's own files give a loopback address
    ],
)
def test_process_0_listens_where_it_was_told(host, variable, expected, monkeypatch):
    if variable:
        monkeypatch.setenv(processes.BIND_VARIABLE, variable)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1" if host[0] != "n" else "127.0.1.1", 7))]
    )
    assert processes._bind_address(host, 7) == expected
