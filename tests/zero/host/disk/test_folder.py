"""Checks what is said of a folder. This module tests zerojax.zero.host.disk.folder."""

import os

import pytest

from zerojax.errors import UserError
from zerojax.zero.host.disk import folder

MOUNTS = (
    b"""21 1 253:0 / / rw - ext4 /dev/root rw
30 21 0:25 / /fast rw,relatime shared:1 - xfs /dev/nvme0n1 rw
31 30 0:26 / /fast/mem\\040ory rw - tmpfs tmpfs rw
32 21 0:27 / /home rw - nfs4 server:/home rw
33 32 0:28 / /home rw - fuse.sshfs host:/home rw
"""
    + b"34 21 0:29 / /\xc3\xbc\\040b rw - btrfs /dev/a rw\n35 21 0:30 / /\xff rw - xfs /dev/\xff rw\n"
)  # names are bytes


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    (tmp_path / "mountinfo").write_bytes(MOUNTS)
    monkeypatch.setattr(folder, "_MOUNTS", str(tmp_path / "mountinfo"))


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("/fast/run", "xfs", ""),
        ("/faster/run", "ext4", ""),
        ("/fast/mem ory", "tmpfs", "keeps its files in the host's memory"),
        (os.fsdecode(b"/\xc3\xbc b/run"), "btrfs", ""),
        (os.fsdecode(b"/\xff/run"), "xfs", ""),
        ("/home/me", "fuse.sshfs", "over the network"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount_and_unfit_ones_are_told(mounts, path, kind, words):
    assert folder.file_system(path) == kind
    warning = folder.warning(path)
    assert warning.startswith(f"{path}: is on {kind}") and words in warning if words else warning == ""


def test_a_system_without_a_list_of_mounts_gives_no_warning(monkeypatch):
    monkeypatch.setattr(folder, "_MOUNTS", "/nowhere/mountinfo")
    assert folder.warning("/home") == ""


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/below: cannot be made \(Not a directory\); choose"):
        folder.make(tmp_path / "file" / "below")
    assert folder.make(tmp_path / "a" / "b").is_dir()


def test_space_is_checked_before_the_folder_is_made(tmp_path):
    folder.check_space(tmp_path / "later" / "on", 1)
    with pytest.raises(UserError, match=r"later: 1024.00 TiB are needed there, and its disk has .* free; free some"):
        folder.check_space(tmp_path / "later", 1 << 50)
    assert not (tmp_path / "later").exists()


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    former = os.umask(0o022)
    try:
        assert folder.make(tmp_path / "scratch").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(former)
