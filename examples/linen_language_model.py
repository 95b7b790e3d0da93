"""Trains a GPT-2-like Linen model on Python's own source, sharded by ZeRO stage. This module shows `zerojax.make_train_step`.

    python examples/linen_language_model.py --stage 3 --steps 40

The model is ordinary Flax. `train` shards it with a mesh, a sharded state and a train step. Without an accelerator, 8 CPU devices are
emulated.
"""

import argparse
import pathlib
import sysconfig
from collections.abc import Iterator

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

VOCAB, EMBED, HEADS, LAYERS, LENGTH = 256, 128, 4, 3, 64
GRAD_ACCUM, MICRO_BATCH = 2, 16  # 2 passes of 16 examples per step; on 8 devices, 2 examples per device and pass


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with dropout."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        attention = nn.MultiHeadDotProductAttention(HEADS, deterministic=deterministic, dropout_rate=self.dropout)
        x = x + nn.Dropout(self.dropout)(attention(nn.LayerNorm()(x), mask=mask), deterministic=deterministic)
        hidden = nn.gelu(nn.Dense(4 * EMBED)(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout)(nn.Dense(EMBED)(hidden), deterministic=deterministic)


class GPT(nn.Module):
    """Learned positions, a stack of blocks, and an output layer tied to the embedding."""

    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = False) -> jax.Array:
        embedding = nn.Embed(VOCAB, EMBED, name="embedding")
        positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, EMBED))
        x = embedding(tokens) + positions[: tokens.shape[1]]
        x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        for layer in range(LAYERS):
            x = Block(self.dropout, name=f"block_{layer}")(x, deterministic)
        return embedding.attend(nn.LayerNorm(name="final_norm")(x))


class TrainState(train_state.TrainState):
    """Flax's train state and a random key for dropout."""

    key: jax.Array


def create_state(key: jax.Array, learning_rate: float = 1e-3) -> TrainState:
    """Returns the initial state."""
    model = GPT()
    params_key, dropout_key = jax.random.split(key)
    params = model.init(params_key, jnp.zeros((1, LENGTH), jnp.int32), deterministic=True)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(learning_rate), key=dropout_key)


def loss_fn(params: dict, batch: dict, state: TrainState) -> tuple[jax.Array, dict]:
    """Returns the mean next-byte loss, and the key for the next pass."""
    next_key, dropout_key = jax.random.split(state.key)
    tokens = batch["tokens"]
    logits = state.apply_fn({"params": params}, tokens[:, :-1], rngs={"dropout": dropout_key}).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss, {"state": {"key": next_key}, "metrics": {"bits_per_byte": loss / jnp.log(2.0)}}


def batches() -> Iterator[dict]:
    """Yields random windows of the Python standard library's source, as bytes."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, (GRAD_ACCUM, MICRO_BATCH))
        yield {"tokens": text[starts[..., None] + np.arange(LENGTH + 1)].astype(np.int32)}


def train(stage: int, steps: int, compute_dtype: str | None = "bfloat16", devices: list | None = None):
    """Trains, and returns the losses, the last state and the partition."""
    mesh = zerojax.make_mesh(devices=devices)
    state, partition = zerojax.shard_train_state(create_state, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = zerojax.make_train_step(
        loss_fn,
        partition,
        clip_norm=1.0,
        grad_accum=GRAD_ACCUM,
        compute_dtype=compute_dtype,
        blocks=r"block_\d+",
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, partition


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)

    losses, state, partition = train(args.stage, args.steps)
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0)
    rich.print(zerojax.memory_table(partition, baseline, accumulates=GRAD_ACCUM > 1))
    here = display.human(state_bytes.measured_bytes(state, partition.mesh.devices.flat[0]))
    replicated = display.human(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    print(f"stage {args.stage} on {partition.mesh.size} devices: {here} of state on each, {replicated} at stage 0")
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
