"""Checks that losses which reduce_dtype changes are found. This module tests zerojax.zero.compare."""

from typing import Any

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.errors import UserError

X = arrays.normal(1, (16, 8))
MASK = (np.arange(16) % 5 > 1).astype(np.float32)


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


SPECS = [("x", P(("replica", "data"), "context")), ("weights", P(("replica", "data")))]


def in_parts(loss_fn, mesh=None, batch_specs=SPECS):
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 8))}, tx=optax.sgd(0.1))
    state, part = zerojax.shard_train_state(state, mesh=mesh or zerojax.make_mesh(context=4), stage=3, min_size=8)
    batch = {"x": arrays.normal(1, (4, 16, 8)), "weights": jnp.arange(4.0)}
    return zerojax.compare_context(loss_fn, part, state, batch, batch_specs=batch_specs)


def attends(attention):
    def loss_fn(params, batch, state):
        x = (batch["x"] @ params["w"]).reshape(*batch["x"].shape[:2], 2, 4)
        squares = jnp.mean(attention(x, x, x, is_causal=True) ** 2, axis=(1, 2, 3))
        return zerojax.Mean(jnp.sum(squares * batch["weights"]), batch["weights"].sum())

    return loss_fn


def test_a_loss_is_the_same_on_parts_of_sequences_only_with_attention_that_exchanges_keys():
    assert in_parts(attends(zerojax.attention)) == []
    refusal, *lines = in_parts(attends(jax.nn.dot_product_attention))
    assert refusal.startswith("loss_fn: is another one where tokens are sharded over context=4: ")
    assert [line.split(":")[0] for line in lines] == ["grad_norm", "loss"]
    assert all("attend with zerojax.attention, take positions and labels from the batch" in line for line in lines)


def test_a_mesh_without_parts_and_leaves_of_which_nothing_is_said_are_refused():
    with pytest.raises(UserError, match=r"^compare_context: the mesh has context=1"):
        in_parts(attends(zerojax.attention), mesh=zerojax.make_mesh())
    with pytest.raises(
        UserError, match=r"^batch/weights: the mesh has context=4, and nothing says which dim .*; pass batch_specs="
    ):
        in_parts(attends(zerojax.attention), batch_specs=SPECS[:1])
    with pytest.raises(UserError, match=r"^batch_specs: no leaf has a dim of tokens"):
        in_parts(attends(zerojax.attention), batch_specs=[("", P(("replica", "data")))])


def test_a_count_of_rows_that_several_devices_have_is_refused_and_one_of_tokens_is_right():
    def counts(batch):
        return {"few": jnp.sum(batch["weights"] < 2), "tokens": jnp.sum(batch["x"][..., 0] < 0)}

    for name, words in (("tokens", None), ("few", "^loss_fn: returned metrics/few, a sum that reads batch/weights")):

        def loss_fn(params, batch, state, name=name):
            return jnp.mean(batch["x"] @ params["w"]), {"metrics": {name: counts(batch)[name]}}

        if words is None:
            assert in_parts(loss_fn) == []
            continue
        with pytest.raises(UserError, match=words):
            in_parts(loss_fn)


def test_values_of_a_step_are_read_as_its_single_fields_are():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="block")(x)

    def loss_fn(params, batch, state):
        return jnp.mean(Net().apply({"params": params}, batch["x"]) ** 2)

    params = {"block": {"kernel": jnp.ones((8, 8)), "bias": jnp.zeros(8)}}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    state, part = zerojax.shard_train_state(state, mesh=zerojax.make_mesh(), stage=3, min_size=0)
    batch = {"x": X.reshape(1, 16, 8).repeat(2, 0)}
    blocks = zerojax.Blocks("block", programs="kinds")
    dtype, sums = zerojax.Fp8(dtype=jnp.bfloat16), zerojax.Sums(grad_accum=2)
    how = {"blocks": blocks, "sums": sums, "compute_dtype": dtype, "tolerance": 0.1}
    assert zerojax.compare_sums(loss_fn, part, state, batch, **how) == []
