"""Checks slices against the safetensors library, and damaged files. This module tests zerojax.interop.tensor_files."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from zerojax.errors import UserError
from zerojax.interop import tensor_files

TENSORS = {
    "a": np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=(7,)).astype(ml_dtypes.bfloat16),
    "c": np.random.default_rng(2).normal(size=(3, 4)).astype(np.float16),
}


@pytest.fixture
def folder(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / tensor_files.ONE_FILE)
    return tmp_path


@pytest.mark.parametrize("window", [1, 50, 2**20])
def test_slices_are_those_of_numpy_in_any_order_and_dtype(folder, monkeypatch, window):
    monkeypatch.setattr(tensor_files, "WINDOW_BYTES", window)
    entries = tensor_files.read_folder(folder)
    assert {name: entry.shape for name, entry in entries.items()} == {k: v.shape for k, v in TENSORS.items()}
    view, index, order = (3, 4, 10), (slice(1, 3), slice(0, 4), slice(2, 7)), (2, 0, 1)
    found = tensor_files.read(entries["a"], view, index, order, ml_dtypes.bfloat16)
    expected = TENSORS["a"].reshape(view)[index].transpose(order).astype(ml_dtypes.bfloat16)
    assert found.dtype == expected.dtype and found.flags.c_contiguous
    np.testing.assert_array_equal(found, expected)
    found = tensor_files.read(entries["b"], (7,), (slice(3, 6),), (0,), np.float32)
    np.testing.assert_array_equal(found, TENSORS["b"][3:6].astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_array_is_finite_without_nan_and_infinity_of_either_sign(dtype):
    largest = np.array([0.0, -0.0, float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).min)]).astype(dtype)
    assert tensor_files.is_finite(largest) and tensor_files.is_finite(largest[:0])
    for odd in (np.nan, -np.nan, np.inf, -np.inf):
        assert not tensor_files.is_finite(np.append(largest, np.array(odd, dtype)))


def test_equal_tensors_are_those_of_equal_bytes(tmp_path):
    a = TENSORS["a"]
    tensors = {"one": a, "same": a.copy(), "other": a + np.eye(12, 10, dtype=np.float32), "shape": a.T.copy()}
    safetensors.numpy.save_file(tensors, tmp_path / tensor_files.ONE_FILE)
    entries = tensor_files.read_folder(tmp_path)
    assert {name: tensor_files.is_equal(entries["one"], entries[name]) for name in tensors} == {
        "one": True,
        "same": True,
        "other": False,
        "shape": False,
    }


def test_what_is_written_is_read_by_the_library(tmp_path):
    with open(tmp_path / "x.safetensors", "wb") as file:
        tensor_files.write_header(file, {name: (array.shape, array.dtype) for name, array in TENSORS.items()})
        for array in TENSORS.values():
            file.write(array.tobytes())
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    for name, array in TENSORS.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert tensor_files.read_header(tmp_path / "x.safetensors").keys() == TENSORS.keys()


def refused(folder):
    with pytest.raises(UserError) as caught:
        tensor_files.read_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_cut_at_any_byte_is_refused(folder):
    path = folder / tensor_files.ONE_FILE
    whole = path.read_bytes()
    for length in (0, 5, 8, 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert f"{path}: is damaged or not safetensors" in refused(folder)
    path.write_bytes(whole + b"\0")
    assert "the file has" in refused(folder)


def test_a_malformed_header_is_refused(folder):
    path = folder / tensor_files.ONE_FILE
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers = {
        "not a table": [],
        "lacks a dtype": {"x": {"shape": [2], "data_offsets": [0, 8]}},
        "two offsets": {"x": good | {"data_offsets": [0]}},
        "not whole numbers": {"x": good | {"shape": [2.5]}},
        "the dtype of tensor x is ['F32']": {"x": good | {"dtype": ["F32"]}},
        "needs another number": {"x": good | {"shape": [3]}},
        "begins at byte 4": {"x": good | {"data_offsets": [4, 12]}},
    }
    for message, header in headers.items():
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        assert message in refused(folder), header
    path.write_bytes((3).to_bytes(8, "little") + b"{x}")
    assert "its header is not JSON" in refused(folder)
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    assert "its header is not JSON" in refused(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(folder):
    (folder / tensor_files.ONE_FILE).rename(folder / "one.safetensors")
    index = folder / tensor_files.INDEX

    def write(files):
        index.write_text(json.dumps({"weight_map": files}))

    write({"a": "one.safetensors", "b": "two.safetensors"})
    assert f"{index}: names two.safetensors, which is missing (1 of 2 files are)" in refused(folder)
    write({"a": "one.safetensors", "z": "one.safetensors"})
    assert "one.safetensors: lacks tensor z" in refused(folder)
    write({"a": "x" * 5000})
    assert "which is missing (1 of 1 files are)" in refused(folder)
    write({"a": "../one.safetensors"})
    assert "names a file outside of its folder" in refused(folder)
    for text in ("{}", "[" * 100_000):
        index.write_text(text)
        assert "is not an index with a weight_map" in refused(folder)
    write({"a": "one.safetensors"})
    assert tensor_files.read_folder(folder).keys() == TENSORS.keys()


def test_a_file_that_changes_after_its_header_was_read_is_named(folder):
    path, entry = folder / tensor_files.ONE_FILE, tensor_files.read_folder(folder)["a"]
    for change in (lambda: path.write_bytes(path.read_bytes()[: entry.start + 8]), path.unlink):
        change()
        with pytest.raises(
            UserError, match=r"model.safetensors: is damaged .*: its tensors cannot be read \(.*\); copy it"
        ):
            tensor_files.read(entry, (12, 10), (slice(0, 12), slice(0, 10)), (0, 1), np.float32)


def test_a_pointer_of_git_lfs_is_named(folder):
    (folder / tensor_files.ONE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "model.safetensors: is a pointer of Git LFS and holds no weights; run git lfs pull" in refused(folder)


def test_tensors_of_one_name_in_two_files_are_equal_or_refused(folder):
    (folder / tensor_files.ONE_FILE).rename(folder / "one.safetensors")
    (folder / tensor_files.INDEX).write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "d": "two.safetensors"}})
    )
    two = {"a": TENSORS["a"].copy(), "d": np.ones(3, np.float32)}
    safetensors.numpy.save_file(two, folder / "two.safetensors")
    assert tensor_files.read_folder(folder)["a"].file.name == "one.safetensors"
    two["a"][3, 4] += 1
    safetensors.numpy.save_file(two, folder / "two.safetensors")
    assert "two.safetensors: tensor a has other numbers than in one.safetensors" in refused(folder)


def test_pickles_are_refused_with_the_way_out_and_so_is_an_empty_folder(tmp_path):
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    message = refused(tmp_path)
    assert "holds pytorch_model.bin, a pickle" in message and "save it as safetensors" in message


def test_weights_are_compared_with_the_record_beside_them(folder):
    path = folder / tensor_files.ONE_FILE
    tensor_files.check([path])  # there is none
    tensor_files.write_checksums(folder)
    tensor_files.check([path, path])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{path}: is not what was written"):
        tensor_files.check([path])
    tensor_files.check([path], slice(1, None, 2))  # another process compares it
    (folder / tensor_files.CHECKSUMS).write_text("{}x")
    with pytest.raises(UserError, match=rf"^{folder / tensor_files.CHECKSUMS}: is cut or altered"):
        tensor_files.check([path])
