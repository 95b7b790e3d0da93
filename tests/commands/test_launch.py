"""Checks the arguments of the launcher. This module tests zerojax.commands.launch."""

import subprocess
import sys

import pytest
import runs

from zerojax.cluster import agent, supervisor, verdict
from zerojax.commands import launch


@pytest.fixture
def orders(monkeypatch):
    """Returns the orders that were given, and runs none."""
    given = []
    monkeypatch.setattr(supervisor.Supervisor, "__init__", lambda self, order: given.append(order))
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda self: 7)
    monkeypatch.setattr(agent, "gpus", lambda environ: [])
    return given


def call(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["launch", *words])
    with pytest.raises(SystemExit) as end:
        launch.main()
    return end.value.code


def test_options_say_what_runs_where_and_the_status_is_that_of_the_run(orders, monkeypatch, tmp_path):
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    words = [
        "--hostfile",
        str(tmp_path / "hosts"),
        "--include",
        "b:1,3",
        "--max_restarts=2",
        "--min_nodes=1",
        "--limits=step=9",
    ]
    assert (
        call(monkeypatch, *words, "--ssh_options", "-p 2222 -i 'a b'", "--", "python", "x.py", "--num_gpus", "3") == 7
    )
    (order,) = orders
    assert order.command == ["python", "x.py", "--num_gpus", "3"] and order.ssh_options == ["-p", "2222", "-i", "a b"]
    assert [(host.name, host.slots) for host in order.hosts] == [("b", ("1", "3"))]
    assert (order.max_restarts, order.min_nodes, order.limits["step"]) == (2, 1, 9.0)


@pytest.mark.parametrize(
    "gpus, words, slots",
    [([], (), 1), ([], ("--num_gpus", "3"), 3), (["4", "5"], (), 2), (["4", "5"], ("--num_gpus=1",), 1)],
)
def test_without_a_hostfile_every_gpu_of_this_host_runs_or_as_many_processes_as_asked(
    orders, monkeypatch, gpus, words, slots
):
    monkeypatch.setattr(agent, "gpus", lambda environ: gpus)
    assert call(monkeypatch, *words, "true") == 7
    (host,) = orders[0].hosts
    assert host.name == "localhost" and len(host.slots) == slots and host.slots[0] == (gpus or ["0"])[0]
    assert orders[0].limits == verdict.LIMITS


def test_slots_that_a_host_without_gpus_lacks_are_refused_with_the_option_that_starts_several_processes(
    orders, monkeypatch, capsys
):
    assert call(monkeypatch, "--include", "localhost:0,1", "true") == 2 and not orders
    assert capsys.readouterr().err == (
        "zerojax: --include localhost:0,1: localhost has no slot '1'; name some of 0; this host has no GPUs: "
        "--num_gpus 2 in its place starts 2 processes\n"
    )
    monkeypatch.setattr(agent, "gpus", lambda environ: ["0"])
    assert call(monkeypatch, "--include", "localhost:0,1", "true") == 2
    assert "this host has no GPUs" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, line",
    [
        ((), "no command; give it after --"),
        (("--num_gpus", "2", "--"), "no command; give it after --"),
        (("--num_gpus", "x", "true"), "argument --num_gpus: invalid int value: 'x'; --help lists the arguments"),
        (("--gpus_per_process=-1", "true"), "--gpus_per_process: must be 0 or more, and is -1"),
        (
            ("--num_gpus=3", "--gpus_per_process=2", "true"),
            "--gpus_per_process: localhost has 3 slots, which do not divide by 2",
        ),
        (("--max_restarts=-1", "true"), "--max_restarts: must be 0 or more, and is -1"),
        (("--grace_seconds=nan", "true"), "--grace_seconds: must be 0 or more, and is nan"),
        (("--min_nodes=2", "true"), "--min_nodes: is 2, and the run has 1 hosts"),
        (
            ("--master_port", "29500", "x.py"),
            "--master_port: is an option of DeepSpeed's launcher; here give --coordinator HOST:PORT",
        ),
        (("--bogus", "x.py"), "unrecognized arguments: --bogus; --help"),
        (("--limits=x=1", "true"), "--limits: 'x=1' must be PHASE=SECONDS"),
        (("--ssh_options", "'", "true"), "--ssh_options: No closing quotation"),
        (
            ("--max_restarts=1", "--", "python", "-m", "zerojax.train"),
            "--max_restarts: a restart resumes from the checkpoints in --workdir",
        ),
        (
            ("--max_restarts=1", "--", "/bin/zerojax", "train"),
            "--max_restarts: a restart resumes from the checkpoints in --workdir",
        ),
    ],
)
def test_wrong_arguments_are_errors_of_one_line(orders, monkeypatch, capsys, words, line):
    assert call(monkeypatch, *words) == 2 and not orders
    err = capsys.readouterr().err
    assert err.startswith(f"zerojax: {line}") and err.count("\n") == 1


def test_a_run_with_a_workdir_may_be_restarted(orders, monkeypatch):
    assert call(monkeypatch, "--max_restarts=1", "--", "python", "-m", "zerojax.train", "--workdir=a") == 7


def test_a_script_is_started_by_python_and_its_own_options_are_left_alone(orders, monkeypatch, tmp_path):
    for name in ("train.py", "tool.py"):
        (tmp_path / name).touch()
    (tmp_path / "tool.py").chmod(0o755)
    assert call(monkeypatch, "--num_gpus=2", str(tmp_path / "train.py"), "--module", "--num_gpus", "3") == 7
    assert orders[0].command == [sys.executable, str(tmp_path / "train.py"), "--module", "--num_gpus", "3"]
    assert call(monkeypatch, str(tmp_path / "tool.py")) == 7 and orders[1].command == [str(tmp_path / "tool.py")]


@pytest.mark.parametrize(
    "ends, status", [("trap 'exit 0' TERM", 2), pytest.param("trap 'exit 7' TERM", 7, marks=runs.LONG)]
)
def test_a_run_whose_output_nobody_reads_is_stopped_and_its_status_is_not_0(ends, status):
    command = ["sh", "-c", f"{ends}; while true; do echo line; sleep 0.1; done"]
    words = [sys.executable, "-m", "zerojax.commands.launch", "--", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "[localhost:0] line\n"
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == status and err.startswith("zerojax launch: stdout is closed: the run is stopped\n")
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_variables_of_a_file_reach_every_process(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("GREETING=a b\n")
    assert call(monkeypatch, "--num_gpus=2", "--", "sh", "-c", "echo $GREETING") == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[localhost:0] a b", "[localhost:1] a b"]
