"""Checks that the first failure of several processes is named. This module tests zerojax.cluster.attempt with short programs."""

import signal
import sys
import time

import launches
import pytest
from launches import BEATS, launch, nodes

from zerojax.cluster import attempt, hosts, supervisor

SHOW = "import os, sys; print(*(os.environ.get(name, '-') for name in sys.argv[1:]))"
NAMES = (
    "ZEROJAX_COORDINATOR",
    "ZEROJAX_NUM_PROCESSES",
    "ZEROJAX_PROCESS_ID",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
)


def test_each_process_gets_its_number_and_the_same_coordinator(capfd, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = launch(capfd, SHOW, *NAMES, processes=3)
    words = [done.lines(rank)[0].split() for rank in range(3)]
    assert done.status == 0 and len({line[0] for line in words}) == 1 and words[0][0].startswith("127.0.0.1:")
    for rank, line in enumerate(words):
        assert line[1:] == ["3", str(rank), str(rank), str(rank), "3", "-"]


def test_the_processes_of_a_run_and_no_other_get_its_secret_whatever_the_user_has(capfd, monkeypatch):
    monkeypatch.setenv("ZEROJAX_SECRET", "of the user")
    runs = [launch(capfd, SHOW, "ZEROJAX_SECRET", variables={"ZEROJAX_SECRET": "of a file"}) for _ in range(2)]
    known = [{tuple(done.lines(rank)) for rank in range(2)} for done in runs]
    assert len(known[0]) == len(known[1]) == 1 and known[0] != known[1]
    assert all(len(line) == 64 and int(line, 16) for (line,) in known[0] | known[1])


def test_each_process_sees_gpus_of_its_own(capfd, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(attempt.Attempt, "_greet", with_gpus(attempt.Attempt._greet, localhost=list("4567")))
    slots = [hosts.Node("localhost", tuple("4567"))]
    done = launch(capfd, SHOW, "CUDA_VISIBLE_DEVICES", hosts=slots, per_process=2)
    assert [done.lines(rank) for rank in range(2)] == [["4,5"], ["6,7"]]
    done = launch(capfd, SHOW, "RANK", hosts=nodes("localhost", slots=8))
    assert done.status == 2 and "host localhost has no GPU 0: it offers 4, 5, 6, 7" in done.err


def with_gpus(greet, **gpus):
    def greeted(self):
        failure = greet(self)
        for host, hello in self._hello.items():
            hello["gpus"] = gpus.get(host.replace("-", "_"), [])
        return failure

    return greeted


def test_a_host_without_gpus_among_others_is_refused_unless_all_use_the_cpu(capfd, tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(attempt.Attempt, "_greet", with_gpus(attempt.Attempt._greet, localhost=["0"]))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    both = nodes("localhost", "node-b")
    done = launch(capfd, SHOW, "CUDA_VISIBLE_DEVICES", hosts=both, max_restarts=1)
    assert done.status == 2 and "host node-b has no GPU, and others have" in done.err
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = launch(capfd, SHOW, "CUDA_VISIBLE_DEVICES", hosts=both)
    assert done.status == 0 and done.lines(0) == ["-"]


def test_a_folder_that_a_host_lacks_is_named(capfd, tmp_path):
    (tmp_path / "file").touch()
    done = launch(capfd, SHOW, log_dir=str(tmp_path / "file" / "logs"), max_restarts=1)
    assert (
        done.status == 2
        and f"host localhost cannot start its processes: {tmp_path}/file/logs: Not a directory" in done.err
    )


def test_the_first_failure_is_told_with_its_last_lines_and_status_and_ends_the_others(capfd, tmp_path):
    program = f"""
import os, pathlib, sys, time
print('hello from', os.environ['RANK'], flush=True)
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).touch()
while os.environ['RANK'] == '1' and not all(pathlib.Path({str(tmp_path)!r}, rank).exists() for rank in "02"):
    time.sleep(0.1)
sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(100)
"""
    began = time.monotonic()
    done = launch(capfd, program, processes=3, log_dir=str(tmp_path / "logs"))
    assert done.status == 5 and time.monotonic() - began < launches.LIMIT / 4
    assert "rank 1 on localhost ended with status 5" in done.err and "    hello from 1" in done.err
    for rank in range(3):
        log = (tmp_path / "logs" / f"localhost_{rank}.log").read_text().splitlines()
        assert log == [f"hello from {rank}", "zerojax launch: rank 1 on localhost ended with status 5"]


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_and_a_killed_one_is_named(capfd):
    program = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '0': signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)\n"
        "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    began = time.monotonic()
    done = launch(capfd, program, grace_seconds=0.5)
    assert done.status == 128 + signal.SIGKILL and "rank 1 on localhost ended with SIGKILL" in done.err
    assert done.lines(0) == ["deaf"] and time.monotonic() - began < launches.LIMIT / 4


def test_a_process_whose_end_follows_from_another_is_not_blamed(capfd):
    program = (
        "import os, sys, time\nrank = int(os.environ['RANK'])\n"
        "if rank == 1: time.sleep(0.7); print('zerojax: config.steps: is wrong'); sys.exit(3)\n"
        "print('zerojax: process 1 ended with status 3: config.steps: is wrong'); sys.exit(1)"
    )
    done = launch(capfd, program)
    assert done.status == 3 and "rank 1 on localhost ended with status 3" in done.err


def test_a_command_that_is_not_there_is_an_error_of_one_line_and_not_restarted(capfd):
    order = attempt.Order(command=["/no/such/program"], hosts=nodes("localhost"), max_restarts=3)
    assert supervisor.Supervisor(order).run() == 127
    done = capfd.readouterr()
    assert done.out.count("zerojax: /no/such/program: No such file or directory") == 1
    assert (
        "status 127 is a command that is not there, which another attempt would meet again; not restarted" in done.err
    )


STOPS = f"""{BEATS}
watch.at("step", 4)
time.sleep(0.5)
def deep():
    if rank == 1:
        time.sleep(0.3)  # some heartbeats
        os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[1] == "stop" else time.sleep(100)
    for step in range(5, 1000):
        watch.at("step", step)
        time.sleep(0.1)
        if sys.argv[1] == "hang":
            time.sleep(100)
deep()
"""


@pytest.mark.parametrize(
    "how, limits, words",
    [
        ("stop", "", "rank 1 on localhost, step 4 (step) is stopped for"),
        ("hang", "step=1", "rank 1 on localhost, step 4 (step) stands still for"),
    ],
)
def test_a_process_that_stops_or_hangs_is_named_with_its_stack(capfd, monkeypatch, how, limits, words):
    monkeypatch.setattr(attempt.verdict, "STOPPED_SECONDS", 1.5)
    began = time.monotonic()
    done = launch(capfd, STOPS, how, limits=limits, grace_seconds=0.5)
    assert done.status == 1 and words in done.err, done.err
    assert "in deep" in done.err and "rank 0 on localhost, step" in done.err
    assert time.monotonic() - began < launches.LIMIT / 4


def test_a_process_whose_data_are_late_is_named_and_may_go_on(capfd, monkeypatch):
    monkeypatch.setattr(attempt.verdict, "STEP_LEAST", 1.0)
    program = f"""{BEATS}
def reading():
    watch.at("data", 4)
    time.sleep(10)
    watch.at("step", 4)
if rank == 1:
    reading()
watch.at("step", 4)
time.sleep(0 if rank == 1 else 11)
"""
    done = launch(capfd, program)
    assert done.status == 0 and done.err.count("rank 1 on localhost, step 4 (data) has waited for data for") == 1
    assert "in reading" in done.err


QUIET = f"""{BEATS}
watch.BEAT_SECONDS = 0.3  # less is not quiet
watch.at("evaluation")
def standing():
    time.sleep(100)
end = time.monotonic() + 2.5
while rank == 0 and time.monotonic() < end:
    pass
if rank == 0:
    print("ahead", flush=True)
    watch.at("step", 1)
standing()
"""


def test_a_process_that_stands_still_is_named_unless_one_beside_it_works_and_ends_the_run_later(monkeypatch):
    monkeypatch.setattr(attempt.verdict, "NAMED_SECONDS", 1.5)
    monkeypatch.setattr(attempt, "LOOK_SECONDS", 0.5)
    said = []
    order = attempt.Order(
        command=[sys.executable, "-c", QUIET],
        hosts=nodes("localhost", slots=2),
        limits=attempt.verdict.read_limits("quiet=4"),
        grace_seconds=0.5,
    )
    status = supervisor.Supervisor(order, hear=lambda rank, text: said.append(text) or True, tell=said.append).run()
    assert status == 1 and said[0] == "ahead"
    named, ended = said[1:]
    assert named.line.startswith("rank 1 on localhost, step 0 (evaluation) gives no sign of life for")
    assert "the run ends after 4 s" in named.line and "in standing" in "".join(named.details)
    assert "rank 0 on localhost, step 1 (step)" in "".join(named.details)
    assert ended.rank == 1 and "gives no sign of life for" in ended.line


def test_hosts_are_reached_by_ssh_with_the_environment_and_folder_of_this_one(capfd, tmp_path, monkeypatch):
    launches.fake_ssh(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("GREETING", 'it\'s "quoted" $HOME')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    program = "import os, sys; print(os.getcwd(), os.environ['GREETING'], os.environ['ZEROJAX_COORDINATOR'][:10], *sys.argv[1:])"
    done = launch(capfd, program, "a b", "$x;*", hosts=nodes("node-a", "node-b"), python=sys.executable, log_dir="logs")
    expected = [f'{tmp_path} it\'s "quoted" $HOME 127.0.0.1: a b $x;*']
    assert done.status == 0 and done.lines(0, "node-a") == done.lines(1, "node-b") == expected, done.err
    assert (tmp_path / "logs" / "node-b_1.log").read_text() == expected[0] + "\n"


def test_a_host_that_cannot_be_reached_is_named_with_the_words_of_ssh(capfd, tmp_path, monkeypatch):
    (launches.fake_ssh(tmp_path / "bin", monkeypatch) / "node-b.down").touch()
    done = launch(capfd, SHOW, hosts=nodes("localhost", "node-b"))
    assert (
        done.status == 1
        and "host node-b cannot be used: ssh: connect to host node-b port 22: No route to host" in done.err
    )
    assert "`ssh node-b true` must work" in done.err


def test_a_host_that_falls_silent_is_lost_and_its_processes_end(capfd, tmp_path, monkeypatch):
    folder = launches.fake_ssh(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr(attempt, "LOST_SECONDS", 3.0)
    monkeypatch.setattr(attempt, "PING_SECONDS", 0.5)
    # The first process stops the whole connection to the second, as a cut network does.
    program = f"""
import os, pathlib, signal, time
pathlib.Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
other = pathlib.Path({str(tmp_path)!r}, "1")
while not other.exists():
    time.sleep(0.1)
time.sleep(3)  # in which the second says that it runs
if os.environ["RANK"] == "0":
    os.kill(int(pathlib.Path({str(folder)!r}, "node-b.pid").read_text()), signal.SIGSTOP)
time.sleep(100)
"""
    done = launch(capfd, program, hosts=nodes("localhost", "node-b"), grace_seconds=0.5)
    assert done.status == 1 and "host node-b is lost (" in done.err and "rank 1 on node-b" in done.err
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    launches.wait_until(lambda: not any(map(launches.is_alive, pids)))
