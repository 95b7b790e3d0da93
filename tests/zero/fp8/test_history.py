"""Checks delayed scaling: what matmuls see, what a step remembers, and what a run restores. This module tests zerojax.zero.fp8.history."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

import zerojax
from zerojax.checkpoint import checkpointer
from zerojax.errors import UserError
from zerojax.ops import fp8
from zerojax.trainer import program, resume
from zerojax.trainer import state as state_lib
from zerojax.zero.fp8 import history

MATRICES = (((1,), (0,)), ((), ()))
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
SETTINGS = zerojax.Fp8(recipe="delayed", history=3)


class Blocks(nn.Module):
    """Two blocks whose first layer reads the batch as it is."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x + nn.Dense(8, name="out")(nn.tanh(nn.Dense(16, name="in")(x)))

        for number in range(2):
            x = Block(name=f"block_{number}")(x)
        return nn.Dense(1, name="head")(x)


def init(key):
    params = Blocks().init(key, jnp.zeros((1, 8)))["params"]
    fields = {"fp8": SETTINGS.init(params, r"block_\d"), "rng": jax.random.key_data(key)}
    return zerojax.TrainState.create(apply_fn=Blocks().apply, params=params, tx=optax.sgd(0.1), **fields)


def loss_fn(params, batch, state):
    return jnp.mean(jnp.square(state.apply_fn({"params": params}, batch["x"])))


@functools.cache
def stepped(stage=3, **how):
    """Returns the state after a step on X, and one on a multiple of it."""
    mesh = zerojax.make_mesh(data=8, devices=jax.devices()[:8])
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, min_size=0)
    step = zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", fp8=SETTINGS, **how)
    rows = X.reshape(how.get("grad_accum", 1), -1, 8) if "grad_accum" in how else X
    for factor in (1.0, 3.0):
        state, _ = step(state, {"x": factor * rows})
    return state


def test_scales_come_from_the_history_and_its_gradient_is_what_the_matmul_saw():
    x, w, dy = jnp.asarray(X), jnp.asarray(X[:8]), jnp.asarray(X)
    past = jnp.asarray([[0.0, 100.0, 7.0], [3e-3, 0.0, 0.0]])

    def run(x, w, past):
        return fp8.dot_general(x, w, MATRICES, recipe="delayed", history=past)

    y, pull = jax.vjp(run, x, w, past)
    scale = fp8.scale_of_amax(jnp.float32(100), fp8.FORWARD)
    rounded = fp8.quantized(x, fp8.FORWARD, scale).values.astype(jnp.float32) / scale
    plain = fp8.quantized(w, fp8.FORWARD, fp8.scale_of(w, fp8.FORWARD))
    np.testing.assert_allclose(y, rounded @ (plain.values.astype(jnp.float32) / plain.scale), rtol=1e-5, atol=1e-5)
    dx, _, seen = pull(dy)
    expected = jnp.stack([jnp.max(jnp.abs(x)), jnp.max(jnp.abs(dy))])
    np.testing.assert_array_equal(seen, jnp.zeros((2, 3)).at[:, 0].set(expected))
    assert np.abs(dx).max() < np.abs(dy @ w.T).max()  # dy is clipped to what its history allows
    empty = jnp.zeros((2, 3))
    np.testing.assert_array_equal(run(x, w, empty), fp8.dot_general(x, w, MATRICES))


HOWS = {
    "one pass": {"reduce_dtype": jnp.float32},
    "two passes": {"reduce_dtype": jnp.float32, "grad_accum": 2},
    "by the compiler": {},
    "stage 1": {"reduce_dtype": jnp.float32, "stage": 1, "remat": "none"},
}


@pytest.mark.parametrize("name", runs.cases(HOWS, long=["one pass", "stage 1"]))
def test_a_step_remembers_the_largest_magnitudes_of_all_devices_and_passes_the_newest_first(name):
    state = stepped(**HOWS[name])
    assert set(state.fp8) == {f"block_{n}/{part}" for n in (0, 1) for part in ("in", "out")}
    largest = np.abs(X).max()
    np.testing.assert_array_equal(state.fp8["block_0/in"][0], np.asarray([3, 1, 0], np.float32) * largest)
    for past in state.fp8.values():
        assert np.all(np.asarray(past[:, :2]) > 0) and np.all(np.asarray(past[:, 2]) == 0)


@runs.LONG  # tests/zero/fp8/test_modules.py compares stages, and the test above what they remember with a closed form
def test_stages_remember_the_same():
    ours, theirs = stepped(**HOWS["two passes"]), stepped(**HOWS["two passes"], stage=0)
    for path, past in ours.fp8.items():
        np.testing.assert_allclose(past, theirs.fp8[path], rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params)):
        np.testing.assert_allclose(leaf, other, atol=1e-5)


def test_a_state_without_histories_is_refused():
    def plain(key):
        return init(key).replace(fp8=())

    mesh = zerojax.make_mesh(data=8, devices=jax.devices()[:8])
    partition = zerojax.partition_state(jax.eval_shape(plain, jax.random.key(0)), mesh=mesh, stage=3)
    with pytest.raises(UserError, match=r"^fp8\.recipe: 'delayed' needs a field `fp8` in the train state"):
        zerojax.make_train_step(loss_fn, partition, blocks=r"block_\d", fp8=SETTINGS)
    with pytest.raises(UserError, match=r"^fp8\.recipe: 'delayed' needs .* a history for each module"):
        history.check(init(jax.random.key(0)).replace(fp8=history.empty(["other"], 2)), ["block_0/up"])
    with pytest.raises(UserError, match=r"^fp8\.dot_general: the recipe 'delayed' needs a history"):
        fp8.dot_general(jnp.ones((4, 4)), jnp.ones((4, 4)), MATRICES, recipe="delayed")
    with pytest.raises(UserError, match=r"^fp8\.history: must be a number of steps from 1 to 4096, and is 0"):
        zerojax.Fp8(history=0)


def test_histories_are_renewed_by_field_and_modules_find_theirs_by_the_end_of_its_path():
    before = history.empty(["net/block_0/up", "net/block_0/big_up"], 2)
    kept = history.OfState()
    with kept.known({"_overwrite_with_gradient": before}):
        assert kept.of_module("block_0/up") is before["net/block_0/up"]
        assert kept.of_module("up/block_0") is None
        inside = kept.of_block({"net/block_0/up/kernel": None, "net/block_0/up/bias": None})
        assert list(inside["_overwrite_with_gradient"]) == ["net/block_0/up"]
    assert kept.of_module("block_0/up") is None
    assert kept.of_block(["net/block_0/up/kernel"]) == {"_overwrite_with_gradient": {}}


def test_a_run_goes_on_in_another_precision_and_back_and_with_another_length_of_history(tmp_path):
    delayed = {"precision": "fp8", "fp8__recipe": "delayed", "fp8__history": 4}

    def built(**settings):
        return program.build(runs.config(**settings), tokenizer_vocab=320)

    def save(before, state, step):
        saver.save(step, before.to_logical(state), {}, meta=resume.meta(before))
        saver.wait()

    def restored(step, **settings):
        after = built(**settings)
        state = resume.state(after, saver, step, saver.meta(step))
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == after.partition.shardings
        return state

    before = built(**delayed)
    first = state_lib.first(before)
    first = first.replace(fp8={path: past + 1 + n for n, (path, past) in enumerate(first.fp8.items())})
    with checkpointer.Checkpointer(tmp_path) as saver:
        save(before, first, 2)
        same, shorter = restored(2, **delayed), restored(2, **{**delayed, "fp8__history": 3})
        assert len(same.fp8) == 7
        jax.tree.map(np.testing.assert_array_equal, same.fp8, first.fp8)
        assert all(past.shape == (2, 3) and not np.any(past) for past in shorter.fp8.values())
        plain = restored(2, precision="bf16")
        assert plain.fp8 == ()
        save(built(precision="bf16"), plain, 3)
        back = restored(3, **delayed)
    assert len(back.fp8) == 7 and not any(np.any(past) for past in back.fp8.values())
    jax.tree.map(np.testing.assert_array_equal, back.params, plain.params)
    assert jax.tree.leaves(back.fp8)[0].sharding.is_fully_replicated
