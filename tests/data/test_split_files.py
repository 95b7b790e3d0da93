"""Checks that a file under another's name is told. This module tests zerojax.data.split_files."""

import os

import pytest

from zerojax.data import split_files
from zerojax.errors import UserError

NAMES = ("d-train.array_record-00000-of-00001", "d-test.array_record-00000-of-00001")


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of two files of one size, with fingerprints."""
    for number, name in enumerate(NAMES):
        (tmp_path / name).write_bytes(bytes([number]) * (3 * split_files.ENDS))
    split_files.record(tmp_path)
    return tmp_path


def check(folder):
    split_files.check(folder, [folder / name for name in NAMES])


def test_the_files_that_were_prepared_pass_and_so_do_files_of_which_nothing_is_known(folder):
    check(folder)
    (folder / "more.array_record").write_bytes(b"x")
    split_files.check(folder, [folder / "more.array_record"])
    (folder / split_files.FILE).unlink()
    (folder / NAMES[0]).write_bytes(b"x")
    check(folder)


def test_swapped_files_are_told_by_the_names_they_had(folder):
    first, second = (folder / name for name in NAMES)
    os.rename(first, folder / "x")
    os.rename(second, first)
    os.rename(folder / "x", second)
    with pytest.raises(
        UserError, match=rf"{NAMES[0]}' holds what '{NAMES[1]}' held, and not what .* files were swapped"
    ):
        check(folder)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"x" + data[1:]])
def test_another_size_start_or_end_is_told(folder, change):
    path = folder / NAMES[1]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{NAMES[1]}' holds something else"):
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_damaged_fingerprints_are_told(folder, text):
    (folder / split_files.FILE).write_bytes(text.encode("latin1"))
    with pytest.raises(UserError, match=r"^data_dir: .*fingerprints.json' is damaged: .* run again$"):
        check(folder)


def test_fingerprints_that_are_a_broken_link_are_not_taken_for_none(folder):
    (folder / split_files.FILE).unlink()
    check(folder)  # an older version wrote none
    (folder / split_files.FILE).symlink_to("gone")
    with pytest.raises(UserError, match=r"fingerprints.json' is damaged"):
        check(folder)
