"""Checks that matrices in fp8 with a scale for each block are read as the floats they stand for. This module tests
zerojax.interop.fp8_blocks."""

import json

import golden_models
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import fp8_blocks

BLOCK = (16, 32)  # of matrices whose dims it mostly does not divide
FURTHER = "model.layers.2.enorm.weight"


def written(folder, block=BLOCK):
    """Writes DeepSeek-V3's folder in fp8 with a tensor of the next-token module; returns the tensors that it stands for, and its own."""
    source = golden_models.FOLDER / "deepseekv3"
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    floats = dict(tensors)
    random = np.random.default_rng(0)
    for name in [name for name in tensors if "_proj" in name]:
        codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        scales = random.uniform(0.5, 2, [-(-size // own) for size, own in zip(codes.shape, BLOCK)]).astype(np.float32)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        whole = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[: codes.shape[0], : codes.shape[1]]
        floats[name] = codes.astype(np.float32) * whole
    folder.mkdir()
    tensors[FURTHER] = np.zeros(64, np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return floats, tensors


def test_matrices_in_fp8_are_read_as_their_floats_on_any_device_and_the_next_token_module_is_told_of(tmp_path):
    floats, _ = written(tmp_path / "in")
    with pytest.warns(UserWarning, match=f"1 tensors such as {FURTHER} are of modules that predict tokens further"):
        loaded = zerojax.load_huggingface(tmp_path / "in", stage=3, min_size=64, dtype="fp32")
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out", dtype=np.float32)
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == floats.keys()
    jax.tree.map(np.testing.assert_array_equal, found, floats)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.filterwarnings("ignore:.*predict tokens further")
def test_what_does_not_fit_together_is_refused_in_one_line(tmp_path):
    _, tensors = written(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    name = "model.layers.0.self_attn.o_proj.weight"
    for changed, line in (
        ({name: tensors[name].astype(np.float32)}, "holds F32 scales of a matrix in F8_E4M3"),
        ({name: None}, "holds F32 scales of a matrix in F8_E4M3"),
        ({f"{name}_scale_inv": tensors[f"{name}_scale_inv"][:1]}, "which does not fit"),
        ({f"{name}_scale_inv": None}, "is stored as F8_E4M3, and only"),
    ):
        kept = {key: array for key, array in (tensors | changed).items() if array is not None}
        safetensors.numpy.save_file(kept, file)
        with pytest.raises(UserError, match=line):
            folder_lib.open_folder(tmp_path / "in")
    for told in (
        {},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 10**30]},
        {"weight_block_size": [128, 128], "fmt": "e5m2"},
    ):
        with pytest.raises(UserError, match="are read in e4m3 with a scale for each block"):
            fp8_blocks.block_of(told)
