"""Checks that arrays are made once, and again where they are lost or damaged. This module tests zerojax.data.kept."""

import os
import threading
import time

import numpy as np
import pytest

from zerojax.data import kept


def made(calls, number=3):
    def make():
        calls.append(number)
        return {"a": np.arange(number), "mask": np.array([True, False])}

    return make


def test_arrays_are_made_once_for_a_key(tmp_path):
    calls = []
    for _ in range(3):
        found = kept.arrays(tmp_path / "deep" / "er", "key", made(calls))
        np.testing.assert_array_equal(found["a"], np.arange(3))
        assert found["mask"].dtype == bool
    assert len(kept.arrays(tmp_path / "deep" / "er", "other", made(calls, 5))["a"]) == 5
    assert calls == [3, 5]


@pytest.mark.parametrize("damage", [b"", b"PK\3\4 damaged", None])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    calls = []
    kept.arrays(tmp_path, "key", made(calls))
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    for _ in range(2):
        np.testing.assert_array_equal(kept.arrays(tmp_path, "key", made(calls))["a"], np.arange(3))
    assert len(calls) == 2


def test_without_a_folder_or_room_nothing_is_kept_and_nothing_fails(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for folder in (None, tmp_path / "file" / "below"):
        calls = []
        for _ in range(2):
            assert len(kept.arrays(folder, "key", made(calls))["a"]) == 3
        assert len(calls) == 2


def test_of_several_that_ask_at_once_one_makes_it_and_the_others_wait(tmp_path):
    calls, found = [], []

    def slow():
        time.sleep(0.1)
        return made(calls)()

    threads = [
        threading.Thread(target=lambda: found.append(kept.arrays(tmp_path, "key", slow)["a"].sum())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and found == [3] * 4


def test_what_was_not_read_for_longest_is_removed_first(tmp_path, monkeypatch):
    for age, key in ((300, "old"), (200, "read"), (100, "new")):
        kept.arrays(tmp_path, key, made([]))
        os.utime(tmp_path / f"{key}.npz", (time.time() - age,) * 2)
    kept.arrays(tmp_path, "read", made([]))
    size = (tmp_path / "new.npz").stat().st_size
    monkeypatch.setattr(kept, "MOST_BYTES", 3 * size)
    kept.arrays(tmp_path, "newest", made([]))
    assert {path.stem for path in tmp_path.glob("*.npz")} == {"read", "new", "newest"}


def test_a_key_tells_apart_all_that_it_is_made_of(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"ab")
    other.write_bytes(b"c")
    keys = [
        kept.key("ab", "c"),
        kept.key("a", "bc"),
        kept.key(b"ab", "c"),
        kept.key("ab"),
        kept.key({"a": 1}),
        kept.key({"a": 2}),
        kept.hash_of_files([str(one), str(other)]),
        kept.hash_of_files([str(other), str(one)]),
    ]
    assert len(set(keys)) == len(keys)
    assert kept.key({"a": 1, "b": 2}) == kept.key({"b": 2, "a": 1})
