"""Checks that encoded examples are kept and found again by all that they are made of. This module tests zerojax.data.pairs.encoded."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from zerojax.data import tokenizer
from zerojax.data.pairs import encoded, records, tasks

BYTES = tokenizer.load_tokenizer("bytes")
FORM = tasks.RowForm(False, 32, 8, 0, 256, 256, (256,))
SETTINGS = tasks.TaskSettings("classification", "{text}", "{label}", (), "", "")
EXAMPLES = [
    {"text": "a long prompt, and more than a row of the model holds", "label": "x\u00e9"},
    {"text": "b", "label": "y"},
]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded, "LEAST", 0)
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    return path


def encode(path, cache, calls, settings=SETTINGS, form=FORM, answer="answer", **how):
    def counted(examples, **given):
        calls.append(given["name"])
        return tasks.encode(examples, **given)

    keywords = {"tokenizer": BYTES, "settings": settings, "form": form, "folder": None, "names": {}, **how}
    partial = functools.partial(counted, **keywords)
    found = encoded.cached(partial, cache, [str(path)])
    return found(records.Files(str(path), "train_file"), name=str(path), answer=answer)


def assert_same(one, other):
    assert dataclasses.replace(one, examples=[]) == dataclasses.replace(other, examples=[])
    assert len(one.examples) == len(other.examples)
    for first, second in zip(one.examples, other.examples):
        for field, value in first._asdict().items():
            np.testing.assert_array_equal(value, getattr(second, field))
            assert type(value) is type(getattr(second, field)) and getattr(value, "dtype", 0) == getattr(
                getattr(second, field), "dtype", 0
            )


def test_a_second_start_encodes_nothing_and_has_the_same_examples_answers_and_notes(path, tmp_path):
    calls = []
    first, second = (encode(path, tmp_path / "cache", calls) for _ in range(2))
    assert len(calls) == 1 and first.notes and first.answers == ("x\u00e9", "y")
    assert_same(second, first)
    assert_same(encode(path, None, calls), first)
    assert second.fingerprint() == first.fingerprint()


def test_examples_for_an_encoder_decoder_are_kept_too(path, tmp_path):
    form, calls = dataclasses.replace(FORM, is_encoder_decoder=True), []
    first, second = (encode(path, tmp_path / "cache", calls, form=form) for _ in range(2))
    assert len(calls) == 1
    assert_same(second, first)


def test_whatever_changes_an_example_encodes_again(path, tmp_path, monkeypatch):
    calls, folder = [], tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    variants = [
        {},
        {"settings": dataclasses.replace(SETTINGS, prompt="{text} ")},
        {"form": dataclasses.replace(FORM, seq_len=16)},
        {"names": {"other": ["x"]}},
        {"folder": folder},
        {"answer": "rejected", "settings": dataclasses.replace(SETTINGS, rejected="{label}")},
    ]
    for variant in variants:
        encode(path, tmp_path / "cache", calls, **variant)
    assert len(calls) == len(variants)
    (folder / "tokenizer_config.json").write_text("{}")
    encode(path, tmp_path / "cache", calls, folder=folder)
    path.write_text(path.read_text().replace("long", "tall"))  # of the same size
    encode(path, tmp_path / "cache", calls)
    monkeypatch.setattr(encoded.kept, "hash_of_files", lambda paths: "code")
    encode(path, tmp_path / "cache", calls)
    assert len(calls) == len(variants) + 3


def test_few_examples_are_not_kept(tmp_path, path, monkeypatch):
    monkeypatch.setattr(encoded, "LEAST", 2**20)
    calls = []
    for _ in range(2):
        encode(path, tmp_path / "cache", calls)
    assert len(calls) == 2 and not (tmp_path / "cache").exists()
