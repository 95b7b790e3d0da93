"""Shards an existing Flax training loop. This module marks each line that changes with "# zerojax".

    python examples/own_train_step.py --stage 3 --steps 60

The train state, the optax chain (masked weight decay, injected hyperparameters) and the train step are the user's own. Without an
accelerator, 8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from flax.training.train_state import TrainState

import zerojax
from zerojax import display
from zerojax.launch import devices as devices_lib
from zerojax.zero import state_bytes

FEATURES, HIDDEN, CODE, BATCH = 256, 256, 16, 64


class Autoencoder(nn.Module):
    """Two hidden layers on each side of a short code."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (HIDDEN, HIDDEN):
            x = nn.LayerNorm()(nn.gelu(nn.Dense(width)(x)))
        x = nn.Dense(CODE, name="code")(x)
        for width in (HIDDEN, HIDDEN):
            x = nn.LayerNorm()(nn.gelu(nn.Dense(width)(x)))
        return nn.Dense(FEATURES, name="outputs")(x)


def make_optimizer(learning_rate: float) -> optax.GradientTransformation:
    """Returns Adam with clipping, and weight decay on matrices only."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.masked(optax.add_decayed_weights(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(learning_rate=learning_rate),
    )


def create_state(key: jax.Array) -> TrainState:
    """Returns the initial state."""
    model = Autoencoder()
    params = model.init(key, jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=make_optimizer(2e-3))


def batches() -> Iterator[np.ndarray]:
    """Yields points on a low-dimensional curved surface in a high-dimensional space."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(CODE // 2, FEATURES))
    while True:
        yield np.tanh(rng.normal(size=(BATCH, CODE // 2)) @ directions).astype(np.float32)


def train(stage: int, steps: int, compute_dtype: str | None = None, devices: list | None = None):
    """Trains, and returns the losses, the last state and the partition."""
    mesh = zerojax.make_mesh(devices=devices)  # zerojax
    state, partition = zerojax.shard_train_state(create_state, jax.random.key(0), mesh=mesh, stage=stage)  # zerojax

    def loss_fn(params, batch):
        return jnp.mean((state.apply_fn({"params": params}, batch) - batch) ** 2)

    loss_fn = zerojax.where_used(loss_fn, partition.placements, compute_dtype=compute_dtype)  # zerojax

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    train_step = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(partition.shardings, partition.batch_sharding),  # zerojax
        out_shardings=(partition.shardings, None),  # zerojax
    )
    losses = []
    for step, batch in zip(range(steps), batches()):
        if step == steps // 2:
            state.opt_state[-1].hyperparams["learning_rate"] = jnp.float32(1e-3)
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return losses, state, partition


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
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
