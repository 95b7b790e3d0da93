"""Checks the splits of a run from files. This module tests zerojax.data.pairs.splits."""

import dataclasses
import json

import pytest

from zerojax.data import batches, tokenizer
from zerojax.data.pairs import splits, tasks
from zerojax.errors import UserError

BYTES = tokenizer.load_tokenizer("bytes")
FORM = tasks.RowForm(False, 32, 8, 0, 256, 256, (256,))
SETTINGS = tasks.TaskSettings("classification", "{text}", "{label}", (), "", "")


def load(tmp_path, train, held_out):
    for name, rows in (("train", train), ("held", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows))
    held = str(tmp_path / "held.jsonl") if held_out else ""
    places = batches.Places("", "", "", "", str(tmp_path / "train.jsonl"), held)
    return splits.load(places, BYTES, SETTINGS, FORM, packs=False, folder=None)


TRAIN = [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("e", "x")]


def test_files_are_read_and_counted(tmp_path):
    found = load(tmp_path, TRAIN, [("f", "y")])
    assert (len(found.train), len(found.held_out), found.answers) == (5, 1, ("x", "y"))
    assert (found.steps(1, 2), found.steps(2, 2), found.steps(0.1, 2), found.batches(4)) == (3, 5, 1, 1)
    assert "5 training examples" in found.notes[-1] and "1 held-out" in found.notes[-1]


def test_pairs_with_two_equal_answers_are_counted(tmp_path):
    lines = [{"text": "a", "label": "x", "other": other} for other in ("x", "y", "x")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = batches.Places("", "", "", "", str(tmp_path / "pairs.jsonl"), "")
    settings = dataclasses.replace(SETTINGS, task="dpo", rejected="{other}")
    notes = splits.load(places, BYTES, settings, FORM, packs=False, folder=None, compared=2).notes
    assert any("2 of 3 pairs have two equal answers" in note for note in notes)


def test_without_held_out_examples_there_are_none(tmp_path):
    found = load(tmp_path, TRAIN, [])
    assert found.held_out is None and found.batches(4) == 0 and "no held-out examples" in found.notes[-1]


def test_held_out_examples_that_are_trained_on_are_told_and_unknown_classes_refused(tmp_path):
    assert any(
        "1 of 2 held-out examples are training examples too" in note
        for note in load(tmp_path, TRAIN, [("f", "y"), ("a", "x")]).notes
    )
    with pytest.raises(UserError, match=r"held.jsonl:1: the answer 'z' is none of the 2 classes"):
        load(tmp_path, TRAIN, [("f", "z")])
