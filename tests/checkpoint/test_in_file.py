"""Checks leaves that are read when they are written. This module tests zerojax.checkpoint.in_file."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

from zerojax.checkpoint import in_file


def leaf(value, reads, number):
    return in_file.InFile(lambda: reads.append(number) or value, value.shape, value.dtype)


def save(folder, tree):
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=in_file.handlers())
    with ocp.Checkpointer(handler) as saver:
        saver.save(folder, args=ocp.args.PyTreeSave(tree))


def test_leaves_in_files_and_arrays_are_saved_alike_and_read_once_in_their_order(tmp_path):
    reads = []
    values = [np.arange(6, dtype=np.float32).reshape(2, 3) + number for number in range(4)]
    tree = {f"leaf_{number}": leaf(value, reads, number) for number, value in enumerate(values)}
    save(tmp_path / "step", {**tree, "array": values[0], "number": 3})
    assert reads == [0, 1, 2, 3]
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "step")  # by any program
    assert restored.pop("number") == 3 and np.array_equal(restored.pop("array"), values[0])
    assert all(np.array_equal(restored[f"leaf_{number}"], value) for number, value in enumerate(values))


def test_a_leaf_is_read_after_the_one_before_is_written(tmp_path, monkeypatch):
    events, write = [], ocp.type_handlers.NumpyHandler._background_serialize

    async def noted(self, values, infos, args=None):
        await write(self, values, infos, args)
        events.append("written")

    monkeypatch.setattr(ocp.type_handlers.NumpyHandler, "_background_serialize", noted)
    value = np.ones(3, np.float32)
    save(tmp_path / "step", {str(number): leaf(value, events, "read") for number in range(3)})
    assert events == ["read", "written"] * 3


def test_a_leaf_that_cannot_be_read_fails_the_save(tmp_path):
    def fail():
        raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        save(tmp_path / "step", {"leaf": in_file.InFile(fail, (2,), np.float32)})


def test_a_leaf_tells_its_shape_without_being_read():
    reads = []
    made = leaf(np.ones((2, 3), np.int8), reads, 0)
    assert (made.shape, made.size, made.nbytes, made.ndim, made.dtype) == ((2, 3), 6, 6, 2, np.int8) and not reads
    assert np.array_equal(np.asarray(made), np.ones((2, 3)))
