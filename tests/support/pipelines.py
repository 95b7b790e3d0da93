"""A small model over a pipeline and on one device. This module serves the tests of zerojax.zero.pipeline."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import mesh as mesh_lib

BLOCKS, HEADS, PASSES = r"block_\d+", "head", 4
SPECS = [("", P(("replica", "data"), "context"))]
TENSOR = ((r"up/kernel", P(None, "model")), (r"down/kernel", P("model", None)))


class Block(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x, scale):
        y = nn.Dense(16, name="down")(nn.tanh(nn.Dense(32, name="up")(nn.LayerNorm()(x))))
        return x + scale * nn.Dropout(self.dropout, deterministic=not self.dropout)(y)


class Net(nn.Module):
    """Its embedding is read by the first and the last stage, and `scale` by all."""

    dropout: float = 0.0
    layers: int = 3

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16, name="embed")
        x, scale = embed(tokens), jnp.cos(0.1 * jnp.arange(16))
        for number in range(self.layers):
            x = Block(self.dropout, name=f"block_{number}")(x, scale)
        return nn.Dense(32, name="head")(x) + embed.attend(x)


class State(TrainState):
    loss_scale: object = ()
    target: object = ()


def loss_of(net, params, batch, state):
    rngs = {"dropout": jax.random.fold_in(jax.random.key(3), state.step)} if net.dropout else {}
    scores = net.apply({"params": params}, batch["tokens"], rngs=rngs)
    if state.target:
        scores += jax.tree.reduce(lambda total, leaf: total + leaf.mean(), state.target, 0.0)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), batch["labels"])
    counted = (batch["labels"] > 3).astype(jnp.float32)
    right = jnp.sum((scores.argmax(-1) == batch["labels"]) * counted)
    mean = functools.partial(zerojax.Mean, weight=jnp.sum(counted))
    metrics = {"right": mean(right), "right_ones": zerojax.Sum(right), "step": state.step, "rate": 0.1 * state.step}
    return mean(jnp.sum(losses * counted)), {"metrics": metrics}


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(0, 32, (PASSES, 8, 5)).astype(np.int32)
    return {"tokens": tokens[..., :4], "labels": tokens[..., 1:]}


def prepared(
    mesh,
    stage=0,
    *,
    net=None,
    schedule="",
    chunks=1,
    loss_scale=None,
    tx=None,
    overrides=(),
    trainable="",
    state_offload=None,
    has_target=False,
    shard,
    **how,
):
    """Returns what `shard` does for the state, and the step, on a mesh of as many devices as it has."""
    net = net or Net()
    make = _abstract if shard is abstract and state_offload is None else _made
    sizes = tuple(({"data": 1} | mesh).items())
    options = (stage, net, schedule, chunks, loss_scale, tx, overrides, trainable, state_offload, has_target)
    made = make(shard, sizes, *options)
    how = {"reduce_dtype": jnp.float32, "clip_norm": 0.5} | how
    return made, zerojax.make_train_step(
        functools.partial(loss_of, net),
        made[1],
        blocks=BLOCKS,
        heads=HEADS,
        grad_accum=PASSES,
        batch_specs=SPECS,
        loss_scale=loss_scale,
        **how,
    )


def _made(shard, sizes, stage, net, schedule, chunks, loss_scale, tx, overrides, trainable, state_offload, has_target):
    mesh = mesh_lib.make_mesh(**dict(sizes), devices=jax.devices()[: int(np.prod([size for _, size in sizes]))])
    loss = functools.partial(loss_of, net)

    def init(key):
        params = net.init({"params": key, "dropout": key}, jnp.zeros((1, 4), jnp.int32))["params"]
        scale = () if loss_scale is None else loss_scale.init()
        fields = {"loss_scale": scale, "target": params if has_target else ()}
        return State.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-2), **fields)

    pipeline = None
    if schedule:
        micro = {name: leaf[0] for name, leaf in batch_of(0).items()}
        pipeline = zerojax.Pipeline(
            loss, micro, BLOCKS, heads=HEADS, schedule=schedule, chunks=chunks, batch_specs=SPECS
        )
    return shard(
        init,
        jax.random.key(0),
        mesh=mesh,
        stage=stage,
        min_size=0,
        overrides=overrides,
        trainable=trainable,
        offload=state_offload,
        pipeline=pipeline,
    )


_abstract = functools.cache(_made)  # a pipeline traces the whole step, which takes a second


def abstract(init, key, **how):
    state = jax.eval_shape(init, key)
    return state, zerojax.partition_state(state, **how)


def trained(mesh, stage=0, **how):
    """Returns the metrics of two steps, the params, and the state."""
    (state, _), step = prepared(mesh, stage, shard=zerojax.shard_train_state, **how)
    metrics = []
    for seed in range(2):
        state, found = step(state, batch_of(seed))
        metrics.append({name: float(value) for name, value in found.items()})
    return metrics, jax.tree.map(np.asarray, state.params), state


@functools.cache
def on_one_device(**how):
    return trained({}, **how)[:2]


def assert_equal(found, expected, tolerance=1e-5):
    for own, other in zip(found[0], expected[0]):
        assert own.keys() == other.keys()
        for name, value in other.items():
            assert own[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=20 * tolerance), found[1], expected[1])
