"""Checks a pipeline whose groups belong to two processes. This module tests zerojax.zero.pipeline.travel in runs of `zerojax launch`."""

import re
import subprocess
import sys
import time

import golden_models
import launches
import numpy as np
import pytest
import runs

from zerojax.cluster import attempt, supervisor

PIPE = {"mesh__pipe": 2, "model__num_layers": 2, "grad_accum": 4, "checkpoint__every": 2, "steps": 8}
HALF = 2e-4  # a master weight that differs in its last bit may turn the rounding of its 16-bit copy
NAMED = 60.0  # seconds in which a lost stage is named
# Process 1, which runs the second stage, gets a signal before its last steps, after the first checkpoint.
LOST = """
import os, pathlib, sys, time
from zerojax import train
from zerojax.checkpoint import files
from zerojax.data import feed
following, taken = feed.Feed.next, []
folder = pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
def lost(streams):
    taken.append(streams)
    if len(taken) == 8 and os.environ["ZEROJAX_ATTEMPT"] == "0" and os.environ["ZEROJAX_PROCESS_ID"] == "1":
        while not files.steps(folder / "checkpoints"):  # a save runs beside the steps
            time.sleep(0.05)
        (folder / "lost").write_text(str(time.time()))
        os.kill(os.getpid(), {})
    return following(streams)
feed.Feed.next = lost
train.main()
"""

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("cache_dir")]


def launch(cache_dir, folder, program, *flags, **changes):
    """Trains in two processes, one stage each, and returns the launcher with its lines, each with the time when it came."""
    settings = runs.flags(**{**PIPE, "emulate_devices": 1, **changes})
    command = [sys.executable, "-m", "zerojax.commands.launch", "--num_gpus=2", *flags, "--", sys.executable, *program]
    how = {"cwd": runs.ROOT, "env": runs.environment(cache_dir), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*command, *settings, f"--workdir={folder}"], text=True, **how) as running:
        lines = [(time.time(), line) for line in running.stdout]
    text = "".join(line for _, line in lines)
    assert running.returncode == 0, text
    return lines, text


def alone(cache_dir, folder, **changes):
    """Trains in one process with both devices, and returns the folder."""
    settings = runs.flags(**{**PIPE, "emulate_devices": 2, **changes})
    command = [sys.executable, "-m", "zerojax.train", *settings, f"--workdir={folder}"]
    subprocess.run(command, cwd=runs.ROOT, env=runs.environment(cache_dir), check=True, timeout=runs.LIMIT)
    return folder


@pytest.fixture(scope="module")
def one_process(cache_dir, tmp_path_factory):
    """Returns the folder of a run of one process."""
    return alone(cache_dir, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("name, number", [("SIGKILL", 9), ("SIGSTOP", 19)])
def test_a_lost_stage_is_named_in_a_minute_and_the_run_goes_on_bit_for_bit(
    cache_dir, tmp_path, one_process, name, number
):
    lines, text = launch(cache_dir, tmp_path, ["-c", LOST.format(number)], "--max_restarts=1")
    lost = float((tmp_path / "lost").read_text())
    named = [at for at, line in lines if "rank 1 on localhost" in line and at > lost]
    assert named and named[0] - lost < NAMED, text
    # A stopped process is woken to end, so it may end its steps and save the last.
    assert "restart 1 of 1" in text and re.search("starts at step [2-8] of 8", text)
    assert runs.numbers(tmp_path) == runs.numbers(one_process), "the same bits as one process that nothing happened to"


@pytest.mark.parametrize("axis", ["data", "replica", "context", "model"])
def test_groups_of_several_devices_in_two_processes_are_those_of_one(cache_dir, tmp_path, axis):
    how = {"mesh__data": 1, f"mesh__{axis}": 2, "steps": 3, "zero__stage": 1}
    launch(cache_dir, tmp_path / "two", ["-m", "zerojax.train"], emulate_devices=2, **how)
    runs.run(tmp_path / "one", devices=4, **{**PIPE, **how}, emulate_devices=4)
    np.testing.assert_allclose(runs.numbers(tmp_path / "two"), runs.numbers(tmp_path / "one"), rtol=1e-6)


@pytest.mark.parametrize(
    "precision, stage, optimizer", [("bf16", 1, "none"), ("fp16", 2, "none"), ("fp16", 1, "host"), ("bf16", 3, "nvme")]
)
def test_16_bit_runs_over_two_processes_resume_as_one_that_never_stopped(
    cache_dir, tmp_path, precision, stage, optimizer
):
    how = {"mesh__data": 2, "precision": precision, "zero__stage": stage, "offload__optimizer": optimizer}
    how |= {"offload__nvme_path": tmp_path} if optimizer == "nvme" else {}
    for steps in (2, 4):
        launch(cache_dir, tmp_path / "two", ["-m", "zerojax.train"], emulate_devices=2, **how, steps=steps)
    alone(cache_dir, tmp_path / "one", emulate_devices=4, **how, steps=4)
    np.testing.assert_allclose(runs.numbers(tmp_path / "two"), runs.numbers(tmp_path / "one"), rtol=HALF)


def test_evaluation_export_and_a_checkpoint_of_two_processes_serve_one(cache_dir, tmp_path, one_process):
    how = {"export__format": "huggingface", "sample__length": 4}
    _, text = launch(cache_dir, tmp_path, ["-m", "zerojax.train"], **how)
    assert "a sample" in text and (tmp_path / "export" / "model.safetensors").exists()
    runs.run(tmp_path, devices=2, **{**PIPE, "steps": 10}, emulate_devices=2)
    assert [step for step, *_ in runs.numbers(tmp_path)] == [*range(1, 11)]
    assert runs.numbers(tmp_path)[:8] == runs.numbers(one_process)


def test_adapters_of_a_folders_model_are_those_of_one_process(cache_dir, tmp_path):
    folder = golden_models.FOLDER / "llama"
    how = {"init_from": folder, "model__num_layers": 0, "lora__r": 2, "steps": 3, "export__format": "huggingface"}
    launch(cache_dir, tmp_path / "two", ["-m", "zerojax.train"], **how)
    assert runs.numbers(tmp_path / "two") == runs.numbers(alone(cache_dir, tmp_path / "one", **how))
    exported = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("two", "one")]
    assert exported[0] == exported[1]


# Host node-b fails before its last steps, after the first checkpoint, and does not come back.
GONE = """
import os, pathlib, sys, time
from zerojax import train
from zerojax.checkpoint import files
from zerojax.data import feed
following, taken = feed.Feed.next, []
down, folder = pathlib.Path(sys.argv.pop(1)), pathlib.Path(sys.argv[-1].removeprefix("--workdir="))
def lost(streams):
    taken.append(streams)
    if len(taken) == 4 and os.environ["ZEROJAX_ATTEMPT"] == "0" and os.environ["ZEROJAX_PROCESS_ID"] == "1":
        while not files.steps(folder / "checkpoints"):
            time.sleep(0.05)
        down.touch()
        os._exit(9)
    return following(streams)
feed.Feed.next = lost
train.main()
"""


@pytest.mark.parametrize("devices, pipe", [(2, 2), (1, 1)])
def test_a_restart_without_a_host_has_the_groups_that_there_is_room_for(
    cache_dir, tmp_path, monkeypatch, capfd, devices, pipe
):
    folder = launches.fake_ssh(tmp_path / "bin", monkeypatch)
    how = {**PIPE, "steps": 4, "checkpoint__every": 1}
    settings = runs.flags(**how, emulate_devices=devices)
    command = [sys.executable, "-c", GONE, str(folder / "node-b.down"), *settings, f"--workdir={tmp_path / 'run'}"]
    order = attempt.Order(
        command=command,
        hosts=launches.nodes("localhost", "node-b"),
        max_restarts=1,
        min_nodes=1,
        rejoin_seconds=1.0,
        variables=runs.environment(cache_dir),
    )
    monkeypatch.chdir(runs.ROOT)
    assert supervisor.Supervisor(order).run() == 0
    text = "".join(capfd.readouterr())
    assert f"hosts are missing: mesh.pipe={pipe}, mesh.replica=1, mesh.data=1; the global batch stays 8" in text
    whole = runs.run(tmp_path / "whole", devices=2 * devices, **how, emulate_devices=2 * devices)
    np.testing.assert_allclose(runs.numbers(tmp_path / "run"), runs.numbers(whole), rtol=1e-5)
