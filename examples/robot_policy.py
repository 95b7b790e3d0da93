"""Trains a robot policy in the form of pi0 by flow matching, sharded by ZeRO. This module shows NNX that holds a scanned Linen stack.

    python examples/robot_policy.py --steps 60
    python examples/robot_policy.py --steps 60 --lora
    python examples/robot_policy.py --plan h100 --topology 1x2

The policy is an NNX module with projections of its own around `bridge.ToNNX` of a Linen stack, `nn.scan(nn.remat(Block))`. A block reads
two streams, a prefix of images and text and the noisy actions, with weights for each and one attention over both. `--lora` trains adapters
inside the einsums, and freezes the rest. The optimizer keeps an average of the weights. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from flax import nnx
from flax.nnx import bridge

import zerojax
from zerojax.launch import devices as devices_lib
from zerojax.plan import report, targets
from zerojax.plan.own_step import plan_own_step

WIDTHS, HIDDEN, HEADS, HEAD, LAYERS, RANK = (64, 32), (256, 128), 4, 16, 4, 4  # of the prefix and of the actions
FEATURES, ACTIONS, LENGTHS, BATCH = 24, 8, (6, 4), 64
PI0 = {  # 3.3B weights in this form; three images, a text, and 50 actions
    **{"WIDTHS": (2048, 1024), "HIDDEN": (34816, 8192), "HEADS": 8, "HEAD": 256, "LAYERS": 18, "RANK": 16},
    **{"FEATURES": 1152, "ACTIONS": 32, "LENGTHS": (816, 50), "BATCH": 32},
}
# Each step of the scan gathers its own layer, with the weights of both experts, and keeps its inputs alone, as nn.remat does.
HOW = {"blocks": "experts/layers", "remat": "full", "reduce_dtype": jnp.float32}


class Einsum(nn.Module):
    """A weight in any contraction, with an adapter of rank RANK beside it."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        down = self.param("lora_a", nn.initializers.normal(0.1), (self.shape[0], RANK))
        up = self.param("lora_b", nn.initializers.zeros, (RANK, self.shape[1]))
        return x @ self.param("w", nn.initializers.lecun_normal(), self.shape) + x @ down @ up


class Block(nn.Module):
    """Two experts: each stream has weights of its own, and attends to both."""

    @nn.compact
    def __call__(self, streams: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple, None]:
        heads = []
        for number, (x, width) in enumerate(zip(streams, WIDTHS)):
            y = Einsum((width, 3 * HEADS * HEAD), name=f"qkv_{number}")(nn.RMSNorm(name=f"norm_{number}")(x))
            heads.append(y.reshape(*y.shape[:2], 3, HEADS, HEAD))
        q, k, v = jnp.moveaxis(jnp.concatenate(heads, axis=1), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v).reshape(*q.shape[:2], -1)
        found = []
        parts = jnp.split(mixed, [streams[0].shape[1]], axis=1)
        for number, (x, part, width, hidden) in enumerate(zip(streams, parts, WIDTHS, HIDDEN)):
            x = x + Einsum((HEADS * HEAD, width), name=f"out_{number}")(part)
            y = nn.gelu(Einsum((width, hidden), name=f"up_{number}")(nn.RMSNorm(name=f"mlp_norm_{number}")(x)))
            found.append(x + Einsum((hidden, width), name=f"down_{number}")(y))
        return tuple(found), None


class Experts(nn.Module):
    """The stack of blocks."""

    @nn.compact
    def __call__(self, prefix: jax.Array, actions: jax.Array) -> jax.Array:
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        return blocks(name="layers")((prefix, actions), None)[0][1]


class Policy(nnx.Module):
    """Predicts how noisy actions move at a time between noise (1) and data (0)."""

    def __init__(self, rngs: nnx.Rngs):
        self.prefix, self.inputs = nnx.Linear(FEATURES, WIDTHS[0], rngs=rngs), nnx.Linear(ACTIONS, WIDTHS[1], rngs=rngs)
        self.time, self.outputs = nnx.Linear(2, WIDTHS[1], rngs=rngs), nnx.Linear(WIDTHS[1], ACTIONS, rngs=rngs)
        self.experts = bridge.ToNNX(Experts())
        self.experts.lazy_init(*(jnp.zeros((1, 1, width)) for width in WIDTHS), rngs=rngs)

    def __call__(self, seen: jax.Array, noisy: jax.Array, time: jax.Array) -> jax.Array:
        at = self.time(jnp.stack([jnp.sin(time), jnp.cos(time)], axis=-1))[:, None]
        return self.outputs(self.experts(self.prefix(seen), self.inputs(noisy) + at))


class Averaged(NamedTuple):
    """The state of an optimizer, and a moving average of the weights that it updates."""

    inner: Any
    average: Any


def with_average(tx: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Returns an optimizer that keeps an average of the weights; it is sharded, and may be offloaded, as moments are."""

    def update(updates: Any, state: Averaged, params: Any) -> tuple[Any, Averaged]:
        updates, inner = tx.update(updates, state.inner, params)
        new = optax.apply_updates(params, updates)
        return updates, Averaged(inner, optax.incremental_update(new, state.average, 1 - decay))

    def init(params: Any) -> Averaged:
        return Averaged(tx.init(params), jax.tree.map(jnp.copy, params))

    return optax.GradientTransformation(init, update)


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yields what a robot sees, the actions that follow from it, noise, and times."""
    random = np.random.default_rng(0)
    rule = random.normal(size=(FEATURES, ACTIONS)) / FEATURES**0.5
    while True:
        seen = random.normal(size=(BATCH, LENGTHS[0], FEATURES))
        actions = np.repeat((seen.mean(1) @ rule)[:, None], LENGTHS[1], axis=1)
        noise, time = random.normal(size=actions.shape), random.uniform(size=BATCH)
        batch = {"seen": seen, "actions": actions, "noise": noise, "time": time}
        yield {name: value.astype(np.float32) for name, value in batch.items()}


def own_code(lora: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the init function, the loss, and which weights are trained."""
    graph, _, rest = nnx.split(nnx.eval_shape(lambda: Policy(nnx.Rngs(0))), nnx.Param, ...)
    tx = with_average(optax.adamw(3e-3), 0.99)

    def init(key: jax.Array) -> zerojax.TrainState:
        return zerojax.TrainState.create(apply_fn=None, params=nnx.state(Policy(nnx.Rngs(key)), nnx.Param), tx=tx)

    def loss_fn(params: Any, batch: dict[str, jax.Array], state: Any) -> jax.Array:
        time = batch["time"][:, None, None]
        noisy = time * batch["noise"] + (1 - time) * batch["actions"]
        moved = nnx.merge(graph, params, rest)(batch["seen"], noisy, batch["time"])
        return jnp.mean((moved - (batch["noise"] - batch["actions"])) ** 2)

    return init, loss_fn, {"trainable": "lora_[ab]"} if lora else {}


def train(steps: int, lora: bool = False, stage: int = 3, devices: list | None = None) -> tuple[list[float], Any]:
    """Trains, and returns the losses and the partition."""
    (init, loss_fn, trained), mesh = own_code(lora), zerojax.make_mesh(devices=devices)
    # The two lines.
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, **trained)
    train_step = zerojax.make_train_step(loss_fn, partition, **HOW)

    losses = []
    for _, batch in zip(range(steps), batches()):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, partition


def plan(mesh: Any, lora: bool = False, stage: int = 3, **how: Any) -> str:
    """Returns what a step needs of each device, which may be absent, and of how much; allocates nothing."""
    init, loss_fn, trained = own_code(lora)
    how, shard, batch = HOW | how, {"stage": stage, **trained}, next(batches())
    found = plan_own_step(init, jax.random.key(0), loss_fn=loss_fn, batch=batch, mesh=mesh, shard=shard, **how)
    return f"stage {stage}: {report.verdict(found)}"


def main(argv: list[str] | None = None) -> None:
    """Plans and trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--lora", action="store_true", help="train adapters, and freeze the rest")
    parser.add_argument("--plan", help="only plan 3.3B weights, for a kind of GPU that may be absent (h100), in bf16")
    parser.add_argument("--topology", default="1x2", help="hosts x GPUs of that plan")
    args = parser.parse_args(argv)
    if args.plan:
        globals().update(PI0)
        mesh = zerojax.make_mesh(devices=targets.devices(args.plan, args.topology))
        print(*(plan(mesh, args.lora, stage, compute_dtype=jnp.bfloat16) for stage in (0, 3)), sep="\n")
        return
    devices_lib.emulate_cpu_devices(8)
    print(*(plan(zerojax.make_mesh(), args.lora, stage) for stage in (0, 3)), sep="\n")
    losses, partition = train(args.steps, args.lora)
    how = {"trainable": "lora_[ab]"} if args.lora else {}
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0, **how)
    rich.print(zerojax.memory_table(partition, baseline))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
