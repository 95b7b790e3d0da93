"""Checks the command `verify-checkpoint`. This module tests zerojax.commands.verify_checkpoint."""

import os

import pytest
import step_folders

from zerojax.checkpoint import files as step_files
from zerojax.commands import verify_checkpoint


@pytest.fixture
def verify(run_main):
    """Returns a function that runs the command, and returns its status, lines and error."""

    def run(*arguments):
        status, out, err = run_main(verify_checkpoint, *arguments)
        return status, out.splitlines(), err

    return run


@pytest.fixture
def run_folder(tmp_path):
    """Returns a run with three steps."""
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 10):
        step_folders.write_step(tmp_path / "checkpoints", step)
    return tmp_path


def test_intact_steps_have_a_line_each_and_status_0(verify, run_folder):
    status, lines, err = verify(run_folder)
    assert (status, err) == (0, "") and [line.split(",")[0] for line in lines] == [
        f"step {step}: intact" for step in (1, 2, 10)
    ]
    assert verify(run_folder / "checkpoints") == (status, lines, err)


def test_a_damaged_step_is_named_with_its_file_and_gives_status_2(verify, run_folder):
    (run_folder / "checkpoints" / "2" / "data" / "metadata").write_text('{"eval_loss": nulx}')
    status, lines, err = verify(run_folder)
    assert (status, err) == (2, "") and lines[1] == "step 2: damaged (data/metadata is altered)"
    assert lines[0].startswith("step 1: intact") and lines[2].startswith("step 10: intact")
    assert verify(run_folder, "--step=10") == (0, lines[2:], "")
    assert verify(run_folder, "--step", 2) == (2, lines[1:2], "")


def test_a_step_without_checksums_is_told_apart(verify, run_folder):
    (run_folder / "checkpoints" / "1" / step_files.SIZES).write_text('{"data/metadata": 19}')
    status, lines, _ = verify(run_folder, "--step=1")
    assert status == 0 and "it was saved without checksums, 1 files" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: WORKDIR"),
        (["absent"], "cannot be read (No such file or directory)"),
        (["empty"], "holds no checkpoint"),
        (["file"], "cannot be read (Not a directory)"),
        (["x" * 300], "cannot be read (File name too long)"),
        ([".", "--step=3"], "no checkpoint of step 3; choose one of steps 1, 2, 10"),
        ([".", "--step=x"], "invalid int value: 'x'"),
        ([".", "--stop=3"], "unrecognized arguments: --stop=3"),
    ],
)
def test_a_wrong_input_ends_in_one_line_with_status_2(verify, run_folder, monkeypatch, arguments, words):
    (run_folder / "empty").mkdir()
    (run_folder / "file").touch()
    monkeypatch.chdir(run_folder)
    status, lines, err = verify(*arguments)
    assert (status, lines) == (2, []) and err.startswith("zerojax: ") and err.count("\n") == 1 and words in err


def test_a_file_that_cannot_be_read_is_damage(verify, run_folder):
    path = run_folder / "checkpoints" / "2" / "data" / "metadata"
    path.unlink()
    os.symlink(path, path)
    assert "step 2: damaged (data/metadata: Too many levels of symbolic links)" in verify(run_folder)[1]
