"""Checks how directories of checkpoints are read. This module tests zerojax.checkpoint.files."""

import json
import math
import os

import pytest

from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError


def write_step(directory, step, loss=None):
    """Writes the files of a complete step: three items and their sizes."""
    unfinished = directory / f"{step}.{step_files.UNFINISHED}-1"
    for item in step_files.ITEMS:
        (unfinished / item).mkdir(parents=True)
        (unfinished / item / "metadata").write_text(json.dumps({"eval_loss": loss}))
    step_files.write_sizes(directory, step)
    unfinished.rename(directory / str(step))
    return directory / str(step)


def test_only_whole_numbers_without_a_suffix_are_complete_steps(tmp_path):
    for step in (30, 4, 100):
        write_step(tmp_path, step)
    (tmp_path / f"200.{step_files.UNFINISHED}-1").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "8").write_text("a file")
    assert step_files.steps(tmp_path) == [4, 30, 100]


def test_an_intact_step_is_found(tmp_path):
    assert write_step(tmp_path, 5) == step_files.intact(tmp_path, 5)


@pytest.mark.parametrize(
    ("damage", "flaw"),
    [
        (lambda path: os.truncate(path / "state" / "metadata", 3), r"state/metadata has 3 bytes of \d+"),
        (lambda path: (path / "data" / "metadata").unlink(), "data/metadata is missing"),
        (lambda path: (path / step_files.SIZES).write_text("{"), r"sizes\.json is cut"),
        (lambda path: (path / step_files.SIZES).unlink(), r"sizes\.json: No such file"),
    ],
)
def test_damage_is_reported_with_the_newest_intact_step_before_it(tmp_path, damage, flaw):
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    damage(tmp_path / "3")
    with pytest.raises(UserError, match=rf"3: checkpoint is damaged \({flaw}.*\); step 2 is intact"):
        step_files.intact(tmp_path, 3)
    damage(tmp_path / "2")
    damage(tmp_path / "1")
    with pytest.raises(UserError, match="no earlier step is intact"):
        step_files.intact(tmp_path, 3)


def test_a_missing_or_foreign_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="no checkpoint of step 3; it holds no checkpoint at all"):
        step_files.intact(tmp_path, 3)
    write_step(tmp_path, 2)
    with pytest.raises(UserError, match="no checkpoint of step 3; choose one of steps 2"):
        step_files.intact(tmp_path, 3)
    (tmp_path / "3").mkdir()
    with pytest.raises(UserError, match="3: not a checkpoint of zerojax"):
        step_files.intact(tmp_path, 3)


def test_losses_skip_steps_that_hold_more_than_a_save_writes(tmp_path):
    write_step(tmp_path, 1, loss=0.5)
    write_step(tmp_path, 2)
    (write_step(tmp_path, 3, loss=0.1) / "notes.txt").write_text("mine")
    (write_step(tmp_path, 4, loss=0.2) / "meta" / "metadata").write_text("{")
    assert step_files.losses(tmp_path) == {1: 0.5, 2: math.inf, 4: math.inf}


def test_a_directory_of_other_things_is_refused_and_a_new_one_made(tmp_path):
    assert step_files.open_directory(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "a" / "b" / ".hidden").write_text("")
    step_files.open_directory(tmp_path / "a" / "b")
    for name in ("w", "x", "y", "z"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"holds a, w, x and 2 more and no checkpoint"):
        step_files.open_directory(tmp_path)
    with pytest.raises(UserError, match="x: cannot hold checkpoints"):
        step_files.open_directory(tmp_path / "x")
    with pytest.raises(UserError, match="need a mounted file system"):
        step_files.open_directory("gs://bucket/run")
