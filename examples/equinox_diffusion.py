"""Trains a small diffusion transformer in Equinox by flow matching, sharded by ZeRO. This module shows a model that is not Flax's.

    python examples/equinox_diffusion.py --steps 60

The module's arrays are the params, and `blocks` is a regex over their paths: each layer gathers its own weights. Without an accelerator,
8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich

import zerojax
from zerojax.launch import devices as devices_lib

WIDTH, HEADS, LAYERS, PATCHES, PATCH, BATCH = 64, 4, 4, 16, 12, 64


class Layer(eqx.Module):
    """Attention and an MLP, whose norms are scaled and shifted by the time."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    modulation: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])
        self.modulation = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[2])

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        scales = jnp.split(self.modulation(jax.nn.silu(time)), 4)
        y = jax.nn.standardize(x) * (1 + scales[0]) + scales[1]
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.nn.standardize(x) * (1 + scales[2]) + scales[3])


class Transformer(eqx.Module):
    """Predicts how noisy patches [patches, patch] move at a time between noise (1) and data (0)."""

    inputs: eqx.nn.Linear
    time: eqx.nn.MLP
    positions: jax.Array
    layers: list[Layer]
    outputs: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, LAYERS + 4)
        self.inputs, self.outputs = eqx.nn.Linear(PATCH, WIDTH, key=keys[0]), eqx.nn.Linear(WIDTH, PATCH, key=keys[1])
        self.time = eqx.nn.MLP(2, WIDTH, WIDTH, 1, jax.nn.silu, key=keys[2])
        self.positions = 0.02 * jax.random.normal(keys[3], (PATCHES, WIDTH))
        self.layers = [Layer(own) for own in keys[4:]]

    def __call__(self, noisy: jax.Array, time: jax.Array) -> jax.Array:
        x, at = jax.vmap(self.inputs)(noisy) + self.positions, self.time(jnp.stack([jnp.sin(time), jnp.cos(time)]))
        for layer in self.layers:
            x = layer(x, at)
        return jax.vmap(self.outputs)(x)


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields images of waves in patches, noise, and times."""
    random = np.random.default_rng(0)
    at = np.arange(PATCHES * PATCH) / PATCH
    while True:
        rate, phase = random.uniform(0.2, 1, (BATCH, 1)), random.uniform(0, 2 * np.pi, (BATCH, 1))
        image = np.sin(rate * at + phase).reshape(BATCH, PATCHES, PATCH)
        batch = {"image": image, "noise": random.normal(size=image.shape), "time": random.uniform(size=BATCH)}
        yield {name: value.astype(np.float32) for name, value in batch.items()}


def train(steps: int, stage: int = 3, devices: list | None = None) -> tuple[list[float], Any]:
    """Trains, and returns the losses and the partition."""
    shapes = eqx.filter_eval_shape(Transformer, jax.random.key(0))
    rest = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def init(key: jax.Array) -> zerojax.TrainState:
        arrays = eqx.filter(Transformer(key), eqx.is_array)
        return zerojax.TrainState.create(apply_fn=None, params={"net": arrays}, tx=optax.adamw(2e-3))

    def loss_fn(params: Any, batch: dict[str, jax.Array], state: Any) -> jax.Array:
        time = batch["time"][:, None, None]
        noisy = time * batch["noise"] + (1 - time) * batch["image"]
        moved = jax.vmap(eqx.combine(params["net"], rest))(noisy, batch["time"])
        return jnp.mean((moved - (batch["noise"] - batch["image"])) ** 2)

    # The two lines.
    mesh = zerojax.make_mesh(devices=devices)
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = zerojax.make_train_step(loss_fn, partition, blocks=r"net/layers/\d+", reduce_dtype=jnp.float32)

    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, partition


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    losses, partition = train(args.steps)
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0)
    rich.print(zerojax.memory_table(partition, baseline))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
