"""Checks the command line: its output, its refusals, and that a refusal loses no data. This module tests zerojax.train."""

import glob
import json
import os
import pathlib
import re
import shutil
import sys

import file_systems
import jax
import numpy as np
import pytest
import runs

from zerojax.checkpoint import checkpointer
from zerojax.trainer import program, workdir

REFUSED = {  # name -> (arguments, words of the error line)
    "unknown key": ([*runs.flags(), "--config.stepz=3"], "--config.stepz=3: unknown config key 'stepz'; did you mean 'steps'?"),
    "unknown group": ([*runs.flags(), "--config.zeroo.stage=3"], "unknown config key 'zeroo'; did you mean 'zero'?"),
    "unknown key like none": ([*runs.flags(), "--config.qqq=3"], "--config.qqq=3: unknown config key 'qqq'; zerojax train --help"),
    "unknown flag": ([*runs.flags(), "--stepz=3"], "Unknown command line flag 'stepz'; settings are given as --config.steps=50"),
    "no flag": ([*runs.flags(), "extra"], "'extra' is not a flag; settings are given as --config.steps=50"),
    "no config": ([], "--config: is missing; name a file, or one of those that `zerojax configs` lists"),
    "config without value": (["--config"], "Missing value for flag --config"),
    "config not there": (["--config=configs/zero9.py"], "--config configs/zero9.py: there is no such file"),
    "stage 4": (runs.flags(zero__stage=4), "config.zero.stage: must be one of 0, 1, 2, 3, and is 4"),
    "word for a number": (runs.flags(steps="abc"), "config.steps: must be a whole number, and is 'abc'"),
    "fraction of a step": (runs.flags(steps=1.5), "config.steps: must be a whole number, and is '1.5'"),
    "number for a group": (runs.flags(zero=3), "config.zero: must be a group of settings (stage, "),
    "rate that is no number": (runs.flags(optimizer__learning_rate="nan"), "config.optimizer.learning_rate: must be"),
    "no steps": (runs.flags(steps=0), "config.steps: must be above 0, and is 0"),
    "override of one part": (runs.flags(zero__overrides="('embed',)"), "config.zero.overrides: must be ((path regex"),
    "override of no regex": (runs.flags(zero__overrides="(('emb[',('data',)),)"), "'emb[' is not a regex"),
    "override of no axis": (runs.flags(zero__overrides="(('embed',('rows',)),)"), "['rows']"),
    "override of no weight": (runs.flags(zero__overrides="(('emmbed',('data',)),)"), "'emmbed' matches no weight's path"),
    "batch": (runs.flags(global_batch_size=12), "config.global_batch_size: 12 does not fit"),
    "batch and micro batch": (runs.flags(micro_batch_size=2), "or --config.global_batch_size=16"),
    "mesh": (runs.flags(mesh__data=16), "config.mesh: replica 1 x data 16 x context 1 x model 1 = 16 devices, but there are 8"),
    "no devices": (runs.flags(emulate_devices=0), "config.emulate_devices: must be above 0"),
    "preset": (runs.flags(model__preset="gpt5"), "config.model.preset: is 'gpt5'; "),
    "small vocabulary": (runs.flags(model__vocab_size=100), "smaller than the 320 ids of config.data.tokenizer"),
    "long sequence": (runs.flags(seq_len=4096), "config.seq_len: 4096 is longer than"),
    "cudnn": (runs.flags(model__attention="cudnn"), "cudnn needs an NVIDIA GPU"),
    "tokenizer": (runs.flags(data__tokenizer="nope.json"), "config.data.tokenizer: 'nope.json' is not a file"),
    "optimizer": (runs.flags(optimizer__name="adamm"), "config.optimizer.name: must be one of adam, adamw"),
    "decay without effect": (runs.flags(optimizer__name="sgd", optimizer__weight_decay=0.1), "config.optimizer.name=sgd applies none"),
    "dataset": (runs.flags(data__name="stdlibb"), "config.data.name: no dataset 'stdlibb'; nearest datasets"),
    "stage in words": (runs.flags(zero__stage="two"), "config.zero.stage: must be one of 0, 1, 2, 3, and is 'two'"),
    "preset, near": (runs.flags(model__preset="tinny"), "did you mean 'tiny'?"),
    "field of a number": ([*runs.flags(), "--config.zero.stage.x=3"], "config.zero.stage.x: unknown config key; config.zero.stage is a"),
    "model axis": (runs.flags(mesh__model=2, zero__overrides="(('', ()),)"), "config.mesh.model: is 2, and no weight is sharded"),
    "state beyond this host": (runs.flags(model__preset="llama3_405b", model__num_layers=16), "host memory: the state of config.model"),
    "long sample": (runs.flags(sample__length=600), "config.sample.length: the prompt's 5 tokens and 600 more"),
    "many gaps": (runs.flags(model__preset="t5_test", sample__length=4, sample__prompt="___" * 64), "config.sample.prompt: has 64 gaps"),
    "workdir that is a URL": ([*runs.flags(), "--workdir=gs://bucket/run"], "--workdir: 'gs://bucket/run' is a URL"),
    "workdir of 300 characters": ([*runs.flags(), "--workdir=" + "x" * 300], "cannot be used (File name too long)"),
    "data below a file": (runs.flags(data__name="python_stdlib", data__dir="/dev/null/x"), "config.data.dir: '/dev/null/x' cannot be used"),
    "config of 300 characters": (["--config=" + "x" * 300], "cannot be used (File name too long)"),
    "steps to profile": (runs.flags(profile__start=6, profile__steps=2), "config.profile: traces steps 6 to 7"),
    "one process of some": ([*runs.flags(), "--process_id=3"], "--coordinator: must be set together with --process_id"),
    "empty workdir": ([*runs.flags(), "--workdir="], "--workdir: is empty"),
}  # fmt: skip
BASE = "from configs import base\ndef get_config():\n    c = base.get_config()\n"
BROKEN_FILES = {
    "syntax": ("def get_config(:\n", "broken.py:1: invalid syntax; fix the config file"),
    "raises": ("def get_config():\n    return 1 / 0\n", "broken.py:2: ZeroDivisionError: division by zero"),
    "import": ("from configs import zero9\n", "broken.py:1: ImportError"),
    "typo": (BASE + "    c.lock()\n    c.stepz = 3\n", "broken.py:5: "),
    "nothing": ("x = 1\n", "no attribute 'get_config'"),
    "no key": ("from ml_collections import config_dict\ndef get_config():\n    return config_dict.ConfigDict()\n", "config.seed: missing"),
    "extra key": (BASE + "    c.stepz = 3\n    return c", "did you mean 'steps'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_in_one_line_and_status_2(commands, tmp_path, name):
    arguments, words = REFUSED[name]
    command = commands(f"--workdir={tmp_path}/run", *arguments)
    assert words in command.error_line
    assert not [path for path in tmp_path.iterdir() if not any(found.is_file() for found in path.rglob("*"))]


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_config_file_is_named_with_its_line(commands, tmp_path, name):
    text, words = BROKEN_FILES[name]
    (tmp_path / "broken.py").write_text(text)
    assert words in commands(f"--config={tmp_path}/broken.py", f"--workdir={tmp_path}/run").error_line


@pytest.mark.parametrize("key", ["train_split", "eval_split"])
@pytest.mark.parametrize("split", ["nope", "validation[:0]"])
def test_a_missing_or_empty_split_is_named_before_the_first_step(commands, tmp_path, stdlib_dir, key, split):
    settings = {"data__name": "python_stdlib", "data__dir": stdlib_dir, f"data__{key}": split}
    command = commands(*runs.flags(**settings), f"--workdir={tmp_path}")
    assert "known splits: " in command.error_line and "starts at step" not in command.out


def test_held_out_text_that_is_trained_on_is_refused_and_text_read_more_than_once_is_told(
    commands, tmp_path, stdlib_dir
):
    settings = {
        "data__name": "python_stdlib",
        "data__dir": stdlib_dir,
        "data__eval_split": "train[:1%]+validation",
        "steps": 1,
        "optimizer__warmup_steps": 0,
    }
    command = commands(*runs.flags(**settings), f"--workdir={tmp_path}/a")
    both = r"config.data.eval_split: \d+ examples of 'train\[:1%\]\+validation' are in config.data.train_split='train'"
    assert re.search(both, command.error_line)
    settings |= {"data__eval_split": "validation", "evaluate__batches": 2**31 - 1}
    command = commands(*runs.flags(**settings), f"--workdir={tmp_path}/b")
    assert "config.evaluate.batches: 2147483647 batches of 264 tokens would read" in command.error_line
    settings |= {"data__eval_split": "validation[:3]", "evaluate__batches": 200}
    command = commands(
        *runs.flags(**settings),
        f"--workdir={tmp_path}/c",
        before="from zerojax import train; train._compile = lambda *_: 1 / 0",
    )
    assert "config.evaluate.batches=200 is more than there is: an evaluation reads the text of" in command.out


def test_settings_without_effect_are_told(commands, tmp_path):
    stop = "from zerojax import train; train._build = lambda *_: 1 / 0"
    command = commands(*runs.flags(optimizer__final_fraction=0.5), f"--workdir={tmp_path}", before=stop)
    assert "config.optimizer.final_fraction=0.5 has no effect: the schedule constant does not read it\n" in command.out


def test_a_full_host_memory_ends_the_run_in_one_line(commands, tmp_path):
    fill = "from zerojax import train\ndef fill(*_):\n    raise MemoryError('too much')\ntrain.train = fill"
    line = commands(*runs.flags(), f"--workdir={tmp_path}", before=fill).error_line
    assert line.startswith("zerojax: out of host memory (too much), and this host has ")


def test_without_an_evaluation_split_nothing_is_evaluated(finished):
    assert runs.evaluations(finished) == [] and list(runs.losses(finished)) == list(range(1, 7))


def test_a_folder_that_cannot_be_used_is_named(commands, tmp_path):
    (tmp_path / "file").write_text("mine")
    for place, reason in ((f"{tmp_path}/file", "File exists"), (f"{tmp_path}/file/run", "Not a directory")):
        assert f"cannot be used ({reason})" in commands(*runs.flags(), f"--workdir={place}").error_line
    assert (tmp_path / "file").read_text() == "mine"
    assert "/proc/run: cannot be used" in commands(*runs.flags(), "--workdir=/proc/run").error_line


@pytest.fixture(scope="module")
def finished(cache_dir, tmp_path_factory):
    """Returns the folder of a run of 6 steps with a checkpoint of each of the last two."""
    return runs.run(tmp_path_factory.mktemp("finished") / "run", checkpoint__every=1)


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_configs_folder_is_refused_and_left_as_it_is(commands, copied):
    before = contents(copied)
    command = commands(*runs.flags(seed=1), f"--workdir={copied}")
    assert "was started with config.seed=0, and this run has 1" in command.error_line
    assert "config.steps=5: the run in" in commands(*runs.flags(steps=5), f"--workdir={copied}").error_line
    assert contents(copied) == before


def test_a_truncated_checkpoint_is_named_and_the_one_before_it_restores(commands, copied):
    largest = max((copied / "checkpoints" / "6").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    command = commands(*runs.flags(steps=7), f"--workdir={copied}")
    assert "checkpoints/6: checkpoint is damaged" in command.error_line and "step 5 is intact" in command.error_line
    shutil.rmtree(copied / "checkpoints" / "6")  # as the line advises
    runs.run(copied)
    assert list(runs.losses(copied)) == list(range(1, 7))


def test_a_foreign_folder_of_checkpoints_is_refused_and_left_as_it_is(commands, tmp_path):
    for number, name in enumerate(("weights.bin", "5/model.ckpt")):
        folder = tmp_path / str(number) / "checkpoints"
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("theirs")
        command = commands(*runs.flags(), f"--workdir={folder.parent}")
        assert "choose " in command.error_line and str(folder) in command.error_line
        assert contents(folder) == {name: b"theirs"}


def test_stray_files_among_checkpoints_are_left_alone(copied):
    (copied / "checkpoints" / "notes.txt").write_text("mine")
    (copied / "checkpoints" / "6" / "notes.txt").write_text("mine")
    runs.run(copied, steps=8, checkpoint__every=1, checkpoint__keep_last=1, checkpoint__keep_best=0)
    names = sorted(path.name for path in (copied / "checkpoints").iterdir())
    assert names == ["6", "8", "notes.txt"]  # a step with a foreign file is not deleted


@pytest.mark.parametrize(
    "text, words",
    [
        (b'{"step": 2}\n{"step"\n{"step": 4}\n', "metrics.jsonl:2: not a line of JSON"),
        (b'{"step": 2}\n{}\n', 'metrics.jsonl:2: not the record of a "step"'),
        (b"[1]\n", 'metrics.jsonl:1: not the record of a "step"'),
        (b'{"step": "2"}\n', 'metrics.jsonl:1: not the record of a "step"'),
    ],
)
def test_an_invalid_line_of_the_metrics_file_is_named(commands, copied, text, words):
    (copied / "metrics.jsonl").write_bytes(text)
    assert words in commands(*runs.flags(steps=7), f"--workdir={copied}").error_line
    assert (copied / "metrics.jsonl").read_bytes() == text


def test_a_metrics_file_with_nan_does_not_stop_a_run_and_lost_files_are_named_and_written_again(copied, capsys):
    (copied / "metrics.jsonl").write_text('{"step": 6, "loss": NaN}\n')
    runs.run(copied, steps=7)
    assert runs.losses(copied)[6] is None and list(runs.losses(copied)) == [6, 7]
    assert "missing" not in capsys.readouterr().out
    for name in ("config.json", "metrics.jsonl"):
        (copied / name).unlink()
    runs.run(copied, steps=8)
    out = capsys.readouterr().out
    assert f"{copied}/config.json: is missing beside checkpoints" in out
    assert f"{copied}/metrics.jsonl: is missing beside checkpoints" in out
    runs.run(copied, steps=9)
    assert "missing" not in capsys.readouterr().out and list(runs.losses(copied)) == [8, 9]


def test_a_second_run_in_a_folder_is_refused_and_touches_nothing(commands, copied):
    unfinished = copied / "checkpoints" / "7.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with workdir.held(copied):
        before = contents(copied)
        line = commands(*runs.flags(steps=7), f"--workdir={copied}").error_line
        assert f"--workdir {copied}: process {os.getpid()} on" in line and "has held it since" in line
        assert contents(copied) == before and unfinished.exists()


def test_a_folder_of_a_killed_run_is_free(commands, copied):
    die = "import os; from zerojax import train; train.train = lambda *_: os.kill(os.getpid(), 9)"
    assert commands(*runs.flags(), f"--workdir={copied}", before=die).status == -9
    assert (copied / workdir.LOCK_FILE).exists()
    assert commands(*runs.flags(), f"--workdir={copied}").status == 0
    assert not (copied / workdir.LOCK_FILE).exists()


def test_an_invalid_saved_config_is_refused(commands, copied):
    for text in ("{", "[]"):
        (copied / "config.json").write_text(text)
        assert "config.json: is not" in commands(*runs.flags(), f"--workdir={copied}").error_line


def test_an_infinite_loss_names_its_step_and_a_checkpoint_that_restores_to_finite_weights(commands, tmp_path):
    settings = {"name": "sgd", "weight_decay": 0.0, "clip_norm": 0.0, "learning_rate": 1e30}
    changes = {"checkpoint__every": 1, **{f"optimizer__{key}": value for key, value in settings.items()}}
    command = commands(*runs.flags(**changes), f"--workdir={tmp_path}")
    # The rate is 0 in step 1 and huge in step 2: the weights of step 2 give step 3 its loss.
    assert "zerojax: step 3: loss is nan; the last good checkpoint is of step 1" in command.error_line
    assert runs.losses(tmp_path)[3] is None
    built = program.build(runs.config(**changes), tokenizer_vocab=320)
    saver = checkpointer.Checkpointer(tmp_path / "checkpoints", keep_last=2, keep_best=0)
    state, _ = saver.restore(1, built.logical_abstract_state)
    saver.close()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(state)))


def test_a_state_that_is_not_finite_replaces_no_checkpoint(commands, tmp_path):
    settings = {"name": "adamw", "weight_decay": 1e6, "clip_norm": 0.0, "learning_rate": 3e38}
    changes = {"checkpoint__every": 1, "checkpoint__keep_last": 1, "checkpoint__keep_best": 0}
    changes |= {f"optimizer__{key}": value for key, value in settings.items()}
    command = commands(*runs.flags(**changes), f"--workdir={tmp_path}")
    # The rate is 0 in step 1 and huge in step 2, whose loss is that of the first weights.
    assert "zerojax: step 2: params/" in command.error_line
    assert (
        "is not finite after it, so the state is not saved; the last good checkpoint is of step 1" in command.error_line
    )
    assert list(runs.losses(tmp_path)) == [1, 2] and [path.name for path in (tmp_path / "checkpoints").iterdir()] == [
        "1"
    ]


@runs.LONG  # an infinite loss of a step ends a run likewise, above
def test_an_infinite_evaluation_loss_ends_the_run_with_an_error(commands, tmp_path):
    settings = {"name": "sgd", "weight_decay": 0.0, "clip_norm": 0.0, "learning_rate": 1e30, "warmup_steps": 1}
    changes = {**runs.EVALUATED, "steps": 2, **{f"optimizer__{key}": value for key, value in settings.items()}}
    command = commands(*runs.flags(**changes), f"--workdir={tmp_path}")
    assert "step 3: eval_loss is nan; no checkpoint before it is good" in command.error_line
    assert not list((tmp_path / "checkpoints").iterdir())


@runs.LONG  # tests/whole_runs/test_processes.py closes the streams of two processes
def test_a_closed_stdout_ends_the_run_in_one_line(commands, tmp_path):
    close = "import os; ends = os.pipe(); os.dup2(ends[1], 1); os.close(ends[0]); os.close(ends[1])"
    assert "stdout is closed" in commands(*runs.flags(), f"--workdir={tmp_path}", before=close).error_line


@runs.LONG
def test_a_full_disk_under_the_printed_lines_ends_the_run_in_one_line(commands, tmp_path):
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    assert "no space left on the device" in commands(*runs.flags(), f"--workdir={tmp_path}", before=full).error_line


@runs.LONG
def test_overrides_come_through_the_command_line_and_resume(commands, tmp_path):
    arguments = [
        *runs.flags(steps=2, zero__overrides="(('embed', ()), ('head', (None, 'data')))"),
        f"--workdir={tmp_path}",
    ]
    for _ in range(2):
        command = commands(*arguments)
        assert command.status == 0 and command.err == "", command.err
    assert json.loads((tmp_path / "config.json").read_text())["zero"]["overrides"][0] == ["embed", []]
    assert "1 x override" in command.out


@pytest.mark.slow
@pytest.mark.skipif(bool(glob.glob("/dev/nvidia[0-9]*")), reason="there is an accelerator, and it would be used")
def test_a_bare_environment_trains_on_emulated_devices_from_a_dataset_on_a_read_only_disk(
    cache_dir, stdlib_dir, tmp_path
):
    keep = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "XLA_FLAGS")
    environ = {key: value for key, value in runs.environment(cache_dir).items() if key in keep or key[:3] == "JAX"}
    settings = runs.flags(data__name="python_stdlib", data__dir=stdlib_dir, steps=2)
    command = [sys.executable, "-m", "zerojax.train", *settings, f"--workdir={tmp_path}"]
    # No stdin, no HOME, a terminal that can do nothing.
    script = 'mount --bind $D $D && mount -o remount,ro,bind $D && ! touch $D/x 2>/dev/null && exec "$@" <&-'
    result = file_systems.in_a_namespace(script, command, environ | {"D": str(stdlib_dir), "TERM": "dumb"})
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert result.stdout.startswith("no accelerator found: emulating 8 CPU devices\n")
    assert f"done: {tmp_path}" in result.stdout


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_last_checkpoint_resumes(cache_dir, finished, tmp_path):
    script = (
        'mount -t tmpfs -o size=3m tmpfs $T; "$@" >/dev/null; echo "first $?"; ls $T/run/checkpoints; '
        'mount -o remount,size=64m $T; "$@" >/dev/null; echo "second $?"; cat $T/run/metrics.jsonl'
    )
    # A checkpoint takes over 1 MB, so the second or third finds the disk full; keep_last=9 deletes none.
    settings = runs.flags(steps=4, checkpoint__every=1, checkpoint__keep_last=9)
    command = [sys.executable, "-m", "zerojax.train", *settings, f"--workdir={tmp_path}/run"]
    result = file_systems.in_a_namespace(script, command, runs.environment(cache_dir) | {"T": str(tmp_path)})
    before, after = result.stdout.split("second ")
    assert before.startswith("first 2\n1\n") and after.startswith("0\n"), (result.stdout, result.stderr)
    # A checkpoint finds it full, or run.json.
    assert result.stderr.count("\n") == 1 and "no space left" in result.stderr.lower(), result.stderr
    lines = [json.loads(line) for line in after.splitlines()[1:]]
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(found) == [1, 2, 3, 4] and found.items() <= runs.losses(finished).items()
