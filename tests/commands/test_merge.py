"""Runs the command in this process. This module tests zerojax.commands.merge."""

import functools
import os
import re

import golden_models
import jax
import numpy as np
import pytest

import zerojax
from zerojax.checkpoint import lock
from zerojax.commands import merge

LOGITS = 2e-5  # as in tests/interop/test_pretrained.py


@pytest.fixture
def command(run_main):
    """Returns f(words) -> (status, stdout, stderr)."""
    return functools.partial(run_main, merge)


def test_a_merged_model_gives_the_logits_of_the_model_with_its_adapter(tmp_path, command):
    source = golden_models.FOLDER / "qwen2"
    status, out, err = command(source, "--adapter", source / "lora", "--out", tmp_path / "merged")
    assert (status, err) == (0, "") and "4 adapters" in out
    before, after = out.splitlines()
    assert before.endswith("merged: writing the merged model") and re.search(
        r"merged: written, [\d.]+ KiB, with 4", after
    )
    known = dict(np.load(source / "lora" / "expected.npz"))
    loaded = zerojax.load_huggingface(tmp_path / "merged", stage=0)
    logits = jax.jit(loaded.apply)(loaded.params, {key: known[key] for key in ("input_ids", "attention_mask")})
    np.testing.assert_allclose(logits, known["logits"], atol=LOGITS, rtol=0)


def test_wrong_words_and_folders_end_in_one_line(tmp_path, command):
    source = golden_models.FOLDER / "qwen2"
    for words, message in (
        ([source, "--adapter", source / "lora", "--out", source], "--out .*: is a folder that is read"),
        ([source, "--adapter", tmp_path, "--out", tmp_path / "x"], "holds no adapter_config.json"),
        ([source, "--out", tmp_path / "x"], "--adapter"),
        ([source, "--adapter", source / "lora", "--out", ""], "--out: is empty"),
    ):
        status, out, err = command(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert re.search(message, err)


def test_two_merges_do_not_write_one_folder_at_once(tmp_path, command):
    source = golden_models.FOLDER / "qwen2"
    words = [source, "--adapter", source / "lora", "--out", tmp_path / "out"]
    held = lock.take(tmp_path / ".out.lock", "the first", "wait")  # as another merge does
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    assert re.search(r"out: process \d+ on .* has held it since .*, or choose another directory$", err.strip())
    held.release()
    status, _, err = command(*words)
    assert (status, err, os.listdir(tmp_path)) == (0, "", ["out"])
    zerojax.load_huggingface(tmp_path / "out", stage=0)
