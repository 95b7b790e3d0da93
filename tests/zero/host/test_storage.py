"""Checks optimizer state that lives in a file: steps, checkpoints and refusals. This module tests zerojax.zero.host.storage."""

import os

import jax
import numpy as np
import offloads
import pytest
import runs

import zerojax
from zerojax import tree
from zerojax.checkpoint import in_file, logical
from zerojax.errors import UserError
from zerojax.zero.host import budget, storage
from zerojax.zero.host.disk import scratch, store

CHUNK = 600  # a kernel's moments, 1,024 bytes on each device, are in two pieces
STEPS = 8


def nvme(folder, **how):
    return {
        "optimizer": "nvme",
        "nvme_path": str(folder),
        "chunk_bytes": CHUNK,
        "in_flight": 3,
        "nvme_buffers": 2,
        **how,
    }


@pytest.fixture(scope="module")
def resident():
    """Returns the state and loss after STEPS steps with nothing offloaded; they are those of every stage, bit for bit."""
    state, metrics, _, _ = offloads.trained(offloads.adam(), None, STEPS, stage=3)
    return state, metrics["loss"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=runs.LONG), 3])
def test_eight_steps_equal_those_without_offload_bit_for_bit(stage, resident, tmp_path):
    state, metrics, train_step, partition = offloads.trained(offloads.adam(), nvme(tmp_path), STEPS, stage=stage)
    assert partition.cuts and len(train_step.updates.groups) > 2 * train_step.stream.in_flight
    on_disk = {path for path, leaf in tree.flatten(state) if storage.is_on_disk(leaf)}
    assert on_disk == set(storage.on_disk(partition)) == partition.on_host
    assert metrics["loss"] == resident[1]
    offloads.assert_equal(state, resident[0])
    assert not list(tmp_path.iterdir())  # its file has no name


def test_a_fraction_and_leaves_made_from_a_state_come_to_the_disk(tmp_path):
    made, _ = offloads.sharded(offloads.adam(), None)
    state, partition = zerojax.shard_train_state(
        made, mesh=zerojax.make_mesh(), offload=nvme(tmp_path, fraction=0.5), min_size=64
    )
    count = sum(map(storage.is_on_disk, jax.tree.leaves(state)))
    assert 0 < count == len(storage.on_disk(partition))
    offloads.assert_equal(state, made)
    assert (
        0
        < sum(leaf.nbytes for leaf in jax.tree.leaves(state) if storage.is_on_disk(leaf))
        <= storage.disk_bytes(partition)
    )


@runs.LONG
def test_checkpoints_of_any_place_restore_into_any_other_and_go_on_alike(tmp_path):
    places = {"none": None, "host": offloads.PIECES, "nvme": nvme(tmp_path / "disk")}
    with zerojax.Checkpointer(tmp_path / "steps") as saver:
        state, _, train_step, partition = offloads.trained(offloads.adam(), places["nvme"], 2, stage=3)
        saver.save(2, state, partition=partition)
        saved = {path: np.asarray(leaf) for path, leaf in logical.to_stored(state).items()}
        state, _ = train_step(state, offloads.batch_of(2))  # over the leaves that were saved
        for name, place in places.items():
            restored, _ = saver.restore(2, offloads.sharded(offloads.adam(), place, stage=2)[1])
            assert any(map(storage.is_on_disk, jax.tree.leaves(restored))) == (name == "nvme")
            assert_holds(restored, saved)
            if name == "host":
                saver.save(3, restored)
        restored, _ = saver.restore(3, partition)
        restored, _ = train_step(restored, offloads.batch_of(2))
        offloads.assert_equal(restored, state)


def assert_holds(state, saved):
    stored = logical.to_stored(state)
    assert stored.keys() == saved.keys()
    assert all(np.array_equal(np.asarray(leaf), saved[path]) for path, leaf in stored.items())


def test_a_save_reads_one_leaf_at_a_time(tmp_path, monkeypatch):
    state, partition = offloads.sharded(offloads.adam(), nvme(tmp_path / "disk"))
    held, most, real, read = [0], [0], store.DiskArray.shards, in_file.InFile.__init__

    def counted(array):
        held[0] += array.nbytes
        most[0] = max(most[0], held[0])
        return real(array)

    def forgetting(self, function, *args):
        read(self, lambda: held.__setitem__(0, 0) or function(), *args)  # the leaf before is written

    monkeypatch.setattr(store.DiskArray, "shards", counted)
    monkeypatch.setattr(in_file.InFile, "__init__", forgetting)
    with zerojax.Checkpointer(tmp_path / "steps") as saver:
        saver.save(0, state, partition=partition)
    assert most[0] == max(leaf.size * 4 for leaf in jax.tree.leaves(partition.on_device.abstract_state.opt_state))


@runs.LONG
def test_skipped_steps_and_16_bit_state_leave_the_disk_as_they_leave_host_memory(tmp_path):
    scaler = zerojax.DynamicLossScale(init_scale=2.0**15, window=3, hysteresis=1)
    how = {"dtype": jax.numpy.float16, "scaler": scaler, "step": {"compute_dtype": jax.numpy.float16, "clip_norm": 0.5}}

    def batches(number):
        return offloads.batch_of(number).at[0].set(np.inf if number == 1 else 0)

    tx, host = zerojax.with_master_weights(offloads.adam()), {"optimizer": "host", "chunk_bytes": CHUNK, "in_flight": 3}
    (state, metrics, *_), (expected, *_) = [
        offloads.trained(tx, place, 3, batches=batches, **how) for place in (nvme(tmp_path), host)
    ]
    assert metrics["skipped_steps"] == 1
    offloads.assert_equal(state, expected)


def test_host_memory_is_that_of_the_chunks_on_their_way_and_the_disk_must_have_room(tmp_path, monkeypatch):
    _, partition = offloads.sharded(offloads.adam(), nvme(tmp_path))
    chunk = max(CHUNK, max(leaf.size * 4 // 8 for leaf in storage.on_disk(partition).values()))
    assert budget.pinned_bytes(partition) == 8 * (3 * chunk + 2 * scratch.aligned(chunk))
    line = storage.line(partition)
    assert f"of optimizer state on a disk, in {tmp_path} (" in line and storage.line(partition.on_device) == ""
    monkeypatch.setattr(storage, "disk_bytes", lambda partition: 1 << 50)
    with pytest.raises(UserError, match=r"1024.00 TiB are needed there, and its disk has"):
        offloads.sharded(offloads.adam(), nvme(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(budget.folder_lib, "file_system", lambda folder: "tmpfs")
    with pytest.warns(
        UserWarning, match=r"offload.nvme_path: .* is on tmpfs, which keeps its files in the host's memory"
    ):
        offloads.sharded(offloads.adam(), nvme(tmp_path))


def test_what_a_disk_cannot_do_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"offload.nvme_path: is missing"):
        offloads.sharded(offloads.adam(), "nvme")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/disk: cannot be made"):
        offloads.sharded(offloads.adam(), nvme(tmp_path / "file" / "disk"))
    _, partition = offloads.sharded(offloads.adam(), nvme(tmp_path))
    with pytest.raises(UserError, match=r"donate: is False, and what offload keeps on a disk"):
        zerojax.make_train_step(offloads.loss_fn, partition, donate=False)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_in_a_step_ends_it_in_one_line(name, tmp_path, monkeypatch):
    state, partition = offloads.sharded(offloads.adam(), nvme(tmp_path))
    train_step = zerojax.make_train_step(offloads.loss_fn, partition)
    state, _ = train_step(state, offloads.batch_of(0))
    jax.block_until_ready(state)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(UserError, match=rf"{tmp_path}: .*ing the offloaded state failed \(Input/output error\)"):
        for number in (1, 2):
            state, _ = train_step(state, offloads.batch_of(number))
