"""Tests zerojax.checkpoint.checkpointer."""

import functools
import json
import logging
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import file_systems
import flax.nnx as nnx
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import tree
from zerojax.checkpoint import checkpointer
from zerojax.checkpoint import files as step_files
from zerojax.errors import UserError
from zerojax.optim import pieces

ROOT = pathlib.Path(__file__).parents[2]


def mesh_of(count, name="data"):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), (name,))


def on(mesh, spec, array):
    return jax.device_put(array, NamedSharding(mesh, spec))


def small_state(step, rows=16):
    mesh = mesh_of(8)
    return {
        "params": {"w": on(mesh, P("data"), jnp.full((rows, 4), step, jnp.float32))},
        "step": on(mesh, P(), jnp.int32(step)),
    }


def open_in(directory, **kept):
    return checkpointer.Checkpointer(directory, **{"keep_last": 9, "keep_best": 0, **kept})


def save_steps(directory, *steps, **kept):
    saver = open_in(directory, **kept)
    for step in steps:
        saver.save(step, small_state(step), {"0": {"at": step}}, meta={"seed": 7}, card=f'{{"step": {step}}}')
    saver.close()


def raw(leaf):
    array = jax.random.key_data(leaf) if jnp.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key) else leaf
    return np.asarray(array, dtype=tree.dtype_of(array))


def assert_bits_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        assert tree.dtype_of(one) == tree.dtype_of(other) and np.shape(one) == np.shape(other)
        assert raw(one).tobytes() == raw(other).tobytes()


def error_of(function, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "model")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_every_dtype_comes_back_bit_for_bit_on_four_devices_and_another_spec(tmp_path, dtype, spec):
    bits = np.random.default_rng(0).integers(0, 2 if dtype == jnp.bool_ else 250, (16, 24, 4), np.uint8)
    array = bits.view(dtype)  # arbitrary bits, with NaN, infinities and subnormals
    saver = open_in(tmp_path)
    saver.save(1, {"w": on(mesh_of(8), P("data"), array)}, {}, meta={})
    sharding = NamedSharding(mesh_of(4, "model"), spec)
    wanted = jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
    state, _ = saver.restore(1, {"w": wanted})
    saver.close()
    assert state["w"].sharding == sharding
    assert raw(state["w"]).tobytes() == array.tobytes()


@pytest.mark.parametrize("kinds", [("device", "pinned_host"), ("pinned_host", "device")])
def test_offloaded_leaves_move_between_host_and_device(tmp_path, kinds):
    before, after = (NamedSharding(mesh_of(8), P("data"), memory_kind=kind) for kind in kinds)
    state = {"mu": jax.device_put(np.arange(16, dtype=np.float32), before)}
    saver = open_in(tmp_path)
    saver.save(1, state, {}, meta={})
    restored, _ = saver.restore(1, {"mu": jax.ShapeDtypeStruct((16,), jnp.float32, sharding=after)})
    saver.close()
    assert restored["mu"].sharding == after
    np.testing.assert_array_equal(raw(restored["mu"]), np.arange(16))


def test_a_leaf_in_pieces_is_one_array_on_disk_and_restores_into_any_pieces(tmp_path):
    values = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)

    def forms(spec, kind, dim, *lengths):
        sharding = NamedSharding(mesh_of(8), spec, memory_kind=kind)
        if not lengths:
            return jax.ShapeDtypeStruct(values.shape, jnp.float32, sharding=sharding)
        shapes = [tuple(n if d == dim else size for d, size in enumerate(values.shape)) for n in lengths]
        return pieces.Pieces([jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape in shapes], dim)

    several = [
        forms(P("data"), "pinned_host", 1, 10, 10, 4),
        forms(P(None, "data"), "pinned_host", 0, 9, 7),
        forms(P(), "device", 0),
        forms(P("data"), "pinned_host", 0),
    ]
    saver = open_in(tmp_path, keep_last=9)
    for step, form in enumerate(several, 1):
        whole = jax.device_put(values, form.sharding)
        saver.save(step, {"mu": pieces.split(whole, form) if pieces.is_pieces(form) else whole}, {}, meta={})
        saver.wait()
        for wanted in several:
            restored, _ = saver.restore(step, {"mu": wanted})
            assert jax.tree.structure(restored["mu"]) == jax.tree.structure(wanted)
            for part, like in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
                assert (part.shape, part.sharding) == (like.shape, like.sharding)
            np.testing.assert_array_equal(pieces.join(restored["mu"]), values)
    saver.close()


def test_random_keys_numbers_and_numpy_arrays_come_back(tmp_path):
    state = {
        "key": jax.random.key(3),
        "keys": on(mesh_of(8), P("data"), jax.random.split(jax.random.key(4, impl="rbg"), 8)),
        "count": 5,
        "scale": 2.5,
        "rows": np.arange(6, dtype=np.int64).reshape(2, 3),
        "odd.name": np.float32(1),
    }
    saver = open_in(tmp_path)
    saver.save(1, state, {}, meta={})
    restored, _ = saver.restore(1, tree.abstract(state))
    saver.close()
    assert_bits_equal(restored, state)
    assert restored["keys"].sharding.spec == P("data")
    assert isinstance(restored["rows"], np.ndarray)


def test_linen_train_states_and_nnx_states_come_back_with_their_structure(tmp_path):
    params = {"dense": {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros((4,))}}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    linen = flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    linen = linen.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    module = nnx.state(nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))))
    state = {"linen": linen, "nnx": module}
    saver = open_in(tmp_path)
    saver.save(1, state, {}, meta={})
    restored, _ = saver.restore(1, jax.eval_shape(lambda: state))
    saver.close()
    assert_bits_equal(restored, state)


def test_the_saved_state_is_that_of_the_call_even_if_its_buffers_are_donated(tmp_path):
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    saver = open_in(tmp_path)
    state, rows, meta = small_state(0, rows=4096), {"0": [1]}, {"seed": 1}
    saver.save(1, state, rows, meta=meta)
    rows["0"].append(2)
    meta["seed"] = 2
    for _ in range(20):
        state = step(state)
    saved, data_state = saver.restore(1, tree.abstract(small_state(0, rows=4096)))
    assert_bits_equal(saved, small_state(0, rows=4096))
    assert data_state == {"0": [1]} and saver.meta(1) == {"seed": 1}
    saver.close()


def test_the_newest_and_the_best_are_kept_also_over_a_restart(tmp_path):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 5.0, 60: float("nan"), 70: 4.0}
    for step, loss in losses.items():
        saver = open_in(tmp_path, keep_last=2, keep_best=2)
        saver.save(step, small_state(step), {}, meta={}, eval_loss=loss)
        saver.close()
    assert sorted(os.listdir(tmp_path)) == ["20", "30", "60", "70"]


def test_steps_that_a_killed_save_did_not_delete_are_deleted_unless_another_writes(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4)
    (tmp_path / "2" / "notes").write_text("of somebody else")
    with open_in(tmp_path) as writer, open_in(tmp_path, keep_last=2) as saver:
        writer.trim()  # deletes nothing, and takes no lock
        writer.save(5, small_state(5))
        writer.wait()
        saver.trim()
        assert saver.steps() == [1, 2, 3, 4, 5]
        writer.close()
        saver.trim()
        assert saver.steps() == [2, 4, 5]
        assert saver.restore(None, tree.abstract(small_state(0)))[0]["step"] == 5


@pytest.mark.parametrize("name", ["run [1]*", "[", "50%?#"])
def test_a_directory_may_have_the_characters_of_patterns(tmp_path, name):
    (tmp_path / "run 1").mkdir()  # what the first name means as a pattern
    save_steps(tmp_path / name / "checkpoints", 1, 2, keep_last=1)
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), small_state(2)
    )
    saver = open_in(tmp_path / name / "checkpoints")
    state, data = saver.restore(None, like)
    assert saver.steps() == [2] and data == {"0": {"at": 2}}
    assert_bits_equal(state["params"]["w"], small_state(2)["params"]["w"])
    assert not list((tmp_path / "run 1").iterdir())


def test_orbax_finds_the_files_of_a_step_in_such_a_directory(tmp_path):
    (tmp_path / "run [1]").mkdir()
    (tmp_path / "run [1]" / "ocdbt.process_0").touch()
    literal = step_files.Literal(tmp_path / "run [1]")
    found = [*literal.glob("ocdbt.*"), *(literal / "x").parent.glob("ocdbt.*"), *epath.Path(literal).glob("ocdbt.*")]
    assert [str(path) for path in found] == [str(tmp_path / "run [1]" / "ocdbt.process_0")] * 3
    assert all(isinstance(path, step_files.Literal) for path in found)


def test_saving_a_saved_step_again_changes_nothing(tmp_path):
    save_steps(tmp_path, 10)
    saver = open_in(tmp_path)
    saver.save(10, small_state(99), {}, meta={})
    saver.save(20, small_state(20), {}, meta={})
    saver.save(20, small_state(99), {}, meta={})  # still being written
    for step in (10, 20):
        assert saver.restore(step, tree.abstract(small_state(0)))[0]["step"] == step
    saver.close()


def test_a_name_that_is_taken_is_refused_instead_of_counted_as_saved(tmp_path):
    save_steps(tmp_path, 10)
    (tmp_path / "20").mkdir()
    (tmp_path / "30").symlink_to(tmp_path / "absent")
    (tmp_path / "40").write_text("mine")
    saver = open_in(tmp_path)
    for step in (20, 30, 40):
        assert "move it away" in error_of(saver.save, step, small_state(step), {}, meta={})
    saver.save(50, small_state(50), {}, meta={})
    saver.close()
    assert (tmp_path / "40").read_text() == "mine" and saver.steps() == [10, 20, 50]


def test_padded_leaves_are_cut_or_padded_if_they_are_resizable(tmp_path):
    logical = np.arange(40, dtype=np.float32).reshape(10, 4)
    saver = open_in(tmp_path)
    saver.save(1, {"embed": on(mesh_of(8), P("data"), np.pad(logical, ((0, 6), (0, 0))))}, {}, meta={})
    for rows, count in ((10, 5), (12, 4), (24, 8)):
        sharding = NamedSharding(mesh_of(count), P("data"))
        wanted = {"embed": jax.ShapeDtypeStruct((rows, 4), jnp.float32, sharding=sharding)}
        state, _ = saver.restore(1, wanted, resizable=frozenset({"embed"}))
        np.testing.assert_array_equal(raw(state["embed"]), np.pad(logical, ((0, rows - 10), (0, 0))))
        message = error_of(saver.restore, 1, wanted)
        assert f"embed: saved in {tmp_path}/1 with shape (16, 4), wanted ({rows}, 4)" in message
        assert "the model or its optimizer differs from the checkpoint's" in message
    saver.close()


class AveragedState(flax.training.train_state.TrainState):
    """A user's own state: averages of the weights, and a random key."""

    average: Any
    key: Any


TX = optax.adamw(1e-3)


def make_average(key):
    params = {"dense": {"kernel": jax.random.normal(key, (10, 30)), "bias": jnp.ones((16,))}}
    average = jax.tree.map(lambda leaf: leaf / 2, params)
    return AveragedState.create(apply_fn=None, params=params, tx=TX, average=average, key=key)


def make_dict(key):
    return {"params": {"w": jax.random.normal(key, (10, 30))}, "count": jnp.zeros((), jnp.int32)}


def make_nnx(key):
    model = nnx.Sequential(nnx.Linear(10, 30, rngs=nnx.Rngs(params=key)), nnx.BatchNorm(30, rngs=nnx.Rngs(0)))
    return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))


@pytest.mark.parametrize("make", [pytest.param(make_average, marks=runs.LONG), make_dict, make_nnx])
def test_any_state_moves_between_stages_meshes_and_paddings(tmp_path, make):
    """As in a user's program: sharded and padded over 8 devices, then 6, then 4 of two replicas, then unsharded."""
    state, partition = zerojax.shard_train_state(
        make, jax.random.key(0), mesh=zerojax.make_mesh(), stage=3, indivisible="pad", min_size=8
    )
    plain = zerojax.unpad(state, partition)
    assert any(leaf.padding for leaf in partition.leaves.values())
    with zerojax.Checkpointer(tmp_path, keep_last=9) as saver:
        saver.save(0, state, partition=partition, data_state={"position": 7})
        abstract = jax.eval_shape(make, jax.random.key(0))
        for step, (devices, replica, stage) in enumerate([(6, 1, 2), (8, 2, 1), (8, 1, 0)], start=1):
            mesh = zerojax.make_mesh(replica, devices=jax.devices()[:devices])
            partition = zerojax.partition_state(abstract, mesh=mesh, stage=stage, indivisible="pad", min_size=8)
            found, data_state = saver.restore(None, partition)
            assert data_state == {"position": 7}
            assert jax.tree.map(lambda leaf: leaf.sharding, found) == partition.shardings
            assert_bits_equal(zerojax.unpad(found, partition), plain)
            saver.save(step, found, partition=partition, data_state=data_state)
        assert_bits_equal(saver.restore(1, jax.eval_shape(lambda: plain))[0], plain)  # to the host, without padding


def test_padding_that_was_not_described_is_not_guessed(tmp_path):
    meshes = [zerojax.make_mesh(devices=jax.devices()[:count]) for count in (8, 6)]
    parts = [
        zerojax.partition_state(jax.eval_shape(make_dict, jax.random.key(0)), mesh=mesh, indivisible="pad", min_size=8)
        for mesh in meshes
    ]
    state = zerojax.pad(make_dict(jax.random.key(0)), parts[0])
    with zerojax.Checkpointer(tmp_path) as saver:
        assert "pass the partition" in error_of(saver.save, 1, state, partition=parts[1])
        saver.save(1, state)
        assert_bits_equal(zerojax.unpad(saver.restore(1, parts[0])[0], parts[0]), make_dict(jax.random.key(0)))
        message = error_of(saver.restore, 1, parts[1])
        assert "params/w: saved in" in message and "with shape (10, 32), wanted (10, 30)" in message
        assert message.endswith("or, if it was saved padded, save it with partition=")
        saver.save(2, make_dict(jax.random.key(0)), partition=None)  # without padding there is nothing to describe
        assert_bits_equal(zerojax.unpad(saver.restore(2, parts[1])[0], parts[1]), make_dict(jax.random.key(0)))


def test_one_program_writes_a_directory_and_others_read_it(tmp_path):
    save_steps(tmp_path, 10)
    with open_in(tmp_path) as first, open_in(tmp_path) as second:
        first.save(20, small_state(20))
        assert f"{tmp_path}: process {os.getpid()} on" in error_of(second.save, 30, small_state(30))
        first.wait()
        assert second.restore(None, tree.abstract(small_state(0)))[0]["step"] == 20
        first.close()
        second.save(30, small_state(30))
    assert sorted(os.listdir(tmp_path)) == ["10", "20", "30"]


def test_a_process_that_ends_at_once_releases_the_lock(tmp_path):
    with open_in(tmp_path) as first, open_in(tmp_path) as second:
        first.save(20, small_state(20))
        first.wait()
        first.unlock()
        second.save(30, small_state(30))
    assert sorted(os.listdir(tmp_path)) == ["20", "30"]


@runs.LONG  # a process of its own
def test_a_program_that_ends_without_closing_has_saved_all_the_same(tmp_path):
    program = (
        f"import jax.numpy as jnp, zerojax; zerojax.Checkpointer({str(tmp_path)!r}).save(7, {{'x': jnp.arange(4)}})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert open_in(tmp_path).latest_intact_step() == 7


def test_the_newest_intact_step_may_be_one_that_is_being_saved(tmp_path):
    with open_in(tmp_path) as saver:
        saver.save(20, small_state(20))
        assert saver.latest_intact_step() == 20


def test_reading_removes_no_unfinished_save_and_writing_does(tmp_path):
    save_steps(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / f"20.{step_files.UNFINISHED}-1")
    with open_in(tmp_path) as saver:
        assert saver.restore(None, tree.abstract(small_state(0)))[0]["step"] == 10
        assert len(os.listdir(tmp_path)) == 2
        saver.save(30, small_state(30))
    assert sorted(os.listdir(tmp_path)) == ["10", "30"]


def test_the_newest_intact_step_is_found(three_steps, tmp_path):
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    newest, *rest = sorted(map(int, os.listdir(tmp_path)), reverse=True)
    (tmp_path / str(newest) / "data" / "metadata").write_text("{}")
    with open_in(tmp_path) as saver:
        assert f"step {rest[0]} is intact" in error_of(saver.restore, None, tree.abstract(small_state(0)))
        assert saver.latest_intact_step() == rest[0]
    with open_in(tmp_path / "empty") as saver:
        assert saver.latest_intact_step() is None
        assert "holds no checkpoint to restore" in error_of(saver.restore, None, tree.abstract(small_state(0)))


@pytest.mark.parametrize(
    "kept", [{"keep_last": 0}, {"keep_last": -1}, {"keep_last": 1.5}, {"keep_last": True}, {"keep_best": -1}]
)
def test_numbers_that_would_delete_all_checkpoints_are_refused(tmp_path, kept):
    name = next(iter(kept))
    assert f"{name}: must be a whole number" in error_of(open_in, tmp_path, **kept)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    with open_in(tmp_path) as saver:
        for step in (-1, 1.5, "3"):
            assert "step: must be a whole number of at least 0" in error_of(saver.save, step, small_state(0))
        assert "data_state: is saved as JSON" in error_of(saver.save, 1, small_state(0), {"at": object()})
        assert "meta: is saved as JSON" in error_of(saver.save, 1, small_state(0), meta={"at": {1, 2}})
        assert "data_state: is saved as JSON" in error_of(saver.save, 1, small_state(0), 3)
        assert "meta: is saved as JSON" in error_of(saver.save, 1, small_state(0), meta=np.zeros(3))
        assert "partition: must be the Partition of the state, and is 3" in error_of(
            saver.save, 1, small_state(0), partition=3
        )
        assert "eval_loss: must be a number, and is 'x'" in error_of(saver.save, 1, small_state(0), eval_loss="x")
        for leaf in ("text", "int8", np.dtype("int8"), 2**40, object(), len, np.array(["text"])):
            assert "a: is " in error_of(saver.save, 1, {"a": leaf})
        assert "step: must be a whole number or None, and is [1]" in error_of(saver.restore, [1], small_state(0))
        for call in (
            saver.meta,
            saver.data_state,
            saver.has_checksums,
            functools.partial(saver.check, abstract_state={}),
        ):
            assert error_of(call, step=[1]) == "step: must be a whole number, and is [1]"
    assert not os.listdir(tmp_path)
    assert "has a null byte" in error_of(open_in, "a\0b")


def test_another_models_state_is_refused_by_the_names_of_its_leaves(tmp_path):
    save_steps(tmp_path, 10)
    saver = open_in(tmp_path)
    wanted = tree.abstract({"params": {"v": np.ones(3)}, **{name: np.ones(3) for name in "abcd"}})
    message = error_of(saver.restore, 10, wanted)
    assert f"{tmp_path}/10: its state lacks a, b, c and 2 more and has params/w, step;" in message
    other_dtype = tree.abstract(small_state(0)) | {"step": jax.ShapeDtypeStruct((), jnp.float32)}
    assert "step: saved in" in error_of(saver.restore, 10, other_dtype)
    assert os.listdir(tmp_path) == ["10"]
    saver.close()


def test_floating_leaves_are_cast_to_the_wanted_dtype(tmp_path):
    saver = open_in(tmp_path)
    exact = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    saver.save(1, {"w": exact, "half": exact.astype(jnp.bfloat16)}, {}, meta={})
    saver.wait()
    wanted = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), "half": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh_of(8), P("data"))), wanted
    )
    for form in (wanted, placed):
        found, _ = saver.restore(1, form)
        assert {name: leaf.dtype for name, leaf in found.items()} == {"w": jnp.bfloat16, "half": jnp.float32}
        np.testing.assert_array_equal(found["w"], exact.astype(jnp.bfloat16))
        np.testing.assert_array_equal(found["half"], exact.astype(jnp.bfloat16).astype(np.float32))
    saver.close()


def test_optional_leaves_may_be_missing_or_unwanted(tmp_path):
    saver = open_in(tmp_path)
    saver.save(1, {"w": np.ones(3)}, {}, meta={})
    saver.save(2, {"w": np.ones(3), "more": {"a": np.ones(2), "b": np.ones(2)}, "other": np.ones(1)}, {}, meta={})
    saver.wait()
    one, two = {"w": np.ones(3)}, {"w": np.ones(3), "more": {"a": np.ones(2), "b": np.ones(2)}}
    abstract = tree.abstract(two)
    found, _ = saver.restore(1, abstract, optional=("more",))
    assert found["more"] == abstract["more"] and found["w"].tolist() == [1, 1, 1]
    found, _ = saver.restore(2, tree.abstract(one), optional=("more", "other"))
    assert list(found) == ["w"] and found["w"].tolist() == [1, 1, 1]
    found, _ = saver.restore(2, tree.abstract({**two, "other": np.ones(1)}), optional=("more",))
    assert found["more"]["b"].tolist() == [1, 1]
    with pytest.raises(UserError, match="lacks more/a"):
        saver.restore(1, abstract)
    with pytest.raises(UserError, match="has more/a"):
        saver.restore(2, tree.abstract({**one, "other": np.ones(1)}), optional=("mo",))
    saver.close()


def test_a_missing_step_is_answered_with_the_steps_there_are(tmp_path):
    saver = open_in(tmp_path)
    assert saver.latest_step() is None
    assert "it holds no checkpoint at all" in error_of(saver.meta, 15)
    saver.close()
    save_steps(tmp_path, 10, 20)
    saver = open_in(tmp_path)
    assert saver.latest_step() == 20
    for function in (saver.meta, lambda step: saver.restore(step, {})):
        assert f"{tmp_path}: no checkpoint of step 15; choose one of steps 10, 20" in error_of(function, 15)
    saver.close()


DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
}
DAMAGE["deleted"] = pathlib.Path.unlink


def test_every_file_of_a_step_that_is_cut_or_deleted_is_found_and_nothing_is_lost(tmp_path):
    save_steps(tmp_path, 10, 20, 30)
    shutil.rmtree(tmp_path / "20" / "state")
    wanted = tree.abstract(small_state(0))
    files = [path for path in (tmp_path / "30").rglob("*") if path.is_file() and path.parent.name != "30"]
    assert {"manifest.ocdbt", "_METADATA", "metadata"} < {path.name for path in files}
    for path in [*files, tmp_path / "30" / "sizes.json"]:
        content = path.read_bytes()
        for damage in DAMAGE.values():
            damage(path)
            saver = open_in(tmp_path)
            for function in (saver.meta, lambda step, saver=saver: saver.restore(step, wanted)):
                message = error_of(function, 30)
                assert f"{tmp_path}/30: checkpoint is damaged ({path.relative_to(tmp_path / '30')}" in message
                assert f"delete or move {tmp_path}/30 out of {tmp_path} to resume from step 10" in message
            saver.close()
            path.write_bytes(content)
    saver = open_in(tmp_path)
    for step in (10, 30):
        assert_bits_equal(saver.restore(step, wanted)[0], small_state(step))
    assert "no earlier step" not in error_of(saver.meta, 20)
    saver.close()


def flip(random, path, others):
    content = bytearray(path.read_bytes() or b"x")
    content[random.integers(len(content))] ^= 1 << random.integers(8)
    path.write_bytes(content)


def swap(random, path, others):
    other = others[random.integers(len(others))]
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


DAMAGES = {
    "flip": flip,
    "cut": lambda random, path, others: os.truncate(path, random.integers(max(1, path.stat().st_size))),
    "lengthen": lambda random, path, others: path.write_bytes(path.read_bytes() + random.bytes(1 + random.integers(9))),
    "delete": lambda random, path, others: path.unlink(),
    "swap": swap,
    "add": lambda random, path, others: (path.parent / f"process_{random.integers(9)}.more").write_bytes(b"{}"),
    "zero": lambda random, path, others: path.write_bytes(bytes(path.stat().st_size)),
    "renumber": lambda random, path, others: None,
}


@pytest.mark.parametrize("seed", range(64))
def test_no_damage_to_one_file_of_a_step_loads_in_silence(three_steps, tmp_path, seed):
    random = np.random.default_rng(seed)
    kind = list(DAMAGES)[seed % len(DAMAGES)]
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    mine = [path for path in files if path.is_relative_to(tmp_path / "30")]
    if kind == "add":  # a file beside the items is not read, and is the user's
        mine = [path for path in mine if path.parent.name != "30"]
    contents = {path: path.read_bytes() for path in files}
    DAMAGES[kind](random, mine[random.integers(len(mine))], files)
    step = 30
    if kind == "renumber":
        step = 31 + int(random.integers(1000))
        (tmp_path / "30").rename(tmp_path / str(step))
    is_damaged = kind == "renumber" or any(
        not path.exists() or path.read_bytes() != contents.get(path)
        for path in {*mine, *(tmp_path / "30").rglob("*")}
        if not path.is_dir()
    )
    saver = open_in(tmp_path)
    try:
        if is_damaged:
            message = error_of(saver.restore, step, tree.abstract(small_state(0)))
            assert f"{tmp_path}/{step}: checkpoint is damaged (" in message
            assert "step 20 is intact" in message or "step 10 is intact" in message  # a swap damages two
        else:
            assert kind == "swap"  # of a file with itself or with an equal one
    finally:
        saver.close()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("three_steps")
    save_steps(directory, 10, 20, 30)
    return directory


def test_a_step_whose_files_are_not_found_again_is_not_saved_and_replaces_nothing(tmp_path, monkeypatch):
    save_steps(tmp_path, 10)
    saver = open_in(tmp_path, keep_last=1)
    read_back = step_files.read_back

    def lose_a_file(directory, step, beside):
        next(path for path in directory.rglob("manifest.ocdbt") if path.parent.name == "state").unlink()
        read_back(directory, step, beside)

    monkeypatch.setattr(step_files, "read_back", lose_a_file)
    saver.save(20, small_state(20), {}, meta={})
    message = error_of(saver.wait)
    assert "saving step 20 failed" in message and "state/manifest.ocdbt" in message
    assert "step 10 is complete and untouched" in message and saver.steps() == [10]
    saver.close()


def test_a_directory_that_is_removed_under_a_run_is_reported_in_one_line(tmp_path):
    saver = open_in(tmp_path / "run")
    saver.save(10, small_state(10), {}, meta={})
    saver.wait()
    saver.save(20, small_state(20), {}, meta={})
    saver._manager.wait_until_finished()
    shutil.rmtree(tmp_path / "run")
    assert "saving step 20 failed" in error_of(saver.close)


def test_a_step_that_orbax_cannot_read_is_damaged_and_a_full_memory_is_not_damage(tmp_path, monkeypatch):
    save_steps(tmp_path, 10)
    saver = open_in(tmp_path)

    def fail_with(error):
        def restore(*args, **kwargs):
            raise error

        monkeypatch.setattr(saver._arrays, "restore", restore)

    fail_with(Exception("Encountered error\nwhile reading"))
    message = error_of(saver.restore, 10, tree.abstract(small_state(0)))
    assert "damaged (Exception: Encountered error while reading); no earlier step is intact" in message
    for error in (MemoryError("no memory"), RuntimeError("RESOURCE_EXHAUSTED")):
        fail_with(error)
        with pytest.raises(type(error)):
            saver.restore(10, tree.abstract(small_state(0)))
    saver.close()


def test_foreign_directories_are_refused_and_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert f"{tmp_path}: holds notes.txt, photos and no checkpoint" in error_of(open_in, tmp_path)
    assert "cannot hold checkpoints (Not a directory)" in error_of(open_in, tmp_path / "notes.txt" / "x")
    assert "mounted file system" in error_of(open_in, "gs://bucket/run")

    year = tmp_path / "runs" / "2024"
    year.mkdir(parents=True)
    (year / "photo.jpg").write_text("mine")
    save_steps(tmp_path / "runs", 3000, 3001, keep_last=1)
    assert sorted(os.listdir(tmp_path / "runs")) == ["2024", "3001"] and (year / "photo.jpg").exists()
    saver = open_in(tmp_path / "runs")
    assert f"{year}: not a checkpoint of zerojax" in error_of(saver.meta, 2024)
    saver.close()


def test_a_directory_that_is_not_writable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *args: False)  # chmod does not stop a test that runs as root
    assert f"{tmp_path}: not writable" in error_of(open_in, tmp_path)


def test_a_step_whose_deletion_was_killed_goes_with_the_next_save(tmp_path):
    save_steps(tmp_path, 10, 20)
    shutil.rmtree(tmp_path / "10" / "meta")
    (tmp_path / "10" / "sizes.json").unlink()
    save_steps(tmp_path, 30, keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["20", "30"]


def test_orbax_logs_nothing_below_warning(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="absl"):
        save_steps(tmp_path, 10)
        logging.getLogger("absl").info("from another package")
    assert [record.message for record in caplog.records if record.name == "absl"] == ["from another package"]


SAVE_FOREVER = """
import itertools
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
sys.path[:0] = ["tests/support", "tests/checkpoint"]
import test_checkpointer
saver = test_checkpointer.open_in(DIRECTORY, keep_last=2)
for step in itertools.count((saver.latest_step() or 0) + 1):
    saver.save(step, test_checkpointer.small_state(step, rows=4096), {"0": step}, meta={"step": step})
    print(step, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_complete_step(commands, tmp_path):
    random = np.random.default_rng(0)
    wanted = tree.abstract(small_state(0, rows=4096))
    last = 0
    for _ in range(2):
        process = commands.start_python(SAVE_FOREVER.replace("DIRECTORY", repr(str(tmp_path))))
        deadline = time.monotonic() + 120
        while process.out.count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = process.out.splitlines()[:3]
        assert len(lines) == 3 and all(line.isdigit() for line in lines), process.err
        time.sleep(random.uniform(0, 0.4))
        process.kill(signal.SIGKILL)
        process.wait()
        saver = open_in(tmp_path)
        step = saver.latest_step()
        assert step >= int(lines[-1]) - 1 > last  # save(n) returns only once n - 1 is complete
        state, data_state = saver.restore(step, wanted)
        assert_bits_equal(state, small_state(step, rows=4096))
        assert data_state == {"0": step} and saver.meta(step) == {"step": step}
        saver.close()
        last = step
    save_steps(tmp_path, last + 1, keep_last=1)
    assert os.listdir(tmp_path) == [str(last + 1)]  # nothing is left of the killed saves


FILL_THE_DISK = """
import sys, time, test_checkpointer
from zerojax import tree
from zerojax.errors import UserError
saver = test_checkpointer.open_in(sys.argv[1], keep_last=1)
big = test_checkpointer.jax.random.normal(test_checkpointer.jax.random.key(0), (2 ** 20,))
saver.save(10, test_checkpointer.small_state(10), {}, meta={})
saver.save(20, {"big": big}, {}, meta={})

def save_two():
    saver.save(30, {"big": big}, {}, meta={})
    time.sleep(1)
    saver.save(40, {}, {}, meta={})

for attempt in (saver.wait, save_two):
    try:
        attempt()
        print("no error")
    except UserError as error:
        print("USER ERROR", error)
restored, _ = saver.restore(10, tree.abstract(test_checkpointer.small_state(0)))
test_checkpointer.assert_bits_equal(restored, test_checkpointer.small_state(10))
saver.save(50, test_checkpointer.small_state(50), {}, meta={})
saver.close()
print("LATEST", saver.latest_step())
"""


@runs.LONG  # tests/test_train.py fills a disk under a run, which goes on from its last checkpoint
def test_a_full_disk_is_reported_and_the_last_checkpoint_survives_it(tmp_path):
    script = f'mount -t tmpfs -o size=3m tmpfs {tmp_path} && exec "$@"'
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [
                str(ROOT),
                str(ROOT / "tests" / "support"),
                str(ROOT / "tests" / "checkpoint"),
                os.environ.get("PYTHONPATH", ""),
            ]
        ),
    }
    command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path / "run")]
    result = file_systems.in_a_namespace(script, command, env)
    errors = [line for line in result.stdout.splitlines() if line.startswith("USER ERROR")]
    assert [
        f"saving step {step} failed: no space left on the disk" in line for step, line in zip((20, 30), errors)
    ] == [
        True,
        True,
    ], result.stdout + result.stderr
    assert all("step 10 is complete and untouched" in line for line in errors)
    assert "LATEST 50" in result.stdout, result.stdout + result.stderr


TWO_PROCESSES = """
import json
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
import numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.sharding import NamedSharding, PartitionSpec as P
from zerojax import tree
from zerojax.checkpoint import checkpointer
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
full = np.arange(32, dtype=np.float32).reshape(8, 4)
sharding = NamedSharding(mesh, P("data"))
state = {"w": jax.make_array_from_callback(full.shape, sharding, lambda index: full[index]),
         "rng": jax.random.key(1), "count": 3}
saver = checkpointer.Checkpointer(directory, keep_last=1, keep_best=0)
for step in (1, 2):
    saver.save(step, state, {str(rank): {"at": "x" * (5 + 10 * rank)}}, meta={}, eval_loss=1.0)
wanted = tree.abstract(state)
wanted["w"] = jax.ShapeDtypeStruct(full.shape, np.float32, sharding=NamedSharding(mesh, P(None, "data")))
restored, data_state = saver.restore(2, wanted)
for shard in restored["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, full[shard.index])
saver.close()
print("STATE", json.dumps(data_state, sort_keys=True))
jax.distributed.shutdown()
"""


def test_two_processes_save_together_and_each_gets_the_rows_of_both(commands, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    given = f"directory, port = {str(tmp_path / 'run')!r}, {port}"
    workers = [commands.start_python(f"{given}\nrank = {rank}\n{TWO_PROCESSES}") for rank in range(2)]
    rows = {"0": {"at": "x" * 5}, "1": {"at": "x" * 15}}
    for worker in workers:
        assert f"STATE {json.dumps(rows)}" in worker.wait().out, worker.err
    saver = open_in(tmp_path / "run")
    wanted = {"w": np.zeros((8, 4), np.float32), "rng": jax.random.key(0), "count": 0}
    state, data_state = saver.restore(2, tree.abstract(wanted))
    saver.close()
    np.testing.assert_array_equal(raw(state["w"]), np.arange(32, dtype=np.float32).reshape(8, 4))
    assert raw(state["rng"]).tobytes() == raw(jax.random.key(1)).tobytes()
    assert data_state == rows and state["count"] == 3


def test_a_second_write_that_failed_with_the_first_is_not_reported_again():
    def record(message):
        return logging.LogRecord("asyncio", logging.ERROR, "base_events.py", 1, message, (), ValueError)

    lost = "Task exception was never retrieved\nfuture: <Task defined at /site-packages/orbax/checkpoint/serialization.py:1>"
    assert not checkpointer._is_worth_showing(record(lost))
    assert checkpointer._is_worth_showing(
        record("Task exception was never retrieved\nfuture: <Task defined at mine.py:1>")
    )


def test_the_next_batch_is_saved_beside_the_items_and_goes_with_its_step(tmp_path):
    batch = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "version": np.int64(4)}
    with checkpointer.Checkpointer(tmp_path, keep_last=1) as saver:
        saver.save(1, small_state(1), {}, batch=batch, card="{}")
        saver.wait()
        found = saver.batch(1)
        assert found.keys() == batch.keys() and found["version"] == 4
        np.testing.assert_array_equal(found["tokens"], batch["tokens"])
        saver.save(2, small_state(2), {})
        saver.wait()
        assert saver.batch(2) == {} and saver.steps() == [2]
        saver.save(3, small_state(3), {}, batch=batch)
    path = tmp_path / "3" / "batch.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"3: checkpoint is damaged \(batch.npz"):
        checkpointer.Checkpointer(tmp_path).batch(3)
