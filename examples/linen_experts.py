"""Trains a Flax decoder with experts of its own on different devices (expert parallelism). This module shows what a model needs.

    python examples/linen_experts.py --expert 4 --steps 40

The model keeps its own router and its own stacked matrices, and calls `experts.route` and `experts.apply`. `overrides` names the axis
`expert` for these matrices. Without an accelerator, 8 CPU devices are emulated.
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
from zerojax.models.experts import ROUTING
from zerojax.ops import experts

VOCAB, EMBED, HEADS, WIDTH, EXPERTS, TOP, LAYERS, LENGTH, EXAMPLES = 256, 128, 4, 128, 8, 2, 2, 32, 16
OVERRIDES = [(r"moe/(wi_0|wi_1|wo)$", P("expert"))]  # the first dim of each stack counts experts
BALANCE = 0.01


class MoE(nn.Module):
    """A mixture of experts in a style of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, EMBED)
        routing = experts.route(nn.Dense(EXPERTS, use_bias=False, name="router")(rows), TOP)
        self.sow("intermediates", ROUTING, routing)
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate, up = (self.param(name, init, (EXPERTS, EMBED, WIDTH)) for name in ("wi_0", "wi_1"))
        down = self.param("wo", init, (EXPERTS, WIDTH, EMBED))
        return experts.apply(rows, routing, gate, up, down, nn.gelu).reshape(x.shape)


class Block(nn.Module):
    """Causal attention and a mixture, each behind a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + MoE(name="moe")(nn.LayerNorm()(x))


class Decoder(nn.Module):
    """A language model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, EMBED)(tokens)
        for layer in range(LAYERS):
            x = Block(name=f"block_{layer}")(x)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def create_state(key: jax.Array) -> train_state.TrainState:
    """Returns the initial state."""
    net = Decoder()
    params = net.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(params: dict, batch: dict[str, jax.Array], state: train_state.TrainState) -> jax.Array:
    """Returns the mean loss of the next tokens, with a loss that balances the experts' load."""
    logits, seen = state.apply_fn({"params": params}, batch["tokens"][:, :-1], mutable=["intermediates"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["tokens"][:, 1:]).mean()
    routings = jax.tree.leaves(seen, is_leaf=lambda leaf: isinstance(leaf, experts.Routing))
    return loss + BALANCE * sum(map(experts.balance_loss, routings)) / LAYERS


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields sequences that count up in steps of 1 to 7, from random numbers."""
    rng, counted = np.random.default_rng(0), np.arange(LENGTH + 1)
    while True:
        first, by = rng.integers(0, VOCAB, (EXAMPLES, 1)), rng.integers(1, 8, (EXAMPLES, 1))
        yield {"tokens": ((first + by * counted) % VOCAB).astype(np.int32)}


def train(expert: int, steps: int, stage: int = 3, devices: list | None = None) -> list[float]:
    """Trains with the experts on `expert` devices, and returns the losses."""
    mesh = zerojax.make_mesh(expert=expert, devices=devices)
    state, partition = zerojax.shard_train_state(
        create_state, jax.random.key(0), mesh=mesh, stage=stage, overrides=OVERRIDES
    )
    train_step = zerojax.make_train_step(
        loss_fn, partition, blocks=r"block_\d+", reduce_dtype=jnp.float32, expert_parts=2
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main(argv: list[str] | None = None) -> None:
    """Trains with the command line's settings, and prints the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--expert", type=int, default=4, help="devices that hold different experts")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    losses = train(args.expert, args.steps)
    print(f"expert {args.expert} on {jax.device_count()} devices, loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
