"""Compares NNX models gathered block by block with the same gathered leaf by leaf. This module tests zerojax.zero.blocks.nnx_blocks."""

import functools
from typing import Any

import compile_only
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.plan import ledger
from zerojax.roles import WEIGHTS_BACKWARD, WEIGHTS_FORWARD

WIDTH, LAYERS, BLOCKS = 32, 2, r"layers/\d+"
X = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
TOLERANCE = 1e-6  # the same operations in another order


class State(TrainState):
    rest: Any


class Block(nnx.Module):
    def __init__(self, rngs, drop):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs) if drop else nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 64, rngs=rngs), nnx.Linear(64, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return x + scale * self.drop(self.down(nnx.gelu(self.up(self.norm(x)))))


class Net(nnx.Module):
    def __init__(self, rngs, drop, layers=LAYERS):
        self.inputs = nnx.Linear(16, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs, drop) for _ in range(layers)])
        self.outputs = nnx.Linear(WIDTH, 8, rngs=rngs)

    def __call__(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.outputs(x)


@functools.cache
def parts(drop):
    return nnx.split(Net(nnx.Rngs(0), drop), nnx.Param, ...)


def loss_of(drop):
    graph = parts(drop)[0]

    def loss_fn(params, batch, state):
        model = nnx.merge(graph, params, state.rest)
        return jnp.mean(model(batch) ** 2), {"state": {"rest": nnx.state(model, nnx.Not(nnx.Param))}}

    return loss_fn


def created(drop):
    _, params, rest = parts(drop)
    return State.create(apply_fn=None, params=params, tx=optax.adam(1e-2), rest=rest)


@functools.cache  # the key differs for omitted arguments, so callers pass all
def trained(drop, stage, reduce_dtype, blocks, heads):
    """Returns losses, params and other variables after three steps."""
    state, partition = zerojax.shard_train_state(created(drop), mesh=zerojax.make_mesh(), stage=stage, min_size=8)
    how = {"blocks": blocks, "heads": heads, "reduce_dtype": reduce_dtype}
    step, losses = zerojax.make_train_step(loss_of(drop), partition, **how), []
    for _ in range(3):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return (
        losses,
        jax.tree.map(np.asarray, nnx.pure(state.params)),
        [
            np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
            for leaf in jax.tree.leaves(state.rest)
        ],
    )


CASES = [(0.5, 3, jnp.float32), (0.0, 3, None), (0.5, 3, None), (0.5, 1, jnp.float32)]


@runs.LONG
@pytest.mark.parametrize("number", runs.cases(range(4), long=(1, 2, 3)))
def test_blocks_change_no_loss_no_draw_and_no_statistics(number):
    drop, stage, reduce_dtype = CASES[number]
    losses, params, rest = trained(drop, stage, reduce_dtype, "", "")
    found = trained(drop, stage, reduce_dtype, BLOCKS, "outputs" if drop else "")
    np.testing.assert_allclose(found[0], losses, atol=TOLERANCE)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found[1], params)
    for own, other in zip(found[2], rest):
        np.testing.assert_allclose(own, other, atol=TOLERANCE)


def test_a_module_given_as_params_keeps_what_its_blocks_change():
    model = Net(nnx.Rngs(0), 0.0)
    (state, _), partition = zerojax.shard_train_state(
        lambda: nnx.split(Net(nnx.Rngs(0), 0.0))[::-1], mesh=zerojax.make_mesh(), stage=3, min_size=8
    )

    def loss_fn(model, batch):
        return jnp.mean(model(batch) ** 2)

    def step(model, blocks):
        sharded = zerojax.where_used(loss_fn, partition.placements, blocks=blocks)
        return *nnx.value_and_grad(sharded)(model, X), nnx.state(model, nnx.BatchStat)

    del state
    plain, by_block = (nnx.jit(functools.partial(step, blocks=blocks))(nnx.clone(model)) for blocks in ("", BLOCKS))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(by_block), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    before = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert any(not np.allclose(old, new) for old, new in zip(before, jax.tree.leaves(by_block[-1])))


def test_a_compiled_step_gathers_each_block_forward_and_again_backward():
    """Of 8 H200s, with explicit collectives."""
    mesh = zerojax.make_mesh(devices=compile_only.devices(8))
    partition = zerojax.partition_state(jax.eval_shape(lambda: created(0.5)), mesh=mesh, stage=3, min_size=1024)
    step = zerojax.make_train_step(loss_of(0.5), partition, blocks=BLOCKS, remat="full", reduce_dtype=jnp.float32)
    text = compile_only.compile_gpu(step.lower(partition.abstract_state, jax.ShapeDtypeStruct(X.shape, X.dtype)))
    rows = ledger.ledger(text, mesh, partition.placements).rows
    kernels = {path for path in partition.placements if "layers" in path and "kernel" in path}
    for role in (WEIGHTS_FORWARD, WEIGHTS_BACKWARD):
        assert {path for row in rows if row.role == role for path in row.weights} >= kernels, role
    gathers = [row for row in rows if row.kind == "all-gather" and set(row.weights) & kernels]
    assert not any(row.is_kept for row in gathers)


def test_blocks_that_no_function_can_be_are_refused():
    class Keeps(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x, other=None):
            x = self.linear(x)
            if other is None:
                self.sow(nnx.Intermediate, "seen", x)
            return x

    graph, params = nnx.split(Keeps(nnx.Rngs(0)))
    _, partition = zerojax.shard_train_state({"params": params}, mesh=zerojax.make_mesh(), stage=3, min_size=8)

    def of(**how):
        def loss_fn(params):
            return jnp.sum(nnx.merge(graph, {"m": params}["m"])(X, **how))

        return zerojax.where_used(loss_fn, partition.placements, blocks="linear")

    jax.eval_shape(of(), params)  # of the Linear inside nothing is sown
    outer = nnx.Dict(m=Keeps(nnx.Rngs(0)))
    graph, params = nnx.split(outer)
    _, partition = zerojax.shard_train_state({"params": params}, mesh=zerojax.make_mesh(), stage=3, min_size=8)
    for how, line in (
        ({}, "blocks: m adds variables while it runs"),
        ({"other": outer}, "blocks: m is called with an NNX module"),
    ):
        sharded = zerojax.where_used(
            lambda params, how=how: jnp.sum(nnx.merge(graph, params).m(X, **how)), partition.placements, blocks="m"
        )
        with pytest.raises(zerojax.UserError, match=line):
            jax.eval_shape(sharded, params)
