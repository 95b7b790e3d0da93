"""Checks what is told after a round. This module tests zerojax.trainer.tuning.rounds."""

import io
import math

import event_files
import numpy as np
import pytest
import runs

from zerojax.trainer import metrics, progress, recorder
from zerojax.trainer.tuning import answers, rounds


class Health:
    """A judge who finds nothing."""

    def flaw(self, values):
        return None

    def count(self, step, flaw):
        pass


def test_a_round_tells_the_mean_over_all_labels_and_the_first_and_the_last_show_answers(tmp_path):
    out, given = io.StringIO(), [answers.Answer("q", "yes", "yes"), answers.Answer("r", "no", "yes")]
    score = answers.Score(given, "accuracy", ("no", "yes"))
    with metrics.MetricsLog(tmp_path, enabled=True) as log, progress.Progress(4, out=out) as shown:
        kept = recorder.Recorder(log, shown, Health(), tokens=1, is_logged=bool)
        told = rounds.Rounds(kept, lambda params: 2.0, lambda params: score, ends=(2, 3, 4))
        told.begin()
        for step, loss, labels in ((1, 1.0, 30), (2, 4.0, 10), (3, 3.0, 5), (4, 3.0, 5)):
            kept.push(step, {"loss": np.float32(loss), "grad_norm": np.float32(1), "labels": np.int32(labels)})
            kept.flush()
            if step > 1:
                assert told.evaluate(step, None) == 2.0
        assert out.getvalue().count("Answers beside labels") == 1
        for _ in range(2):
            told.tell_last()
        told.end()
    lines = [line for line in metrics.read(tmp_path) if "train_loss" in line]
    assert [line["train_loss"] for line in lines] == [1.75, 3.0, 3.0]
    assert lines[0]["train_perplexity"] == pytest.approx(math.exp(1.75))
    assert (lines[0]["eval_accuracy"], lines[0]["eval_perplexity"]) == (0.5, pytest.approx(math.exp(2.0)))
    assert lines[0]["memory/training_host_total_peak_bytes"] > 0 and not [name for name in lines[0] if "device" in name]
    assert [line["answers"][1]["found"] for line in metrics.read(tmp_path) if "answers" in line] == ["no"] * 3
    text = out.getvalue()
    first, second, third = (text.index(f"epoch {number}: accuracy") for number in (1, 2, 3))
    assert text.count("Answers beside labels") == 2 and "Answers" in text[first:second] and "Answers" in text[third:]
    assert "epoch 1: training loss 1.7500, perplexity 5.755" in text and "epoch 2: accuracy 50.0% (1 of 2" in text
    assert "epoch 1, training: host memory" in text and "epoch 2, evaluation: host memory" in text
    assert text.count("the memory of the device is not reported by this backend (cpu)") == 1
    tags = {value.tag for event in event_files.read(tmp_path) for value in event.summary.value}
    assert {"train_loss", "eval_accuracy", "memory/training_host_peak_bytes"} <= tags
    assert any(tag.startswith("answers") for tag in tags)


def test_steps_that_tell_no_labels_count_alike_and_one_that_overflowed_does_not(tmp_path):
    with metrics.MetricsLog(tmp_path, enabled=True) as log, progress.Progress(4, out=io.StringIO()) as shown:
        kept = recorder.Recorder(log, shown, Health(), tokens=1, is_logged=bool)
        told = rounds.Rounds(kept, lambda params: 2.0, None, ends=(3,))
        told.begin()
        for step, loss in ((1, 1.0), (2, np.inf), (3, 4.0)):
            kept.push(step, {"loss": np.float32(loss), "grad_norm": np.float32(1)})
            kept.flush()
        told.evaluate(3, None)
    assert [line["train_loss"] for line in metrics.read(tmp_path) if "train_loss" in line] == [2.5]


def test_a_perplexity_that_no_float_holds_is_the_largest():
    assert rounds.perplexity(1e6) == math.exp(rounds.LARGEST) < math.inf


@runs.LONG  # tests/mission evaluates at the ends of epochs, and tests/data resumes within one
def test_a_run_over_epochs_evaluates_at_their_ends_and_resumes_within_one(tmp_path, cache_dir):
    changes = {
        "data__name": "short_reviews",
        "data__task": "classification",
        "data__train_split": "train[:10%]",
        "data__eval_split": "validation[:16]",
        "data__dir": str(tmp_path / "data"),
        "data__answer_len": 10,
        "data__pack": False,
        "seq_len": 64,
        "global_batch_size": 16,
        "evaluate__answers": 0,
        "checkpoint__every": 3,
        "epochs": 1.5,
    }
    whole = runs.run(tmp_path / "run", **changes)
    found = metrics.read(whole)
    assert [line["step"] for line in found if "train_loss" in line] == [4, 6]  # 60 examples
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 7))
    runs.run(tmp_path / "part", **{**changes, "epochs": 0.6})
    runs.run(tmp_path / "part", **changes)
    assert runs.losses(tmp_path / "part") == runs.losses(whole)
