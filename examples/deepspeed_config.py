"""Trains a small Flax model by a DeepSpeed config: the config's stage, optimizer, schedule, precision and batch, in a step of your own.

python examples/deepspeed_config.py [ds_config.json]

Without a file it uses the config below. Devices: any number; without an accelerator 8 CPU devices are emulated. Result: a line for each key
of the config, and a loss that falls from 1.5 to about 0.1 in 40 steps.
"""

import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import zerojax
from zerojax.launch import devices as devices_lib

FEATURES, HIDDEN = 64, 256
CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
}


class Net(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(FEATURES)(nn.gelu(nn.Dense(HIDDEN)(x)))


def loss_fn(params, batch, state):
    """Returns the mean squared error."""
    return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]).astype(jnp.float32) ** 2)


def batches(count: int, passes: int):
    """Yields {"x", "y"}: float32[(passes,) examples, FEATURES] each; y is a fixed rotation of x."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    leading = (count // passes,) if passes == 1 else (passes, count // passes)
    while True:
        x = rng.normal(size=(*leading, FEATURES)).astype(np.float32)
        yield {"x": x, "y": (x @ rotation).astype(np.float32)}


def train(config: dict, steps: int) -> list[float]:
    """Trains as the config says, and returns the losses."""
    found = zerojax.from_deepspeed_config(config)
    for line in found.lines:
        print(f"{line.key}: {line.verdict}; {line.text}")

    def init(key):
        net = Net()
        params = net.init(key, jnp.zeros((1, FEATURES)))["params"]
        scale = found.loss_scale.init() if found.loss_scale else ()
        return zerojax.TrainState.create(
            apply_fn=net.apply, params=params, tx=found.tx, rng=jax.random.key_data(key), loss_scale=scale
        )

    mesh = zerojax.make_mesh(**found.mesh)
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=found.stage, **found.options)
    train_step = zerojax.make_train_step(loss_fn, partition, **found.step)
    losses = []
    for _, batch in zip(range(steps), batches(found.global_batch_size or 64, found.step["grad_accum"])):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def main() -> None:
    """Reads the config that the command line names, and trains."""
    devices_lib.emulate_cpu_devices(8)
    config = CONFIG
    if len(sys.argv) > 1:
        with open(sys.argv[1]) as file:
            config = json.load(file)
    losses = train(config, 40)
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
