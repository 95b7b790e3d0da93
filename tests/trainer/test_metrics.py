"""Checks the log and its reader. This module tests zerojax.trainer.metrics."""

import json
import math
import os
import signal

import event_files
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import programs
import pytest
from tensorboardX.proto import event_pb2

from zerojax.errors import UserError
from zerojax.trainer import metrics, run_totals


def log(workdir, steps, resume: int | None = None, **values):
    with metrics.MetricsLog(workdir, enabled=True) as file:
        if resume is not None:
            file.resume_at(run_totals.LossCurve(1, resume))
        for step in steps:
            file.write(step, values or {"loss": 1.0 / step})


def test_a_written_step_is_read_back(tmp_path):
    log(tmp_path, [1, 2], loss=0.25, tokens=7, grad_norm=np.float32(0.5))
    row = {"loss": 0.25, "tokens": 7, "grad_norm": 0.5}
    assert metrics.read(tmp_path) == [{"step": 1, **row}, {"step": 2, **row}]


def test_tensorboard_holds_the_same_scalars(tmp_path):
    log(tmp_path, [3, 4], loss=0.25, learning_rate=0.5)
    scalars = {(e.step, v.tag): v.simple_value for e in event_files.read(tmp_path) for v in e.summary.value}
    assert scalars == {(s, name): x for s in (3, 4) for name, x in (("loss", 0.25), ("learning_rate", 0.5))}


def test_tensorboard_knows_where_a_resumed_run_starts(tmp_path):
    log(tmp_path, [3], resume=2)
    assert [e.step for e in event_files.read(tmp_path) if e.session_log.status == event_pb2.SessionLog.START] == [3]


def test_an_evaluation_that_a_resumed_run_repeats_appears_once(tmp_path):
    for values in ({"loss": 0.5}, {"train_loss": 0.5}, {"eval_loss": 0.5}, {"answers": 1, "step_seconds": 2}):
        log(tmp_path, [1, 2], **values)
    with metrics.MetricsLog(tmp_path, enabled=True) as file:
        file.resume_at(run_totals.LossCurve(1, 2), is_unevaluated=True)
    kept = [(record["step"], *record.keys() - {"step", "step_seconds"}) for record in metrics.read(tmp_path)]
    assert kept == [(1, "loss"), (2, "loss"), (1, "train_loss"), (2, "train_loss"), (1, "eval_loss"), (1, "answers")]


@pytest.mark.parametrize(
    "old, new, is_told",
    [
        ("", "", False),
        ("0.25", "0.75", True),
        ('"nan"', '"inf"', True),
        ('"nan"', '"n"', True),
        ('{"step": 2', '{"step": 1', False),
    ],
)
def test_a_resumed_run_tells_of_losses_that_are_not_those_of_its_checkpoint(tmp_path, recwarn, old, new, is_told):
    curve = run_totals.LossCurve()
    for step, loss in ((1, 0.5), (2, 0.25), (3, math.nan)):
        log(tmp_path, [step], loss=loss)
        curve.add(step, loss)
    path = tmp_path / metrics.FILE
    path.write_text(path.read_text().replace(old, new))
    with metrics.MetricsLog(tmp_path, enabled=True) as file:
        file.resume_at(curve)
    told = [f"{path}: the losses of steps 1 to 3 are not those of this run" in str(one.message) for one in recwarn]
    assert told == [True] * is_told  # a log that lacks steps, as with log_every=10, cannot be compared


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_named(tmp_path, value):
    log(tmp_path, [1], loss=value, grad_norm=2.0)
    text = (tmp_path / metrics.FILE).read_text()
    record = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    assert record == {"step": 1, "loss": None, "grad_norm": 2.0, "not_finite": {"loss": str(value)}}


@hypothesis.given(written=st.integers(0, 8), cut=st.integers(0, 40), at=st.integers(0, 10))
@hypothesis.settings(max_examples=30, deadline=None)
def test_after_a_kill_and_resume_every_step_appears_once(tmp_path_factory, written, cut, at):
    at = min(at, written)
    workdir = tmp_path_factory.mktemp("run")
    log(workdir, range(1, written + 1))
    path = workdir / metrics.FILE
    if path.exists():
        lines = path.read_bytes()
        path.write_bytes(lines[: max(len(lines) - cut, 0)])
    survived = {record["step"] for record in metrics.read(workdir)} if path.exists() else set()
    log(workdir, range(at + 1, 12), resume=at)
    steps = [record["step"] for record in metrics.read(workdir)]
    assert steps == [s for s in range(1, at + 1) if s in survived] + list(range(at + 1, 12))


def test_a_killed_process_leaves_every_written_step(tmp_path):
    program = (
        "import os, signal\nfrom zerojax.trainer import metrics\n"
        f"log = metrics.MetricsLog({str(tmp_path)!r}, enabled=True)\n"
        "for step in (1, 2, 3): log.write(step, {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert programs.python(program).returncode == -signal.SIGKILL
    assert [record["step"] for record in metrics.read(tmp_path)] == [1, 2, 3]


def test_a_broken_line_before_the_last_is_named(tmp_path):
    (tmp_path / metrics.FILE).write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        metrics.read(tmp_path)


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(UserError, match="give the workdir of a run"):
        metrics.read(tmp_path)


def test_a_file_in_the_place_of_the_events_is_named(tmp_path):
    (tmp_path / metrics.TENSORBOARD).touch()
    with metrics.MetricsLog(tmp_path, enabled=True) as file, pytest.raises(UserError, match="/tensorboard: cannot be"):
        file.open()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("full", ["lines", "events"])
def test_a_full_disk_is_reported_once_and_then_the_log_is_silent(tmp_path, full, monkeypatch):
    if full == "lines":
        (tmp_path / metrics.FILE).symlink_to("/dev/full")
    else:
        monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    file = metrics.MetricsLog(tmp_path, enabled=True)
    with pytest.raises(UserError, match="No space left on device"):
        file.write(1, {"loss": 1.0})
    file.write(2, {"loss": 1.0})
    file.close()


def test_a_disabled_log_writes_nothing(tmp_path):
    with metrics.MetricsLog(tmp_path, enabled=False) as file:
        file.resume_at(run_totals.LossCurve(1, 3))
        file.write(4, {"loss": 1.0})
    assert not list(tmp_path.iterdir())


def test_device_memory_holds_the_statistics_of_the_backend(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_in_use": 3, "peak_bytes_in_use": 5, "bytes_limit": 9}

    assert metrics.device_memory() == {}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert metrics.device_memory() == {"device_bytes_in_use": 3, "device_peak_bytes": 5}
