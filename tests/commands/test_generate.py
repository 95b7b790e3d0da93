"""Runs the command in this process. This module tests zerojax.commands.generate."""

import pathlib
import shutil
import sys

import golden_models
import numpy as np
import pytest
import tokenizers

from zerojax.commands import generate

LOGITS, LOSS = 2e-5, 1e-5  # as in tests/interop/test_pretrained.py
WORDS = ["<s>", "</s>", "<pad>", "one", "two", "three", "four"]


@pytest.fixture
def command(monkeypatch, capsys):
    """Returns f(words) -> (status, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["zerojax generate", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            generate.main()
        return (end.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Returns the folder of a model with a tokenizer of seven words."""
    folder = tmp_path_factory.mktemp("spoken") / "model"
    shutil.copytree(golden_models.FOLDER / "qwen2", folder)
    vocab = {word: number for number, word in enumerate(WORDS)} | {f"w{n}": n for n in range(len(WORDS), 384)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_ids_give_the_logits_the_loss_and_the_tokens_of_transformers(tmp_path, command):
    expected = golden_models.expected("t5")
    given = {name: expected[name] for name in ("input_ids", "attention_mask", "labels")}
    np.savez(tmp_path / "in.npz", **given)
    words = ["--ids", tmp_path / "in.npz", "--out", tmp_path / "out.npz", "--max_new_tokens", 12, "--stage", 3]
    assert command(golden_models.FOLDER / "t5", *words) == (0, "", "")
    found = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=LOSS)
    np.testing.assert_array_equal(found["generated"], expected["generated"])


def test_prompts_of_unequal_length_are_continued_as_each_alone(spoken, command):
    status, both, err = command(spoken, "--prompt", "one two three", "--prompt", "four", "--max_new_tokens", 5)
    assert (status, err) == (0, "")
    lines = both.splitlines()
    assert lines[0].startswith("one two three w") and lines[1].startswith("four w")
    assert command(spoken, "--prompt", "four", "--max_new_tokens", 5)[1] == lines[1] + "\n"


MODEL = golden_models.FOLDER / "llama"
WRONG = {
    "--prompt, --ids: give one of them": (MODEL,),
    "--ids, --out: belong together": (MODEL, "--ids", "in.npz"),
    "argument --stage: invalid choice: 7": (MODEL, "--prompt", "x", "--stage", "7"),
    "tokenizer.json: is missing, so --prompt cannot be read": (MODEL, "--prompt", "x"),
    "nowhere: is not a folder": ("nowhere", "--prompt", "x"),
    "--ids nowhere.npz: cannot be read as .npz": (MODEL, "--ids", "nowhere.npz", "--out", "out.npz"),
    "--ids cut.npz: cannot be read as .npz": (MODEL, "--ids", "cut.npz", "--out", "out.npz"),
    "--ids one.npy: cannot be read as .npz": (MODEL, "--ids", "one.npy", "--out", "out.npz"),
    "attention_mask: must be 0 where a row is padded, else 1, and holds <U1": (
        MODEL,
        "--ids",
        "words.npz",
        "--out",
        "out.npz",
    ),
    "input_ids: must be integers [rows, length], and are int64[0, 2]": (MODEL, "--ids", "none.npz", "--out", "out.npz"),
    "has no input_ids; it holds labels": (MODEL, "--ids", "labels.npz", "--out", "out.npz"),
    "top_p: must be above 0": (MODEL, "--ids", "ids.npz", "--out", "o.npz", "--temperature", "1", "--top_p", "7"),
    "max_new_tokens: must be 1 or more, and 16777216 at most, and is 0": (
        MODEL,
        "--ids",
        "ids.npz",
        "--out",
        "out.npz",
        "--max_new_tokens",
        "0",
    ),
    "at most, and is 1000000000000": (MODEL, "--ids", "ids.npz", "--out", "o.npz", "--max_new_tokens", "1000000000000"),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_one_line(tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    np.savez("labels.npz", labels=np.ones((1, 2), int))
    np.savez("ids.npz", input_ids=np.ones((1, 2), int))
    np.savez("words.npz", input_ids=np.ones((1, 2), int), attention_mask=np.array([["a", "b"]]))
    np.savez("none.npz", input_ids=np.ones((0, 2), int))
    np.save("one.npy", np.ones((1, 2), int))
    pathlib.Path("cut.npz").write_bytes(pathlib.Path("ids.npz").read_bytes()[:90])
    status, out, err = command(*WRONG[message])
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("zerojax: ") and message in err


def test_a_prompt_of_bytes_that_are_no_text_is_one_line(spoken, command):
    assert command(spoken, "--prompt", "\udcff")[::2] == (2, "zerojax: --prompt: is not a text in UTF-8; correct it\n")


def test_settings_of_the_folder_that_are_not_applied_are_named(tmp_path, spoken, command):
    folder = tmp_path / "beams"
    shutil.copytree(spoken, folder)
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    _, _, err = command(folder, "--prompt", "four", "--max_new_tokens", 5)
    assert err == "zerojax: note: generation_config.json sets num_beams=4, which is not applied\n"
