"""Checks runs of several processes, each with emulated devices. This module tests the trainer under scripts/launch_local.py."""

import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import runs

SUM_ORDER = 1e-6  # relative: the same float32 sums over eight devices, four of them in another process
TEXT = {**runs.EVALUATED, "data__name": "python_stdlib", "evaluate__every": 3}
SCRIPT = runs.ROOT / "scripts" / "launch_local.py"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache_dir")]


def start(cache: pathlib.Path, folder: pathlib.Path, **changes) -> subprocess.Popen:
    """Starts two processes of four devices."""
    trainer = [sys.executable, "-m", "zerojax.train", *runs.flags(emulate_devices=4, **changes), f"--workdir={folder}"]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--processes=2", "--", *trainer],
        cwd=runs.ROOT,
        env=runs.environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launcher: subprocess.Popen) -> str:
    """Waits for a clean end and returns the output."""
    try:
        out, _ = launcher.communicate(timeout=runs.LIMIT)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, out
    return out


@pytest.fixture(scope="module")
def one_process(cache_dir, stdlib_dir, tmp_path_factory):
    """Returns the folder of 6 steps in one process of eight devices."""
    return runs.run(tmp_path_factory.mktemp("one"), data__dir=str(stdlib_dir), **TEXT)


def assert_same(folder: pathlib.Path, expected: pathlib.Path) -> None:
    np.testing.assert_allclose(runs.numbers(folder), runs.numbers(expected), rtol=SUM_ORDER)
    np.testing.assert_allclose(runs.evaluations(folder), runs.evaluations(expected), rtol=SUM_ORDER)


def test_two_processes_of_four_devices_train_as_one_of_eight_and_their_checkpoint_resumes_in_one(
    cache_dir, tmp_path, stdlib_dir, one_process
):
    text = {**TEXT, "data__dir": str(stdlib_dir)}
    out = finish(start(cache_dir, tmp_path, steps=3, sample__length=4, export__format="huggingface", **text))
    assert "8 x cpu (emulated), 2 processes" in out and out.count("a sample, from") == 1
    assert (tmp_path / "export" / "model.safetensors").exists() and (tmp_path / "losses.png").exists()
    assert [step for step, *_ in runs.numbers(tmp_path)] == [1, 2, 3]
    runs.run(tmp_path, sample__length=4, export__format="huggingface", **text)
    assert_same(tmp_path, one_process)


def test_a_checkpoint_of_one_process_resumes_in_two_and_sigterm_saves_and_ends_both(
    cache_dir, tmp_path, stdlib_dir, one_process
):
    text = {**TEXT, "data__dir": str(stdlib_dir)}
    runs.run(tmp_path, steps=2, zero__stage=0, **text)
    launcher = start(
        cache_dir, tmp_path, steps=5000, evaluate__every=0, **{k: v for k, v in text.items() if k != "evaluate__every"}
    )
    deadline = time.monotonic() + runs.LIMIT
    while len(runs.numbers(tmp_path)) < 6 and launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGTERM)
    out = finish(launcher)
    step = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert f"stopped by a signal at step {step}, saved" in out
    found = runs.numbers(tmp_path)
    assert [line[0] for line in found] == list(range(1, step + 1))
    np.testing.assert_allclose(found[:6], runs.numbers(one_process), rtol=SUM_ORDER)


def test_bad_input_ends_both_with_status_2(cache_dir, tmp_path):
    launcher = start(cache_dir, tmp_path, global_batch_size=12)
    out, _ = launcher.communicate(timeout=runs.LIMIT)
    assert launcher.returncode == 2 and "zerojax: config.global_batch_size: 12 does not fit" in out
