"""Makes and restores states, whole and part by part. This module tests zerojax.trainer.state."""

import functools

import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from zerojax import precision
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import logical as logical_lib
from zerojax.trainer import program, resume
from zerojax.trainer import state as state_lib
from zerojax.zero.host import create as offload_create
from zerojax.zero.host import memory_kind
from zerojax.zero.offload import late_norm
from zerojax.zero.update import padding

LLAMA = golden_models.FOLDER / "llama"
OFFLOAD = {"offload__optimizer": "host", "offload__chunk_bytes": 20_000}

pytestmark = pytest.mark.usefixtures("cache_dir")


def build(**changes):
    return program.build(runs.config(**changes), tokenizer_vocab=320)


@functools.cache
def first_weights(devices: int = 8, **changes):
    with runs.on_devices(devices):
        built = build(**changes)
        return jax.tree.map(np.asarray, logical_lib.to_logical(state_lib.first(built)).params)


@pytest.mark.parametrize(
    "changes", [{"zero__stage": 3}, pytest.param({"zero__stage": 1, "precision": "bf16"}, marks=runs.LONG)], ids=str
)
def test_the_first_weights_depend_on_the_seed_alone(changes):
    expected = first_weights(devices=1)
    jax.tree.map(np.testing.assert_array_equal, first_weights(**changes), expected)
    assert (first_weights(devices=1, seed=1)["embed"]["embedding"] != expected["embed"]["embedding"]).any()


@pytest.mark.parametrize(
    "changes", [{"zero__stage": 3, "zero__indivisible": "pad"}, {"precision": "bf16", "zero__stage": 1}], ids=str
)
def test_an_imported_model_starts_from_its_folders_weights(changes):
    built = build(init_from=str(LLAMA), model__num_layers=0, **changes)
    state = state_lib.first(built)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == built.partition.shardings
    found = logical_lib.to_logical(state).params
    jax.tree.map(np.testing.assert_array_equal, found, golden_models.load("llama", 0).params)


def test_a_restored_state_is_the_state_that_was_saved():
    for changes in ({"precision": "bf16", "zero__stage": 1}, {"zero__stage": 3}):
        built = build(**changes)
        state = state_lib.first(built)
        copy = jax.tree.map(jnp.copy, logical_lib.to_logical(state))
        restored = state_lib.restored(built, copy, offload_create.begin(built.partition))
        assert jax.tree.structure(restored.opt_state) == jax.tree.structure(state.opt_state)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
        assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == jax.tree.leaves(built.partition.shardings)


@runs.LONG
def test_a_factored_optimizers_state_is_that_of_the_weights_without_padding():
    """On 6 devices, where most dims do not divide. `zero.update` is tested with the same optimizer."""
    with runs.on_devices(6):
        built = build(optimizer__name="adafactor", zero__min_size=0, zero__indivisible="pad", global_batch_size=6)
        state = state_lib.first(built)
        plain = padding.unpad(state, built.partition)
        expected = jax.eval_shape(built.create, plain.params)
        assert jax.tree.map(np.shape, plain.opt_state) == jax.tree.map(np.shape, expected.opt_state)
        after, _ = jax.eval_shape(built.train_step, state, built.abstract_batch)
        assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, state)
        assert any(leaf.padding for leaf in built.partition.leaves.values())


@pytest.mark.parametrize(
    "name", runs.cases(sorted({*precision.PRECISIONS} - {"fp8", "fp16"}), long=["bf16_sr", "fp32"])
)
def test_a_state_made_part_by_part_has_the_bits_and_dtypes_of_one_made_at_once(name):
    away = {**OFFLOAD, "offload__params": "host", "offload__params_on_device": "embed"}
    here, there = (build(precision=name, zero__stage=3, **changes) for changes in ({}, away))
    states = [state_lib.first(built) for built in (here, there)]
    assert [leaf.dtype for leaf in jax.tree.leaves(states[1])] == [
        leaf.dtype for leaf in jax.tree.leaves(there.partition.abstract_state)
    ]
    stored = [logical_lib.to_stored(logical_lib.to_logical(state)) for state in states]
    assert stored[0].keys() == stored[1].keys()
    for path, value in stored[0].items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(stored[1][path]), err_msg=path)


@runs.LONG  # tests/mission trains with offload as without, and changes stage and offload between starts
def test_an_offloaded_program_begins_trains_and_restores_as_one_on_the_device(tmp_path):
    """At stage 2, where the master weights are offloaded too; then its checkpoint restores at stage 3, with each kind of offload."""
    here, there = build(zero__stage=2, precision="bf16"), build(zero__stage=2, precision="bf16", **OFFLOAD)
    assert there.partition.on_host and there.partition.cuts
    states = [state_lib.first(built) for built in (here, there)]
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
        {"zero__stage": 3, **OFFLOAD, "offload__params": "host"},
        {"zero__stage": 2, "offload__optimizer": "host", "offload__late_norm": True},
    ):
        built = build(precision="bf16", **changes)
        restored, _ = saver.restore(1, built.logical_abstract_state, optional=resume.OPTIONAL)
        state = state_lib.restored(built, restored, offload_create.begin(built.partition))
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
        assert any(memory_kind.is_on_host(leaf) for leaf in weights) == ("offload__params" in changes)
    saver.close()
    # The last program of the loop but one has its params on the host: it evaluates and trains as the one on the device.
    there = build(zero__stage=3, precision="bf16", **OFFLOAD, offload__params="host")
    with checkpointer.Checkpointer(tmp_path, keep_last=1, keep_best=0) as saver:
        logical, _ = saver.restore(1, there.logical_abstract_state)
        state = state_lib.restored(there, logical, offload_create.begin(there.partition))
    on_device = results[0][0]
    micro = {name: array[: there.sizes.global_batch_size] for name, array in batch.items()}
    np.testing.assert_allclose(
        there.forward.loss(state.params, micro), here.forward.loss(on_device.params, micro), rtol=2e-3
    )
    np.testing.assert_allclose(
        there.train_step(state, batch)[1]["loss"], here.train_step(on_device, batch)[1]["loss"], rtol=2e-3
    )


WIRES = {"wire__gradients": "int4", "wire__host_devices": 4, "wire__error_feedback": True, "zero__stage": 3}


def test_what_was_not_sent_is_saved_and_dropped_by_another_mesh_with_a_line(tmp_path):
    built = build(**WIRES, precision="bf16")
    rng, state = np.random.default_rng(0), state_lib.first(built)
    unsent = jax.tree.map(
        lambda leaf: jax.device_put(rng.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding), state.unsent_grads
    )
    assert unsent
    state = state.replace(unsent_grads=unsent)
    for leaf in unsent.values():
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.sharding.num_devices == leaf.size
    with checkpointer.Checkpointer(tmp_path, keep_last=1, keep_best=0) as saver:
        saver.save(1, built.to_saved(state), {}, meta=resume.meta(built))
        saver.wait()
        saved = saver.meta(1)
        others = (
            {"wire__host_devices": 2},
            {"mesh__data": 4, "mesh__replica": 2, "wire__host_devices": 2},
            {"wire__error_feedback": False},
        )
        for changes in ({}, *others):
            again = build(**{**WIRES, **changes}, precision="bf16")
            found = resume.state(again, saver, 1, saved)
            assert jax.tree.structure(found) == jax.tree.structure(again.partition.abstract_state)
            dropped = [
                line for line in resume.notes(again, saver, resume.Start(1, saved), tmp_path) if "unsent" in line
            ]
            assert len(dropped) == bool(changes)
            for path, leaf in dict(found.unsent_grads or {}).items():
                assert leaf.sharding == again.partition.shardings.unsent_grads[path]
                np.testing.assert_array_equal(leaf, np.zeros(leaf.shape) if changes else unsent[path])
