"""Checks that files are found and read on this host and by URL. This module tests zerojax.data.locations."""

import fsspec
import pytest

from zerojax.data import locations
from zerojax.errors import UserError


@pytest.fixture
def memory():
    """A file system elsewhere, with three files."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    for name, data in (("b.jsonl", b"second\n"), ("a.jsonl", b"first\nline\n"), ("c.txt", b"")):
        system.pipe(f"/data/{name}", data)
    yield system
    system.store.clear()


def write(folder):
    for name, data in (("b.jsonl", b"second\n"), ("a.jsonl", b"first\nline\n"), ("c.txt", b"")):
        (folder / name).write_bytes(data)
    return str(folder)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_files_are_found_by_name_and_read_in_parts(tmp_path, memory, where):
    folder = write(tmp_path) if where == "here" else "memory://data"
    found = locations.matching(f"{folder}/*.jsonl", "train_file")
    assert [(path.rpartition("/")[2], size) for path, size in found] == [("a.jsonl", 11), ("b.jsonl", 7)]
    assert locations.matching(f"{folder}/b.jsonl", "train_file") == found[1:]
    first = found[0].path
    assert locations.read(first, 2, 8) == b"rst\nli" and locations.read(first, 8, 99) == b"ne\n"
    with locations.opened(first) as file:
        assert file.read() == b"first\nline\n"
    assert [locations.place(first, at).rpartition(":")[2] for at in (0, 5, 6)] == ["1", "1", "2"]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_fingerprint_and_a_version_tell_a_changed_file(tmp_path, memory, where):
    folder = write(tmp_path) if where == "here" else "memory://data"
    path = f"{folder}/a.jsonl"

    def told():
        (found,) = locations.matching(path, "train_file")
        return locations.fingerprint(found), locations.version(path)

    before = told()
    assert told() == before
    if where == "here":
        (tmp_path / "a.jsonl").write_bytes(b"First\nline\n")
    else:
        memory.pipe("/data/a.jsonl", b"First\nline\n")
    after = told()
    assert after[0] != before[0] and after[1] != before[1]


@pytest.mark.parametrize(
    "pattern, line",
    [
        ("memory://data/x-*.jsonl", r"^train_file: there is no file 'memory://data/x-\*.jsonl'; name a file"),
        ("memory://data/x.jsonl", r"^train_file: there is no file"),
        ("nothing.jsonl", r"^train_file: there is no file 'nothing.jsonl'"),
        ("bogus://data/x.jsonl", r"^train_file: fsspec knows no bogus:// \(.*https.*\); correct the URL"),
    ],
)
def test_a_file_that_is_missing_is_one_line(memory, pattern, line):
    with pytest.raises(UserError, match=line):
        locations.matching(pattern, "train_file")


def test_the_package_that_reads_a_url_is_named_where_it_is_missing(monkeypatch):
    def missing(url):
        raise ImportError("Please install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"^train_file: s3:// needs a package that is not installed \(.*s3fs.*\)"):
        locations.matching("s3://bucket/a.jsonl", "train_file")


def test_a_read_elsewhere_is_tried_again_and_its_last_error_told(monkeypatch, memory):
    monkeypatch.setattr(locations, "_PAUSE", 0.0)
    failures = [OSError("reset"), OSError("reset")]
    plain = type(memory).cat_file

    def flaky(self, path, **how):
        if failures:
            raise failures.pop()
        return plain(self, path, **how)

    monkeypatch.setattr(type(memory), "cat_file", flaky)
    assert locations.read("memory://data/a.jsonl", 0, 5) == b"first"
    failures.extend([OSError("reset")] * 3)
    with pytest.raises(UserError, match=r"^memory://data/a.jsonl: cannot be read \(OSError: reset\)"):
        locations.read("memory://data/a.jsonl", 0, 5)


def test_a_file_that_vanishes_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    for ask in (locations.size, locations.opened, locations.version, lambda path: locations.read(path, 0, 1)):
        with pytest.raises(UserError, match=rf"^{path}: cannot be read \(No such file or directory\)"):
            ask(str(path))
