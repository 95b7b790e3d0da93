"""Checks that a step that overflows changes only the loss scale. This module tests loss scaling in zerojax.zero.step."""

from typing import Any

import arrays
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState

from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.optim import fused, master_weights
from zerojax.zero import shard_state, step
from zerojax.zero.update import loss_scale

STEPS, BAD_STEPS = 12, (0, 3, 4, 9)
TX = optax.adamw(optax.linear_schedule(3e-2, 1e-3, STEPS), weight_decay=0.1)
ANOTHER_PROGRAM = 1e-6  # the same float32 arithmetic, fused differently by the compiler
LAST_PLACES = 2e-3  # relative: float16 has 11 bits, and another scale rounds values below 2**-14 differently


class ScaledState(TrainState):
    loss_scale: Any


def params_of(dtype=jnp.float32):
    return {
        "a": (arrays.normal(0, (8, 16)) / 4).astype(dtype),
        "b": jnp.zeros((16,), dtype),
        "c": (arrays.normal(1, (16, 8)) / 4).astype(dtype),
    }


def loss_fn(params, batch, state):
    hidden = jax.nn.relu(batch["x"] @ params["a"] + params["b"])
    return jnp.mean((hidden @ params["c"] - batch["y"]).astype(jnp.float32) ** 2)


def batch_of(number, spoil=None):
    """Returns a batch. `spoil` becomes one number of one row, so it is on one device."""
    x, y = np.random.default_rng(100 + number).standard_normal((2, 16, 8), np.float32)
    x = jnp.asarray(x)
    return {"x": x if spoil is None else x.at[5, 3].set(spoil), "y": jnp.asarray(y)}


ROUNDED = fused.fused_adamw(optax.linear_schedule(3e-2, 1e-3, STEPS), moments="bf16", stochastic_rounding=True)


def start(scaler, stage, copy_dtype=None, tx=TX):
    tx = master_weights.with_master_weights(tx) if copy_dtype else tx
    state = ScaledState.create(
        apply_fn=None, params=params_of(copy_dtype or jnp.float32), tx=tx, loss_scale=scaler.init()
    )
    return shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=stage, min_size=0)


def without_scale(state):
    return jax.tree.map(np.asarray, jax.tree.leaves(state.replace(loss_scale=())))


# compute dtype, scaler, copy dtype, optimizer, stage, passes, tolerance to the run without the bad batches
RUNS = {
    "float16, static": (jnp.float16, loss_scale.StaticLossScale(2.0**10), None, TX, 3, 1, 0),
    "float16, static, copies, 2 passes": (jnp.float16, loss_scale.StaticLossScale(2.0**10), jnp.float16, TX, 1, 2, 0),
    "float16, static, copies, one pass": (
        jnp.float16,
        loss_scale.StaticLossScale(2.0**10),
        jnp.float16,
        ROUNDED,
        2,
        1,
        0,
    ),
    "float32, dynamic": (None, loss_scale.DynamicLossScale(window=2), None, TX, 2, 1, 0),
    "float16, dynamic": (jnp.float16, loss_scale.DynamicLossScale(2.0**12, window=2), None, TX, 3, 1, LAST_PLACES),
}


@pytest.mark.parametrize("name", runs.cases(RUNS, long=["float16, static", "float16, static, copies, one pass"]))
def test_a_run_with_overflows_is_the_run_without_their_batches(name):
    dtype, scaler, copy_dtype, tx, stage, passes, tolerance = RUNS[name]
    first, part = start(scaler, stage, copy_dtype, tx)
    train_step = step.make_train_step(
        loss_fn, part, clip_norm=0.5, grad_accum=passes, compute_dtype=dtype, loss_scale=scaler
    )

    def run(state, is_bad, only_good):
        found = []
        for number in range(STEPS):
            if number in is_bad and only_good:
                continue
            spoil = {0: jnp.inf, 3: jnp.nan, 4: 1e30, 9: -jnp.inf}[number] if number in is_bad else None
            batch = batch_of(number, spoil)
            batch = batch if passes == 1 else jax.tree.map(lambda leaf: leaf.reshape(passes, -1, 8), batch)
            state, metrics = train_step(state, batch)
            skipped = int(metrics["overflow_leaf"]) >= 0
            assert skipped == (number in is_bad)
            if not skipped:
                found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return found, state, metrics

    found, state, metrics = run(jax.tree.map(jnp.copy, first), BAD_STEPS, only_good=False)
    expected, clean, _ = run(first, BAD_STEPS, only_good=True)
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    for a, b in zip(without_scale(state), without_scale(clean)):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=tolerance, atol=tolerance)
    assert int(state.step) == STEPS - len(BAD_STEPS) and int(metrics["skipped_steps"]) == len(BAD_STEPS)
    assert found[-1][0] < found[0][0], "the run must learn"
    # Every device holds the same scale.
    assert {shard.data.item() for shard in state.loss_scale.scale.addressable_shards} == {float(state.loss_scale.scale)}


def test_a_power_of_two_costs_no_bits_and_no_scale_is_the_scale_1():
    runs = []
    for scaler in (loss_scale.StaticLossScale(2.0**16), loss_scale.StaticLossScale(1.0), None):
        state, part = start(scaler or loss_scale.DynamicLossScale(), 3)
        if scaler is None:
            plain = TrainState.create(apply_fn=None, params=params_of(), tx=TX)
            state, part = shard_state.shard_train_state(plain, mesh=mesh_lib.make_mesh(), stage=3, min_size=0)
        train_step = step.make_train_step(loss_fn, part, clip_norm=0.5, loss_scale=scaler)
        numbers = []
        for number in range(STEPS):
            state, metrics = train_step(state, batch_of(number))
            numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        runs.append((numbers, jax.tree.map(np.asarray, (state.params, state.opt_state))))
        assert ("loss_scale" in metrics) == (scaler is not None)
    scaled, by_one, absent = runs
    jax.tree.map(np.testing.assert_array_equal, scaled, by_one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=ANOTHER_PROGRAM), by_one, absent)


def test_gradients_too_small_for_float16_reach_the_weights():
    """Without the scale they are zero. With it they are those of float32."""

    def tiny(params, batch, state):
        return 2.0**-18 * jnp.mean((batch["x"] @ params["w"]).astype(jnp.float32))

    batch = {"x": arrays.normal(0, (16, 8))}
    moved = {}
    for name, scaler in (("scaled", loss_scale.DynamicLossScale()), ("unscaled", loss_scale.StaticLossScale(1.0))):
        params = {"w": jnp.ones((8, 8), jnp.float16)}
        tx = master_weights.with_master_weights(optax.sgd(2.0**18))
        state = ScaledState.create(apply_fn=None, params=params, tx=tx, loss_scale=scaler.init())
        state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=1, min_size=0)
        state, _ = step.make_train_step(tiny, part, compute_dtype=jnp.float16, loss_scale=scaler)(state, batch)
        moved[name] = 1 - np.asarray(state.opt_state.master["w"])
    expected = np.broadcast_to(np.asarray(batch["x"]).mean(0)[:, None] / 8, (8, 8))
    np.testing.assert_allclose(moved["scaled"], expected, rtol=LAST_PLACES, atol=LAST_PLACES * abs(expected).max())
    assert abs(moved["unscaled"] - expected).max() > 0.1 * abs(expected).max()


@pytest.fixture(scope="module")
def spoilt_gradients():
    """Returns f(leaf, row, column, value): takes one step whose gradient has `value` at one element, and returns the result."""
    scaler = loss_scale.DynamicLossScale(hysteresis=1)
    before, part = start(scaler, 3)

    def spoilt(params, batch, state):
        return loss_fn(params, batch, state) + sum(jnp.sum(params[k] * batch["add"][k][0]) for k in params)

    train_step = step.make_train_step(spoilt, part, loss_scale=scaler, donate=False)

    def take(leaf, place, value):
        add = {k: np.zeros(p.shape, np.float32) for k, p in params_of().items()}
        add[leaf].flat[place % add[leaf].size] = value
        batch = {**batch_of(0), "add": {k: np.broadcast_to(v, (8, *v.shape)) for k, v in add.items()}}
        return before, *train_step(before, batch)

    return take


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from("abc"), st.integers(0, 127), st.sampled_from([np.inf, -np.inf, np.nan, 65504.0, 1e18])
)
def test_one_bad_element_anywhere_skips_the_step_and_its_leaf_is_named(spoilt_gradients, leaf, position, value):
    before, after, metrics = spoilt_gradients(leaf, position, value)
    is_bad = not np.isfinite(value)
    told = f"the gradient of params/{leaf} is not finite at loss scale 65536"
    assert loss_scale.overflow(metrics, before.params) == (told if is_bad else None)
    assert int(after.step) == (0 if is_bad else 1)
    assert float(after.loss_scale.scale) == (2.0**15 if is_bad else 2.0**16)
    assert float(metrics["loss_scale"]) == 2.0**16
    assert not metrics["is_exhausted"]
    changed = [not np.array_equal(a, b) for a, b in zip(without_scale(before), without_scale(after))]
    assert not any(changed) if is_bad else all(changed)


@pytest.mark.parametrize("on_minimum", loss_scale.ON_MINIMUM)
def test_at_the_minimum_the_step_reports_that_the_run_must_end_or_holds(on_minimum):
    scaler = loss_scale.DynamicLossScale(4.0, hysteresis=1, min_scale=2.0, on_minimum=on_minimum)
    state, part = start(scaler, 3)
    train_step = step.make_train_step(loss_fn, part, loss_scale=scaler)
    state, metrics = train_step(state, batch_of(0, jnp.nan))
    loss_scale.raise_if_exhausted(metrics, state.params)
    state, metrics = train_step(state, batch_of(0, jnp.nan))
    assert float(state.loss_scale.scale) == 2.0
    if on_minimum == "hold":
        loss_scale.raise_if_exhausted(metrics, state.params)
        state, metrics = train_step(state, batch_of(1))
        assert int(state.step) == 1
    else:
        with pytest.raises(
            UserError, match=r"^the gradient of params/a is not finite at loss scale 2, which is the smallest"
        ):
            loss_scale.raise_if_exhausted(metrics, state.params)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(16)(x)))


class StateWithMore(ScaledState):
    batch_stats: Any
    key: Any


def test_batch_statistics_and_random_keys_of_a_skipped_step_are_those_before_it():
    variables = jax.jit(Classifier().init)(jax.random.key(0), jnp.zeros((2, 8)))
    scaler = loss_scale.DynamicLossScale()
    state = StateWithMore.create(
        apply_fn=None, tx=optax.sgd(0.1), loss_scale=scaler.init(), key=jax.random.key(3), **variables
    )
    state, part = shard_state.shard_train_state(state, mesh=mesh_lib.make_mesh(), stage=3, min_size=0)

    def with_statistics(params, batch, state):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, changed = Classifier().apply(variables, batch["x"], mutable=["batch_stats"])
        return jnp.mean((y - batch["y"]) ** 2), {"state": {**changed, "key": jax.random.split(state.key)[0]}}

    train_step = step.make_train_step(with_statistics, part, loss_scale=scaler, donate=False)
    plain = lambda state: jax.tree.leaves((state.params, state.batch_stats, jax.random.key_data(state.key)))  # noqa: E731
    skipped, _ = train_step(state, batch_of(0, jnp.inf))
    assert all(np.array_equal(a, b) for a, b in zip(plain(skipped), plain(state)))
    taken, _ = train_step(skipped, batch_of(0))
    assert not any(np.array_equal(a, b) for a, b in zip(plain(taken), plain(state)))


def test_a_state_without_the_field_or_with_an_unread_one_is_refused():
    scaler = loss_scale.DynamicLossScale()
    plain = TrainState.create(apply_fn=None, params=params_of(), tx=TX)
    _, part = shard_state.shard_train_state(plain, mesh=mesh_lib.make_mesh())
    with pytest.raises(UserError, match="needs a field `loss_scale` in the train state; declare `loss_scale: Any`"):
        step.make_train_step(loss_fn, part, loss_scale=scaler)
    empty = ScaledState.create(apply_fn=None, params=params_of(), tx=TX, loss_scale=())
    _, part = shard_state.shard_train_state(empty, mesh=mesh_lib.make_mesh())
    with pytest.raises(UserError, match=r"create it with loss_scale=scaler\.init"):
        step.make_train_step(loss_fn, part, loss_scale=scaler)
    _, part = start(scaler, 3)
    with pytest.raises(UserError, match="the state has a loss scale, and `loss_scale` is None; pass loss_scale="):
        step.make_train_step(loss_fn, part)
