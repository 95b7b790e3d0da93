"""Trains a model whose blocks are found in a trace together with other features. This module tests zerojax.make_train_step as a whole."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from jax.sharding import PartitionSpec as P

import zerojax

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 32, 32, 16, 16
BLOCKS = r"net/layers/\d+"
# Sums over devices in another order, over five steps.
LAST_PLACES = 1e-5


class Layer(eqx.Module):
    norm: eqx.nn.RMSNorm
    qkv: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm, self.qkv = eqx.nn.RMSNorm(WIDTH), eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.up, self.down = eqx.nn.Linear(WIDTH, 64, key=keys[1]), eqx.nn.Linear(64, WIDTH, key=keys[2])

    def __call__(self, x):
        heads = jax.vmap(self.qkv)(jax.vmap(self.norm)(x)).reshape(1, len(x), 3, 2, WIDTH // 2)
        x = x + zerojax.attention(*jnp.moveaxis(heads, 2, 0), is_causal=True).reshape(x.shape)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(x)))


class Net(eqx.Module):
    embed: jax.Array
    layers: list
    out: eqx.nn.Linear

    def __init__(self, key):
        self.embed, self.out = 0.1 * jax.random.normal(key, (WORDS, WIDTH)), eqx.nn.Linear(WIDTH, WORDS, key=key)
        self.layers = [Layer(own) for own in jax.random.split(key, LAYERS)]

    def __call__(self, tokens):
        x = self.embed[tokens]
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.out)(x)


REST = eqx.filter(eqx.filter_eval_shape(Net, jax.random.key(0)), lambda leaf: hasattr(leaf, "shape"), inverse=True)


def init(key):
    params = {"net": eqx.filter(Net(key), eqx.is_array)}
    return zerojax.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


def loss_fn(params, batch, state):
    scores = jax.vmap(eqx.combine(params["net"], REST))(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["targets"])
    return zerojax.Mean(losses.sum(), jnp.float32(losses.size))


def penalised(params, batch, state):
    squares = sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(params))
    mean = loss_fn(params, batch, state)
    return mean.total / mean.weight + 1e-4 * squares


def batch(passes=1):
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH + 1), 0, WORDS)
    found = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return found if passes == 1 else jax.tree.map(lambda leaf: leaf.reshape(passes, -1, LENGTH), found)


def losses(mesh, loss=loss_fn, shard=None, passes=1, stage=3, **how):
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, **shard or {})
    train_step = zerojax.make_train_step(loss, partition, sums=zerojax.Sums(jnp.float32, grad_accum=passes), **how)
    found = []
    for _ in range(5):
        state, metrics = train_step(state, batch(passes))
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def of_one_device(loss=loss_fn, trainable=""):
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    return losses(mesh, loss, stage=0, shard={"trainable": trainable})


TOKENS = {"batch_specs": [("", P(("replica", "data"), "context"))]}
OVER_MODEL = [("up/weight", P("model", "data")), ("down/weight", P("data", "model"))]
CROSSED = {
    "context": ({"context": 2}, {}, TOKENS),
    "kinds": ({}, {}, {"programs": "kinds"}),
    "optimizer state in host memory": ({}, {"offload": "host"}, {}),
    "adapters": ({}, {"trainable": "up|down"}, {}),
    "packed wires": ({}, {}, {"wires": zerojax.PackedWires()}),
    "a penalty over model": ({"model": 2}, {"overrides": OVER_MODEL}, {"loss": penalised}),
    "a penalty over copies and passes": ({"replica": 2}, {}, {"loss": penalised, "passes": 2}),
    "a penalty with padding": ({}, {"indivisible": "pad", "min_size": 8}, {"loss": penalised}),
    "a penalty, block by block": ({}, {"offload": {"optimizer": "host", "params": "host"}}, {"loss": penalised}),
}


LONG = ("optimizer state in host memory", "a penalty over copies and passes")


@pytest.mark.parametrize("name", runs.cases(CROSSED, long=LONG))
def test_blocks_of_a_trace_have_the_losses_of_one_device_beside(name):
    axes, shard, how = CROSSED[name]
    found = losses(zerojax.make_mesh(**axes), shard=shard, blocks=BLOCKS, **how)
    one = of_one_device(how.get("loss", loss_fn), shard.get("trainable", ""))
    np.testing.assert_allclose(found, one, rtol=LAST_PLACES)
    assert one[-1] < one[0]


@pytest.mark.parametrize(
    ("schedule", "blocks", "loss"),
    [("1f1b", BLOCKS, loss_fn), ("zero_bubble", "net/layers", penalised)],
    ids=["layers", "a list with a penalty"],
)
def test_a_pipeline_of_blocks_of_a_trace_has_the_losses_of_one_device(schedule, blocks, loss):
    micro = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], batch(2)))
    pipeline = zerojax.Pipeline(loss, micro, blocks=blocks, schedule=schedule)
    found = losses(zerojax.make_mesh(pipe=2), loss, shard={"pipeline": pipeline}, passes=2)
    np.testing.assert_allclose(found, of_one_device(loss), rtol=LAST_PLACES)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(WORDS, WIDTH, name="embed")(tokens)
        for number in range(LAYERS):
            x = x + nn.Dense(WIDTH, name=f"layer_{number}")(nn.gelu(x))
        return nn.Dense(WORDS, name="out")(x)


def test_adapters_in_blocks_of_a_trace_have_the_losses_of_one_device():
    net, lora = LinenNet(), zerojax.Lora(r=4, alpha=8, target_modules=r"layer_\d+")
    tokens = batch()["tokens"]

    def apply(params, tokens):  # no interceptor knows weights that a loss has changed
        return net.apply({"params": jax.tree.map(lambda leaf: leaf * 1, params)}, tokens)

    def init(key):
        params = zerojax.add_lora(net.init(key, tokens)["params"], lora, key, apply, tokens)
        return zerojax.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    def loss_fn(params, batch, state):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, batch["tokens"]), batch["targets"]).mean()

    def of_devices(count, stage):
        mesh, shard = zerojax.make_mesh(devices=jax.devices()[:count]), {"trainable": lora.trainable, "min_size": 8}
        state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, **shard)
        train_step = zerojax.make_train_step(
            zerojax.with_lora(loss_fn, lora), partition, blocks=r"layer_\d+", reduce_dtype=jnp.float32
        )
        found = []
        for _ in range(5):
            state, metrics = train_step(state, batch())
            found.append(float(metrics["loss"]))
        return found

    one = of_devices(1, 0)
    np.testing.assert_allclose(of_devices(8, 3), one, rtol=LAST_PLACES)
    assert one[-1] < one[0]


@pytest.mark.parametrize(
    ("axes", "how", "line"),
    [
        ({}, {"offload": BLOCKS}, "its trace is not cut at other modules where recompute, offload"),
        ({}, {"recompute": f"{BLOCKS}/up"}, "its trace is not cut at other modules where recompute, offload"),
        ({"model": 2}, {"activations": [(BLOCKS, P("model", "model"))]}, "its trace is not cut at other modules"),
        ({}, {"compute_dtype": zerojax.Fp8()}, "^fp8.filter: .* matches no module with a weight `kernel`"),
    ],
    ids=["offload of activations", "recompute", "activations over model", "fp8"],
)
@pytest.mark.filterwarnings("ignore:mesh")
def test_what_needs_modules_is_refused_in_a_line_before_anything_compiles(axes, how, line):
    _, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=zerojax.make_mesh(**axes), stage=3)
    with pytest.raises(zerojax.UserError, match=line):
        train_step = zerojax.make_train_step(loss_fn, partition, blocks=BLOCKS, reduce_dtype=jnp.float32, **how)
        train_step.trace(partition.abstract_state, jax.eval_shape(batch))
