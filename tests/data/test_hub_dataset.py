"""Checks datasets of the Hugging Face hub, made here without a network. This module tests zerojax.data.hub_dataset."""

import importlib

import pytest

from zerojax.data import source
from zerojax.errors import UserError

NAME = "hf:ought/raft/twitter_complaints"
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LABELS = ["no complaint", "complaint"]
CALLS = [[{"f": {"a": 1}}], [], [{"f": {"b": "x"}}, {"f": {}}]]
ROWS = {
    "Tweet text": ["late again", None, "thank you"],
    "Label": [1, 0, None],
    "ID": [7, None, 9],
    "messages": [TALK, [], TALK],
    "picture": [None] * 3,
    "calls": CALLS,
    "tools": CALLS,
}


@pytest.fixture(scope="module")
def datasets():
    """Returns the hub's library, which takes two seconds to import."""
    return importlib.import_module("datasets")


@pytest.fixture
def asked(monkeypatch, datasets):
    """Lets the hub's library return three rows in two splits, and returns the arguments of its calls."""
    features = {
        "Tweet text": datasets.Value("string"),
        "Label": datasets.ClassLabel(names=LABELS),
        "ID": datasets.Value("int32"),
        "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        "picture": datasets.Image(),
        "calls": [{"f": {"a": datasets.Value("int32"), "b": datasets.Value("string")}}],
        "tools": datasets.List(datasets.Json()),
    }
    rows = datasets.Dataset.from_dict(ROWS, features=datasets.Features(features))
    calls = []
    found = datasets.DatasetDict({"train": rows, "test": rows.select([0])})
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments: calls.append(arguments) or found)
    return calls


def test_a_dataset_is_prepared_once_and_then_read_without_the_hub(asked, tmp_path):
    source.prepare(NAME, tmp_path)
    source.prepare(NAME, tmp_path)
    assert asked == [("ought/raft", "twitter_complaints")]
    opened = source.open_source(NAME, "train", tmp_path)
    rows = [opened[index] for index in range(len(opened))]
    assert [row["Tweet text"].decode() for row in rows] == ["late again", "", "thank you"]
    assert [(row["Label"], row["ID"], row["messages"]) for row in rows] == [(1, 7, TALK), (0, None, []), (-1, 9, TALK)]
    assert [row["calls"] for row in rows] == [row["tools"] for row in rows] == CALLS
    assert "picture" not in rows[0] and source.class_names(NAME, tmp_path) == {"Label": LABELS}
    assert len(source.open_source(NAME, "train[:67%]", tmp_path)) == 2
    with pytest.raises(UserError, match=r"^eval_split: no split 'validation' in .*; known splits: "):
        source.open_source(NAME, "validation", tmp_path, "eval_split")
    assert len(asked) == 1


def test_names_that_differ_in_signs_alone_are_two_datasets(asked, tmp_path):
    for name in ("hf:a/b_c", "hf:a/b-c", "hf:imdb"):
        source.prepare(name, tmp_path)
    assert asked == [("a/b_c",), ("a/b-c",), ("imdb",)] and len(list(tmp_path.glob("hf_*"))) == 3


@pytest.mark.parametrize("name", ["hf:", "hf:a b", "hf:a/b/c/d", "hf:../x y"])
def test_a_name_of_another_form_is_refused(asked, tmp_path, name):
    with pytest.raises(UserError, match=r"^name: .* must be hf:USER/DATASET"):
        source.prepare(name, tmp_path)
    assert not asked


def test_what_cannot_be_downloaded_is_told_with_the_command_that_downloads_it(monkeypatch, datasets, tmp_path):
    def away(*arguments):
        raise ConnectionError("the hub is away.\nmore")

    monkeypatch.setattr(datasets, "load_dataset", away)
    with pytest.raises(UserError) as caught:
        source.prepare(NAME, tmp_path)
    line = str(caught.value)
    assert f"'{NAME}' is not in the hub's cache and cannot be downloaded (ConnectionError: the hub is away)" in line
    assert "datasets.load_dataset('ought/raft', 'twitter_complaints')" in line and "\n" not in line
    assert not any(tmp_path.iterdir())
