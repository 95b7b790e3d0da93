"""Runs the command in this process. This module tests zerojax.commands.generate."""

import functools
import json
import pathlib
import shutil
import subprocess
import sys
import types

import golden_models
import numpy as np
import programs
import pytest
import runs
import tokenizers

from zerojax.commands import generate

LOGITS, LOSS = 2e-5, 1e-5  # as in tests/interop/test_pretrained.py
WAIT = f"zerojax: {generate.COMPILING}\n"
WORDS = ["<s>", "</s>", "<pad>", "one", "two", "three", "four"]


@pytest.fixture
def command(run_main, monkeypatch):
    """Returns f(words) -> (status, stdout, stderr), the latter without the line on compiled programs."""
    monkeypatch.setattr(generate.program_cache, "begin", lambda **how: "")
    return functools.partial(run_main, generate)


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
    assert command(golden_models.FOLDER / "t5", *words) == (0, "", WAIT)
    with np.load(tmp_path / "out.npz") as file:
        found = dict(file)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=LOGITS, rtol=0)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=LOSS)
    np.testing.assert_array_equal(found["generated"], expected["generated"])


@runs.LONG
def test_prompts_of_unequal_length_are_continued_as_each_alone(spoken, command):
    status, both, err = command(spoken, "--prompt", "one two three", "--prompt", "four", "--max_new_tokens", 5)
    assert (status, err) == (0, WAIT)
    lines = both.splitlines()
    assert lines[0].startswith("one two three w") and lines[1].startswith("four w")
    assert command(spoken, "--prompt", "four", "--max_new_tokens", 5)[1] == lines[1] + "\n"


def test_prompts_are_read_by_the_tokenizer_of_the_adapters_folder_where_it_has_one(spoken, tmp_path, command):
    model, adapter = golden_models.FOLDER / "qwen2", tmp_path / "adapter"
    shutil.copytree(model / "rslora", adapter)
    shutil.copy(spoken / "tokenizer.json", adapter)
    asked = ["--prompt", "one two three", "--max_new_tokens", 5, "--adapter"]
    found = command(model, *asked, adapter)
    assert found == command(spoken, *asked, model / "rslora") and found[1].startswith("one two three w")


def test_answers_of_a_file_in_batches_are_those_of_its_prompts_and_stand_beside_the_labels(spoken, tmp_path, command):
    asked = ["one two three", "four", "two two"]
    found = command(spoken, *(word for text in asked for word in ("--prompt", text)), "--max_new_tokens", 5)[1]
    answers = [line.removeprefix(text).strip() for text, line in zip(asked, found.splitlines())]
    lines = [
        {"q": "one two", "r": "three", "label": answers[0]},
        {"q": "four", "r": "", "label": "no"},
        {"q": "two", "r": "two"},
    ]
    (tmp_path / "in[1].jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--file", tmp_path / "in[1].jsonl", "--out", tmp_path / "out.jsonl", "--template", "{q} {r}"]
    status, out, err = command(spoken, *words, "--max_new_tokens", 5, "--batch_size", 2)
    assert (status, err) == (0, WAIT)
    assert out == f"{tmp_path}/out.jsonl: 3 predictions; 50.0% right (1 of 2 with a label)\n"
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written[0] == lines[0] | {"prediction": answers[0], "expected": answers[0], "is_right": True}
    assert written[1] == lines[1] | {"prediction": answers[1], "expected": "no", "is_right": False}
    assert written[2] == lines[2] | {"prediction": answers[2]}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, flags",
    [("qwen2", ["--temperature", 0.8, "--top_k", 30, "--seed", 3]), ("t5", []), ("qwen2", ["--stage", 3])],
)
def test_a_file_is_answered_alike_in_any_batches_and_by_two_processes(spoken, tmp_path, command, name, flags):
    folder = tmp_path / "model"
    shutil.copytree(golden_models.FOLDER / name, folder)
    shutil.copy(spoken / "tokenizer.json", folder)
    texts = ["one two three", "four", "two two", "three " * 20, "one one", "four"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--file", tmp_path / "in.jsonl", "--template", "{text}", "--max_new_tokens", 6, *flags]
    assert command(folder, *words, "--batch_size", 2, "--out", tmp_path / "one.jsonl")[::2] == (0, WAIT)
    words = [*words, "--batch_size", 3, "--emulate_devices", 1, "--num_processes", 2, "--out", tmp_path / "two.jsonl"]
    address = f"--coordinator=127.0.0.1:{programs.free_port()}"
    python = [sys.executable, "-m", "zerojax", "generate", folder, *words, address]
    both = [subprocess.Popen([*map(str, python), f"--process_id={rank}"], cwd=runs.ROOT) for rank in range(2)]
    assert [process.wait(runs.LIMIT) for process in both] == [0, 0]
    one, two = ((tmp_path / f"{kind}.jsonl").read_text() for kind in ("one", "two"))
    assert one == two and len(set(one.splitlines())) == (6 if "--temperature" in flags else 5)


def test_an_example_that_lacks_a_field_is_named_and_an_earlier_result_stays(spoken, tmp_path, command):
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    (tmp_path / "out.jsonl").write_text("mine")
    words = ["--file", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--template", "{text}"]
    status, out, err = command(spoken, *words)
    assert (status, out) == (2, "") and "in.jsonl:2: has no field 'text', which --template names" in err
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "the examples are read from it" in command(spoken, *words[:2], "--out", words[1], *words[4:])[2]


@pytest.mark.parametrize("is_pair, longest, given, expected", [
    (False, 10, None, 54), (True, 60, None, 63), (False, 70, None, 64), (False, 10, 60, 60), (False, 0, None, 64),
])  # fmt: skip
def test_the_default_number_of_new_tokens_is_what_fits_and_a_given_one_stays(is_pair, longest, given, expected, capsys):
    family = types.SimpleNamespace(is_encoder_decoder=is_pair)
    folder = types.SimpleNamespace(family=family, positions=64)
    assert generate._new_tokens(folder, types.SimpleNamespace(max_new_tokens=given), longest) == expected
    note = f"zerojax: note: {expected} tokens are added at most, and not 64: the model has 64 positions\n"
    assert capsys.readouterr().err == (note if expected in (54, 63) else "")


MODEL = golden_models.FOLDER / "llama"
WRONG = {
    "--prompt, --ids, --file: give one of them": (MODEL,),
    "--prompt, --ids, --file: give one": (MODEL, "--prompt", "x", "--file", "x.jsonl", "--out", "y"),
    "--ids or --file, and --out: belong together": (MODEL, "--ids", "in.npz"),
    "--run, --template: are of --file's prompts": (MODEL, "--prompt", "x", "--template", "{text}"),
    "--file: the prompts need a template": (MODEL, "--file", "x.jsonl", "--out", "y.jsonl"),
    "--file: there is no file 'x.jsonl'": (MODEL, "--file", "x.jsonl", "--out", "y.jsonl", "--template", "{text}"),
    "--run: nowhere/config.json is not the config of a run": (MODEL, "--file", "x", "--out", "y", "--run", "nowhere"),
    "argument --stage: invalid choice: 7": (MODEL, "--prompt", "x", "--stage", "7"),
    "tokenizer.json: is missing, so texts cannot be read": (MODEL, "--prompt", "x"),
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


def test_a_tokenizer_whose_regex_gives_up_is_one_line(tmp_path, spoken, command):
    folder = tmp_path / "slow"
    shutil.copytree(spoken, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    status, out, err = command(folder, "--prompt", "a" * 40 + "b")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("zerojax: --prompt: the tokenizer cannot encode it (Onig: Regex search error")


def test_settings_of_the_folder_that_are_not_applied_are_named(tmp_path, spoken, command):
    folder = tmp_path / "beams"
    shutil.copytree(spoken, folder)
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    _, _, err = command(folder, "--prompt", "four", "--max_new_tokens", 5)
    assert err == "zerojax: note: generation_config.json sets num_beams=4, which is not applied\n" + WAIT
