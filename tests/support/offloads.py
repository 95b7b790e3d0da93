"""Trains a small state with and without offload. This module is shared by the tests of zerojax.zero.offload."""

import functools
from typing import Any
from unittest import mock

import arrays
import jax
import jax.numpy as jnp
import numpy as np
from flax.training import train_state

import zerojax
from zerojax.zero.host import settings
from zerojax.zero.update import update

WIDTH, HIDDEN, EXAMPLES = 16, 64, 16
PIECES = {
    "optimizer": "host",
    "chunk_bytes": 300,
    "in_flight": 4,
}  # a kernel's two moments have 1,024 bytes on each device


class State(train_state.TrainState):
    """A train state with a loss scale."""

    loss_scale: Any = ()


def weights(key: jax.Array, layers: int = 2, width: int = WIDTH) -> dict[str, Any]:
    """Returns float32 weights, of which the scales stay on the device."""
    keys = jax.random.split(key, 2 * layers)
    return {
        f"layer_{n}": {
            "wide": jax.random.normal(keys[2 * n], (width, HIDDEN)) / 4,
            "narrow": jax.random.normal(keys[2 * n + 1], (HIDDEN, width)) / 8,
            "scale": jnp.ones(width),
        }
        for n in range(layers)
    }


def predict(params: Any, x: jax.Array) -> jax.Array:
    """Returns the output of a residual net; x: [examples, width]."""
    for layer in params.values():
        x = x + jnp.tanh(x * layer["scale"] @ layer["wide"]) @ layer["narrow"]
    return x


def loss_fn(params: Any, batch: jax.Array, state: Any) -> jax.Array:
    """Returns the mean squared distance from a fixed function of the batch."""
    return jnp.mean((predict(params, batch) - jnp.sin(3 * batch)).astype(jnp.float32) ** 2)


def batch_of(step: int, *leading: int, width: int = WIDTH) -> jax.Array:
    """Returns the batch of a step: [*leading, examples, width]."""
    return arrays.normal(step, (*leading, EXAMPLES, width))


def sharded(tx: Any, offload: Any, *, dtype: Any = jnp.float32, scaler: Any = None, width: int = WIDTH, **how: Any):
    """Returns the first state and its partition."""

    def init(key: jax.Array) -> State:
        params = jax.tree.map(lambda w: w.astype(dtype), weights(key, width=width))
        scale = () if scaler is None else scaler.init()
        return State.create(apply_fn=None, params=params, tx=tx, loss_scale=scale)

    how.setdefault("mesh", zerojax.make_mesh())
    return zerojax.shard_train_state(init, jax.random.key(0), offload=offload, min_size=64, **how)


def trained(tx: Any, offload: Any, steps: int = 5, *, batches: Any = batch_of, step: Any = None, **how: Any):
    """Returns (state, metrics of the last step, step, partition) after some steps. They clip by a bfloat16 factor.

    XLA sums squares in the order in which a gradient lies in memory. A program that returns gradients may lay them out otherwise than
    one that also updates (jaxlib 0.12 does), and then the norms differ in their last digit. The rounded factors are equal.
    """
    state, partition = sharded(tx, offload, **how)
    train_step = zerojax.make_train_step(
        loss_fn, partition, loss_scale=how.get("scaler"), **(step or {"clip_norm": 0.5})
    )
    metrics: dict[str, Any] = {}
    with mock.patch.object(update.Clip, "factor", rounded_factor):
        for number in range(steps):
            state, metrics = train_step(state, batches(number))
    return state, metrics, train_step, partition


own_factor = update.Clip.factor


def rounded_factor(clip: update.Clip, state: Any, norm: jax.Array) -> Any:
    """Stands in for `update.Clip.factor`."""
    return (
        jax.lax.reduce_precision(own_factor(clip, state, norm), exponent_bits=8, mantissa_bits=7) if clip.limit else 1.0
    )


def assert_equal(offloaded: Any, resident: Any) -> None:
    """Asserts that two states have the same bits, whatever the pieces."""
    from zerojax.checkpoint import logical

    one, other = logical.to_stored(offloaded), logical.to_stored(resident)
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(np.asarray(one[path]), np.asarray(other[path]), err_msg=path)


@functools.cache
def adam() -> Any:
    """Returns one optimizer object, so that states of different tests have one tree type."""
    return zerojax.fused_adamw(1e-2, weight_decay=0.1)


HOST = settings.Offload(optimizer="host")
