"""DeepSpeed's introduction in zerojax: an MLP in float16 with a dynamic loss scale, stage 2, and its optimizer state in host memory.

    python examples/deepspeed_intro.py
    python examples/deepspeed_intro.py --config ds_config.json --checkpoints runs/intro

The settings are those of a ds_config.json; the one below is taken without --config. The device holds float16 weights and gradients. Float32
master weights and moments are in pinned host memory, and pass through the device in each update. With --checkpoints a second start goes on
where the first one ended. Devices: any number that divides the batch; without an accelerator 8 CPU devices are emulated. Result: in 40
steps the loss falls from 2.5 to below 2.
"""

import argparse
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import zerojax
from zerojax.launch import devices

FEATURES, HIDDEN, CLASSES = 784, 1024, 10
CONFIG = {
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


class MLP(nn.Module):
    """Two layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(HIDDEN, dtype=x.dtype)(x))
        return nn.Dense(CLASSES, dtype=x.dtype)(x)


def loss_fn(params: Any, batch: Any, state: Any) -> jax.Array:
    """Returns the mean cross entropy of the labels."""
    logits = state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batch_of(step: int, size: int) -> dict[str, jax.Array]:
    """Returns {"x": float32[size, FEATURES], "y": int32[size]}, whose labels a fixed random matrix gives."""
    x = jax.random.normal(jax.random.key(step), (size, FEATURES))
    return {"x": x, "y": jnp.argmax(x @ jax.random.normal(jax.random.key(1), (FEATURES, CLASSES)), axis=1)}


def train(config: dict, steps: int = 20, checkpoints: str = "") -> tuple[list[float], Any, zerojax.Partition]:
    """Trains to a step as the config says. Returns the losses, the state and its partition."""
    # deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    found = zerojax.from_deepspeed_config(config)
    for line in found.lines:
        if line.verdict == "not supported":
            print(f"{line.key}: {line.verdict}; {line.text}")
    if found.tx is None or found.global_batch_size is None:
        raise zerojax.UserError("the config has no optimizer or no batch size: give it both, as CONFIG here has them")
    half = {"fp16": jnp.float16, "bf16": jnp.bfloat16}.get(found.precision)
    tx = zerojax.with_master_weights(found.tx) if half else found.tx

    def init(key: jax.Array) -> zerojax.TrainState:
        params = MLP().init(key, jnp.zeros((1, FEATURES)))["params"]
        params = jax.tree.map(lambda w: w.astype(half or w.dtype), params)
        scale = found.loss_scale.init() if found.loss_scale else ()
        return zerojax.TrainState.create(
            apply_fn=MLP().apply, params=params, tx=tx, rng=jax.random.key_data(key), loss_scale=scale
        )

    mesh = zerojax.make_mesh(**found.mesh)
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=found.stage, **found.options)
    train_step = zerojax.make_train_step(loss_fn, partition, blocks=r"Dense_\d+", **found.step)

    passes = found.step["grad_accum"]  # where there are several, arrays are [passes, examples, ...]
    leading = (passes, -1) if passes > 1 else (-1,)
    sharding = zerojax.batch_sharding(mesh, len(leading) - 1)

    first, saver = 0, zerojax.Checkpointer(checkpoints, keep_last=1) if checkpoints else None
    if saver and saver.latest_step() is not None:  # model_engine.load_checkpoint(folder)
        state, data = saver.restore(None, partition)
        first = data["next_batch"]
    losses = []
    for step in range(first, steps):
        batch = batch_of(step, found.global_batch_size)
        batch = jax.tree.map(lambda leaf: leaf.reshape(*leading, *leaf.shape[1:]), batch)
        batch = jax.device_put(batch, sharding)
        # loss = model_engine(batch); model_engine.backward(loss); model_engine.step()
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    if saver:  # model_engine.save_checkpoint(folder)
        if losses:
            saver.save(steps, state, partition=partition, data_state={"next_batch": steps})
        saver.close()
    return losses, state, partition


def main() -> None:
    """Trains as the config of the command line says, and tells where the state lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a ds_config.json")
    parser.add_argument("--steps", type=int, default=40, help="the last step")
    parser.add_argument("--checkpoints", default="", help="a folder for the state of the last step")
    args = parser.parse_args()
    devices.emulate_cpu_devices(8)
    config = CONFIG
    if args.config:
        with open(args.config) as file:
            config = json.load(file)
    try:
        _, state, partition = train(config, args.steps, args.checkpoints)
    except zerojax.UserError as error:  # one line instead of a traceback
        parser.error(str(error))
    scale = state.loss_scale
    print(f"stage {partition.stage} on {len(jax.devices())} devices")
    if scale:
        print(f"loss scale {float(scale.scale):g}, {int(scale.skipped_steps)} steps skipped")
    print(f"in host memory: {', '.join(sorted(partition.on_host)) or 'nothing'}")


if __name__ == "__main__":
    main()
