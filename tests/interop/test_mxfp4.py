"""Checks that packed experts are read as the floats they stand for. This module tests zerojax.interop.mxfp4."""

import json

import golden_models
import jax
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from zerojax.errors import UserError
from zerojax.interop import folder as folder_lib
from zerojax.interop import mxfp4

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed(folder, shape_of_blocks=lambda shape: shape):
    """Writes gpt-oss's folder with packed experts, and returns the tensors that they stand for."""
    random, source = np.random.default_rng(0), golden_models.FOLDER / "gptoss"
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    floats = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32), np.uint8)
        scales = random.integers(115, 124, codes.shape[:3], np.uint8)
        blocks = codes[..., ::2] | codes[..., 1::2] << 4
        tensors |= {f"{name}_blocks": blocks.reshape(shape_of_blocks(blocks.shape)), f"{name}_scales": scales}
        values = np.asarray(VALUES, np.float32)[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        floats[name] = np.ascontiguousarray(values.reshape(experts, outputs, inputs).swapaxes(1, 2))
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return floats


@pytest.mark.parametrize("shape", [lambda shape: shape, lambda shape: (*shape[:2], -1)], ids=["4 dims", "3 dims"])
def test_packed_experts_are_read_as_their_floats_and_are_written_as_floats(tmp_path, shape):
    floats = packed(tmp_path / "in", shape)
    loaded = zerojax.load_huggingface(tmp_path / "in", stage=3, min_size=64, dtype="fp32")
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out", dtype=np.float32)
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == floats.keys()
    jax.tree.map(np.testing.assert_array_equal, written, floats)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert folder_lib.open_folder(tmp_path / "out").model == loaded.config


def test_any_slice_is_that_of_the_whole(tmp_path):
    floats = packed(tmp_path / "in")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    entry = folder_lib.open_folder(tmp_path / "in").entries[name]
    leaf = floats[name].reshape(4, 64, 160, 2)
    for index in (
        np.s_[1:3, 0:64, 0:160, 0:2],
        np.s_[0:4, 30:33, 5:9, 1:2],
        np.s_[3:4, 32:64, 0:1, 0:2],
        np.s_[2:2, 0:64, 0:160, 0:2],
    ):
        np.testing.assert_array_equal(mxfp4.read(entry, leaf.shape, index, np.float32), leaf[index])


def test_what_does_not_fit_together_is_refused_in_one_line(tmp_path):
    packed(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    for changed, line in (
        ({f"{name}_scales": None}, "_scales, which has three dims of U8 beside it, is missing"),
        ({f"{name}_scales": tensors[f"{name}_scales"][:, :, :1]}, "which does not fit scales of shape"),
        ({f"{name}_blocks": tensors[f"{name}_blocks"].astype(np.int32)}, "is missing or another"),
    ):
        kept = {key: array for key, array in (tensors | changed).items() if array is not None}
        safetensors.numpy.save_file(kept, file)
        with pytest.raises(UserError, match=line):
            folder_lib.open_folder(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="weights of gpt_oss that are quantized by 'fp8' are not read"):
        folder_lib.open_folder(tmp_path / "in")
