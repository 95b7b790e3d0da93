"""Checks that packed experts are read as the floats they stand for. This module tests zerojax.interop.mxfp4."""

import dataclasses
import functools
import json

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.interop import adapted, mxfp4, peft
from zerojax.interop import folder as folder_lib
from zerojax.models import families
from zerojax.ops import quantized

BATCH = {"input_ids": np.random.default_rng(1).integers(3, 384, (8, 12))}
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
    golden_models.assert_written_as(floats, loaded, tmp_path / "out")
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
    tensors = safetensors.numpy.load_file(tmp_path / "in" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    for changed, line in (
        ({f"{name}_scales": None}, "_scales, which has three dims of U8 beside it, is missing"),
        ({f"{name}_scales": tensors[f"{name}_scales"][:, :, :1]}, "which does not fit scales of shape"),
        ({f"{name}_blocks": tensors[f"{name}_blocks"].astype(np.int32)}, "is missing or another"),
    ):
        golden_models.assert_refused_with(tmp_path / "in", tensors | changed, line)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="weights of gpt_oss that are quantized by 'fp8' are not read"):
        folder_lib.open_folder(tmp_path / "in")


@pytest.mark.parametrize("stage, model", [(3, 1), pytest.param(0, 2, marks=pytest.mark.long)])
def test_frozen_experts_stay_packed_and_give_the_logits_of_their_floats(tmp_path, stage, model):
    """Adapters beside them are those of stacked experts."""
    packed(tmp_path / "in")
    lora = zerojax.Lora(r=2, target_modules=("q_proj",), target_parameters=("gate_up_proj", "down_proj"))
    mesh, found = zerojax.make_mesh(model=model), []
    for quantize in ("none", "mxfp4"):
        own = dataclasses.replace(lora, quantize=quantize)
        loaded = zerojax.load_huggingface(tmp_path / "in", mesh=mesh, stage=stage, min_size=64, dtype="fp32", lora=own)
        grad = jax.jit(
            jax.value_and_grad(lambda params, of=loaded: jnp.sum(of.apply(params, BATCH) ** 2), allow_int=True)
        )
        value, grads = grad(loaded.params)
        experts = grads["layer_1"]["mlp"]["experts"]
        found.append((value, experts["gate_up_adapter"]["lora_b"], experts["down_adapter"]["lora_b"]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), *found)
    tensors = safetensors.numpy.load_file(tmp_path / "in" / "model.safetensors")
    for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        node = loaded.params["layer_1"]["mlp"]["experts"][ours]
        for name, end in zip(quantized.parts_of("mxfp4"), ("blocks", "scales")):
            stored = tensors[f"model.layers.1.mlp.experts.{theirs}_{end}"]
            np.testing.assert_array_equal(np.asarray(node[name]).reshape(-1), stored.reshape(-1))
    zerojax.export_huggingface(loaded.params, loaded, tmp_path / "out", dtype=np.float32)
    assert zerojax.load_huggingface(tmp_path / "out", stage=0).config == loaded.config


def test_float_experts_are_rounded_and_other_models_have_none():
    lora = zerojax.Lora(r=2, quantize="mxfp4")
    loaded = zerojax.load_huggingface(golden_models.FOLDER / "gptoss", stage=3, min_size=64, lora=lora)
    plain = golden_models.load("gptoss", 3).params["layer_0"]["mlp"]["experts"]["down"]
    found = quantized.dequantize(loaded.params["layer_0"]["mlp"]["experts"]["down"], np.float32)
    groups = lambda array: np.moveaxis(np.asarray(array), 1, -1).reshape(4, 64, 5, 32)  # noqa: E731
    most = np.abs(groups(plain)).max(axis=-1, keepdims=True)
    assert np.all(np.abs(groups(found) - groups(plain)) <= most / 4)
    with pytest.raises(
        UserError, match=r"lora.quantize: 'mxfp4' is the form of gpt-oss's experts, and this model has none"
    ):
        zerojax.load_huggingface(golden_models.FOLDER / "mixtral", stage=0, lora=lora)


def test_experts_that_are_trained_in_full_are_not_packed():
    family = families.PRESETS["gpt_oss_20b"]
    choose = lambda saved: peft.choose(  # noqa: E731
        zerojax.Lora(target_modules=("q_proj",), modules_to_save=saved, quantize="mxfp4"),
        family,
        family.presets["gpt_oss_20b"],
    )
    assert len(choose(()).quantized) == 2 * 24 and len(choose(("layers.0.mlp.experts",)).quantized) == 2 * 23
    with pytest.raises(
        UserError, match=r"^lora.quantize: 'mxfp4' is of frozen experts, and lora.modules_to_save trains"
    ):
        choose(("experts",))


def test_gpt_oss_120b_with_adapters_takes_less_than_half_of_an_h200():
    """114.7 billion weights of experts in 4.25 bits, and 2.2 billion others in bfloat16."""
    family = families.PRESETS["gpt_oss_120b"]
    model = family.presets["gpt_oss_120b"]
    lora = zerojax.Lora(r=16, quantize="mxfp4", target_parameters=("gate_up_proj", "down_proj"))
    chosen = peft.choose(lora, family, model)
    leaves = dict(tree.flatten(adapted.abstract(family, model, chosen, lambda path: jnp.bfloat16)))
    frozen = sum(tree.nbytes(leaf) for path, leaf in leaves.items() if "lora_" not in path) / 1e9
    assert 65 < frozen < 66 and sum("mxfp4" in path for path in leaves) == 2 * 36
