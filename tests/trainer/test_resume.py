"""Checks that a resumed run gives the numbers of one that never stopped. This module tests zerojax.trainer.resume."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import runs

import zerojax
from zerojax.checkpoint import checksums
from zerojax.checkpoint import logical as logical_lib
from zerojax.data import fingerprints
from zerojax.trainer import program, resume
from zerojax.trainer import state as state_lib
from zerojax.trainer.card import document
from zerojax.trainer.checks import memory_guard

SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order by another stage or number of devices
HALF_PRECISION = 2e-2  # relative: eight bits of bfloat16, over a few steps
KILLS_ON_DISK = int(os.environ.get("ZEROJAX_TEST_KILLS_ON_DISK", 1))
KILLED = {**runs.EVALUATED, "steps": 8, "checkpoint__every": 1, "evaluate__every": 3}
SLOW = """
import time
from zerojax.data import feed as streams_lib
following = streams_lib.Feed.next
streams_lib.Feed.next = lambda streams: ([time.sleep(0.02) for _ in range(10)], following(streams))[1]
"""
SLOW_TO_COMPILE = """
import time
from zerojax.trainer.checks import memory_guard
compile_step = memory_guard.compile_step
memory_guard.compile_step = lambda built: (print("compiling", flush=True), time.sleep(30), compile_step(built))[-1]
"""
HANG_WHILE_BUILDING = """
import time
from zerojax.trainer import program
program.build = lambda *_, **__: (print("building", flush=True), [time.sleep(0.1) for _ in range(600)])
"""
STOP_AT_2 = """
import os, signal
from zerojax.data import feed as streams_lib
following, taken = streams_lib.Feed.next, []
def next_batch(streams):
    taken.append(streams)
    if len(taken) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return following(streams)
streams_lib.Feed.next = next_batch
"""
# Two signals from another process would count as one during a long call into C.
INTERRUPT_TWICE_AT_2 = STOP_AT_2.replace(
    "os.kill(os.getpid(), signal.SIGTERM)", "[os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
)

STOP_INSIDE = """
import os, signal
from zerojax.{module} import {name} as owner
original = owner.{function}
def stopped(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return original(*args, **kwargs)
owner.{function} = stopped
"""
STOP_IN_EVALUATION = STOP_INSIDE.format(module="trainer", name="program", function="held_out_loss")
STOP_IN_EXPORT = STOP_INSIDE.format(module="interop", name="huggingface", function="export")

pytestmark = pytest.mark.usefixtures("cache_dir")


def recorded(folder: pathlib.Path) -> tuple[list, list, dict]:
    """Returns all numbers that do not depend on the clock, and the hash of the losses."""
    return runs.numbers(folder), runs.evaluations(folder), document.read(folder)["losses"]


def said(err: str) -> str:
    """Returns the stderr of a run without Orbax's warning about a slow disk."""
    return "".join(line for line in err.splitlines(True) if "Waiting for previous save to complete took" not in line)


@pytest.fixture(scope="module")
def uninterrupted(cache_dir, stdlib_dir, tmp_path_factory):
    """Returns the settings of a run over text, and the numbers it gives in one piece."""
    settings = {**KILLED, "data__name": "python_stdlib", "data__dir": str(stdlib_dir)}
    folder = runs.run(tmp_path_factory.mktemp("uninterrupted"), **settings)
    assert [line[0] for line in runs.numbers(folder)] == list(range(1, KILLED["steps"] + 1))
    return settings, recorded(folder)


def wait_for(condition, command: runs.Command) -> None:
    """Waits until `condition()` or the end of the command, whichever is first."""
    deadline = time.monotonic() + runs.LIMIT
    while not condition() and os.path.exists(f"/proc/{command.pid}/task") and time.monotonic() < deadline:
        time.sleep(0.001)
    assert time.monotonic() < deadline, command.out + command.err


def is_saving(folder: pathlib.Path) -> bool:
    return any("orbax-checkpoint-tmp" in path.name for path in (folder / "checkpoints").glob("*"))


def lines(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@runs.LONG  # tests/mission kills a run beside a save, and tests/checkpoint kills saves
@pytest.mark.parametrize("kills", [2, 5])
def test_a_run_killed_at_any_moment_gives_the_numbers_of_one_that_was_not(commands, uninterrupted, tmp_path, kills):
    """A kill falls into a save, the next anywhere from the start of the process on, and a third into a save again."""
    settings, numbers = uninterrupted
    arguments, draw = runs.flags(**settings), random.Random(0)
    killed_while_saving = 0
    for number in range(kills):
        command = commands.start(*arguments, f"--workdir={tmp_path}")
        if number % 2 == 0 and lines(tmp_path) < KILLED["steps"] - 2:
            wait_for(lambda more=lines(tmp_path) + 1: lines(tmp_path) >= more and is_saving(tmp_path), command)
            time.sleep(draw.random() * 0.02 if number else 0)  # the first kill is sure to fall into its save
        else:
            time.sleep(draw.random() * 1.5)
        killed_while_saving += is_saving(tmp_path)
        command.kill(signal.SIGKILL)
        command.wait()
    assert killed_while_saving, "no kill fell into a save"
    command = commands(*arguments, f"--workdir={tmp_path}")
    assert command.status == 0 and said(command.err) == "", command.err
    assert recorded(tmp_path) == numbers
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if "tmp" in path.name) == []


@pytest.mark.slow
@runs.LONG  # tests/mission kills a run with both offloads
def test_a_run_with_its_state_on_a_disk_loses_nothing_by_kills(commands, stdlib_dir, tmp_path):
    disk, (whole, killed) = tmp_path / "disk", (tmp_path / name for name in ("whole", "killed"))
    settings = KILLED | {"steps": 2 * KILLS_ON_DISK, "reduce_dtype": "fp32", "zero__stage": 3}
    settings |= {"offload__optimizer": "nvme", "offload__params": "nvme", "offload__chunk_bytes": 20_000}
    settings |= {"offload__nvme_path": str(disk), "data__name": "python_stdlib", "data__dir": str(stdlib_dir)}
    arguments = runs.flags(**settings)
    runs.run(whole, **settings)
    draw = random.Random(1)
    for _ in range(KILLS_ON_DISK):
        command = commands.start(*arguments, f"--workdir={killed}")
        wait_for(lambda more=lines(killed) + 1: lines(killed) >= more, command)  # a step at least, so that a run ends
        time.sleep(draw.random() * 0.2)
        command.kill(signal.SIGKILL)
        command.wait()
        assert not list(disk.iterdir()), "a killed run leaves nothing on the disk"
    command = commands(*arguments, f"--workdir={killed}")
    assert command.status == 0, command.err
    assert recorded(killed) == recorded(whole)


SIGNALS = [((signal.SIGINT, 2),), ((signal.SIGTERM, 2), (signal.SIGINT, 5))]


@pytest.mark.slow
@pytest.mark.parametrize("signals", runs.cases(SIGNALS, long=SIGNALS[1:]), ids=["one", "two"])
def test_a_run_stopped_by_signals_saves_ends_with_status_0_and_resumes(commands, uninterrupted, tmp_path, signals):
    """A run that SIGTERM stops resumes in the test of an evaluation that is given up, too."""
    settings, numbers = uninterrupted
    settings = {**settings, "checkpoint__every": 0}
    arguments = [*runs.flags(**settings), f"--workdir={tmp_path}"]
    for number, first in signals:
        command = commands.start(*arguments, before=SLOW)
        wait_for(lambda first=first: lines(tmp_path) >= first, command)
        command.kill(number)
        if number == signal.SIGTERM:
            command.kill(number)  # a second SIGTERM has no further effect
        assert command.wait().status == 0 and said(command.err) == "", command.err
        step = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
        assert f"stopped by a signal at step {step}, saved; the same command resumes" in command.out
        assert (document.read(tmp_path)["status"], document.read(tmp_path)["line"]) == ("stopped", "by a signal")
        assert first <= step < KILLED["steps"] and [line[0] for line in runs.numbers(tmp_path)] == list(
            range(1, step + 1)
        )
    assert recorded(runs.run(tmp_path, **settings)) == numbers


@runs.LONG
def test_a_second_interrupt_ends_a_run_at_once_in_one_line(commands, tmp_path):
    """It leaves what a kill leaves."""
    command = commands(*runs.flags(), f"--workdir={tmp_path}", before=INTERRUPT_TWICE_AT_2)
    assert command.status == 130
    assert command.err == "zerojax: interrupted; the same command resumes from the last checkpoint\n"


@pytest.mark.parametrize(
    "code, word, number, status",
    [
        (SLOW_TO_COMPILE, "compiling", signal.SIGINT, 130),
        (HANG_WHILE_BUILDING, "building", signal.SIGTERM, 143),
    ],
)
def test_a_signal_before_the_first_step_ends_in_one_line(commands, tmp_path, code, word, number, status):
    command = commands.start(*runs.flags(), f"--workdir={tmp_path}", before=code)
    wait_for(lambda: word in command.out, command)
    command.kill(number)
    assert command.wait().status == status and command.err.count("\n") == 1, command.err
    assert command.err.endswith("; the same command resumes from the last checkpoint\n")
    assert not (tmp_path / "run.lock").exists()


@runs.LONG
@pytest.mark.parametrize(
    "code, steps",
    [(STOP_AT_2, 4), pytest.param(STOP_IN_EVALUATION, 2, marks=runs.LONG)],
    ids=["before it", "inside the last"],
)
def test_a_stop_gives_up_an_evaluation_with_which_the_resumed_run_begins(commands, tmp_path, capsys, code, steps):
    settings = {"steps": steps, "evaluate__every": 2, **runs.EVALUATED}
    command = commands(*runs.flags(**settings), f"--workdir={tmp_path}", before=code)
    assert command.status == 0 and "stopped by a signal at step 2, saved" in command.out, command.err
    assert not runs.evaluations(tmp_path) and document.read(tmp_path)["status"] == "stopped"
    runs.run(tmp_path, **settings)
    assert f"starts at step 2 of {steps}" in capsys.readouterr().out
    found = runs.evaluations(tmp_path)
    assert [at for at, _ in found] == list(range(2, steps + 1, 2))
    card = document.read(tmp_path)
    assert (card["status"], card["eval_loss"]) == ("finished", found[-1][1])


def test_a_stop_in_an_export_ends_at_once_and_the_same_command_writes_it(commands, tmp_path):
    settings = {"steps": 4, "export__format": "huggingface"}
    command = commands(*runs.flags(**settings), f"--workdir={tmp_path}", before=STOP_IN_EXPORT)
    assert (command.status, command.err.count("\n")) == (143, 1), command.err
    assert command.err.endswith("the training is done and saved; the same command writes the results\n")
    assert not (tmp_path / "export").exists()
    runs.run(tmp_path, **settings)
    assert (tmp_path / "export" / "model.safetensors").exists()


ODD = {"model__vocab_size": 321, "global_batch_size": 56, "seq_len": 8}
PADDED = {"devices": 7, "zero__indivisible": "pad", **ODD}


@pytest.fixture(scope="module")
def padded(cache_dir, tmp_path_factory):
    """Returns the folder of 2 steps at stage 3 on seven devices, with padded weights; copy it."""
    return runs.run(tmp_path_factory.mktemp("padded"), steps=2, **PADDED)


@runs.LONG  # tests/mission resumes at any stage and offload, and tests/checkpoint moves states between stages, meshes and paddings
def test_a_checkpoint_of_any_stage_device_count_and_padding_resumes_in_any_other(padded, tmp_path):
    whole = runs.run(tmp_path / "whole", zero__stage=0, **ODD)
    moved = pathlib.Path(shutil.copytree(padded, tmp_path / "moved"))
    runs.run(moved, steps=4, zero__stage=1, devices=1, grad_accum=2, **ODD)
    runs.run(moved, steps=5, **PADDED)
    runs.run(moved, steps=6, zero__stage=2, mesh__replica=2, mesh__data=4, **ODD)
    np.testing.assert_allclose(runs.numbers(moved), runs.numbers(whole), rtol=SUM_ORDER)


@pytest.mark.slow
@runs.LONG  # tests/whole_runs/test_fp16_runs.py moves checkpoints between four others
def test_a_checkpoint_moves_between_precisions_bit_for_bit(three_steps, tmp_path):
    folder = runs.run(tmp_path / "bf16", steps=2, precision="bf16", zero__stage=2)
    leaves = []
    for name, stage in (("bf16", 2), ("fp32", 3), ("bf16", 1)):
        _, state = runs.restored(folder, 2, precision=name, zero__stage=stage)
        leaves.append(jax.tree.map(np.asarray, jax.tree.leaves(logical_lib.to_logical(state))))
    for found in leaves[1:]:
        jax.tree.map(np.testing.assert_array_equal, found, leaves[0])
    runs.run(folder, steps=3, precision="fp32")
    np.testing.assert_allclose(
        list(runs.losses(folder).values()), list(runs.losses(three_steps).values()), rtol=HALF_PRECISION
    )


@pytest.fixture(scope="module")
def over_text(cache_dir, tmp_path_factory):
    """Returns the folder of 2 steps over text, which it holds too; copy it."""
    return runs.run(tmp_path_factory.mktemp("text"), steps=2, data__name="python_stdlib")


def test_steps_can_be_extended_and_a_dataset_deleted_before_is_prepared_again(over_text, uninterrupted, tmp_path):
    folder = pathlib.Path(shutil.copytree(over_text, tmp_path / "run"))
    shutil.rmtree(folder / "datasets")
    runs.run(folder, steps=6, data__name="python_stdlib")
    assert runs.numbers(folder) == uninterrupted[1][0][:6]


def test_padded_shapes_are_those_of_the_model():
    with runs.on_devices(7):
        changes = {"global_batch_size": 7, "zero__indivisible": "pad", "model__vocab_size": 321}
        built = program.build(runs.config(**changes), tokenizer_vocab=320)
        state = state_lib.first(built)
    shapes = resume.padded_shapes(built.partition)
    assert shapes["params/embed/embedding"] == [321, 64]
    assert state.params["embed"]["embedding"].shape == (322, 64)
    assert resume.logical_params(built, state)["embed"]["embedding"].shape == (321, 64)
    assert {path.removeprefix("opt_state/0/mu/") for path in shapes if "/mu/" in path} == {
        path.removeprefix("params/") for path in shapes if path.startswith("params/")
    }


def test_resume_names_a_padded_leaf_that_is_another_models(padded):
    changes = {name: value for name, value in PADDED.items() if name != "devices"} | {"model__vocab_size": 322}
    with (
        runs.on_devices(7),
        pytest.raises(ValueError, match=r"embedding was saved with shape \(321, 64\).*\(322, 64\)"),
    ):
        runs.restored(padded, 2, **changes)
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def three_steps(cache_dir, tmp_path_factory):
    """Returns the folder of a run with checkpoints of steps 2 and 3; copy it."""
    return runs.run(tmp_path_factory.mktemp("three"), steps=3, checkpoint__every=2)


def damage(path, text):
    """Writes other text of the same length."""
    path.write_text(text.ljust(path.stat().st_size)[: path.stat().st_size])


def scramble(path, text):
    """Writes other text of the same length as if it had been saved."""
    damage(path, text)
    folder, name = path.parent.parent, f"{path.parent.name}/{path.name}"
    record = checksums.read(folder / "sizes.json")
    checksums.write(folder / "sizes.json", record._replace(files={**record.files, **checksums.of(folder, [name])}))


UNFIT = {
    "another depth": (lambda step: None, {"model__num_layers": 2}, "its state lacks"),
    "another width": (lambda step: None, {"model__vocab_size": 336}, "with shape"),
    "another batch": (lambda step: None, {"global_batch_size": 16}, "with 8 sequences a step, and this run has 16"),
    "another length": (lambda step: None, {"seq_len": 16}, "seq_len=32 and this run has seq_len=16"),
    "data that is no JSON": (lambda step: scramble(step / "data" / "metadata", "{"), {}, "damaged"),
    "data of no rows": (lambda step: scramble(step / "data" / "metadata", "{}"), {}, "row 0 is not among the 0 saved"),
    "data that is a list": (lambda step: scramble(step / "data" / "metadata", "[]"), {}, "row 0 does not have"),
    "a row that is a number": (
        lambda step: scramble(step / "data" / "metadata", '{"0": 1}'),
        {},
        "row 0 does not have",
    ),
    "meta that is no JSON": (lambda step: scramble(step / "meta" / "metadata", "}"), {}, "damaged"),
    "meta that is a list": (lambda step: scramble(step / "meta" / "metadata", "[]"), {}, "damaged"),
    "meta without meta": (lambda step: scramble(step / "meta" / "metadata", "{}"), {}, "damaged"),
    "meta of nothing": (lambda step: scramble(step / "meta" / "metadata", '{"meta":null}'), {}, "damaged"),
    "shapes in a list": (lambda step: scramble(step / "meta" / "metadata", '{"meta":{"padded":[]}}'), {}, "damaged"),
    "a shape that is a number": (
        lambda step: scramble(step / "meta" / "metadata", '{"meta":{"padded":{"x":1}}}'),
        {},
        "damaged",
    ),
    "data that changed": (lambda step: damage(step / "data" / "metadata", "{}"), {}, "(data/metadata is altered)"),
    "arrays that changed": (
        lambda step: damage(step / "state" / "manifest.ocdbt", "x"),
        {},
        "(state/manifest.ocdbt is altered); step 2 is intact",
    ),
    "another step's folder": (
        lambda step: (step.rename(step.with_name("1")), step.with_name("2").rename(step)),
        {},
        "the folder holds step 2 under another number",
    ),
    "sizes in a list": (lambda step: (step / "sizes.json").write_text("[]"), {}, "damaged"),
    "a state without metadata of its arrays": (
        lambda step: scramble(step / "state" / "_METADATA", "?"),
        {},
        "damaged",
    ),
    "a log that is none": (
        lambda step: (step.parent.parent / "metrics.jsonl").write_text('{"step": 1}\ngarbage\n{"step": 3}\n'),
        {},
        "metrics.jsonl:2: not a line of JSON",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_compiling_and_changes_nothing(
    three_steps, tmp_path, monkeypatch, case
):
    spoil, changes, words = UNFIT[case]
    folder = pathlib.Path(shutil.copytree(three_steps, tmp_path / "run"))
    (folder / "config.json").unlink()  # else the difference of the configs is reported first
    spoil(folder / "checkpoints" / "3")
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    monkeypatch.setattr(memory_guard, "compile_step", lambda *_: pytest.fail("compiled"))
    with pytest.raises(zerojax.UserError, match=re.escape(words)):
        runs.run(folder, steps=6, **changes)
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_another_config_is_refused_by_the_checkpoint_if_that_of_the_folder_is_lost(three_steps, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(three_steps, tmp_path / "run"))
    (folder / "config.json").unlink()
    with pytest.raises(
        zerojax.UserError, match=r"checkpoints/3: was saved with config.optimizer.learning_rate=0.01, and"
    ):
        runs.run(folder, steps=6, optimizer__learning_rate=0.02)
    runs.run(folder, steps=4, checkpoint__every=2)
    assert json.loads((folder / "config.json").read_text())["steps"] == 4
    assert "config.json: is missing beside checkpoints" in capsys.readouterr().out


def test_missing_lines_of_the_metrics_are_counted(three_steps, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(three_steps, tmp_path / "run"))
    runs.run(folder, steps=4, checkpoint__every=1)
    assert "steps logged up to" not in capsys.readouterr().out
    lines = (folder / "metrics.jsonl").read_text().splitlines(True)
    (folder / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    runs.run(folder, steps=5)
    assert "metrics.jsonl: holds 3 of the 4 steps logged up to step 4; restore it" in capsys.readouterr().out
    (folder / "metrics.jsonl").write_text("")
    runs.run(folder, steps=5)
    assert "metrics.jsonl: holds 0 of the 5 steps logged up to step 5; restore it" in capsys.readouterr().out


def test_other_text_and_another_tokenizer_of_the_same_sizes_are_refused(over_text, tmp_path, monkeypatch, capsys):
    changes = {"data__name": "python_stdlib"}
    folder = pathlib.Path(shutil.copytree(over_text, tmp_path / "run"))
    find = fingerprints.of_text
    monkeypatch.setattr(fingerprints, "of_text", lambda *how: find(*how)[::-1])
    with pytest.raises(zerojax.UserError, match=r"checkpoints/2: was saved with another training text \(fingerprint"):
        runs.run(folder, steps=3, **changes)
    monkeypatch.setattr(fingerprints, "of_text", find)
    monkeypatch.setattr(fingerprints, "of_tokenizer", lambda _: "0")
    with pytest.raises(zerojax.UserError, match=r"another tokenizer .*; set config.data.tokenizer to the one"):
        runs.run(folder, steps=3, **changes)
    monkeypatch.undo()
    rewrite_meta(
        folder / "checkpoints" / "2", lambda meta: [meta.pop(name) for name in ("fingerprints", "config", "logged")]
    )
    capsys.readouterr()
    runs.run(folder, steps=3, **changes)
    assert "checkpoint 2 was saved without fingerprints of its data" in capsys.readouterr().out


def rewrite_meta(step: pathlib.Path, change) -> None:
    """Changes a checkpoint's `meta` as if it had been saved so."""
    saved = json.loads((step / "meta" / "metadata").read_text())
    change(saved["meta"])
    (step / "meta" / "metadata").write_text(json.dumps(saved))
    record = checksums.read(step / "sizes.json")
    changed = checksums.of(step, ["meta/metadata"])
    checksums.write(step / "sizes.json", record._replace(files={**record.files, **changed}))


@runs.LONG
def test_a_signal_while_a_finished_run_is_restored_ends_it_before_it_samples(commands, three_steps, tmp_path, capsys):
    folder = shutil.copytree(three_steps, tmp_path / "run")
    code = """
import os, signal
from zerojax.trainer import resume
state = resume.state
resume.state = lambda *args, **how: (os.kill(os.getpid(), signal.SIGTERM), state(*args, **how))[-1]
"""
    settings = {"steps": 3, "checkpoint__every": 2, "sample__length": 8}
    command = commands(*runs.flags(**settings), f"--workdir={folder}", before=code)
    assert command.status == 143 and command.err.count("\n") == 1 and "a sample" not in command.out
    runs.run(pathlib.Path(folder), **settings)
    assert "a sample" in capsys.readouterr().out
