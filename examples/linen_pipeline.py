"""Trains an ordinary Flax decoder whose layers are on several groups of devices (a pipeline). This module shows what a script changes.

    python examples/linen_pipeline.py --pipe 2 --schedule 1f1b --steps 40

The model and its loss stay as they are. `zerojax.Pipeline` says how layers are divided and in which order micro-batches run; ZeRO shards
each group's weights over `data`. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import zerojax
from zerojax.launch import devices as devices_lib

VOCAB, EMBED, MLP, LAYERS, LENGTH, EXAMPLES, MICRO_BATCHES = 256, 128, 512, 4, 32, 8, 4
BLOCKS = r"block_\d+"


class Block(nn.Module):
    """Causal attention and MLP, each behind a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(nn.LayerNorm()(x))))


class Decoder(nn.Module):
    """A language model whose output projection is its embedding."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed, mask = nn.Embed(VOCAB, EMBED), nn.make_causal_mask(tokens)
        x = embed(tokens) + nn.Embed(LENGTH, EMBED)(jnp.arange(tokens.shape[1]))
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x, mask)
        return embed.attend(nn.LayerNorm()(x))


def create_state(key: jax.Array) -> train_state.TrainState:
    """Returns the initial state."""
    net = Decoder()
    params = net.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params: dict, batch: dict[str, jax.Array], state: train_state.TrainState) -> jax.Array:
    """Returns the mean loss of the labels."""
    logits = state.apply_fn({"params": params}, batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields the micro-batches of a step: sequences that count up in steps of 1 to 7, from random numbers."""
    rng, counted = np.random.default_rng(0), np.arange(LENGTH + 1)
    while True:
        first, by = (rng.integers(1, most, (MICRO_BATCHES, EXAMPLES, 1)) for most in (VOCAB, 8))
        yield {"tokens": ((first + by * counted) % VOCAB).astype(np.int32)}


def train(pipe: int, steps: int, schedule: str = "1f1b", stage: int = 3, devices: list | None = None) -> list[float]:
    """Trains with `pipe` groups of devices, and returns the losses."""
    mesh = zerojax.make_mesh(pipe=pipe, devices=devices)
    pipeline = None
    if pipe > 1:
        micro_batch = jax.tree.map(lambda leaf: leaf[0], next(batches()))
        chunks = 2 if schedule == "interleaved" else 1
        pipeline = zerojax.Pipeline(loss_fn, micro_batch, BLOCKS, schedule=schedule, chunks=chunks)
    state, partition = zerojax.shard_train_state(
        create_state, jax.random.key(0), mesh=mesh, stage=stage, pipeline=pipeline
    )
    train_step = zerojax.make_train_step(
        loss_fn, partition, blocks=BLOCKS, grad_accum=MICRO_BATCHES, reduce_dtype=jnp.float32
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pipe", type=int, default=2, help="groups of devices")
    parser.add_argument(
        "--schedule", default="1f1b", choices=["gpipe", "1f1b", "interleaved", "zero_bubble"], help="order of passes"
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    losses = train(args.pipe, args.steps, args.schedule)
    print(f"{args.pipe} groups of {jax.device_count() // args.pipe} devices, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
