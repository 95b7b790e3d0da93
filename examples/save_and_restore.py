"""Saves a sharded train state, and goes on from it at another stage and on another mesh.

    python examples/save_and_restore.py

Trains at stage 3 on 8 devices and saves. A second part, which stands for a later program, restores at stage 1 on 6 devices and trains on.
The losses are those of a run without the break. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import zerojax
from zerojax.launch import devices as devices_lib

FEATURES, HIDDEN, CLASSES, BATCH = 64, 250, 10, 48


class TrainState(train_state.TrainState):
    """A train state with averaged weights."""

    average: Any

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """Updates the weights, then their average."""
        new = super().apply_gradients(grads=grads, **kwargs)
        return new.replace(average=optax.incremental_update(new.params, self.average, 0.1))


class Net(nn.Module):
    """Two layers. HIDDEN divides by neither 8 nor 6, so its weights are padded."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES)(nn.gelu(nn.Dense(HIDDEN)(x)))


def init(key: jax.Array) -> TrainState:
    """Returns the initial state."""
    params = Net().init(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=Net().apply, params=params, average=params, tx=optax.adam(1e-3))


def loss_fn(params: Any, batch: Any, state: TrainState) -> jax.Array:
    """Returns the mean cross entropy."""
    logits = state.apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Returns the batch of a step, so that the step is the position in the data."""
    x = np.random.default_rng(step).normal(size=(BATCH, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :CLASSES], axis=-1)}


def begin(directory: str, steps: int, stage: int = 3, devices: list | None = None) -> list[float]:
    """Trains from the initial state, saves, and returns the losses."""
    mesh = zerojax.make_mesh(devices=devices)
    state, partition = zerojax.shard_train_state(
        init, jax.random.key(0), mesh=mesh, stage=stage, min_size=8, indivisible="pad"
    )
    train_step, losses = zerojax.make_train_step(loss_fn, partition), []
    with zerojax.Checkpointer(directory, keep_last=2) as saver:
        for step in range(steps):
            state, metrics = train_step(state, batch_of(step))
            losses.append(float(metrics["loss"]))
        saver.save(steps, state, partition=partition, data_state={"next_batch": steps})
    return losses


def go_on(directory: str, steps: int, stage: int = 1, devices: list | None = None) -> list[float]:
    """Restores the newest checkpoint, trains up to `steps`, and returns the losses."""
    mesh = zerojax.make_mesh(devices=devices)
    abstract_state = jax.eval_shape(init, jax.random.key(0))  # nothing is allocated
    partition = zerojax.partition_state(abstract_state, mesh=mesh, stage=stage, min_size=8, indivisible="pad")
    train_step, losses = zerojax.make_train_step(loss_fn, partition), []
    with zerojax.Checkpointer(directory, keep_last=2) as saver:
        state, data_state = saver.restore(None, partition)
        for step in range(data_state["next_batch"], steps):
            state, metrics = train_step(state, batch_of(step))
            losses.append(float(metrics["loss"]))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Trains in two parts, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each part")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    with tempfile.TemporaryDirectory() as directory:
        before = begin(directory, args.steps)
        after = go_on(directory, 2 * args.steps, devices=jax.devices()[:6])
    print(f"stage 3 on {jax.device_count()} devices: loss {before[0]:.4f} -> {before[-1]:.4f}")
    print(f"stage 1 on {len(jax.devices()[:6])} devices: loss {after[0]:.4f} -> {after[-1]:.4f}")


if __name__ == "__main__":
    main()
