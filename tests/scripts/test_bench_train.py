"""Checks the benchmark of training. This module tests scripts/bench_train.py and scripts/bench_report.py."""

import ast
import contextlib
import importlib
import io
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import runs

from zerojax.models.llama import family as presets
from zerojax.models.llama import model as llama
from zerojax.trainer import config as config_lib

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_report  # noqa: E402
import bench_train  # noqa: E402

LIMIT = 120  # seconds; a benchmark of the small model that takes longer hangs
SMALL = {key: value for key, value in runs.SMALL.items() if value != "" and not key.startswith("data")}
WORDS = "configs/base.py " + " ".join(f"{key}={value}" for key, value in SMALL.items()) + " emulate_devices=2"
EXAMPLE = {
    "status": "ok",
    "seconds": 9.0,
    "step_s": [9.0, 5.0, 1.0, 2.0, 3.0, 0.1],
    "host_s": [1.0, 1.0, 0.5, 0.5, 0.5, 0.5],
    "loss": [3.0, 2.9, 2.8, 2.7, 2.65, 2.6],
    "first_step_s": 8.0,
    "measured_bytes": 2_000_000_000,
    "planned_bytes": 1_000_000_000,
    "devices": 2,
    "tokens_per_step": 1000,
    "flops_per_token": 4e9,
    "peak_flops": 8e12,
    "bound_s": 0.5,
    "compile_s": 4.0,
}


@pytest.fixture(scope="module")
def benched(tmp_path_factory, cache_dir):
    """Runs a small setting and an invalid one. Returns stdout and bench.json."""
    folder = tmp_path_factory.mktemp("bench") / "out"
    words = ["--steps=6", f"--workdir={folder}", f"--limit_s={LIMIT}"]
    words += ["--run", f"small: {WORDS} SOME_FLAG=7", "--run", "wrong: configs/base.py model.preset=nope"]
    environ, out = mock.patch.dict(os.environ, runs.environment(cache_dir), clear=True), io.StringIO()
    with environ, contextlib.redirect_stdout(out):
        assert bench_train.main(words) == 0
    return out.getvalue(), json.loads((folder / "bench.json").read_text())


@runs.LONG
def test_a_setting_is_run_by_the_trainer_and_its_figures_follow_from_its_steps(benched):
    _, saved = benched
    small = saved["settings"]["small"]
    [found] = small["runs"]
    assert found["status"] == "ok"
    assert len(found["step_s"]) == len(found["host_s"]) == len(found["loss"]) == 6
    assert found["seconds"] > found["first_step_s"] > found["compile_s"] > 0
    row, steps = small["summary"], found["step_s"][2:-1]
    assert row["step_s"] == statistics.median(steps)
    assert (row["shortest_s"], row["longest_s"]) == (min(steps), max(steps))
    assert row["tokens_per_s_per_device"] == pytest.approx(8 * 32 / 2 / row["step_s"])
    assert row["host_share"] > 0 and row["mfu"] is None and row["measured_bytes"] is None  # unknown on CPUs
    model = config_lib.dataclasses.replace(presets.PRESETS["test"], vocab_size=320, num_layers=1)
    assert found["flops_per_token"] == llama.flops_per_token(model, 32)


@runs.LONG
def test_a_setting_that_fails_is_a_row_with_the_trainers_own_line(benched):
    out, saved = benched
    status = saved["settings"]["wrong"]["summary"]["status"]
    assert status.startswith("failed: zerojax: config.model.preset: is 'nope'; ")
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    assert [line.split(" ")[1] for line in lines] == ["setting", "---", "small", "wrong"]


@runs.LONG
def test_the_provenance_of_the_figures_is_saved(benched):
    saved = benched[1]
    assert (
        saved["versions"].keys() >= {"jax", "jaxlib", "flax"} and saved["environment"]["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    )
    commit = (
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    )
    assert saved["commit"] == commit
    assert saved["settings"]["small"]["setting"]["environ"] == {"SOME_FLAG": "7"}
    assert "zerojax.train" in saved["settings"]["small"]["runs"][0]["command"]


@pytest.mark.parametrize("name", bench_train.SETTINGS)
def test_every_named_setting_is_valid(name):
    setting = bench_train.parse(name, bench_train.SETTINGS[name])
    raw = importlib.import_module(setting.config.removesuffix(".py").replace("/", ".")).get_config()
    raw.update_from_flattened_dict({key: literal(value) for key, value in setting.overrides.items()})
    config = config_lib.from_dict(raw)
    assert config.seq_len <= presets.PRESETS[config.model.preset].max_seq_len


def literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def test_groups_name_settings():
    assert {name for names in bench_train.GROUPS.values() for name in names} <= set(bench_train.SETTINGS)


def test_regexes_and_quoted_flags_stay_one_word():
    setting = bench_train.parse("a", r"a.py model.offload=layer_(1?\d)/up 'XLA_FLAGS=--one --two' x='a #b'")
    assert setting.overrides == {"model.offload": r"layer_(1?\d)/up", "x": "a #b"}
    assert setting.environ == {"XLA_FLAGS": "--one --two"}


def test_words_change_the_config_the_environment_and_the_number_of_processes():
    [setting] = bench_train.chosen(
        [], ['a: configs/zero3.py zero.stage=1 XLA_FLAGS="--x=1 --y" processes=2 data.name='], 1
    )
    assert (setting.overrides, setting.processes) == ({"zero.stage": "1", "data.name": ""}, 2)
    environ = bench_train.environment(setting, {"XLA_FLAGS": "--x=0", "HOME": "here"})
    assert (environ["XLA_FLAGS"], environ["HOME"]) == ("--x=0 --x=1 --y", "here")
    assert environ["JAX_ENABLE_COMPILATION_CACHE"] == "0"
    assert "JAX_ENABLE_COMPILATION_CACHE" not in bench_train.environment(setting, {"JAX_COMPILATION_CACHE_DIR": "c"})
    words = bench_train.command(setting, pathlib.Path("/out/a-0"), 8)
    assert words[2] == "zerojax.commands.launch" and "--config.zero.stage=1" in words and "--config.steps=8" in words
    assert "--config.data.name=" in words and "--config.data.name=random" not in words


@pytest.mark.parametrize(
    "names, free, line",
    [
        (["9b"], [], "--settings: '9b' is not known; known: tiny, 1b"),
        ([], ["configs/zero3.py"], '--run: must be "name: config.py key=value ..."'),
        ([], ["a: zero.stage=1"], "a: a setting begins with a config file"),
        ([], ["a:"], "a: a setting begins with a config file"),
        ([], ["a: configs/zero3.py stage"], "a: 'stage' must be key=value"),
        ([], ["a: configs/zero3.py processes=0"], "a: processes must be a number above 0, and is '0'"),
        (["1b", "plan-one"], [], "--settings, --run: two settings have the same name"),
        ([], [], "nothing to run"),
    ],
)
def test_settings_that_are_not_understood_are_refused(names, free, line):
    with pytest.raises(ValueError) as refused:
        bench_train.chosen(names, free, 1)
    assert str(refused.value).startswith(line)


def pretend(monkeypatch, program):
    monkeypatch.setattr(bench_train, "command", lambda *_: [sys.executable, "-uc", program])
    return bench_train.parse("a", "configs/zero3.py")


def test_a_run_out_of_memory_is_ended_at_its_message(tmp_path, monkeypatch):
    setting = pretend(monkeypatch, "import time; print('out of device memory: looking for'); time.sleep(60)")
    began = time.monotonic()
    assert bench_train.run(setting, tmp_path / "a-0", 4, 60)["status"] == "out of memory"
    assert time.monotonic() - began < 30


def test_a_run_is_ended_when_time_is_up_and_none_is_begun_that_cannot_end(tmp_path, monkeypatch, capsys):
    pretend(monkeypatch, "import time; time.sleep(60)")
    status = bench_train.main(["--settings", "1b", "8b", "--repeat=2", "--limit_s=1", f"--workdir={tmp_path / 'out'}"])
    assert status == 1
    out = capsys.readouterr().out
    assert (
        out.count("stopped: time is up") == 2 and out.count("not started: no time left") == 4
    )  # one each in the table


@hypothesis.given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 100))
def test_a_run_is_expected_to_take_what_it_took_or_else_the_shortest_of_others(own, other, failed):
    known = {"a": [{"status": "failed", "seconds": own}], "b": [{"status": "ok", "seconds": other}], "c": []}
    assert bench_train.likely_seconds(known, "a") == own
    assert bench_train.likely_seconds(known, "c") == other
    assert bench_train.likely_seconds({"a": [{"status": "failed", "seconds": failed}], "b": []}, "b") == 0


def test_the_first_steps_and_the_last_are_not_counted_and_rates_follow_from_the_median():
    row = bench_report.summary([EXAMPLE, {**EXAMPLE, "step_s": [9.0, 9.0, 4.0, 4.0, 4.0, 0.1]}])
    assert (row["step_s"], row["shortest_s"], row["longest_s"]) == (3.0, 1.0, 4.0)
    assert row["tokens_per_s_per_device"] == pytest.approx(1000 / 2 / 3)
    assert row["mfu"] == pytest.approx(1000 / 2 / 3 * 4e9 / 8e12)
    assert row["host_share"] == pytest.approx(0.5 / 3)
    cells = bench_report.table({"a": row}).splitlines()[-1].split(" | ")
    assert cells[8:10] == ["1.00", "2.00"] and cells[-2:] == ["3 -> 2.6", "ok |"]


def test_runs_that_failed_do_not_count_beside_one_that_ended_well():
    failed = {"status": "out of memory", "seconds": 3.0, "planned_bytes": 7, "devices": 2}
    assert bench_report.summary([failed, EXAMPLE])["status"] == "1 of 2 runs"
    assert bench_report.summary([failed]) == {"status": "out of memory", "runs": 0, "devices": 2, "planned_bytes": 7}
    for steps in ([1.0, 1.0], [1.0, 1.0, 1.0], []):
        assert bench_report.summary([{**EXAMPLE, "step_s": steps}])["status"] == "too few steps to count"


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit):
        bench_train.main(["--settings", "1b", "--workdir", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["file"]
