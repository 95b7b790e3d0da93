"""Checks programs against plain optax and the table of bytes. This module tests zerojax.trainer.program."""

import compile_only
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from zerojax import precision
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import logical as logical_lib
from zerojax.errors import UserError
from zerojax.interop import folder
from zerojax.models.llama import model as llama
from zerojax.ops import losses
from zerojax.optim import registry, schedules
from zerojax.trainer import program, resume
from zerojax.zero import memory, shard_state
from zerojax.zero.offload import create as offload_create
from zerojax.zero.offload import late_norm, layout

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
    state = program.init_state(built)
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


def test_the_first_weights_depend_on_the_seed_alone():
    def weights(devices: int = 8, **changes):
        with runs.on_devices(devices):
            built = build(**changes)
            return jax.tree.map(np.asarray, logical_lib.to_logical(program.init_state(built)).params)

    expected = weights(zero__stage=0)
    for changes in ({"zero__stage": 3}, {"zero__stage": 1, "precision": "bf16"}, {"devices": 1}):
        jax.tree.map(np.testing.assert_array_equal, weights(**changes), expected)
    assert (weights(seed=1)["embed"]["embedding"] != expected["embed"]["embedding"]).any()


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
    params = jax.device_put(logical_lib.to_logical(program.init_state(built)).params, jax.devices()[0])
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
    state, found = program.init_state(built), []
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
    state, found = program.init_state(built), []
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


@pytest.mark.parametrize(
    "changes", [{"zero__stage": 3, "zero__indivisible": "pad"}, {"precision": "bf16", "zero__stage": 1}], ids=str
)
def test_an_imported_model_starts_from_its_folders_weights(changes):
    built = build(init_from=str(LLAMA), model__num_layers=0, **changes)
    state = program.init_state(built)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == built.partition.shardings
    found = logical_lib.to_logical(state).params
    jax.tree.map(np.testing.assert_array_equal, found, golden_models.load("llama", 0).params)


def test_a_run_from_a_folder_resumes_and_exports_with_the_folders_files(tmp_path):
    settings = {"init_from": str(LLAMA), "model__num_layers": 0, "zero__stage": 3}
    runs.run(tmp_path, **settings, steps=2)
    runs.run(tmp_path, **settings, steps=3, export__format="huggingface")
    assert list(runs.losses(tmp_path)) == [1, 2, 3]
    exported = folder.open_folder(tmp_path / "export")
    source = folder.open_folder(LLAMA)
    assert (exported.raw, exported.generation) == (source.raw, source.generation)
    assert exported.model == source.model and exported.dtype == np.float32


def test_settings_of_a_model_that_cannot_take_effect_with_a_folder_are_refused():
    for changes, message in (
        ({"model__num_layers": 1}, "config.model.num_layers: is 1, and config.init_from=.*llama has its own model"),
        ({"model__num_layers": 0, "seq_len": 300}, "config.seq_len: 300 is longer than the 256 positions of .*llama"),
    ):
        with pytest.raises(UserError, match=message):
            build(init_from=str(LLAMA), **changes)


def test_a_restored_state_is_the_state_that_was_saved():
    for changes in ({"precision": "bf16", "zero__stage": 1}, {"zero__stage": 3}):
        built = build(**changes)
        state = program.init_state(built)
        copy = jax.tree.map(jnp.copy, logical_lib.to_logical(state))
        restored = program.restored_state(built, copy, offload_create.begin(built.partition))
        assert jax.tree.structure(restored.opt_state) == jax.tree.structure(state.opt_state)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
        assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == jax.tree.leaves(built.partition.shardings)


def test_a_program_for_gpus_counts_its_operations_and_describes_its_export():
    built = program.build(runs.config(precision="bf16"), tokenizer_vocab=320, devices=compile_only.gpus())
    assert built.model.attention == "cudnn"
    here = program.build(runs.config(precision="bf16"), tokenizer_vocab=320)
    assert built.flops_per_token == here.flops_per_token > 0
    table = built.family.huggingface
    assert table.write(built.model) == table.write(here.model)


def test_a_factored_optimizers_state_is_that_of_the_weights_without_padding():
    """On 6 devices, where most dims do not divide. `zero.update` is tested with the same optimizer."""
    with runs.on_devices(6):
        built = build(optimizer__name="adafactor", zero__min_size=0, zero__indivisible="pad", global_batch_size=6)
        state = program.init_state(built)
        plain = shard_state.unpad(state, built.partition)
        expected = jax.eval_shape(built.create, plain.params)
        assert jax.tree.map(np.shape, plain.opt_state) == jax.tree.map(np.shape, expected.opt_state)
        after, _ = jax.eval_shape(built.train_step, state, built.abstract_batch)
        assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, state)
        assert any(leaf.padding for leaf in built.partition.leaves.values())


OFFLOAD = {"offload__optimizer": "host", "offload__chunk_bytes": 20_000}


@pytest.mark.parametrize("name", sorted({*precision.PRECISIONS} - {"fp8", "fp16"}))
def test_a_state_made_part_by_part_has_the_bits_and_dtypes_of_one_made_at_once(name):
    away = {**OFFLOAD, "offload__params": "host", "offload__params_on_device": "embed"}
    here, there = (build(precision=name, zero__stage=3, **changes) for changes in ({}, away))
    states = [program.init_state(built) for built in (here, there)]
    assert [leaf.dtype for leaf in jax.tree.leaves(states[1])] == [
        leaf.dtype for leaf in jax.tree.leaves(there.partition.abstract_state)
    ]
    stored = [logical_lib.to_stored(logical_lib.to_logical(state)) for state in states]
    assert stored[0].keys() == stored[1].keys()
    for path, value in stored[0].items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(stored[1][path]), err_msg=path)


def test_an_offloaded_program_begins_trains_and_restores_as_one_on_the_device(tmp_path):
    """At stage 2, where the master weights are offloaded too; then its checkpoint restores at stage 3, with each kind of offload."""
    here, there = build(zero__stage=2, precision="bf16"), build(zero__stage=2, precision="bf16", **OFFLOAD)
    assert there.partition.on_host and there.partition.cuts
    states = [program.init_state(built) for built in (here, there)]
    batch = jax.tree.map(lambda a: jax.device_put(np.ones(a.shape, a.dtype), a.sharding), here.abstract_batch)
    stored = [logical_lib.to_stored(logical_lib.to_logical(state)) for state in states]
    assert stored[0].keys() == stored[1].keys()
    for path, value in stored[0].items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(stored[1][path]), err_msg=path)
    results = [built.train_step(state, batch) for built, state in zip((here, there), states)]
    assert results[0][1]["loss"] == results[1][1]["loss"]
    logical = logical_lib.to_logical(results[1][0])
    expected = {path: np.asarray(value) for path, value in logical_lib.to_stored(logical).items()}
    saver = checkpointer.Checkpointer(tmp_path, keep_last=1, keep_best=0)
    saver.save(1, logical, {}, meta={})
    for changes in (
        {"zero__stage": 3},
        {"zero__stage": 3, **OFFLOAD},
        {"zero__stage": 3, **OFFLOAD, "offload__params": "host"},
        {"zero__stage": 2, "offload__optimizer": "host", "offload__late_norm": True},
    ):
        built = build(precision="bf16", **changes)
        restored, _ = saver.restore(1, built.logical_abstract_state, optional=resume.OPTIONAL)
        state = program.restored_state(built, restored, offload_create.begin(built.partition))
        assert jax.tree.leaves(jax.tree.map(lambda leaf: leaf.sharding, state)) == jax.tree.leaves(
            built.partition.shardings
        )
        found = logical_lib.to_stored(logical_lib.to_logical(state))
        has_norm = bool(changes.get("offload__late_norm"))  # which the checkpoint lacks, so the next step takes its own
        assert [float(found.pop(name)) for name in ("last_norm",) if name in found] == [late_norm.UNKNOWN] * has_norm
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(np.asarray(found[path]), value, err_msg=path)
        if "offload__chunk_bytes" not in changes:
            continue
        weights = jax.tree.leaves(state.params)
        assert any(layout.is_on_host(leaf) for leaf in weights) == ("offload__params" in changes)
    saver.close()
    # The last program of the loop but one has its params on the host: it evaluates and trains as the one on the device.
    there = build(zero__stage=3, precision="bf16", **OFFLOAD, offload__params="host")
    with checkpointer.Checkpointer(tmp_path, keep_last=1, keep_best=0) as saver:
        logical, _ = saver.restore(1, there.logical_abstract_state)
        state = program.restored_state(there, logical, offload_create.begin(there.partition))
    on_device = results[0][0]
    micro = {name: array[: there.sizes.global_batch_size] for name, array in batch.items()}
    np.testing.assert_allclose(there.eval_loss(state.params, micro), here.eval_loss(on_device.params, micro), rtol=2e-3)
    np.testing.assert_allclose(
        there.train_step(state, batch)[1]["loss"], here.train_step(on_device, batch)[1]["loss"], rtol=2e-3
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_run_pins_is_bounded_before_it_uses_a_device(stage):
    config = runs.config(zero__stage=stage, precision="bf16", **OFFLOAD)
    built = program.build(config, tokenizer_vocab=320)
    held = 8 * sum(layout.shard_bytes(leaf) for leaf in layout.host_leaves(built.partition).values())
    assert held <= program.most_pinned_bytes(config) < 1.2 * held + 10 * config.offload.chunk_bytes
    assert program.most_pinned_bytes(runs.config(zero__stage=stage)) == 0


@pytest.mark.parametrize("precision, part", [("bf16", 1.0), ("bf16_sr", 0.5)])
def test_what_a_run_pins_of_its_params_is_bounded_too(precision, part):
    parts = {"offload__fraction": part, "offload__params_fraction": part}
    config = runs.config(zero__stage=3, precision=precision, **(OFFLOAD | parts), offload__params="host")
    built = program.build(config, tokenizer_vocab=320)
    held = 8 * sum(layout.shard_bytes(leaf) for leaf in layout.host_leaves(built.partition).values())
    assert held <= program.most_pinned_bytes(config) < 1.3 * held + 10 * config.offload.chunk_bytes


def test_dropout_of_a_model_without_any_is_refused():
    with pytest.raises(
        UserError, match=r"config.model.dropout: is 0.1, and the model of config.model.preset=test has no dropout"
    ):
        build(model__dropout=0.1)
