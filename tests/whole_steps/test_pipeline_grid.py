"""Trains our families and models of others over meshes of groups, data, context and model, and compares with one device.

This module tests zerojax.zero.pipeline beside every other axis: 1, 2 or 4 groups, each of one or two axes of two devices, at stages 0 to 3.
One step of descent with momentum gives the loss and, as its momentum, the gradients.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import arrays
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.models.llama import family
from zerojax.models.llama.config import Heads, MLPForm, Norms, Scales
from zerojax.trainer import program
from zerojax.trainer import state as state_lib

SUM_ORDER = 1e-5  # relative to a leaf's largest gradient: the same float32 sums, taken in another order
NOISE = 1e-2  # of the largest gradient of all: smaller leaves are sums that cancel, such as those of biases of keys, which are 0
PASSES, ROWS, LENGTH, W, HEADS, VOCAB = 4, 2, 8, 16, 4, 32
CASES = ["llama", "gemma", "t5", "gpt", "encoder-decoder", "nnx"]
MESHES = [
    (pipe, *sizes)
    for pipe in (1, 2, 4)
    for sizes in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2))  # data, context, model
    if pipe * math.prod(sizes) <= 8
]
SCHEDULES: Mapping[int, tuple[str, ...]] = {  # by the stage of ZeRO
    1: ("1f1b",) * 4,
    2: ("1f1b", "interleaved", "zero_bubble", "gpipe"),
    4: ("zero_bubble", "1f1b", "gpipe", "1f1b"),
}


class Found(NamedTuple):
    """The loss of the first weights, and the gradients."""

    loss: float
    grads: Any


# Families of ours, by the trainer

GEMMA = dataclasses.replace(
    family.PRESETS["test"],
    heads=Heads(windows=(5, 0), norm="each", cap=50.0),
    norms=Norms(offset=1.0, places="both"),
    mlp=MLPForm("gelu"),
    scales=Scales(embed=8.0, logits_cap=30.0),
    tie_embeddings=True,
)
FAMILIES = {"llama": {}, "gemma": {}, "t5": {"model__preset": "t5_test"}}
DESCENT = {
    "optimizer__name": "sgd",
    "optimizer__clip_norm": 0.0,
    "grad_accum": PASSES,
}


def of_family(name: str, layers: int, axes: Mapping[str, int], stage: int, schedule: str) -> Found:
    with mock.patch.dict(family.PRESETS, {"test": GEMMA} if name == "gemma" else {}):
        sizes = {f"mesh__{axis}": size for axis, size in axes.items()}
        how = {"pipeline__schedule": schedule, "pipeline__chunks": 1 + (schedule == "interleaved")}
        how |= {"zero__stage": stage, "model__num_layers": layers // 2 if name == "t5" else layers}
        config = runs.config(zero__min_size=0, **DESCENT, **FAMILIES[name], **sizes, **how)
        devices = jax.devices()[: math.prod(axes.values())]
        built = program.build(config, tokenizer_vocab=320, devices=devices)
        state = state_lib.first(built)
        return after(state, lambda state: built.train_step(state, runs.drawn_batch(built, 0)))


def after(state: Any, step: Any) -> Found:
    state, metrics = step(state)
    return Found(float(metrics["loss"]), jax.tree.map(np.asarray, optax.tree.get(state.opt_state, "trace")))


# Models as others write them, by `make_train_step`

CAUSAL = functools.partial(zerojax.attention, is_causal=True)
SPECS = [("", P(("replica", "data"), "context"))]
TENSOR = [("up/kernel", P(None, "model")), ("down/kernel", P("model"))]


class Block(nn.Module):
    """One of a decoder, which also reads `memory` if it is given; with `zerojax.attention` one of an encoder."""

    attention_fn: Any = CAUSAL

    @nn.compact
    def __call__(self, x, memory=None):
        y = nn.LayerNorm()(x)
        x += nn.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(y)
        if memory is not None:
            x += nn.MultiHeadDotProductAttention(HEADS, attention_fn=zerojax.attention)(nn.LayerNorm()(x), memory)
        return x + nn.Dense(W, name="down")(nn.gelu(nn.Dense(4 * W, name="up")(nn.LayerNorm()(x))))


class Gpt(nn.Module):
    """Its embedding is its output projection."""

    layers: int

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(VOCAB, W)
        x = embed(batch["tokens"]) + nn.Embed(LENGTH, W)(batch["positions"])
        for layer in range(self.layers):
            x = Block(name=f"block_{layer}")(x)
        return embed.attend(nn.LayerNorm()(x))


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads what the encoder's last block returns, and both sides read one embedding."""

    layers: int

    @nn.compact
    def __call__(self, batch):
        embed, where = nn.Embed(VOCAB, W), nn.Embed(LENGTH, W)(batch["positions"])
        memory, x = embed(batch["sources"]) + where, embed(batch["tokens"]) + where
        for layer in range(self.layers // 2):
            memory = Block(zerojax.attention, name=f"block_{layer}")(memory)
        for layer in range(self.layers // 2, self.layers):
            x = Block(name=f"block_{layer}")(x, memory)
        return nn.Dense(VOCAB, name="head")(x)


TEXT = arrays.integers(1, (PASSES, ROWS, LENGTH + 1), 0, VOCAB)
BATCH = {
    "sources": arrays.integers(2, (PASSES, ROWS, LENGTH), 0, VOCAB),
    "tokens": TEXT[..., :-1],
    "labels": TEXT[..., 1:],
    "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (PASSES, ROWS, LENGTH)),
}
MICRO = {key: leaf[0] for key, leaf in BATCH.items()}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.after = nnx.LayerNorm(W, rngs=rngs), nnx.LayerNorm(W, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, W, decode=False, rngs=rngs, attention_fn=CAUSAL)
        self.up, self.down = nnx.Linear(W, 4 * W, rngs=rngs), nnx.Linear(4 * W, W, rngs=rngs)

    def __call__(self, x):
        x += self.attend(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.after(x))))


class NnxGpt(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed, self.where = nnx.Embed(VOCAB, W, rngs=rngs), nnx.Embed(LENGTH, W, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.head = nnx.Linear(W, VOCAB, rngs=rngs)

    def __call__(self, batch):
        x = self.embed(batch["tokens"]) + self.where(batch["positions"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_linen(kind: type[nn.Module], layers: int) -> tuple[Any, Any]:
    """Returns the params and f(params, batch) -> logits."""
    net = kind(layers)
    return net.init(jax.random.key(0), MICRO)["params"], lambda params, batch: net.apply({"params": params}, batch)


def of_nnx(layers: int) -> tuple[Any, Any]:
    graph, params = nnx.split(NnxGpt(layers, nnx.Rngs(0)), nnx.Param)
    return params, lambda params, batch: nnx.merge(graph, params)(batch)


OTHERS = {
    "gpt": functools.partial(of_linen, Gpt),
    "encoder-decoder": functools.partial(of_linen, EncoderDecoder),
    "nnx": of_nnx,
}
BLOCKS = r"block_\d+|blocks/\d+"


def of_another(name: str, layers: int, axes: Mapping[str, int], stage: int, schedule: str) -> Found:
    params, logits_of = OTHERS[name](layers)

    def loss_fn(params, batch, _):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch), batch["labels"])
        counted = (batch["labels"] > 3).astype(jnp.float32)
        return zerojax.Mean(jnp.sum(losses * counted), counted.sum())

    pipeline = None
    if axes["pipe"] > 1:
        chunks = 1 + (schedule == "interleaved")
        pipeline = zerojax.Pipeline(loss_fn, MICRO, BLOCKS, schedule=schedule, chunks=chunks, batch_specs=SPECS)
    devices = jax.devices()[: math.prod(axes.values())]
    state, partition = zerojax.shard_train_state(
        lambda: TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1, 0.9)),
        mesh=zerojax.make_mesh(**axes, devices=devices),
        stage=stage,
        min_size=0,
        overrides=TENSOR if axes["model"] > 1 else (),
        pipeline=pipeline,
    )
    step = zerojax.make_train_step(
        loss_fn, partition, blocks=BLOCKS, grad_accum=PASSES, reduce_dtype=jnp.float32, batch_specs=SPECS
    )
    return after(state, lambda state: step(state, BATCH))


def of_case(name: str, layers: int, sizes: tuple[int, ...], stage: int) -> Found:
    axes = dict(zip(("pipe", "data", "context", "model"), sizes))
    return (of_another if name in OTHERS else of_family)(name, layers, axes, stage, SCHEDULES[sizes[0]][stage])


@functools.cache
def alone(name: str, layers: int) -> Found:
    return of_case(name, layers, (1, 1, 1, 1), 0)


@pytest.mark.long
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name, sizes, stage):
    layers = 4 if sizes[0] == 4 or SCHEDULES[sizes[0]][stage] == "interleaved" else 2  # one or two a stage
    found, expected = of_case(name, layers, sizes, stage), alone(name, layers)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=SUM_ORDER)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected.grads))
    assert largest > NOISE

    def check(path, grad, exact):
        allowed = SUM_ORDER * max(np.abs(exact).max(), NOISE * largest)
        np.testing.assert_allclose(grad, exact, rtol=0, atol=allowed, err_msg=jax.tree_util.keystr(path))

    jax.tree.map_with_path(check, found.grads, expected.grads)
