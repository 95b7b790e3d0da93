"""Checks programs against plain optax and the table of bytes. This module tests zerojax.trainer.program."""

import contextlib
import functools
import io

import compile_only
import golden_models
import jax
import numpy as np
import pytest
import runs
import safetensors.numpy

from zerojax import display, precision
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.interop import folder
from zerojax.models.llama import model as llama
from zerojax.trainer import program
from zerojax.trainer import state as state_lib
from zerojax.zero import state_bytes

SUM_ORDER = 1e-5  # relative: the same float32 sums in another order, over 30 steps
COUNTERS = 3 * 4 + 2 * 4  # further bytes than weights and moments: the step, two counts of optax, a random key

pytestmark = pytest.mark.usefixtures("cache_dir")


def build(**changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320)


POLICIES = [("bf16", "fp32", stage) for stage in (0, 1, 2, 3)] + [("fp32", "fp32", 3)]
POLICIES += [pytest.param("fp32", "fp32", stage, marks=runs.LONG) for stage in (0, 1, 2)]
POLICIES += [("fp16", "bf16", 2), ("bf16_sr", "fp32", 1), ("bf16_sr", "bf16", 0), ("bf16_sr", "bf16", 3)]


@pytest.mark.parametrize("name, moments, stage", POLICIES)
def test_bytes_a_parameter_are_those_of_the_formula_on_every_device(name, moments, stage):
    built = build(precision=name, zero__stage=stage, zero__min_size=0, optimizer__moments=moments)
    state = state_lib.first(built)
    found = [state_bytes.measured_bytes(state, device) for device in jax.devices()]
    expected = state_bytes.bytes_per_parameter(precision.PRECISIONS[name], stage, 8, moments=moments)
    scale = sum(leaf.nbytes for leaf in jax.tree.leaves(state.loss_scale))
    assert found == [sum(expected.values()) * llama.count_params(built.model) + COUNTERS + scale] * 8
    counted = state_bytes.bytes_per_device(built.partition)
    assert sum(counted.values()) - counted["gradients"] == found[0]


def test_a_run_at_stage_0_over_a_model_axis_holds_the_bytes_of_its_column_of_stage_0():
    built = build(precision="bf16", zero__stage=0, mesh__model=2)
    here, there = (state_bytes.bytes_per_device(partition) for partition in (built.partition, built.baseline))
    assert here == there != state_bytes.bytes_per_device(build(precision="bf16", zero__stage=0).partition)
    assert "model=2" in display.as_text(program.memory_table(built))


def test_nothing_is_allocated_to_build(monkeypatch):
    before = len(jax.live_arrays())
    built = build(precision="bf16", zero__stage=1)
    assert len(jax.live_arrays()) == before
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(built.partition.abstract_state))


LLAMA = golden_models.FOLDER / "llama"
ODD = {
    "one token, one device": {"devices": 1, "global_batch_size": 1, "seq_len": 1},
    "seven devices": {"devices": 7, "global_batch_size": 7, "zero__stage": 2},
    "seven devices, padded, odd vocabulary, three passes": {
        "devices": 7,
        "global_batch_size": 21,
        "grad_accum": 3,
        "model__vocab_size": 321,
        "seq_len": 5,
        "precision": "bf16",
        "zero__indivisible": "pad",
    },
    "odd vocabulary, three passes": {
        "model__vocab_size": 321,
        "global_batch_size": 24,
        "grad_accum": 3,
        "precision": "bf16",
        "zero__stage": 1,
    },
    "tensor parallel": {
        "mesh__data": 4,
        "mesh__model": 2,
        "global_batch_size": 4,
        "zero__overrides": (("mlp/down", ("model",)), ("norm", ())),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    runs.cases(ODD, long=ODD),  # tests/zero trains them, and tests/interop exports padded weights
)
def test_odd_shapes_train_evaluate_sample_and_export(tmp_path, name):
    settings = {"steps": 2, "optimizer__warmup_steps": 0, "sample__length": 2, "export__format": "huggingface"}
    runs.run(tmp_path, **settings, **runs.EVALUATED, **ODD[name])
    found = [*runs.losses(tmp_path).values(), runs.evaluations(tmp_path)[0][1]]
    np.testing.assert_allclose(found, np.log(320), atol=0.5)  # random tokens teach nothing
    assert (tmp_path / "export" / "model.safetensors").exists()


SERVED = {"sample__length": 3, "export__format": "huggingface", **runs.EVALUATED}


@pytest.fixture(scope="module")
def from_folder(tmp_path_factory):
    """Returns f(model) -> the folder of a run of three steps from a folder of weights, resumed after two, and what it printed last."""

    @functools.cache
    def run(model):
        folder = tmp_path_factory.mktemp(f"model_{model}")
        settings = {"init_from": str(LLAMA), "model__num_layers": 0, "zero__stage": 3, "mesh__model": model}
        if model == 1:
            runs.run(folder, **settings, steps=2)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runs.run(folder, **settings, steps=3, **SERVED)
        return folder, out.getvalue()

    return run


@runs.LONG
def test_a_model_axis_imports_evaluates_samples_and_exports_as_none_does(from_folder):
    found = []
    for model in (1, 2):
        own, out = from_folder(model)
        sample = out.partition("a sample, from")[2].splitlines()[1]
        weights = safetensors.numpy.load_file(own / "export" / "model.safetensors")
        found.append((runs.numbers(own), runs.evaluations(own), weights, sample))
    *plain, weights, text = found[0]
    *sharded, own_weights, own_text = found[1]
    np.testing.assert_equal(text, own_text)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SUM_ORDER), sharded, plain)
    # Adam divides a gradient near 0 by its own size: a hundredth of a step of 0.01.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), own_weights, weights)


def test_a_batch_is_sharded_within_each_pass():
    assert build(global_batch_size=16).batch_sharding.spec == jax.P(mesh_lib.EXAMPLES)
    assert build(global_batch_size=16, grad_accum=2).batch_sharding.spec == jax.P(None, mesh_lib.EXAMPLES)


@runs.LONG
def test_a_run_from_a_folder_resumes_and_exports_with_the_folders_files(from_folder):
    own, out = from_folder(1)
    assert "starts at step 2 of 3" in out
    assert list(runs.losses(own)) == [1, 2, 3]
    exported = folder.open_folder(own / "export")
    source = folder.open_folder(LLAMA)
    assert (exported.raw, exported.generation) == (source.raw, source.generation)
    assert exported.model == source.model and exported.dtype == np.float32


def test_a_program_for_gpus_counts_its_operations_and_describes_its_export():
    built = program.build(runs.config(precision="bf16"), tokenizer_vocab=320, devices=compile_only.gpus())
    assert built.model.attention == "cudnn"
    here = program.build(runs.config(precision="bf16"), tokenizer_vocab=320)
    assert built.flops_per_token == here.flops_per_token > 0
    table = built.family.huggingface
    assert table.write(built.model) == table.write(here.model)


def test_delayed_scales_have_no_place_in_the_stages_of_a_pipeline():
    config = runs.config(mesh__pipe=2, mesh__data=1, grad_accum=2, precision="fp8", fp8__recipe="delayed")
    with pytest.raises(UserError, match=r"fp8\.recipe: is 'delayed' and keeps magnitudes in the state"):
        program.build(config, devices=jax.devices()[:2])


def test_a_refused_offload_of_long_texts_is_said_to_be_theirs():
    with pytest.raises(
        UserError, match=r"config\.model\.offload: .*long_texts=True sets this offload; omit that, and set --"
    ):
        build(model__long_texts=True, model__remat="none")
    with pytest.raises(UserError, match=r"config\.model\.offload: (?!.*long_texts)"):
        build(model__offload="layer_0", model__remat="none")
