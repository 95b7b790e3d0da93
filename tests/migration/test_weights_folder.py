"""Checks written folders with the safetensors library. This module tests zerojax.migration.weights_folder."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from zerojax.errors import UserError
from zerojax.migration import weights_folder

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16).view(),
    "c": np.arange(3),
    "d": np.float32(7).reshape(()),
}


@pytest.mark.parametrize("most", [2**30, 24])
def test_the_library_reads_every_array_in_its_dtype(tmp_path, most):
    carried = tmp_path / "config.json"
    carried.write_text("{}")
    weights_folder.write(ARRAYS, tmp_path / "out", carried={"config.json": carried}, max_shard_bytes=most)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (most == 24) and (tmp_path / "out" / "config.json").exists()
    found = {}
    for file in files:
        with safe_open(file, "np") as opened:
            found |= {
                name: (file.name, opened.get_slice(name).get_shape(), opened.get_slice(name).get_dtype())
                for name in list(opened.keys())
            }
            for name in set(opened.keys()) - {"b"}:
                np.testing.assert_array_equal(opened.get_tensor(name), ARRAYS[name])
    assert {name: tuple(shape) for name, (_, shape, _) in found.items()} == {
        name: array.shape for name, array in ARRAYS.items()
    }
    assert found["b"][2] == "BF16"
    if most == 24:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: file for name, (file, *_) in found.items()}


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(UserError, match=r"holds mine; choose a new folder"):
        weights_folder.write(ARRAYS, tmp_path)
