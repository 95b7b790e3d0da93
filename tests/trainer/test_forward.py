"""Checks how a run evaluates whose weights are on the groups of a pipeline. This module tests zerojax.trainer.forward."""

import shutil

import jax
import numpy as np
import pytest
import runs

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.checkpoint import checkpointer, logical
from zerojax.errors import UserError
from zerojax.trainer import config as config_lib
from zerojax.trainer import forward, program, resume
from zerojax.trainer import state as state_lib
from zerojax.zero.host import create as offload_create
from zerojax.zero.pipeline import state as pipeline_state

pytestmark = pytest.mark.usefixtures("cache_dir")


@pytest.mark.parametrize(
    "sizes", [{"pipe": 2}, {"pipe": 2, "replica": 2}, {"pipe": 4, "model": 2}, {"pipe": 2, "context": 2}]
)
def test_the_mesh_has_all_devices_once_and_data_takes_the_place_of_pipe(sizes):
    mesh = mesh_lib.make_mesh(**sizes)
    found = forward.mesh_of(mesh)
    assert sorted(device.id for device in found.devices.flat) == list(range(8))
    assert found.shape == {
        **{k: v for k, v in mesh.shape.items() if k != "pipe"},
        "data": mesh.shape["data"] * sizes["pipe"],
    }
    # Devices along the other axes are those of the pipeline's groups.
    groups = [
        {device.id for device in row} for row in np.moveaxis(mesh.devices, -1, -1).reshape(-1, mesh.shape["model"])
    ]
    assert all({device.id for device in row} in groups for row in found.devices.reshape(-1, mesh.shape["model"]))
    assert forward.mesh_of(found) is found


def test_a_batch_is_evaluated_in_passes_that_the_devices_divide():
    mesh = mesh_lib.make_mesh()
    assert forward.passes_of(mesh, config_lib.BatchSizes(32, 4, 2)) == 2
    assert forward.passes_of(mesh, config_lib.BatchSizes(32, 1, 8)) == 4
    with pytest.raises(
        UserError, match=r"config.global_batch_size: 12 sequences do not divide over the 8 devices.*=16"
    ):
        forward.passes_of(mesh, config_lib.BatchSizes(12, 1, 3))


def test_params_are_those_of_the_pipeline_and_a_run_without_one_copies_nothing():
    changes = {"mesh__pipe": 2, "grad_accum": 2, "zero__min_size": 0, "zero__indivisible": "pad"}
    built = program.build(runs.config(**changes), tokenizer_vocab=320)
    params = state_lib.first(built).params
    held = built.forward.params(params)
    expected = program.build(runs.config(), tokenizer_vocab=320)
    plain = state_lib.first(expected).params
    assert expected.forward.params(plain) is plain
    for (path, own), (_, other) in zip(tree.flatten(held), tree.flatten(plain)):
        np.testing.assert_array_equal(np.asarray(own)[tuple(map(slice, other.shape))], other, err_msg=path)
        assert own.sharding == built.forward.partition.placements[f"params/{path}"].stored
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params)} == {4}


def test_a_run_goes_on_with_other_groups_of_devices(tmp_path):
    """The checkpoint of two stages restores without a pipeline, and the losses are those of a run that never had one."""
    changes = {"steps": 4, **runs.EVALUATED}
    runs.run(tmp_path / "one", **changes)
    in_two = {**changes, "mesh__pipe": 2, "grad_accum": 2, "checkpoint__at_end": True}
    runs.run(tmp_path / "two", **{**in_two, "steps": 2})
    runs.run(tmp_path / "two", **changes)
    ours, expected = (runs.numbers(tmp_path / name) for name in ("two", "one"))
    np.testing.assert_allclose([row[1:] for row in ours], [row[1:] for row in expected], rtol=1e-5)
    losses = [[loss for _, loss in runs.evaluations(tmp_path / name)][-1] for name in ("two", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def shardings(state):
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("offloaded", runs.cases(["none", "host", "nvme"], long=["host", "nvme"]))
def test_what_several_processes_save_of_16_bit_groups_is_restored_where_it_was(tmp_path, offloaded):
    changes = {"mesh__pipe": 2, "grad_accum": 2, "zero__stage": 1, "precision": "bf16", "zero__min_size": 0}
    far = {"offload__optimizer": offloaded, "offload__chunk_bytes": 8192}
    far |= {"offload__nvme_path": str(tmp_path)} if offloaded == "nvme" else {}
    changes |= {} if offloaded == "none" else far
    built = program.build(runs.config(**changes), tokenizer_vocab=320)
    first, placed = state_lib.first(built), built.partition.pipeline
    placed.travel.is_one = False  # as one process of several
    logical = jax.tree.map(lambda leaf: leaf + 0, built.to_logical(first)) if offloaded == "none" else None
    keep = offload_create.begin(built.partition)
    if logical is None:
        wanted = built.logical_abstract_state
        spread = built.to_saved(first)
        assert shardings(spread) == shardings(pipeline_state.spread(wanted, placed))
        logical = pipeline_state.settled(spread, wanted, placed, keep)
    restored = state_lib.restored(built, logical, keep)
    assert shardings(restored) == jax.tree.leaves(built.partition.shardings)
    jax.tree.map(np.testing.assert_array_equal, restored, first)


@pytest.mark.long
@pytest.mark.parametrize("precision, stage", [("fp32", 3), ("bf16", 2), ("fp16", 1)])
def test_checkpoints_of_a_pipeline_with_its_state_in_host_memory_go_on_in_any(tmp_path, precision, stage):
    changes = {"steps": 3, "checkpoint__at_end": True, "precision": precision, "zero__stage": stage}
    in_two = {"mesh__pipe": 2, "grad_accum": 2}
    far = {**in_two, "offload__optimizer": "host", "offload__chunk_bytes": 8192}
    runs.run(tmp_path / "first", **{**changes, **far, "steps": 2})
    ways = {"same": far, "near": in_two, "one": {}, "far_one": {"offload__optimizer": "host"}}
    found = {}
    for name, way in ways.items():
        shutil.copytree(tmp_path / "first", tmp_path / name)
        built = program.build(runs.config(**changes, **way), tokenizer_vocab=320)
        with checkpointer.Checkpointer(tmp_path / name / "checkpoints") as saver:
            found[name] = logical.to_stored(built.to_logical(resume.state(built, saver, 2, saver.meta(2))))
    for name, own in found.items():
        assert own.keys() == found["same"].keys()
        for path, leaf in own.items():
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(found["same"][path]), err_msg=f"{name} {path}")
    runs.run(tmp_path / "same", **{**changes, **far})
    runs.run(tmp_path / "near", **{**changes, **in_two})
    ours, expected = (runs.numbers(tmp_path / name) for name in ("same", "near"))
    np.testing.assert_allclose([row[1:] for row in ours], [row[1:] for row in expected], rtol=1e-5)
