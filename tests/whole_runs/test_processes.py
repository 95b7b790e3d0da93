"""Checks runs of several processes, each with emulated devices. This module tests the trainer; one test starts it with `zerojax launch`."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs

from zerojax.checkpoint import files

SUM_ORDER = 1e-6  # relative: the same float32 sums over eight devices, four of them in another process
SOON = 45.0  # seconds in which all processes are gone after the first one failed; heartbeats alone take 100
TEXT = {**runs.EVALUATED, "data__name": "python_stdlib", "evaluate__every": 3}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache_dir")]


def statuses(both: list[runs.Command]) -> tuple[int, ...]:
    """Waits for the ends of two processes and returns their statuses."""
    return tuple(command.wait().status for command in both)


def assert_end_soon(both: list[runs.Command], expected: tuple[int, int], words: tuple[str, str]) -> None:
    """Checks that both are gone soon after the first end, with these statuses and one line of stderr that has these words."""
    ended = [
        command.wait() and time.monotonic() for command in sorted(both, key=lambda c: expected[both.index(c)] >= 0)
    ]
    assert abs(ended[0] - ended[1]) < SOON
    assert statuses(both) == expected, [command.err for command in both]
    for command, said in zip(both, words, strict=True):
        assert said in command.err and "Check failure" not in command.err, command.err
        assert "ZeroDivisionError: division by zero\nzerojax" in command.err or command.err.count("\n") <= 1, (
            command.err
        )


@pytest.fixture(scope="module")
def one_process(cache_dir, stdlib_dir, tmp_path_factory):
    """Returns the folder of 6 steps in one process of eight devices."""
    return runs.run(tmp_path_factory.mktemp("one"), data__dir=str(stdlib_dir), **TEXT)


KILLED = """
import os, pathlib, sys, time
from zerojax import train
from zerojax.checkpoint import files
from zerojax.trainer import program
def killed(*_):
    checkpoints = pathlib.Path(sys.argv[-1].removeprefix("--workdir=")) / "checkpoints"
    while not files.steps(checkpoints):  # a save runs beside the steps
        time.sleep(0.05)
    os.kill(os.getpid(), 9)
if os.environ["ZEROJAX_ATTEMPT"] == "0" and os.environ["ZEROJAX_PROCESS_ID"] == "0":
    program.held_out_loss = killed
train.main()
"""


@runs.LONG  # tests/mission has a run that is killed and goes on in two processes
def test_two_processes_train_as_one_although_one_is_killed_in_evaluation_and_one_process_resumes_their_run(
    cache_dir, tmp_path, stdlib_dir, one_process
):
    """The launcher starts both again, and they resume. A single process takes the last steps."""
    text = {**TEXT, "data__dir": str(stdlib_dir), "checkpoint__every": 2}
    settings = runs.flags(emulate_devices=4, steps=4, sample__length=4, export__format="huggingface", **text)
    trainer = [sys.executable, "-c", KILLED, *settings, f"--workdir={tmp_path}"]
    command = [sys.executable, "-m", "zerojax.commands.launch", "--num_gpus=2", "--max_restarts=1", "--", *trainer]
    done = subprocess.run(
        command, cwd=runs.ROOT, env=runs.environment(cache_dir), capture_output=True, text=True, timeout=runs.LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 on localhost" in done.stderr and "ended with SIGKILL" in done.stderr
    assert "starts at step 2 of 4" in done.stdout and "restart 1 of 1" in done.stderr
    assert "8 x cpu (emulated), 2 processes" in done.stdout and done.stdout.count("a sample, from") == 1
    assert (tmp_path / "export" / "model.safetensors").exists() and (tmp_path / "losses.png").stat().st_size > 1000
    assert [step for step, *_ in runs.numbers(tmp_path)] == [1, 2, 3, 4]
    runs.run(tmp_path, **text)
    np.testing.assert_allclose(runs.numbers(tmp_path), runs.numbers(one_process), rtol=SUM_ORDER)
    found, expected = (dict(runs.evaluations(folder)) for folder in (tmp_path, one_process))
    assert found.keys() == {3, 4, 6} and expected.keys() == {3, 6}
    np.testing.assert_allclose([found[step] for step in expected], list(expected.values()), rtol=SUM_ORDER)


@pytest.mark.long  # tests/mission goes on in two processes with a disk, and tests/launch stops two at the same step
def test_a_checkpoint_of_one_process_resumes_in_two_and_sigterm_to_one_saves_and_ends_both(
    commands, tmp_path, stdlib_dir, one_process
):
    """The two have their optimizer state on a disk, of which each saves its shards."""
    text = {**TEXT, "data__dir": str(stdlib_dir)}
    runs.run(tmp_path, steps=2, **text)
    long = {**text, "emulate_devices": 4, "steps": 5000, "evaluate__every": 0, "offload__optimizer": "nvme"}
    long = runs.flags(**long)
    both = commands.start_two(*long, f"--workdir={tmp_path}")
    deadline = time.monotonic() + runs.LIMIT
    while len(runs.numbers(tmp_path)) < 6 and time.monotonic() < deadline and not any(c.err for c in both):
        time.sleep(0.1)
    both[1].kill(signal.SIGTERM)
    assert statuses(both) == (0, 0), both[0].err + both[1].err
    step = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by a signal at step {step}, saved" in both[0].out
    found = runs.numbers(tmp_path)
    assert [line[0] for line in found] == list(range(1, step + 1))
    np.testing.assert_allclose(found[:6], runs.numbers(one_process), rtol=SUM_ORDER)


def test_bad_input_ends_both_with_status_2(commands, tmp_path):
    both = commands.start_two(*runs.flags(emulate_devices=4, global_batch_size=12), f"--workdir={tmp_path}")
    assert statuses(both) == (2, 2) and "zerojax: config.global_batch_size: 12 does not fit" in both[0].err


AT_STEP_3 = """
from zerojax.data import feed
following, taken = feed.Feed.next, []
def next_batch(streams):
    taken.append(streams)
    if len(taken) == 3:
        fail()
    return following(streams)
feed.Feed.next = next_batch
"""

# --- ends: no process holds its machine after another's end, and none ends with the stack trace of XLA

FAILED_SAVE = """
from zerojax.checkpoint import files
def read_back(directory, step, card):
    raise OSError(5, "Input/output error")
files.read_back = read_back
"""
BEFORE_IT_BEGINS = """
import os
from zerojax.trainer import program
program.build = lambda *_, **__: os.kill(os.getpid(), {})
"""
CLOSED = "\nimport os; ends = os.pipe(); os.dup2(ends[1], {0}); os.close(ends[0]); os.close(ends[1])\n"


def fails(code: str) -> str:
    return f"import os, signal, time\ndef fail():\n    {code}\n{AT_STEP_3}"


ENDS = {  # name -> (code of process 0, code of process 1, their statuses, words of their stderr)
    "process 1 fails": ("", fails("1 / 0"), (1, 1), ("process 1 ended with status 1: ZeroDivisionError", "ZeroDivisionError")),
    "a save fails": (FAILED_SAVE, "", (2, 2), ("saving step 2 failed: ", "process 0 ended with status 2")),
    "process 1 is stopped before it begins": (
        "", BEFORE_IT_BEGINS.format(15), (143, 143), ("process 1 ended with status 143: stopped by SIGTERM", "stopped by SIGTERM")),
    "process 1 is killed before it begins": ("", BEFORE_IT_BEGINS.format(9), (1, -9), ("process 1 is gone", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", runs.cases(ENDS, long=["a save fails"]))  # tests/test_train.py fills a disk
def test_all_processes_end_soon_and_in_one_line_after_the_end_of_one(commands, tmp_path, name):
    *before, expected, words = ENDS[name]
    settings = runs.flags(emulate_devices=1, checkpoint__every=2, steps=5000)
    both = commands.start_two(*settings, f"--workdir={tmp_path}", before=before)
    assert_end_soon(both, expected, words)
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.long  # tests/test_train.py closes those of one process
def test_streams_that_nobody_reads_stop_a_run_after_a_save_and_without_a_word(commands, tmp_path):
    settings = runs.flags(emulate_devices=1, checkpoint__every=0, steps=5000)
    lose = fails(f"exec({(CLOSED.format(1) + CLOSED.format(2))!r})")
    both = commands.start_two(*settings, f"--workdir={tmp_path}", before=(lose, ""))
    assert statuses(both) == (2, 2)
    (step,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert [line[0] for line in runs.numbers(tmp_path)] == list(range(1, step + 1))
    assert both[0].err == "" and f"stdout is closed: stopped at step {step}, saved" in both[1].err


def test_a_document_that_one_of_two_processes_cannot_read_stops_both_with_all_steps_saved_and_one_goes_on_without_it(
    commands, tmp_path
):
    path, folder = tmp_path / "text.jsonl", tmp_path / "run"
    lines = [json.dumps({"text": f"{number:03d} " * 20}) for number in range(200)]
    path.write_text("\n".join([*lines[:150], '{"text": ', *lines[150:]]) + "\n")
    one = {"train_file": str(path), "title": "one"}
    mixed = {"data__name": "python_stdlib", "data__sources": f"({one!r}, {one | {'title': 'two'}!r})"}
    flags = runs.flags(**mixed, steps=100, checkpoint__every=0, emulate_devices=2)
    both = commands.start_two(*flags, f"--workdir={folder}")
    assert statuses(both) == (2, 2), [command.err for command in both]
    step = max(runs.losses(folder))
    assert any(
        "text.jsonl:151: is not JSON" in command.err and f"stopped at step {step}, saved" in command.err
        for command in both
    ), [command.err for command in both]
    assert 0 < step < 100 and files.steps(folder / "checkpoints") == [step]
    done = commands(*flags, "--config.data.on_bad=skip", f"--config.steps={step + 9}", f"--workdir={folder}")
    assert done.status == 0 and re.search(r"skipped since the start: [12]; the first", done.out), (done.out, done.err)
    assert list(runs.losses(folder)) == list(range(1, step + 10))
