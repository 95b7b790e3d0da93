"""Checks programs against plain optax and the table of bytes. This module tests zerojax.trainer.program."""

import compile_only
import golden_models
import jax
import numpy as np
import optax
import pytest
import runs

from zerojax import precision
from zerojax.checkpoint import logical as logical_lib
from zerojax.interop import folder
from zerojax.models.llama import model as llama
from zerojax.ops import losses
from zerojax.optim import registry, schedules
from zerojax.trainer import program
from zerojax.trainer import state as state_lib
from zerojax.zero import memory

SUM_ORDER = 1e-5  # relative: the same float32 sums in another order, over 30 steps
FEW_BITS = 1e-2  # relative, over 12 steps in which the loss halves: eight bits of weights or of moments
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
    found = [memory.measured_bytes(state, device) for device in jax.devices()]
    expected = memory.bytes_per_parameter(precision.PRECISIONS[name], stage, 8, moments=moments)
    scale = sum(leaf.nbytes for leaf in jax.tree.leaves(state.loss_scale))
    assert found == [sum(expected.values()) * llama.count_params(built.model) + COUNTERS + scale] * 8
    counted = memory.bytes_per_device(built.partition)
    assert sum(counted.values()) - counted["gradients"] == found[0]


def test_nothing_is_allocated_to_build(monkeypatch):
    before = len(jax.live_arrays())
    built = build(precision="bf16", zero__stage=1)
    assert len(jax.live_arrays()) == before
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(built.partition.abstract_state))


@pytest.fixture(scope="module")
def plain_losses(cache_dir):
    """Returns 30 losses of the same model, batches and optimizer in plain optax on one device."""
    built = build(steps=30)
    settings = built.config.optimizer
    model = llama.Llama(built.model)
    schedule = schedules.make(settings.schedule, settings.learning_rate, 2, 30, settings.final_fraction)
    tx = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(schedule, settings.b1, settings.b2, settings.eps, weight_decay=0.1, mask=registry.decays),
    )
    params = jax.device_put(logical_lib.to_logical(state_lib.first(built)).params, jax.devices()[0])
    opt_state = tx.init(params)

    def loss_fn(params, tokens):
        return losses.cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    @jax.jit
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    found = []
    for tokens in batches(30):
        params, opt_state, loss = step(params, opt_state, tokens)
        found.append(float(loss))
    return found


def batches(steps: int):
    """Returns token batches that can be learnt: each token is followed by its double."""
    first = np.random.default_rng(0).integers(1, 320, size=(steps, 8, 1))
    return (first * 2 ** np.arange(9) % 320).astype(np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zero__stage": 1}, marks=runs.LONG),
        {"zero__stage": 3, "mesh__replica": 2, "mesh__data": 4},
    ],
    ids=["stage1", "stage3 2x4"],
)
def test_thirty_losses_are_those_of_plain_optax_on_one_device(plain_losses, changes):
    built = build(steps=30, **changes)
    state, found = state_lib.first(built), []
    for tokens in batches(30):
        state, numbers = built.train_step(state, {"tokens": jax.device_put(tokens, built.batch_sharding)})
        found.append(float(numbers["loss"]))
    np.testing.assert_allclose(found, plain_losses, rtol=SUM_ORDER)
    assert found[-1] < found[0] - 1


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16_sr", "zero__stage": 3},
        pytest.param({"precision": "bf16_sr", "optimizer__moments": "bf16", "zero__stage": 1}, marks=runs.LONG),
        {"precision": "bf16", "optimizer__moments": "int8", "zero__stage": 2},
        pytest.param({"precision": "fp16", "zero__stage": 3}, marks=runs.LONG),  # as in test_fp16_runs
    ],
    ids=str,
)
def test_every_policy_learns_as_float32_does(plain_losses, changes):
    built = build(steps=30, **changes)
    state, found = state_lib.first(built), []
    for tokens in batches(30):
        state, numbers = built.train_step(state, {"tokens": jax.device_put(tokens, built.batch_sharding)})
        found.append(float(numbers["loss"]))
    np.testing.assert_allclose(found[:12], plain_losses[:12], rtol=FEW_BITS)
    assert np.mean(found[-5:]) < np.mean(plain_losses[-5:]) + 0.2  # from 5.8; float16 may skip a step
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == built.partition.shardings


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
        "zero__overrides": (("mlp/(gate|up)", (None, "model")), ("mlp/down", ("model",)), ("norm", ())),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    runs.cases(ODD, long=("seven devices", "one token, one device", "odd vocabulary, three passes", "tensor parallel")),
)
def test_odd_shapes_train_evaluate_sample_and_export(tmp_path, name):
    settings = {"steps": 2, "optimizer__warmup_steps": 0, "sample__length": 2, "export__format": "huggingface"}
    runs.run(tmp_path, **settings, **runs.EVALUATED, **ODD[name])
    found = [*runs.losses(tmp_path).values(), runs.evaluations(tmp_path)[0][1]]
    np.testing.assert_allclose(found, np.log(320), atol=0.5)  # random tokens teach nothing
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_a_model_axis_gives_the_losses_of_none(tmp_path):
    """And it samples and exports."""
    plain = runs.run(tmp_path / "plain", **runs.EVALUATED)
    settings = {"global_batch_size": 8, "sample__length": 2, "export__format": "huggingface", **runs.EVALUATED}
    sharded = runs.run(tmp_path / "split", **{**ODD["tensor parallel"], **settings})
    np.testing.assert_allclose(runs.numbers(sharded), runs.numbers(plain), rtol=SUM_ORDER)
    np.testing.assert_allclose(runs.evaluations(sharded), runs.evaluations(plain), rtol=SUM_ORDER)
    assert (sharded / "export" / "model.safetensors").exists()


def test_a_batch_is_sharded_within_each_pass():
    assert build(global_batch_size=16).batch_sharding.spec == jax.P(("replica", "data"))
    assert build(global_batch_size=16, grad_accum=2).batch_sharding.spec == jax.P(None, ("replica", "data"))


LLAMA = golden_models.FOLDER / "llama"


def test_a_run_from_a_folder_resumes_and_exports_with_the_folders_files(tmp_path):
    settings = {"init_from": str(LLAMA), "model__num_layers": 0, "zero__stage": 3}
    runs.run(tmp_path, **settings, steps=2)
    runs.run(tmp_path, **settings, steps=3, export__format="huggingface")
    assert list(runs.losses(tmp_path)) == [1, 2, 3]
    exported = folder.open_folder(tmp_path / "export")
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
