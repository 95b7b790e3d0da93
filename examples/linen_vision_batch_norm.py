"""Trains a small residual network with batch norm, sharded by ZeRO stage. This module shows a train state with its own collection.

    python examples/linen_vision_batch_norm.py --stage 3 --steps 30

Batch statistics are means over the global batch, as on one device: the loss function takes global arrays, and only their shardings
differ by stage. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from flax.training import train_state

import zerojax
from zerojax import display
from zerojax.launch import devices as devices_lib
from zerojax.zero import state_bytes

CLASSES, SIZE, BATCH = 8, 16, 64
WIDTHS = (32, 64, 128)


class Residual(nn.Module):
    """Two convolutions with batch norm, and a shortcut."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        strides = (self.stride, self.stride)
        y = nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not is_training, momentum=0.9)(y))
        y = nn.Conv(self.width, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not is_training, momentum=0.9)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), strides, use_bias=False, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, one residual block per width, global average pooling and a classifier."""

    @nn.compact
    def __call__(self, images: jax.Array, is_training: bool = True) -> jax.Array:
        x = nn.Conv(WIDTHS[0], (3, 3), name="stem")(images)
        for number, width in enumerate(WIDTHS):
            x = Residual(width, stride=1 if number == 0 else 2, name=f"residual_{number}")(x, is_training)
        return nn.Dense(CLASSES, name="classifier")(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    """Flax's train state and the running statistics of batch norm."""

    batch_stats: Any


def create_state(key: jax.Array) -> TrainState:
    """Returns the initial state."""
    model = ResNet()
    variables = model.init(key, jnp.zeros((1, SIZE, SIZE, 3)))
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True))
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
    )


def loss_fn(params: dict, batch: dict, state: TrainState) -> tuple[jax.Array, dict]:
    """Returns the mean loss, and the new batch statistics for the state."""
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, changed = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
    return loss, {"state": {"batch_stats": changed["batch_stats"]}, "metrics": {"accuracy": accuracy}}


def batches() -> Iterator[dict]:
    """Yields noisy images, with one pattern per class."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(CLASSES, SIZE, SIZE, 3))
    while True:
        label = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        image = 0.5 * patterns[label] + rng.normal(size=(BATCH, SIZE, SIZE, 3))
        yield {"image": image.astype(np.float32), "label": label}


def train(stage: int, steps: int, compute_dtype: str | None = None, devices: list | None = None):
    """Trains, and returns the losses, the last state and the partition."""
    mesh = zerojax.make_mesh(devices=devices)
    state, partition = zerojax.shard_train_state(create_state, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = zerojax.make_train_step(loss_fn, partition, compute_dtype=compute_dtype)
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, partition


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)

    losses, state, partition = train(args.stage, args.steps)
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0)
    rich.print(zerojax.memory_table(partition, baseline))
    here = display.human(state_bytes.measured_bytes(state, partition.mesh.devices.flat[0]))
    replicated = display.human(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    print(f"stage {args.stage} on {partition.mesh.size} devices: {here} of state on each, {replicated} at stage 0")
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
