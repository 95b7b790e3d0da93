"""Checks that a step over a pipeline is the step of one device. This module tests zerojax.zero.pipeline.step."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState
from pipelines import BLOCKS, TENSOR, Block, Net, abstract, assert_equal, on_one_device, prepared, trained

import zerojax
from zerojax.errors import UserError
from zerojax.zero.pipeline import order, turns

HALF = 2e-3  # 8 bits of mantissa, through two steps of Adam


@pytest.mark.parametrize(
    "mesh, stage, schedule, chunks, layers",
    [
        ({"pipe": 2, "data": 2}, 3, "zero_bubble", 1, 2),
        pytest.param({"pipe": 2, "data": 2}, 3, "1f1b", 1, 3, marks=runs.LONG),
        pytest.param({"pipe": 2, "data": 2}, 2, "zero_bubble", 1, 3, marks=runs.LONG),
        pytest.param({"pipe": 4, "data": 2}, 3, "zero_bubble", 1, 3, marks=runs.LONG),
        pytest.param({"pipe": 4, "data": 2}, 2, "gpipe", 1, 3, marks=runs.LONG),
        pytest.param({"pipe": 2, "data": 2}, 1, "interleaved", 2, 3, marks=runs.LONG),
        pytest.param({"pipe": 2, "replica": 2, "data": 2}, 3, "1f1b", 1, 3, marks=runs.LONG),
        pytest.param({"pipe": 2, "context": 2}, 2, "1f1b", 1, 3, marks=runs.LONG),
    ],
)
def test_a_step_over_a_pipeline_is_that_of_one_device(mesh, stage, schedule, chunks, layers):
    metrics, params, state = trained(mesh, stage, schedule=schedule, chunks=chunks, net=Net(layers=layers))
    assert_equal((metrics, params), on_one_device(net=Net(layers=layers)))
    assert int(state.step) == 2
    homes = {leaf.sharding.device_set == state.step.sharding.device_set for leaf in jax.tree.leaves(state.params)}
    assert homes == {False}, "each weight lives on the devices of one group"
    moments = jax.tree.leaves(state.opt_state[0].mu)
    assert [m.sharding for m in moments] == [p.sharding for p in jax.tree.leaves(state.params)] or stage < 3


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"fp8": zerojax.Fp8("tensorwise")}, marks=runs.LONG),
        {"fp8": zerojax.Fp8("rowwise", first=1)},
    ],
)
def test_with_one_device_a_group_it_is_so_to_the_last_bit(how):
    metrics, params, _ = trained({"pipe": 2}, schedule="interleaved", chunks=2, **how)
    expected = trained({}, **how)
    assert metrics == expected[0]
    jax.tree.map(np.testing.assert_array_equal, params, expected[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "pipe, axis, stage", itertools.product((2, 4), ("replica", "data", "context", "model"), range(4))
)
def test_each_axis_at_each_stage_is_that_of_one_device(pipe, axis, stage):
    how = {"overrides": TENSOR} if axis == "model" else {}
    schedule = (order.KINDS if pipe == 2 else ("1f1b", "zero_bubble", "gpipe", "1f1b"))[stage]
    found = trained({"pipe": pipe, axis: 2}, stage, schedule=schedule, chunks=1 + (schedule == "interleaved"), **how)
    assert_equal(found, on_one_device())


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, how",
    [
        ({"pipe": 2, "data": 2, "model": 2}, {"overrides": TENSOR}),
        ({"pipe": 2, "data": 2}, {"trainable": "up|head"}),
        ({"pipe": 2, "data": 2}, {"remat": "none"}),
        ({"pipe": 2, "data": 2}, {"has_target": True}),
        ({"pipe": 2, "data": 2}, {"loss_scale": zerojax.DynamicLossScale(init_scale=2.0**40)}),
        ({"pipe": 2, "data": 2}, {"remat": "full", "offload": r"block_\d+"}),
        ({"pipe": 2, "data": 2}, {"offload": r"block_\d+/up"}),
        ({"pipe": 2, "data": 2}, {"tx": optax.sgd(0.1, momentum=0.9)}),
        ({"pipe": 2, "data": 2}, {"tx": optax.adafactor(1e-2, min_dim_size_to_factor=8)}),
        ({"pipe": 2, "data": 2}, {"tx": zerojax.fused_adamw(1e-2)}),
    ],
)
def test_other_settings_are_those_of_one_device(mesh, how):
    expected = trained({}, **{name: own for name, own in how.items() if name != "overrides"})
    assert_equal(trained(mesh, 3, schedule="1f1b", **how), expected)


@runs.LONG
@pytest.mark.parametrize("stage", [pytest.param(1, marks=runs.LONG), 3])
def test_sums_in_16_bits_are_near_those_in_32_and_take_half_of_their_memory(stage):
    mesh, how = {"pipe": 2, "data": 2}, {"schedule": "1f1b", "accum_dtype": jnp.bfloat16, "net": Net(layers=2)}
    found, exact = trained(mesh, stage, **how), on_one_device(net=Net(layers=2))
    assert_equal(found, exact, tolerance=HALF)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(exact[1])))
    (_, _), step = prepared(mesh, stage, shard=abstract, **how)
    sums = [own for group in step.updates for own in map(step._of_groups[0].summed, group.trained)]
    assert {own.dtype for own in sums} == {jnp.dtype(jnp.bfloat16)}


@runs.LONG
@pytest.mark.parametrize(
    "axes, stage", [({"data": 2}, 0), ({"data": 2}, 1), ({"data": 2}, 3), ({"data": 2, "model": 2}, 2)]
)
def test_sums_in_16_bits_have_the_bits_in_turns_that_they_have_after_the_pass(axes, stage, monkeypatch):
    how = {"schedule": "1f1b", "accum_dtype": jnp.bfloat16, "overrides": TENSOR if "model" in axes else ()}
    found = trained({"pipe": 2, **axes}, stage, **how)
    monkeypatch.setattr(turns, "of", lambda part, *of: [part])
    expected = trained({"pipe": 2, **axes}, stage, **how)
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


@pytest.mark.long
def test_masks_of_dropout_are_those_without_a_pipeline():
    found, expected = (
        trained(mesh, 2, net=Net(dropout=0.5), schedule=name)
        for mesh, name in (({"pipe": 2, "data": 2}, "1f1b"), ({"data": 2}, ""))
    )
    assert_equal(found, expected)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"reduce_dtype": None}, "reduce_dtype: is None"),
        ({"by_columns": "head"}, "by_columns: 'head' needs all devices"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(how, message):
    with pytest.raises(UserError, match=message):
        prepared({"pipe": 2, "data": 2}, 3, shard=abstract, schedule="1f1b", **how)


def test_a_mesh_with_stages_needs_a_pipeline():
    with pytest.raises(UserError, match="pipeline: is not given"):
        prepared({"pipe": 2}, shard=abstract)


def test_one_pass_is_warned_of_with_the_share_that_groups_wait():
    (_, partition), _ = prepared({"pipe": 2}, shard=abstract, schedule="1f1b")
    with pytest.warns(
        UserWarning, match="^grad_accum: is 1, so the 2 groups .* each waits 50% of the time; divide .* at least 2"
    ):
        zerojax.make_train_step(lambda *_: 0.0, partition, blocks=BLOCKS, reduce_dtype=jnp.float32)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:grad_accum")
@pytest.mark.parametrize("passes", [1, 4])
def test_a_batch_may_be_one_array_and_leaves_may_be_padded(passes):
    batch = np.random.default_rng(0).normal(size=(passes, 12, 16)).astype(np.float32)
    batch = batch[0] if passes == 1 else batch
    micro = batch if passes == 1 else batch[0]

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for number in range(3):
                x = Block(0.0, name=f"block_{number}")(x, 1.0)
            return x

    def loss(params, x, state):
        return jnp.mean(jnp.square(Layers().apply({"params": params}, x) - 1))

    def init(key):
        params = Layers().init(key, jnp.zeros((1, 16)))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    losses = []
    for pipe, data in ((1, 1), (2, 3)):
        mesh = zerojax.make_mesh(pipe=pipe, data=data, devices=jax.devices()[: pipe * data])
        pipeline = zerojax.Pipeline(loss, micro, BLOCKS) if pipe > 1 else None
        how = {"mesh": mesh, "min_size": 0, "indivisible": "pad", "pipeline": pipeline}
        state, partition = zerojax.shard_train_state(init, jax.random.key(0), **how)
        step = zerojax.make_train_step(loss, partition, blocks=BLOCKS, grad_accum=passes, reduce_dtype=jnp.float32)
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[2:], losses[:2], rtol=1e-5)
