"""Trains adapters, resumes, and refuses what does not fit. This module tests zerojax.trainer.weights."""

import functools
import pathlib
import shutil

import golden_models
import jax
import numpy as np
import pytest
import runs
import safetensors.numpy

import zerojax
from zerojax import roles, tree
from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.ops import quantized
from zerojax.trainer import program, results, resume
from zerojax.trainer import state as state_lib
from zerojax.trainer.checks import host
from zerojax.zero import state_bytes
from zerojax.zero.host import budget, memory_kind, selection, storage

FOLDER = golden_models.FOLDER / "llama"
ADAPTED = {
    "init_from": str(FOLDER),
    "model__num_layers": 0,
    "data__tokenizer": "auto",
    "zero__min_size": 64,
    "lora__r": 4,
    "lora__dropout": 0.1,
    "lora__target_modules": "all-linear",
}


def build(devices=None, **changes):
    return program.build(runs.config(**{**ADAPTED, **changes}), devices=devices)


def first(devices=None, **changes):
    """Returns a program and its first state."""
    built = build(devices, **changes)
    return built, state_lib.first(built)


def own(state):
    return dict(tree.flatten(state.params))


@pytest.fixture(scope="module")
def begun(cache_dir, tmp_path_factory):
    """Returns the settings and the folder of a run of two steps from a folder of its own; copy it."""
    base = shutil.copytree(FOLDER, tmp_path_factory.mktemp("base") / "llama")
    settings = {**ADAPTED, "init_from": str(base), "lora__target_modules": "q_proj"}
    return settings, runs.run(tmp_path_factory.mktemp("begun"), **settings, steps=2)


def test_a_resumed_run_is_the_uninterrupted_one_and_its_checkpoints_hold_adapters_alone(begun, tmp_path):
    settings, folder = begun
    shutil.copytree(folder, tmp_path / "parts")
    for name in ("whole", "parts"):
        runs.run(tmp_path / name, **settings, steps=4)
    whole, parts = (runs.losses(tmp_path / name) for name in ("whole", "parts"))
    assert len(whole) == 4 and whole == parts
    built = build(**settings, steps=4)
    with checkpointer.Checkpointer(tmp_path / "whole" / "checkpoints") as saver:
        assert resume.state(built, saver, 4, saver.meta(4)).step == 4
    names = (tmp_path / "whole" / "checkpoints" / "4" / "state" / "_METADATA").read_text()
    assert "lora_a" in names and "kernel" not in names


def test_delayed_scales_of_fp8_have_histories_of_frozen_matmuls_too():
    built, state = first(precision="fp8", fp8__recipe="delayed")
    modules = {path.removesuffix("/kernel") for path in own(state) if path.endswith("kernel") and "layer_" in path}
    assert modules and set(state.fp8) == modules
    assert jax.tree.structure(state) == jax.tree.structure(built.partition.abstract_state)


def test_another_base_is_refused_in_one_line(begun, tmp_path):
    settings, folder = begun
    shutil.copytree(folder, tmp_path / "run")
    file = pathlib.Path(settings["init_from"]) / "model.safetensors"
    before = file.read_bytes()
    weights = bytearray(before)
    weights[-4:] = b"\0\0\0\0"
    weights[-2000:-1000] = bytes(1000)
    file.write_bytes(weights)
    try:
        with pytest.raises(
            UserError, match=r"was saved with another model in config.init_from \(fingerprint .*\); restore that folder"
        ):
            runs.run(tmp_path / "run", **settings, steps=3)
    finally:
        file.write_bytes(before)


@runs.LONG
@pytest.mark.parametrize("quantize", runs.cases(["none", "nf4"], long=("none",)))
def test_frozen_weights_without_a_folder_are_drawn_and_the_same_at_every_stage(quantize):
    settings = {
        "init_from": "",
        "data__tokenizer": "bytes",
        "model__num_layers": 1,
        "lora__quantize": quantize,
        "precision": "bf16",
    }
    (one, first_), (_, other) = first(**settings, zero__stage=3), first(**settings, zero__stage=0)
    jax.tree.map(np.testing.assert_array_equal, first_.params, other.params)
    dtypes = {str(leaf.dtype) for path, leaf in own(first_).items() if "lora_" in path}
    assert dtypes == {"float32"}
    frozen = {str(leaf.dtype) for path, leaf in own(first_).items() if "lora_" not in path}
    assert frozen == ({"bfloat16"} if quantize == "none" else {"bfloat16", "uint8"})
    trained = jax.tree.leaves(one.partition.trainable_part(first_.params))
    moments = [leaf for leaf in jax.tree.leaves(first_.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(trained)


@pytest.fixture(scope="module")
def losses_on_the_device(cache_dir):
    return functools.cache(
        lambda quantize: losses(*first(jax.devices()[:2], **FEW, model__remat="full", lora__quantize=quantize))
    )


CHUNKS = {"offload__chunk_bytes": 1 << 14, "offload__in_flight": 2}
FEW = {"lora__target_modules": "q_proj,down_proj"}


def losses(built, state):
    rows = np.arange(8 * 33).reshape(8, 33) % 300
    batch = {"tokens": jax.device_put(rows.astype(np.int32), built.batch_sharding)}
    found = []
    for _ in range(3):
        state, metrics = built.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return [*found, float(built.forward.loss(state.params, batch))]


@runs.LONG
@pytest.mark.parametrize(
    ("optimizer", "params", "quantize"),
    [
        ("host", "host", "nf4"),
        pytest.param("nvme", "nvme", "none", marks=runs.LONG),
        pytest.param("none", "host", "none", marks=runs.LONG),
        pytest.param("host", "nvme", "nf4", marks=runs.LONG),
        pytest.param("host", "nvme", "fp8_block", marks=runs.LONG),
    ],
)
def test_adapters_train_with_offload_as_on_the_device_and_pin_what_was_counted(
    losses_on_the_device, tmp_path, optimizer, params, quantize
):
    """With dropout, which blocks draw as on the device."""
    where = {"offload__optimizer": optimizer, "offload__params": params, "lora__quantize": quantize}
    where |= (CHUNKS if optimizer != "none" else {}) | (
        {"offload__nvme_path": str(tmp_path)} if params == "nvme" else {}
    )
    built, state = first(jax.devices()[:2], **FEW, model__remat="full", **where)
    partition, leaves = built.partition, dict(tree.flatten(state))
    adapters = [tree.shard_bytes(leaf) for path, leaf in selection.host_leaves(partition).items() if "lora_" in path]
    assert bool(adapters) == (optimizer != "none") and len(partition.on_host) > len(adapters)
    pinned, in_files = 0, set()
    for path, leaf in leaves.items():
        if storage.is_on_disk(leaf):
            in_files.add(path)
        elif memory_kind.is_on_host(leaf):
            pinned += sum(shard.data.nbytes for shard in leaf.addressable_shards)
            assert path in partition.on_host
    assert in_files == storage.on_disk(partition).keys()
    assert pinned == 2 * state_bytes.bytes_elsewhere(partition).get(roles.HOST, 0)
    written = budget.NEW_PARAMS[params] * max(adapters, default=0) + 2 * (
        1 << 14
    )  # and two chunks, of each of two devices
    assert pinned <= budget.pool_bytes(partition) <= pinned + 2 * written
    assert not pinned or pinned <= host.most_pinned_bytes(built.config)
    assert losses(built, state) == pytest.approx(losses_on_the_device(quantize), rel=1e-5)


def test_quantized_weights_on_a_disk_are_exported_as_those_on_the_device(cache_dir, tmp_path):
    how = {"lora__quantize": "nf4", "lora__target_modules": "q_proj", "export__format": "huggingface"}

    def exported(name, **where):
        built, state = first(jax.devices()[:2], **how, **where)
        results.export(built, state, tmp_path / name, None)
        return safetensors.numpy.load_file(tmp_path / name / "model.safetensors")

    there = exported("disk", offload__params="nvme", offload__nvme_path=str(tmp_path / "store"), model__remat="full")
    jax.tree.map(np.testing.assert_array_equal, there, exported("device"))


def test_frozen_weights_that_stay_on_the_device_are_not_counted_before_a_device_is_used():
    config = runs.config(**ADAPTED, offload__optimizer="host", **CHUNKS)
    found = state_bytes.bytes_elsewhere(program.build(config).partition)[roles.HOST]
    assert 8 * found <= host.most_pinned_bytes(config) < 8 * 1.2 * found + 3 * (1 << 14)


def test_a_folder_of_adapters_is_a_start(cache_dir):
    built, state = first(lora__r=0, lora__target_modules="", lora__init_from=str(FOLDER / "lora"), lora__dropout=0.0)
    assert built.weights.adapted.chosen.lora.alpha == 32
    loaded = zerojax.load_huggingface(FOLDER, stage=0, adapter=FOLDER / "lora")
    jax.tree.map(np.testing.assert_array_equal, state.params, loaded.params)


def test_targets_that_mean_the_modules_of_a_folder_by_other_names_are_no_contradiction():
    changes = {"lora__r": 0, "lora__dropout": 0.0, "lora__init_from": str(FOLDER / "lora")}
    chosen = build(lora__target_modules=r".*\.(q|v)_proj", **changes).weights.adapted.chosen
    assert chosen.lora.target_modules == ("q_proj", "v_proj") and chosen.adapted
    with pytest.raises(
        UserError, match=r"^config.lora.target_modules: is 'all-linear', and config.lora.init_from=.* has"
    ):
        build(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora__target_modules": "q_prj"},
            r"config.lora.target_modules: 'q_prj' names no linear module.*did you mean 'q_proj'",
        ),
        (
            {"lora__init_from": str(FOLDER / "lora")},
            r"config.lora.r: is 4, and config.lora.init_from=.* has 8; leave it at its default",
        ),
        ({"lora__init_from": str(FOLDER)}, r"config.lora.init_from: .* holds no adapter_config.json"),
        (
            {"lora__quantize": "nf4", "precision": "fp8"},
            r"config.lora.quantize: is 'nf4', and with config.precision=fp8 kernels are dequantized",
        ),
        (
            {"lora__r": 0, "export__format": "peft", "lora__dropout": 0.0},
            r"config.export.format: 'peft' writes adapters, and the run has none",
        ),
        ({"lora__dropout": 1.0}, r"config.lora.dropout: must be at least 0 and below 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=f"^{message}"):
        build(**changes)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_magnitudes_begin_as_the_norms_of_the_kernels_as_they_are_stored(quantize):
    changes = {"lora__dora": True, "lora__target_modules": "q_proj,down_proj,embed_tokens", "lora__quantize": quantize}
    found, other = (own(first(zero__stage=stage, **changes)[1]) for stage in (0, 3))
    kernels = {path.removesuffix("/lora_magnitude"): leaf for path, leaf in found.items() if "magnitude" in path}
    assert len(kernels) == 5
    for module, magnitude in kernels.items():
        np.testing.assert_allclose(other[f"{module}/lora_magnitude"], magnitude, rtol=1e-5)
        parts = {path.rpartition("/")[2]: leaf for path, leaf in found.items() if path.startswith(f"{module}/kernel/")}
        kernel = quantized.dequantize(parts, np.float32) if parts else found.get(f"{module}/kernel")
        kernel = found[f"{module}/embedding"] if kernel is None else kernel
        columns = np.asarray(kernel, np.float32).reshape(-1, magnitude.size)
        np.testing.assert_allclose(magnitude, np.linalg.norm(columns, axis=0), rtol=1e-5)


def test_an_adapter_of_a_tied_embedding_cannot_be_exported_merged():
    changes = {"init_from": str(golden_models.FOLDER / "qwen2"), "lora__target_modules": "embed_tokens"}
    build(**changes, export__format="peft")
    for export in ({"export__format": "huggingface"}, {"export__deltas_every": 1}):
        with pytest.raises(
            UserError, match=r"^config.lora.target_modules: model.embed_tokens has an adapter, and is the"
        ):
            build(**changes, **export)


@pytest.mark.parametrize("saved", ["", "lm_head"])
def test_the_trained_weights_and_all_are_counted_as_peft_does(saved):
    built = build(lora__target_modules="q_proj,v_proj", lora__modules_to_save=saved)
    with safetensors.safe_open(FOLDER / "model.safetensors", "numpy") as file:
        sizes = {name: int(np.prod(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
        shapes = [
            file.get_slice(name).get_shape() for name in sizes if "q_proj.weight" in name or "v_proj.weight" in name
        ]
    trained = sum(4 * (outs + ins) for outs, ins in shapes) + (sizes["lm_head.weight"] if saved else 0)
    every = sum(sizes.values()) + trained  # PEFT keeps the original of a module that it trains in full
    line = f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}"
    assert built.weights.count_line(built.partition) == line


def test_a_frozen_weight_counts_two_thirds_of_the_operations_of_a_trained_one():
    plain, adapted = build(lora__r=0, lora__dropout=0.0, lora__target_modules=""), build()
    assert plain.weights.adapted is None
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapted.logical_abstract_state.params))
    attention = plain.flops_per_token - 6 * _used(plain)
    assert adapted.flops_per_token == pytest.approx(4 * _used(plain) + 6 * trained + attention)


def _used(built):
    """Returns the weights that multiply a token."""
    return sum(leaf.size for path, leaf in tree.flatten(built.partition.abstract_state.params) if "embed" not in path)
