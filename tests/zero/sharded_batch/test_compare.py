"""Checks that losses which reduce_dtype changes are found. This module tests zerojax.zero.sharded_batch.compare."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax

X = jax.random.normal(jax.random.key(1), (16, 8))
MASK = (jnp.arange(16) % 5 > 1).astype(jnp.float32)


class WithMean(TrainState):
    mean: Any


def found(loss_fn):
    state = WithMean.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1), mean=jnp.zeros(8))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    lines = zerojax.compare_sums(loss_fn, part, state, {"x": X, "mask": MASK})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return lines


def test_a_loss_that_is_a_mean_over_examples_or_says_its_weight_is_exact():
    def loss_fn(params, batch, state):
        squares = jnp.mean((batch["x"] @ params["w"]) ** 2, axis=-1)
        fields = {"mean": 0.5 * state.mean + 0.5 * batch["x"].mean(0)}
        return zerojax.Mean(jnp.sum(squares * batch["mask"]), batch["mask"].sum()), {
            "metrics": {"plain": squares.mean()},
            "state": fields,
        }

    assert found(loss_fn) == []


def test_each_value_that_differs_is_named_with_both_values_and_the_way_out():
    def loss_fn(params, batch, state):
        y = batch["x"] @ params["w"]
        masked = jnp.sum(jnp.mean(y**2, axis=-1) * batch["mask"]) / batch["mask"].sum()
        return masked, {"metrics": {"plain": jnp.mean(y)}, "state": {"mean": batch["x"].max(0)}}

    lines = found(loss_fn)
    assert [line.split(":")[0] for line in lines] == ["grad_norm", "loss", "state/mean"]
    assert all("% apart); return zerojax.Mean(total, weight)" in line and "\n" not in line for line in lines)


def test_lines_that_draw_the_same_numbers_on_every_device_are_named():
    closed_over = jax.random.key(0)

    def loss_fn(params, batch, state):
        noise = jax.random.normal(jax.random.fold_in(closed_over, state.step), batch["x"].shape)  # the same
        apart = jax.random.normal(batch["key"])
        return jnp.mean((batch["x"] @ params["w"]) ** 2) + 0.0 * (noise.sum() + apart)

    state = WithMean.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1), mean=jnp.zeros(8))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=0)
    (line,) = zerojax.compare_sums(loss_fn, part, state, {"x": X, "key": jax.random.key(1)})
    assert (
        f"test_compare.py:{loss_fn.__code__.co_firstlineno + 1}" in line
        and "same random numbers on every device" in line
    )
