"""Replaces files completely. This module tests zerojax.files."""

import os

import pytest

from zerojax import files
from zerojax.errors import UserError


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path):
    files.replace(tmp_path / "config.json", "one\n")
    files.replace(tmp_path / "config.json", "two\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": "two\n"}


def test_the_former_text_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    files.replace(tmp_path / "plan.json", "one\n")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.replace(tmp_path / "plan.json", "two\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"plan.json": "one\n"}


def test_a_symbolic_link_is_replaced_and_never_followed(tmp_path):
    victim, own = tmp_path / "victim", tmp_path / "own.json"
    victim.write_text("dear\n")
    for name in ("own.json.new", "own.json"):
        (tmp_path / name).symlink_to(victim)
    files.check_replaceable(own, "--out")
    (tmp_path / "own.json.new").symlink_to(victim)
    files.replace(own, "one\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"victim": "dear\n", "own.json": "one\n"}
    assert not own.is_symlink()
    (tmp_path / "own.json.new").symlink_to(tmp_path / "nothing")
    files.replace(own, "two\n")
    assert own.read_text() == "two\n" and not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("mode, new", [(0o600, 0o600), (0o640, 0o640), (0o444, 0o644), (None, 0o644)])
def test_a_file_keeps_the_permissions_of_the_one_that_it_replaces(tmp_path, mode, new):
    path = tmp_path / "config.json"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    former = os.umask(0o022)
    try:
        files.replace(path, "one\n")
    finally:
        os.umask(former)
    assert path.stat().st_mode & 0o777 == new


def test_a_key_that_others_can_read_is_warned_of(tmp_path):
    path = tmp_path / "key"
    path.write_text(" word\n")
    path.chmod(0o600)
    assert files.read_key(path, "--key_file") == "word"
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.warns(UserWarning, match=rf"^--key_file {path}: others can read it; chmod 600 it$"):
            assert files.read_key(path, "--key_file") == "word"
    path.write_bytes(b"\xff")
    for unread in (path, tmp_path / "absent"):
        line = rf"^--key_file {unread}: (cannot be read|is no text) .*; name a file with the key$"
        with pytest.raises(UserError, match=line):
            files.read_key(unread, "--key_file")


def test_a_device_or_a_pipe_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name, why in (("pipe", "is a device or a pipe"), ("link", "is a device or a pipe"), ("", "is a folder")):
        for check in (files.check_file, files.check_replaceable):
            with pytest.raises(UserError, match=rf"^--out {tmp_path / name}: {why}"):
                check(tmp_path / name, "--out")
    files.check_replaceable(tmp_path / "new.json", "--out")


def test_a_disk_error_is_one_line_with_the_path_the_reason_and_the_way_out(tmp_path):
    path = tmp_path / "absent" / "plan.json"
    with pytest.raises(UserError) as caught, files.writing(path, "choose another folder"):
        files.replace(path, "one\n")
    assert str(caught.value) == f"{path}: cannot be written (No such file or directory); choose another folder"
    for number, way_out in ((13, "fix that"), (28, "make room")):
        with pytest.raises(UserError, match=f"; {way_out}, then run again to resume$"), files.writing(path):
            raise OSError(number, "x")


def test_paths_that_can_be_files_are_accepted(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    for path in (tmp_path, tmp_path / "new" / "er", tmp_path / "link", "relative", ".", "a:b", "C:/x"):
        files.check_path(path, "--workdir")


@pytest.mark.parametrize(
    "path, why",
    [
        ("", "is empty"),
        ("gs://bucket/run", "is a URL"),
        ("file:///tmp", "is a URL"),
        ("{folder}/" + "x" * 300, "File name too long"),
        ("{folder}" + "/x" * 5000, "File name too long"),
        ("{folder}/file/below", "Not a directory"),
        ("{folder}/loop", "Too many levels of symbolic links"),
        ("{folder}/loop/below", "Too many levels of symbolic links"),
        ("{folder}/\0", "null"),
        ("{folder}/\ud800", "codec"),
    ],
    ids=range(10),
)
def test_other_paths_are_refused_in_one_line_with_the_place(tmp_path, path, why):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError) as caught:
        files.check_path(path.format(folder=tmp_path), "config.data.dir")
    assert str(caught.value).startswith("config.data.dir: ") and why in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_cannot_be_read_is_one_line_with_the_reason_and_a_damaged_file_its_own():
    def read(error, *damaged):
        with files.reading("a.json", "copy it again", *damaged):
            raise error

    with pytest.raises(UserError, match=r"^a\.json: cannot be read \(Permission denied\); copy it again$"):
        read(PermissionError(13, "Permission denied"))
    with pytest.raises(UserError, match=r"^a\.json: is not JSON \(bad \{\} here\); mend it$"):
        read(ValueError("bad {}\nhere"), "is not JSON ({}); mend it")
    with pytest.raises(ValueError, match=r"^bad$") as kept:
        read(ValueError("bad"))
    assert not isinstance(kept.value, UserError)
    with pytest.raises(UserError, match=r"^own$"):
        read(UserError("own"), "is not JSON")
