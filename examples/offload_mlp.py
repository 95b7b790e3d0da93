"""A two-layer MLP in float16 with dynamic loss scaling, stage 2, with its optimizer state in host memory.

    python examples/offload_mlp.py

This is the model and the setting of DeepSpeed's introduction: `fp16.enabled`, `zero_optimization.stage = 2` and
`offload_optimizer.device = "cpu"`. The device holds float16 weights and gradients; float32 master weights and moments stay in pinned
host memory, and pass through the device in each update. `offload="host"` is all that differs from a state on the device.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.training import train_state

import zerojax

FEATURES, HIDDEN, CLASSES, BATCH = 784, 1024, 10, 64


class MLP(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(HIDDEN, dtype=x.dtype)(x))
        return nn.Dense(CLASSES, dtype=x.dtype)(x)


class State(train_state.TrainState):
    """A TrainState with a loss scale."""

    loss_scale: Any = ()


def loss_fn(params: Any, batch: Any, state: State) -> jax.Array:
    """Returns the mean cross entropy of the labels."""
    logits = state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)
    return -jnp.mean(picked)


def train(stage: int = 2, steps: int = 20, *, offload: Any = "host") -> tuple[list[float], State, zerojax.Partition]:
    """Trains on labels that a fixed random matrix gives. Returns the losses, the state and its partition."""
    scaler = zerojax.DynamicLossScale(init_scale=2.0**16)
    tx = zerojax.with_master_weights(zerojax.fused_adamw(1e-3))

    def init(key: jax.Array) -> State:
        params = MLP().init(key, jnp.zeros((1, FEATURES)))["params"]
        params = jax.tree.map(lambda w: w.astype(jnp.float16), params)
        return State.create(apply_fn=MLP().apply, params=params, tx=tx, loss_scale=scaler.init())

    mesh = zerojax.make_mesh()
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage, offload=offload)
    train_step = zerojax.make_train_step(
        loss_fn, partition, loss_scale=scaler, compute_dtype=jnp.float16, reduce_dtype=jnp.float32, clip_norm=1.0
    )
    rule = jax.random.normal(jax.random.key(1), (FEATURES, CLASSES))
    losses = []
    for step in range(steps):
        x = jax.random.normal(jax.random.key(step), (BATCH, FEATURES))
        batch = jax.device_put({"x": x, "y": jnp.argmax(x @ rule, axis=1)}, partition.batch_sharding)
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, partition


if __name__ == "__main__":
    losses, state, partition = train()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {int(state.loss_scale.skipped_steps)} steps skipped")
    for path in sorted(partition.on_host):
        print(f"in host memory: {path}")
