"""Checks that matrices in fp8 with a scale for each block are read as the floats they stand for, or kept beside adapters. This module tests
zerojax.interop.fp8_blocks."""

import functools
import json

import golden_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax.training import train_state

import zerojax
from zerojax import tree
from zerojax.errors import UserError
from zerojax.interop import adapted, fp8_blocks, layout, peft
from zerojax.models import families
from zerojax.ops import quantized
from zerojax.zero.blocks import tensor_parallel

BLOCK = (16, 32)  # of matrices whose dims it mostly does not divide
STORED = (128, 128)  # as files have it
WIDE = {
    "hidden_size": 192,
    "q_lora_rank": 136,
    "moe_intermediate_size": 160,
}  # of several blocks, the last ones partial
BATCH = {"input_ids": np.random.default_rng(1).integers(3, 384, (8, 12))}
FURTHER = "model.layers.2.enorm.weight"


def written(folder, block=BLOCK, name="deepseekv3", form="e4m3", **wider):
    """Writes DeepSeek-V3's folder in fp8 with a tensor of the next-token module; returns the tensors that it stands for, and its own.

    With `wider` sizes in its config, tensors of other shapes are drawn.
    """
    source, random = golden_models.FOLDER / name, np.random.default_rng(0)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | wider
    family = families.MODEL_TYPES[config["model_type"]]
    for tensor in layout.tensors(family, family.huggingface.read(config, tensors)):
        for own in tensor.members:
            if tensors[own.name].shape != own.shape:
                tensors[own.name] = random.normal(0, 0.1, own.shape).astype(np.float32)
    floats = dict(tensors)
    for name in [name for name in tensors if "_proj" in name or ".experts." in name]:
        codes = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        scales = random.uniform(0.5, 2, [-(-size // own) for size, own in zip(codes.shape, block)]).astype(np.float32)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        whole = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: codes.shape[0], : codes.shape[1]]
        floats[name] = codes.astype(np.float32) * whole
    folder.mkdir()
    tensors |= {FURTHER: np.zeros(64, np.float32)} if "num_nextn_predict_layers" in config else {}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "fmt": form, "weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return floats, tensors


def test_matrices_in_fp8_are_read_as_their_floats_on_any_device_and_the_next_token_module_is_told_of(tmp_path):
    floats, _ = written(tmp_path / "in")
    with pytest.warns(UserWarning, match=f"1 tensors such as {FURTHER} are of modules that predict tokens further"):
        loaded = zerojax.load_huggingface(tmp_path / "in", stage=3, min_size=64, dtype="fp32")
    golden_models.assert_written_as(floats, loaded, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*predict tokens further")
def test_what_does_not_fit_together_is_refused_in_one_line(tmp_path):
    _, tensors = written(tmp_path / "in")
    name = "model.layers.0.self_attn.o_proj.weight"
    for changed, line in (
        ({name: tensors[name].astype(np.float32)}, "holds F32 scales of a matrix in F8_E4M3"),
        ({name: None}, "holds F32 scales of a matrix in F8_E4M3"),
        ({f"{name}_scale_inv": tensors[f"{name}_scale_inv"][:1]}, "which does not fit"),
        ({f"{name}_scale_inv": None}, "is stored as F8_E4M3, and only"),
    ):
        golden_models.assert_refused_with(tmp_path / "in", tensors | changed, line)
    for told in (
        {},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 10**30]},
        {"weight_block_size": [128, 128], "fmt": "e5m2"},
    ):
        with pytest.raises(UserError, match="are read in e4m3 with a scale for each block"):
            fp8_blocks.block_of(told)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Returns a folder of several blocks, and its tensors."""
    folder = tmp_path_factory.mktemp("wide") / "in"
    return folder, written(folder, STORED, **WIDE)[1]


def loaded_with(folder, quantize, stage, model=1):
    lora = zerojax.Lora(r=2, alpha=4, target_modules="all-linear", quantize=quantize)
    mesh = zerojax.make_mesh(model=model)
    loaded = zerojax.load_huggingface(folder, mesh=mesh, stage=stage, min_size=64, dtype="fp32", lora=lora)
    begin = lambda path, leaf: leaf + jnp.asarray(0.02, leaf.dtype) if path.endswith("lora_b") else leaf  # noqa: E731
    return loaded, tree.map_with_path(begin, loaded.params)


def of_a_step(loaded, params, stage):
    """Returns logits, and a step's loss and gradients, which are the first momentum."""
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0, momentum=0.9))
    mesh = loaded.partition.mesh
    shapes = {path: leaf.shape for path, leaf in tree.flatten({"params": params})}
    rows, _ = tensor_parallel.overrides(loaded.family.parallel.weights, shapes, mesh)
    how = {"stage": stage, "min_size": 64, "trainable": loaded.trainable, "overrides": rows}
    state, partition = zerojax.shard_train_state(state, mesh=mesh, **how)

    def loss_fn(params, batch, _):
        return jnp.mean(loaded.apply(params, batch) ** 2)

    how = {"blocks": loaded.blocks, "reduce_dtype": jnp.float32}
    step = zerojax.make_train_step(loss_fn, partition, **how)
    logits = jax.jit(loaded.apply)(params, BATCH)
    state, metrics = step(state, jax.device_put(BATCH, partition.batch_sharding))
    grads = dict(tree.flatten(optax.tree_utils.tree_get(state.opt_state, "trace")))
    return (
        np.asarray(logits),
        metrics["loss"],
        {path: np.asarray(leaf) for path, leaf in grads.items() if hasattr(leaf, "shape")},
    )


@pytest.fixture(scope="module")
def of_floats(wide):
    return of_a_step(*loaded_with(wide[0], "none", 0), 0)


@pytest.mark.filterwarnings("ignore:.*predict tokens further")
@pytest.mark.filterwarnings("ignore:mesh. .*block_scales stay replicated, because model=2 does not divide 1")
@pytest.mark.parametrize("stage, model", [
    pytest.param(0, 1, marks=pytest.mark.long), (3, 1), pytest.param(3, 2, marks=pytest.mark.long),
])  # fmt: skip
def test_frozen_matrices_stay_in_their_blocks_and_give_what_their_floats_give(wide, of_floats, tmp_path, stage, model):
    folder, tensors = wide
    loaded, params = loaded_with(folder, "fp8_block", stage, model)
    logits, loss, grads = of_a_step(loaded, params, stage)
    np.testing.assert_allclose(logits, of_floats[0], atol=1e-6 * np.abs(of_floats[0]).max())
    np.testing.assert_allclose(loss, of_floats[1], rtol=1e-6)
    assert grads.keys() == of_floats[2].keys() and len(grads) > 30
    for path, grad in grads.items():
        np.testing.assert_allclose(grad, of_floats[2][path], atol=1e-5 * np.abs(of_floats[2][path]).max(), err_msg=path)
    names = set(tensors)
    for tensor in layout.tensors(loaded.family, loaded.config):
        node = dict(tree.flatten(params, is_leaf=quantized.is_quantized))[tensor.path]
        for number, own in enumerate(tensor.members):
            if f"{own.name}_scale_inv" in tensors:
                codes, scales = (np.asarray(node[part]) for part in quantized.parts_of("fp8_block"))
                codes, scales = (codes, scales) if own.part is None else (codes[number], scales[number])
                assert own.to_theirs(codes).tobytes() == tensors[own.name].tobytes()
                assert np.ascontiguousarray(scales.T).tobytes() == tensors[f"{own.name}_scale_inv"].tobytes()
                names -= {own.name, f"{own.name}_scale_inv"}
    assert not any("scale_inv" in name for name in names)
    zerojax.export_huggingface(params, loaded, tmp_path / "out", dtype=np.float32)
    merged = zerojax.load_huggingface(tmp_path / "out", stage=0, dtype="fp32")
    found = jax.jit(merged.apply)(merged.params, BATCH)
    np.testing.assert_allclose(found, logits, atol=1e-5 * np.abs(logits).max())


def test_floats_are_rounded_as_minimax_m2_files_are_read(tmp_path):
    """Its config has another name for e4m3."""
    written(tmp_path / "in", STORED, "minimaxm2", "float8_e4m3fn")
    load = functools.partial(zerojax.load_huggingface, stage=3, min_size=64, dtype="fp32")
    lora = zerojax.Lora(r=2, quantize="fp8_block")
    stored = load(tmp_path / "in", lora=lora).params["layer_1"]
    plain = load(tmp_path / "in")
    zerojax.export_huggingface(plain.params, plain, tmp_path / "floats", dtype=np.float32)
    rounded = load(tmp_path / "floats", lora=lora).params["layer_1"]
    for path, kernel in tree.flatten(plain.params["layer_1"]):
        node = dict(tree.flatten(stored, is_leaf=quantized.is_quantized)).get(path)
        if quantized.is_quantized(node):
            np.testing.assert_array_equal(quantized.dequantize(node, np.float32), kernel)
            again = quantized.dequantize(dict(tree.flatten(rounded, is_leaf=quantized.is_quantized))[path], np.float32)
            assert np.abs(again - kernel).max() <= np.abs(kernel).max() / 16


def test_deepseek_v3_with_adapters_takes_a_byte_a_weight_and_scales():
    """669.1 billion weights of matrices in 8.002 bits, and 2 billion others in bfloat16."""
    family = families.PRESETS["deepseek_v3"]
    model = family.presets["deepseek_v3"]
    chosen = peft.choose(zerojax.Lora(r=16, quantize="fp8_block"), family, model)
    leaves = dict(tree.flatten(adapted.abstract(family, model, chosen, lambda path: jnp.bfloat16)))
    kernel = "layer_5/attention/kv_a/kernel/"
    assert leaves[kernel + "fp8_block"].shape == (7168, 576) and leaves[kernel + "block_scales"].shape == (56, 5)
    frozen = {path: tree.nbytes(leaf) for path, leaf in leaves.items() if "lora_" not in path}
    coded = sum(size for path, size in frozen.items() if path.endswith("fp8_block"))
    scales = sum(size for path, size in frozen.items() if path.endswith("block_scales"))
    assert 4 * coded / 128**2 <= scales < 4.01 * coded / 128**2
    assert round(coded / 1e9, 1) == 669.1 and round(sum(frozen.values()) / 1e9, 1) == 673.2
