"""Checks that what the trace of a loss says of its parts is true of their numbers. This module tests zerojax.zero.sharded_batch.parts."""

import random
from typing import Any

import arrays
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.errors import UserError
from zerojax.ops import losses
from zerojax.zero.sharded_batch import inputs, outputs, parts

ROWS, LENGTH, W, WAYS = 4, 16, 8, 4
SPECS = [("w", P(("replica", "data"))), ("", P(("replica", "data"), "context"))]
PARAMS = {"w": arrays.normal(2, (W, W)) / 3, "table": arrays.normal(5, (5, W))}
BATCH = {
    "x": arrays.normal(1, (ROWS, LENGTH, W)),
    "mask": (arrays.uniform(3, (ROWS, LENGTH)) < 0.4).astype(jnp.float32),
    "tokens": arrays.integers(4, (ROWS, LENGTH), 0, 5),
    "w": jnp.arange(ROWS) + 1.0,
}
SUM_ORDER = 1e-5  # relative: the same float32 sums, taken in another order
Mean, Sum = zerojax.Mean, zerojax.Sum


def powers(loss_fn):
    """Returns what the trace of `loss_fn(params, batch)` says of a mesh with WAYS parts of a sequence."""
    layout = inputs.Layout(zerojax.make_mesh(data=2, context=WAYS), 1, SPECS, by_device=True)
    read = outputs.with_aux(lambda params, batch, _: loss_fn(params, batch), lambda _: 1.0)
    return parts.powers(read, PARAMS, BATCH, None, layout)


def in_parts(batch, number):
    own = slice(number * LENGTH // WAYS, (number + 1) * LENGTH // WAYS)
    return {name: leaf if name == "w" else leaf[:, own] for name, leaf in batch.items()}


def check_numbers(loss_fn):
    """Compares a plain loss of whole sequences with what the trace says of those of parts."""
    power = powers(loss_fn)["metrics/loss"]
    own = [loss_fn(PARAMS, in_parts(BATCH, number)) for number in range(WAYS)]
    expected = loss_fn(PARAMS, BATCH)
    scale = max(1.0, float(np.mean(np.abs(own))) * WAYS**power)  # some sums cancel to 0
    assert abs(float(np.mean(own)) * WAYS**power - float(expected)) <= SUM_ORDER * scale, (power, own, expected)


def per_token(params, batch):
    return jnp.mean(jnp.tanh(batch["x"] @ params["w"]) ** 2, -1)


def no_tokens(params, batch):
    return jnp.sum(batch["w"][:, None] * jnp.sum(params["w"] ** 2, -1))


RIGHT: dict[str, Any] = {
    "mean": lambda p, b: per_token(p, b).mean(),
    "a sum over tokens": lambda p, b: per_token(p, b).sum(1).mean(),
    "no tokens": no_tokens,
    "by the number of tokens": lambda p, b: jnp.sum(per_token(p, b) / b["x"].shape[1]),
    "a mean and a penalty": lambda p, b: per_token(p, b).mean() + jnp.sum(p["w"] ** 2),
    "dot": lambda p, b: jnp.einsum("bt,bt,b->", per_token(p, b), b["mask"], b["w"]),
    "labels": lambda p, b: optax.softmax_cross_entropy_with_integer_labels(b["x"], b["tokens"]).mean(),
    "a table": lambda p, b: jnp.sum(p["table"][b["tokens"]] * b["x"]),
    "one_hot": lambda p, b: jnp.sum(jax.nn.one_hot(b["tokens"], W) * b["x"]),
    "flat": lambda p, b: jnp.sum(jax.nn.softmax(b["x"].reshape(-1, W) @ p["w"]).max(-1)),
    "windows": lambda p, b: jnp.sum(b["x"].reshape(ROWS, -1, 2, W).max(2)),
    "a loop over features": lambda p, b: jax.lax.scan(
        lambda total, w: (total + jnp.sum(jnp.tanh(b["x"] @ w)), None), jnp.float32(0), p["w"]
    )[0],
    "a loop": lambda p, b: jnp.sum(jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ p["w"]), b["x"])),
    "a branch": lambda p, b: jnp.sum(jax.lax.cond(p["w"][0, 0] > 0, jnp.sin, jnp.cos, b["x"])),
    "counts": lambda p, b: jnp.sum(jnp.zeros(5).at[b["tokens"]].add(1.0) * jnp.arange(5.0)),
    "a custom derivative": lambda p, b: jnp.sum(jax.nn.relu(b["x"]) + jax.nn.silu(b["x"])),
    "tiles": lambda p, b: jnp.sum(zerojax.over_tiles(lambda x: x + jnp.tanh(x @ p["w"]), b["x"], 4)),
    "one pass": lambda p, b: losses.one_pass_cross_entropy(b["x"], p["w"], b["tokens"]),
    "a function by rows": lambda p, b: jax.vmap(lambda x, w: jnp.mean(x @ p["w"]) * w)(b["x"], b["w"]).sum(),
    "attention to what all have": lambda p, b: jnp.sum(jax.nn.softmax(b["x"] @ p["table"].T) @ p["table"]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_is_taken_is_that_of_whole_sequences_times_a_power(name):
    check_numbers(RIGHT[name])


NEIGHBOURS, OF_DEVICE, COUNTS = (
    "tokens of other devices are missing in",
    "return zerojax.Mean",
    "counts its tokens from 0",
)
WRONG: dict[str, tuple[Any, str]] = {
    "a mean over a mask": (lambda p, b: jnp.sum(per_token(p, b) * b["mask"]) / b["mask"].sum(), OF_DEVICE),
    "a function of a sum": (lambda p, b: jnp.log(per_token(p, b).sum()), OF_DEVICE),
    "a norm over tokens": (lambda p, b: jnp.mean((b["x"] - b["x"].mean(1, keepdims=True)) ** 2), OF_DEVICE),
    "a sum beside what all have": (lambda p, b: Sum(jnp.sum(per_token(p, b)) + no_tokens(p, b)), "take their means"),
    "positions": (lambda p, b: jnp.mean(b["x"] * jnp.arange(b["x"].shape[1])[:, None]), COUNTS),
    "positions of numpy": (lambda p, b: jnp.mean(b["x"] * np.arange(b["x"].shape[1])[:, None]), COUNTS),
    "a maximum": (lambda p, b: per_token(p, b).max(), NEIGHBOURS + " the max over tokens"),
    "labels cut off": (lambda p, b: jnp.mean(b["x"][:, 1:] * b["x"][:, :-1]), NEIGHBOURS),
    "rolled": (lambda p, b: jnp.mean(b["x"] * jnp.roll(b["x"], 1, 1)), "other operations run|" + NEIGHBOURS),
    "a running sum": (lambda p, b: jnp.mean(jnp.cumsum(b["x"], 1) ** 2), NEIGHBOURS + " cumsum"),
    "in order": (lambda p, b: jnp.mean(jnp.sort(b["x"], 1)[..., 0] * b["mask"]), NEIGHBOURS + " sort"),
    "a transform": (lambda p, b: jnp.mean(jnp.abs(jnp.fft.fft(b["x"], axis=1))), NEIGHBOURS + " a Fourier"),
    "scores": (lambda p, b: jnp.mean(jax.nn.softmax(b["x"] @ b["x"].swapaxes(1, 2))), "zerojax.attention"),
    "the first token": (lambda p, b: jnp.mean(b["x"][:, 0]), NEIGHBOURS),
    "by number": (lambda p, b: jnp.mean(b["x"][:, b["w"].astype(jnp.int32)]), "the number of one device's tokens"),
    "a draw for each example": (
        lambda p, b: jnp.mean(per_token(p, b) * jax.random.uniform(jax.random.key(0), (ROWS, 1))),
        "numbers are drawn for examples",
    ),
    "ignored labels": (lambda p, b: losses.one_pass_cross_entropy(b["x"], p["w"], b["tokens"], ignored=0), OF_DEVICE),
    "a metric": (lambda p, b: (per_token(p, b).mean(), {"metrics": {"most": b["x"].max()}}), "metrics/most: "),
    "a value for each token": (
        lambda p, b: (per_token(p, b).mean(), {"metrics": {"all": per_token(p, b)}}),
        "each token",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_reads_other_tokens_is_refused_with_its_line(name):
    loss_fn, words = WRONG[name]
    with pytest.raises(UserError, match=words) as caught:
        powers(loss_fn)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("loss_fn: is another one where tokens are sharded over context=4")
    assert name == "a value for each token" or ".py:" in line


STEPS: list[Any] = [
    lambda p, b, x: x @ p["w"],
    lambda p, b, x: jnp.tanh(x),
    lambda p, b, x: x * 0.5 + 1.0,
    lambda p, b, x: x * b["mask"][..., None] if x.shape == b["x"].shape else x,
    lambda p, b, x: x * b["w"].reshape(-1, *(1,) * (x.ndim - 1)),
    lambda p, b, x: x + b["x"] if x.shape == b["x"].shape else x + b["x"].mean() if x.ndim == 3 else x + b["x"].mean(1),
    lambda p, b, x: jax.nn.softmax(x, -1),
    lambda p, b, x: jax.nn.softmax(x, 1),
    lambda p, b, x: x - x.mean(1, keepdims=True),
    lambda p, b, x: x / x.shape[1],
    lambda p, b, x: x * x.shape[1],
    lambda p, b, x: x.sum(1) if x.ndim == 3 else x,
    lambda p, b, x: x.mean(1) if x.ndim == 3 else x,
    lambda p, b, x: jnp.cumsum(x, -1),
    lambda p, b, x: jnp.cumsum(x, 1),
    lambda p, b, x: jnp.where(b["mask"][..., None] > 0, x, 2.0) if x.shape == b["x"].shape else x,
    lambda p, b, x: jnp.concatenate([x, x], -1)[..., ::2],
    lambda p, b, x: x[:, ::-1],
    lambda p, b, x: x.reshape(ROWS, -1, 2, W).mean(2) if x.ndim == 3 and x.shape[1] > 2 else x,
    lambda p, b, x: jnp.maximum(x, 0.1),
]
ENDS: list[Any] = [
    lambda p, b, x: x.mean(),
    lambda p, b, x: x.sum(),
    lambda p, b, x: jnp.sum(x**2),
    lambda p, b, x: x.sum() + no_tokens(p, b),
    lambda p, b, x: x.mean() + no_tokens(p, b),
    lambda p, b, x: x.sum() / x.shape[1],
    lambda p, b, x: jnp.einsum("b...w,b...w->", x, x),
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=runs.LONG) for seed in range(1, 40))])
def test_no_chain_of_operations_that_is_taken_has_other_numbers(seed):
    rng, taken, count = random.Random(seed), 0, 15
    for _ in range(count):
        chain = [*rng.choices(STEPS, k=rng.randint(1, 4)), rng.choice(ENDS)]

        def loss_fn(params, batch, chain=chain):
            x = batch["x"]
            for step in chain:
                x = step(params, batch, x)
            return x

        try:
            check_numbers(loss_fn)
        except parts.Refused:
            continue
        taken += 1
    assert 0 < taken < count


class Counting(TrainState):
    counts: Any


def counted(counts, batch):
    return {
        "words": Sum(counts["words"] + batch["mask"].sum()),
        "examples": Sum(counts["examples"] + batch["w"].sum()),
        "masked": counts["masked"] + jnp.sum(batch["mask"] > 0),
        "mean": 0.9 * counts["mean"] + 0.1 * batch["x"].mean((0, 1)),
    }


def trained(loss_fn, context):
    """Returns the metrics of one step and the values of the state after it."""
    mesh = zerojax.make_mesh(data=2, context=context, devices=jax.devices()[: 2 * context])
    counts = {"words": jnp.float32(3.0), "examples": jnp.float32(3.0), "masked": jnp.int32(3), "mean": jnp.ones(W)}
    state = Counting.create(apply_fn=None, params=PARAMS, tx=optax.sgd(1.0), counts=counts)
    state, partition = zerojax.shard_train_state(state, mesh=mesh, stage=3, min_size=8)
    step = zerojax.make_train_step(loss_fn, partition, reduce_dtype=jnp.float32, batch_specs=SPECS)
    state, metrics = step(state, BATCH)
    return jax.tree.map(np.asarray, (metrics, state.params, state.counts))


ALL = {
    "Mean": lambda p, b: Mean(jnp.sum(per_token(p, b) * b["mask"]), b["mask"].sum()),
    "Mean of examples": lambda p, b: Mean(jnp.sum(per_token(p, b).mean(1) * b["w"]), b["w"].sum()),
    "Mean without tokens": lambda p, b: Mean(no_tokens(p, b), b["w"].sum()),
    "Mean of both": lambda p, b: Mean(jnp.sum(per_token(p, b).mean(1)), b["mask"].size),
    "Sum": lambda p, b: Sum(jnp.sum(per_token(p, b) * b["mask"])),
    "Sum of means": lambda p, b: Sum(jnp.sum(per_token(p, b).mean(1) * b["w"])),
    "Sum without tokens": lambda p, b: Sum(no_tokens(p, b)),
    "mean": RIGHT["mean"],
    "plain sum": RIGHT["a sum over tokens"],
    "plain sum without tokens": lambda p, b: no_tokens(p, b) / len(b["w"]),
}


def compared(loss_fn):
    whole, found = (trained(loss_fn, context) for context in (1, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=SUM_ORDER, atol=1e-6), found, whole)


def test_metrics_and_counts_with_and_without_tokens_are_those_of_whole_sequences():
    def loss_fn(params, batch, state):
        metrics = {name: of(params, batch) for name, of in ALL.items()}
        return per_token(params, batch).mean(), {"metrics": metrics, "state": {"counts": counted(state.counts, batch)}}

    compared(loss_fn)


@pytest.mark.parametrize("name", runs.cases(ALL, long=set(ALL) - {"Mean of both", "Sum without tokens"}))
def test_losses_and_gradients_are_those_of_whole_sequences(name):
    compared(lambda p, b, s: ALL[name](p, b))
