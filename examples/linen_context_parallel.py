"""Trains an ordinary Flax decoder on parts of sequences (context parallelism). This module shows the three changes that a model needs.

    python examples/linen_context_parallel.py --context 4 --steps 40

Attention is `zerojax.attention`. Positions and labels come with the batch, since a device has only a part of each sequence. `batch_specs`
says which dim of a batch's leaves counts tokens. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
import functools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.launch import devices as devices_lib

VOCAB, EMBED, HEADS, MLP, LAYERS, LENGTH, EXAMPLES = 256, 128, 4, 512, 2, 64, 8
SPECS = [("tokens|labels|positions", P(("replica", "data"), "context"))]


class Block(nn.Module):
    """Causal attention and MLP, each behind a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        attention = functools.partial(zerojax.attention, is_causal=True)
        x = x + nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention)(nn.LayerNorm()(x))
        return x + nn.Dense(EMBED)(nn.gelu(nn.Dense(MLP)(nn.LayerNorm()(x))))


class Decoder(nn.Module):
    """A language model with learned positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(tokens) + nn.Embed(LENGTH, EMBED)(positions)
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def create_state(key: jax.Array) -> train_state.TrainState:
    """Returns the initial state."""
    net, tokens = Decoder(), jnp.zeros((1, LENGTH), jnp.int32)
    params = net.init(key, tokens, tokens)["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params: dict, batch: dict[str, jax.Array], state: train_state.TrainState) -> jax.Array:
    """Returns the mean loss of the labels."""
    logits = state.apply_fn({"params": params}, batch["tokens"], batch["positions"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields sequences that count up in steps of 1 to 7, from random numbers, with the label and the position of each token."""
    rng, counted = np.random.default_rng(0), np.arange(LENGTH + 1)
    positions = np.broadcast_to(counted[:-1], (EXAMPLES, LENGTH)).astype(np.int32)
    while True:
        first, by = rng.integers(0, VOCAB, (EXAMPLES, 1)), rng.integers(1, 8, (EXAMPLES, 1))
        text = ((first + by * counted) % VOCAB).astype(np.int32)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": positions}


def train(context: int, steps: int, stage: int = 3, devices: list | None = None) -> list[float]:
    """Trains with `context` devices for each sequence, and returns the losses."""
    mesh = zerojax.make_mesh(context=context, devices=devices)
    state, partition = zerojax.shard_train_state(create_state, jax.random.key(0), mesh=mesh, stage=stage)
    if context > 1:  # once, before training: does the loss stay the same?
        for line in zerojax.compare_context(loss_fn, partition, state, next(batches()), batch_specs=SPECS):
            print(line)
    train_step = zerojax.make_train_step(
        loss_fn, partition, blocks=r"block_\d+", reduce_dtype=jnp.float32, batch_specs=SPECS
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4, help="devices for each sequence")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    losses = train(args.context, args.steps)
    print(f"context {args.context} on {jax.device_count()} devices, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
