"""Checks the command line, its report and the page of keys. This module tests zerojax.commands.migrate."""

import functools
import json
import pathlib

import pytest
import runs

from zerojax.commands import migrate
from zerojax.trainer import config as config_lib

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "migrate.md"
PLAIN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 3, "warmup_max_lr": 3e-4}},
}  # fmt: skip


def write(folder, content, name="ds_config.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def call(run_main):
    return functools.partial(run_main, migrate)


def load(path):
    """Returns the settings of a written config."""
    names = {}
    exec(compile(path.read_text(), path, "exec"), names)
    return names["get_config"](), names["__doc__"]


def test_a_written_config_is_valid_short_and_opens_with_its_command(call, tmp_path):
    out = tmp_path / "configs" / "mine.py"
    status, text, errors = call(write(tmp_path, PLAIN), "--out", out, "--strict")
    assert (status, errors) == (0, "") and f"written: {out}" in text
    raw, doc = load(out)
    config = config_lib.from_dict(raw)
    assert (config.zero.stage, config.precision, config.steps, config.optimizer.schedule) == (
        2,
        "bf16",
        3,
        "WarmupDecayLR",
    )
    assert f"python -m zerojax.train --config {out}" in doc
    settings = [line for line in out.read_text().splitlines() if line.startswith("    c.")]
    assert 5 <= len(settings) <= 30 and all("  # " in line for line in settings)


@runs.LONG  # tests/mission trains two, and tests/optim/test_deepspeed_schedules.py has the rates
def test_a_translated_config_trains(call, tmp_path):
    call(write(tmp_path, PLAIN), "--out", tmp_path / "mine.py")
    raw, _ = load(tmp_path / "mine.py")
    small = {
        key: value
        for key, value in runs.SMALL.items()
        if key.split(".")[0] in ("model", "data", "seq_len", "sample", "evaluate", "log_every")
    }
    raw.update_from_flattened_dict(small)
    from zerojax import train

    train.train(config_lib.from_dict(raw), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert rates == pytest.approx(
        [0.0, 0.0, 3e-4], rel=1e-6
    )  # WarmupDecayLR: one step late, ln(1) = 0, ln(2) / ln(2) = 1


def test_strict_writes_nothing_and_ends_with_status_2(call, tmp_path):
    path = write(tmp_path, {**PLAIN, "comet": {"enabled": True}, "mistake": 1})
    out = tmp_path / "mine.py"
    status, text, errors = call(path, "--out", out, "--strict")
    assert status == 2 and not out.exists() and errors.count("\n") == 1 and "2 keys are not supported" in errors
    assert "comet.enabled = true: " in text and "mistake = 1: the format has no such key" in text
    assert call(path, "--out", out)[0] == 0 and out.exists()
    alone = write(tmp_path, {**PLAIN, "mistake": 1})
    assert "1 key is not supported" in call(alone, "--strict")[2]


def test_a_misspelt_section_or_key_is_named_with_the_nearest_known_one(call, tmp_path):
    content = {key: value for key, value in PLAIN.items() if key != "zero_optimization"}
    content |= {
        "zero_optimisation": {"stage": 3, "overlap_comm": None},
        "gradient_cliping": 1.0,
        "mine": {"a": 1},
        "other": 1,
    }
    for words in ((), ("--json",)):
        status, text, errors = call(write(tmp_path, content), *words)
        assert status == 0
        assert [line.partition("ds_config.json: ")[2] for line in errors.splitlines()] == [
            "the section zero_optimisation is not known, and was not read; did you mean zero_optimization?",
            "gradient_cliping is not known, and was not read; did you mean gradient_clipping?",
            "the section mine is not known, and was not read",
        ]
    assert len(json.loads(text)["keys"]) == 18  # a value of null counts as a key, and what the file lacks does not
    report = call(write(tmp_path, content))[1]
    assert "DeepSpeed config, 16 keys, and 2 absent ones that matter" in report
    whole = write(tmp_path, {**PLAIN, "gradient_clipping": 1.0})
    assert "DeepSpeed config, 14 keys\n" in call(whole)[1]


def test_what_was_repaired_in_the_file_is_told_on_stderr(call, tmp_path):
    path = write(tmp_path, "zero\\_optimization:\nstage: 3\nbf16:\nenabled: true\n", "pasted.yaml")
    status, text, errors = call(path, "--strict")
    assert status == 0 and errors.count("\n") == 1 and "pasted.yaml: its \\_ are read as _" in errors
    assert "keys without a section are read in zero_optimization, bf16" in errors
    assert "zero_optimization.stage = 3: config.zero.stage = 3" in text


def test_json_holds_the_settings_the_keys_and_the_config(call, tmp_path):
    status, text, _ = call(write(tmp_path, PLAIN), "--json")
    found = json.loads(text)
    assert status == 0 and found["settings"]["zero.stage"] == 2 and found["kind"] == "DeepSpeed config"
    assert {"key", "value", "verdict", "text"} == found["keys"][0].keys() and "def get_config" in found["config"]


@pytest.mark.parametrize(
    "content, words, message",
    {
        "missing": (None, (), "cannot be read (No such file or directory)"),
        "empty": ("", (), "holds no table of keys"),
        "no format": ("{a: [", (), "is neither JSON nor YAML"),
        "twice": ('{"train_batch_size": 8, "train_batch_size": 9}', (), "'train_batch_size' comes twice"),
        "a binary file": ("\0\ud800", (), "is not text"),
        "stage": ('{"zero_optimization": {"stage": 4}}', (), "zero_optimization.stage: must be 0, 1, 2 or 3, and is 4"),
        "two precisions": ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}}', (), "both are true"),
        "no run has it": ('{"optimizer": {"type": "Adam", "params": {"lr": -1}}}', (), "optimizer.params.lr becomes a config that cannot"),
        "NaN": ('{"gradient_clipping": NaN}', (), "gradient_clipping: must be a number, and is nan"),
        "a text": ('{"gradient_clipping": "much"}', (), "gradient_clipping: must be a number, and is 'much'"),
        "version": ("{\"steps_per_print\": 1}", ("--deepspeed", "new"), "--deepspeed: must be a version such as 0.18.2"),
        "flag": ("{}", ("--strictly",), "unrecognized arguments: --strictly"),
    }.values(),
)  # fmt: skip
def test_a_wrong_input_is_one_line_with_status_2(call, tmp_path, content, words, message):
    path = tmp_path / "ds_config.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
    status, text, errors = call(path, *words)
    assert (status, text) == (2, "") and errors.count("\n") == 1 and message in errors


def test_the_page_holds_the_tables_of_keys():
    """To update the page, put the output of `zerojax migrate --keys` in place of its last section."""
    page = PAGE.read_text()
    assert (
        page[page.index("### Keys of DeepSpeed") :].strip().splitlines() == "\n".join(migrate.key_tables()).splitlines()
    )
