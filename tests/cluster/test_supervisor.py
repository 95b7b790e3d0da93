"""Checks restarts, signals and what is printed. This module tests zerojax.cluster.supervisor with short programs."""

import os
import signal
import threading
import time

import launches
import pytest
from launches import launch, nodes

from zerojax.cluster import attempt, supervisor

ONCE = """
import os, sys
attempt, rank = int(os.environ["ZEROJAX_ATTEMPT"]), int(os.environ["RANK"])
print(attempt, os.environ["ZEROJAX_RUN_ID"], os.environ["ZEROJAX_NUM_PROCESSES"], os.environ["ZEROJAX_FULL_PROCESSES"], flush=True)
sys.exit(7 if rank == 1 and attempt < int(sys.argv[1]) else 0)
"""


def test_a_run_is_restarted_until_it_ends_well(capfd, tmp_path):
    done = launch(capfd, ONCE, "2", max_restarts=2, log_dir=str(tmp_path))
    said = [line.split() for line in done.lines(0)]
    assert done.status == 0 and [words[0] for words in said] == ["0", "1", "2"]
    assert len({words[1] for words in said}) == 1 and {tuple(words[2:]) for words in said} == {("2", "2")}
    assert done.err.count("rank 1 on localhost ended with status 7") == 2 and "restart 2 of 2" in done.err
    assert "zerojax launch: restart 2" in (tmp_path / "localhost_0.log").read_text()


def test_without_restarts_left_the_status_is_that_of_the_last_failure(capfd):
    done = launch(capfd, ONCE, "9", max_restarts=1)
    assert done.status == 7 and done.err.count("ended with status 7") == 2


def test_wrong_input_is_not_restarted(capfd):
    done = launch(
        capfd, "import sys; print('zerojax: config.steps: is wrong'); sys.exit(2)", processes=1, max_restarts=3
    )
    assert done.status == 2 and len(done.lines(0)) == 1 and "not restarted" in done.err


STOPPED = f"""{launches.BEATS}
watch.at("step", 3)
if attempt == 0:
    watch.stopped(3, is_cause=rank == 1)
print(attempt, flush=True)
"""


@pytest.mark.parametrize("restarts, attempts", [(0, ["0"]), (2, ["0", "1"])])
def test_a_run_that_a_signal_to_one_process_stopped_goes_on_if_it_may_be_restarted(capfd, restarts, attempts):
    done = launch(capfd, STOPPED, max_restarts=restarts)
    assert done.status == 0 and done.lines(0) == attempts
    assert done.err.count("rank 1 on localhost got a signal: the run is stopped and saved at step 3") == 1


LOSES = """
import os, pathlib, sys, time
down, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
print(os.environ["ZEROJAX_NUM_PROCESSES"], os.environ["ZEROJAX_FULL_PROCESSES"], flush=True)
if os.environ["ZEROJAX_ATTEMPT"] == "0":
    down.touch()
    sys.exit(9)
"""


@pytest.mark.parametrize("min_nodes, status", [(1, 0), (0, 9)])
def test_a_restart_goes_on_with_the_hosts_that_are_enough(capfd, tmp_path, monkeypatch, min_nodes, status):
    folder = launches.fake_ssh(tmp_path / "bin", monkeypatch)
    more = {"max_restarts": 1, "min_nodes": min_nodes, "rejoin_seconds": 0.5}
    done = launch(capfd, LOSES, str(folder / "node-b.down"), hosts=nodes("localhost", "node-b"), **more)
    assert done.status == status, done.err
    if min_nodes:
        assert done.lines(0)[-1] == "1 2" and "restart 1 of 1, on 1 of 2 hosts" in done.err
    else:
        assert "not restarted: node-b does not answer, and --min_nodes is 2" in done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once_and_a_clean_end_is_status_0(capfd, tmp_path, number):
    program = (
        "import os, pathlib, signal, sys, time\nseen = []\n"
        f"signal.signal({int(number)}, lambda number, frame: seen.append(number))\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\nwhile not seen: time.sleep(0.01)\n"
        "time.sleep(0.3); print('seen', len(seen))"
    )

    def send():
        launches.wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), number)

    former = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    done = launch(capfd, program, str(tmp_path), max_restarts=3)
    sender.join()
    assert done.status == 0 and done.lines(0) == done.lines(1) == ["seen 1"]
    assert signal.getsignal(number) is former


def test_processes_ignore_no_signal_also_where_the_launcher_does(capfd):
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        order = attempt.Order(["grep", "SigIgn", "/proc/self/status"], nodes("localhost"))
        assert supervisor.Supervisor(order).run() == 0
    finally:
        signal.signal(signal.SIGINT, former)
    assert int(capfd.readouterr().out.split()[-1], 16) == 0


def test_sigquit_kills_processes_that_would_not_end(capfd, tmp_path):
    program = (
        "import os, pathlib, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).touch()\nwhile True: signal.pause()"
    )

    def send():
        launches.wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGQUIT)

    sender = threading.Thread(target=send)
    sender.start()
    done = launch(capfd, program, str(tmp_path), max_restarts=3, grace_seconds=0.5)
    sender.join()
    assert done.status == 128 + signal.SIGKILL


def test_a_slow_reader_holds_up_nobody_and_a_closed_one_stops_the_run():
    read, write = os.pipe()
    closed = threading.Event()
    with open(write, "w") as stream:
        screen = supervisor.Screen(closed.set)
        began = time.monotonic()
        for index in range(20_000):  # far more than a pipe holds
            screen._put(stream, f"line {index}")
        assert time.monotonic() - began < 5
        text = b""
        while text.count(b"\n") < 20_000:
            text += os.read(read, 1 << 16)
        assert text.splitlines()[-1] == b"line 19999"
        screen.close()
        os.close(read)
    assert not closed.is_set()


def test_a_line_of_a_process_can_be_heard_and_hidden(capfd):
    heard = []
    order = attempt.Order(command=["sh", "-c", "echo one; echo two"], hosts=nodes("localhost"))
    status = supervisor.Supervisor(order, hear=lambda rank, text: heard.append((rank, text)) or text == "two").run()
    assert status == 0 and heard == [(0, "one"), (0, "two")]
    assert capfd.readouterr().out == "[localhost:0] two\n"
