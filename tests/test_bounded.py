"""Checks what is opened and what JSON is read. This module tests zerojax.bounded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from zerojax import bounded
from zerojax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbftext")
    (tmp_path / "link").symlink_to("file")
    assert bounded.read_text(tmp_path / "link") == "text"
    with bounded.open_file(tmp_path / "file", 7) as file:
        assert file.read(5) == b"\xef\xbb\xbfte"


def test_what_is_no_file_is_an_error_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match="it is a pipe, a socket or a device, and no file"):
            bounded.open_file(path)
    for path in (tmp_path, tmp_path / "loop", tmp_path / "nothing"):
        with pytest.raises(OSError, match=str(path)):
            bounded.read_bytes(path)


def test_a_file_larger_than_allowed_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert bounded.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        bounded.read_bytes(path, 4)
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        bounded.read_bytes("/proc/self/status", 10)  # which says that it has none


@pytest.mark.parametrize("form", [str, str.encode])
def test_json_is_what_python_reads_within_the_bounds(form, monkeypatch):
    text = '{"a": [1, 2.5, null, true, "\\u4e2d"], "b": {}}'
    assert bounded.parse_json(form(text)) == json.loads(text)
    assert bounded.parse_json(form("[1e999]")) == [float("inf")]
    for odd in ("[1e999]", "[NaN]", "[-Infinity]"):
        with pytest.raises(ValueError, match="is no finite number"):
            bounded.parse_json(form(odd), is_strict=True)
    for twice in ('[{"a": 1, "b": 2, "a": 1}]', '{"x": [{"a": 1, "a": 1}]}', '{"b": 1, "a": 2, "a": 3, "b": 4}'):
        with pytest.raises(ValueError, match="the key 'a' comes twice"):
            bounded.parse_json(form(twice))
    assert bounded.parse_json(form(f"[-{10**306}]"), is_strict=True) == [-(10**306)]
    with pytest.raises(ValueError, match="has 309 digits, and a float has at most 308"):
        bounded.parse_json(form(f"[{10**308}]"), is_strict=True)
    assert bounded.parse_json(form("[1e9, 3]"), is_strict=True) == [1e9, 3]
    with pytest.raises(ValueError, match="nested too deeply"):
        bounded.parse_json(form("[" * 100_000))
    with pytest.raises(ValueError, match="digits"):
        bounded.parse_json(form("9" * 5000))
    monkeypatch.setattr(bounded, "MOST_VALUES", 3)
    assert bounded.parse_json(form("[1,2]")) == [1, 2]
    with pytest.raises(ValueError, match="it holds more than 3 values"):
        bounded.parse_json(form("[{},[]]"))


def test_bytes_that_are_no_utf8_and_halves_of_letters_are_told_with_their_place():
    assert bounded.decoded("a\u00e9\U0001f600".encode()) == "a\u00e9\U0001f600"
    with pytest.raises(UserError, match=r"^is not UTF-8 at its byte 2 \(near b'ab\\xff'\); save"):
        bounded.decoded(b"ab\xff")
    assert bounded.half_letter({"a": ["\U0001f600", 1, None], "\u00e9": 1.5}) == ""
    assert bounded.half_letter({"a": ["b\ud800c"]}) == r"""'{"a": ["b\ud800'"""
    assert bounded.half_letter({"a\udfff\udfff": 1}) == r"""'{"a\udfff'"""


def test_odd_files_end_in_one_line():
    """A share of `tests/support/odd_files.py`, which makes and judges some 1,200 of them."""
    command = [sys.executable, "tests/support/odd_files.py", "--quick", "--share", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and ", 0 faults, " in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.long
def test_all_odd_files_end_in_one_line():
    done = subprocess.run(
        [sys.executable, "tests/support/odd_files.py"], cwd=ROOT, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
