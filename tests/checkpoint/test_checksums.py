"""Checks that changed files are found. This module tests zerojax.checkpoint.checksums."""

import json
import os
import zlib

import pytest

from zerojax.checkpoint import checksums

ALL = slice(None)
BIG = bytes(range(256)) * 12345  # several blocks, and a part of one


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of three files and their record."""
    for name, content in {"a": b"one", "b/c": BIG, "b/empty": b""}.items():
        (tmp_path / "it" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "it" / name).write_bytes(content)
    return tmp_path / "it", checksums.of(tmp_path / "it", checksums.names(tmp_path / "it"))


def test_every_file_but_a_hidden_one_is_recorded_with_its_bytes_and_crc32(folder):
    path, saved = folder
    (path / ".hidden").write_text("x")
    assert checksums.names(path) == ["a", "b/c", "b/empty"]
    assert saved == {"a": (3, zlib.crc32(b"one")), "b/c": (len(BIG), zlib.crc32(BIG)), "b/empty": (0, 0)}
    assert checksums.flaw(path, saved, part=ALL) is None


@pytest.mark.parametrize("at", [0, checksums.BLOCK - 1, checksums.BLOCK, len(BIG) - 1])
def test_one_changed_bit_is_found_by_those_who_read_the_file(folder, at):
    path, saved = folder
    content = bytearray(BIG)
    content[at] ^= 1
    (path / "b/c").write_bytes(content)
    assert checksums.flaw(path, saved, part=ALL) == "b/c is altered"
    parts = [checksums.flaw(path, saved, part=slice(process, None, 2)) for process in range(2)]
    assert parts == ["b/c is altered", None]  # the largest file is the first process's


def test_a_missing_file_another_size_and_an_unreadable_file_are_named(folder):
    path, saved = folder
    (path / "a").write_bytes(b"four")
    assert checksums.flaw(path, saved, part=slice(0)) == "a has 4 bytes of 3"
    (path / "a").unlink()
    assert checksums.flaw(path, saved, part=slice(0)) == "a is missing"
    os.symlink(path / "a", path / "a")
    assert checksums.flaw(path, saved, part=slice(0)) == "a: Too many levels of symbolic links"
    with pytest.raises(OSError, match="symbolic links") as caught:
        checksums.of(path, ["a"])
    assert caught.value.filename == str(path / "a")


def test_a_record_comes_back_and_no_changed_byte_of_it_does(folder):
    path, saved = folder
    record = checksums.Record(7, saved)
    checksums.write(path / "record", record)
    assert checksums.read(path / "record") == record and record.has_checksums
    text = (path / "record").read_bytes()
    for at in range(len(text)):
        for bit in range(8):
            (path / "record").write_bytes(text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :])
            with pytest.raises(ValueError, match=r"is (cut or )?altered|is not a table"):
                checksums.read(path / "record")


def test_a_record_of_sizes_alone_is_read_and_compares_sizes(folder):
    path, _ = folder
    (path / "record").write_text(json.dumps({"a": 3}))
    record = checksums.read(path / "record")
    (path / "a").write_bytes(b"two")
    assert not record.has_checksums and checksums.flaw(path, record.files, part=ALL) is None


@pytest.mark.parametrize("text", ["{", "", "[]", "3", '{"a": null}', "[" * 100_000, '{"crc32": 1}', "\udcff"])
def test_a_text_that_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "record").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"is (cut or )?altered|is not a table"):
        checksums.read(tmp_path / "record")
