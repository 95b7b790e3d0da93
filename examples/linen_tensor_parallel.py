"""Trains a model in the form of flax's lm1b with tensor parallelism, by a table of `overrides` alone. This module shows that model's table.

    python examples/linen_tensor_parallel.py --model 2 --steps 40

The model is ordinary Flax and names no mesh. The modules and weights have the names of flax's example `lm1b`. Without an accelerator, 8 CPU
devices are emulated.
"""

import argparse
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

VOCAB, EMBED, HEADS, MLP, LAYERS, LENGTH, EXAMPLES = 256, 128, 4, 512, 2, 64, 16

# Megatron-LM's table (arXiv:1909.08053): the first matmul of a branch by columns, the second by rows; embedding and logits by vocabulary.
# The stage adds `data` to another dim. Norms match no row: they are replicated over `model`.
OVERRIDES = [
    (r"Embed_0/embedding", P("model")),
    (r"(query|key|value)/kernel", P(None, "model")),  # [embed, heads, width]
    (r"out/kernel", P("model")),  # [heads, width, embed]
    (r"MlpBlock_0/Dense_0/kernel", P(None, "model")),
    (r"MlpBlock_0/Dense_1/kernel", P("model")),
    (r"logitdense/kernel", P(None, "model")),
]
# Optional: without it the compiler chooses what it moves. A branch gathers its input once; between branches examples are sharded where
# they divide, and else tokens.
TOKENS, ALL_TOKENS = P("model", "model"), P()
ACTIVATIONS = [
    (r"encoderdecoderblock_\d+/(MultiHeadDotProductAttention|MlpBlock)_0", TOKENS, ALL_TOKENS),
    (r".*/(query|key|value)", P(None, None, "model")),
    (r".*/MlpBlock_0/Dense_0", P(None, None, "model")),
    (r"encoderdecoderblock_\d+(/LayerNorm_\d)?|encoderdecoder_norm", TOKENS),
]


class MlpBlock(nn.Module):
    """Two matmuls."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(EMBED)(nn.relu(nn.Dense(MLP)(x)))


class EncoderDecoder1DBlock(nn.Module):
    """Causal attention and MLP, each behind a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(nn.LayerNorm(use_bias=False)(x), mask=mask)
        return x + MlpBlock()(nn.LayerNorm(use_bias=False)(x))


class TransformerLM(nn.Module):
    """A decoder with an output layer of its own."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(tokens)
        for layer in range(LAYERS):
            x = EncoderDecoder1DBlock(name=f"encoderdecoderblock_{layer}")(x)
        return nn.Dense(VOCAB, use_bias=False, name="logitdense")(nn.LayerNorm(name="encoderdecoder_norm")(x))


def create_state(key: jax.Array) -> train_state.TrainState:
    """Returns the initial state."""
    net = TransformerLM()
    params = net.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params: dict, batch: jax.Array, state: train_state.TrainState) -> jax.Array:
    """Returns the mean loss of the next token."""
    logits = state.apply_fn({"params": params}, batch[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def batches() -> Iterator[np.ndarray]:
    """Yields sequences that count up in steps of 1 to 7, from random numbers."""
    rng = np.random.default_rng(0)
    while True:
        first, by = rng.integers(0, VOCAB, (EXAMPLES, 1)), rng.integers(1, 8, (EXAMPLES, 1))
        yield ((first + by * np.arange(LENGTH + 1)) % VOCAB).astype(np.int32)


def train(model: int, steps: int, stage: int = 3, devices: list | None = None) -> list[float]:
    """Trains with `model` devices along the axis `model`, and returns the losses."""
    mesh = zerojax.make_mesh(model=model, devices=devices)
    overrides = OVERRIDES if model > 1 else ()
    state, partition = zerojax.shard_train_state(
        create_state, jax.random.key(0), mesh=mesh, stage=stage, overrides=overrides
    )
    train_step = zerojax.make_train_step(
        loss_fn,
        partition,
        blocks=r"encoderdecoderblock_\d+",
        reduce_dtype=jnp.float32,
        activations=ACTIVATIONS,
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=int, default=2, help="devices along `model`")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    losses = train(args.model, args.steps)
    print(f"model {args.model} on {jax.device_count()} devices, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
