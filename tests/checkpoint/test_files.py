"""Checks how directories of checkpoints are read. This module tests zerojax.checkpoint.files."""

import json
import math
import os

import pytest
from step_folders import write_step

from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError


def test_only_whole_numbers_without_a_suffix_are_complete_steps(tmp_path):
    for step in (30, 4, 100):
        write_step(tmp_path, step)
    (tmp_path / f"200.{step_files.UNFINISHED}-1").mkdir()
    (tmp_path / "007").mkdir()
    (tmp_path / "8").write_text("a file")
    assert step_files.steps(tmp_path) == [4, 30, 100]


def test_a_directory_is_made_for_this_user_alone_and_one_that_exists_is_left_as_it_is(tmp_path):
    former = os.umask(0o022)
    try:
        made = step_files.open_directory(tmp_path / "run" / "checkpoints")
        (tmp_path / "shared").mkdir(mode=0o755)
        shared = step_files.open_directory(tmp_path / "shared")
    finally:
        os.umask(former)
    assert [path.stat().st_mode & 0o777 for path in (made, made.parent, shared)] == [0o700, 0o755, 0o755]


def test_an_intact_step_is_found(tmp_path):
    assert write_step(tmp_path, 5) == step_files.intact(tmp_path, 5)


@pytest.mark.parametrize(
    ("damage", "flaw"),
    [
        (lambda path: os.truncate(path / "state" / "metadata", 3), r"state/metadata has 3 bytes of \d+"),
        (lambda path: (path / "data" / "metadata").unlink(), "data/metadata is missing"),
        (lambda path: (path / step_files.SIZES).write_text("{"), r"sizes\.json is cut"),
        (
            lambda path: (path / "meta" / "metadata").write_text('{"eval_loss": 12345}'),
            "meta/metadata has 20 bytes of 19",
        ),
        (lambda path: (path / "data" / "metadata").write_text('{"eval_loss": nulx}'), "data/metadata is altered"),
        (lambda path: (path / step_files.LATE[0]).write_text('{"eval_loss": nulx}'), "_CHECKPOINT_METADATA is altered"),
        (lambda path: (path / step_files.LATE[1]).unlink(), r"commit_success\.txt is missing"),
        (lambda path: (path / "state" / "d").write_text("x"), "state/d is not a file of this step"),
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


def test_a_step_under_another_number_is_damaged(tmp_path):
    for step in (1, 2):
        write_step(tmp_path, step)
    (tmp_path / "2").rename(tmp_path / "7")
    with pytest.raises(
        UserError, match=r"7: checkpoint is damaged \(the folder holds step 2 under .*; step 1 is intact"
    ):
        step_files.intact(tmp_path, 7)


def test_a_step_that_lacks_what_every_step_has_is_not_completed(tmp_path):
    (tmp_path / f"3.{step_files.UNFINISHED}-1" / "data").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="was not written: 'state/_METADATA'"):
        step_files.read_back(tmp_path, 3)
    with pytest.raises(FileNotFoundError):
        step_files.seal(tmp_path, 3)


def test_a_kill_before_the_last_files_are_recorded_leaves_an_intact_step(tmp_path):
    path = write_step(tmp_path, 3)
    sealed = (path / step_files.SIZES).read_text()
    path.rename(tmp_path / f"3.{step_files.UNFINISHED}-1")
    step_files.read_back(tmp_path, 3)
    (tmp_path / f"3.{step_files.UNFINISHED}-1").rename(path)
    (path / f"{step_files.SIZES}.new").write_text(sealed[:10])
    assert (path / step_files.SIZES).read_text() != sealed and step_files.intact(tmp_path, 3) == path
    step_files.seal(tmp_path, 3)
    assert (path / step_files.SIZES).read_text() == sealed and step_files.intact(tmp_path, 3) == path


def test_a_step_of_older_code_is_checked_by_the_sizes_it_has(tmp_path):
    path = write_step(tmp_path, 3)
    assert step_files.has_checksums(tmp_path, 3)
    sizes = {name: (path / name).stat().st_size for name in step_files.NEEDED}
    (path / step_files.SIZES).write_text(json.dumps(sizes))
    assert step_files.intact(tmp_path, 3) == path and not step_files.has_checksums(tmp_path, 3)
    os.truncate(path / "data" / "metadata", 1)
    with pytest.raises(UserError, match=r"data/metadata has 1 bytes of \d+"):
        step_files.intact(tmp_path, 3)


@pytest.mark.parametrize("name", ["a\\b", "b\udcff"])
def test_a_path_under_which_checkpoints_would_be_lost_is_refused_before_it_is_made(tmp_path, name):
    with pytest.raises(UserError, match="choose a path without it") as caught:
        step_files.open_directory(tmp_path / name / "checkpoints")
    str(caught.value).encode()
    assert not list(tmp_path.iterdir())


def test_a_missing_or_foreign_step_is_refused(tmp_path):
    for directory in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match="no checkpoint of step 3; it holds no checkpoint at all"):
            step_files.intact(directory, 3)
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
    altered = write_step(tmp_path, 5, loss=0.5) / "meta" / "metadata"
    altered.write_text(altered.read_text().replace("0.5", "0.1"))
    assert step_files.losses(tmp_path) == {1: 0.5, 2: math.inf, 4: math.inf, 5: math.inf}


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
