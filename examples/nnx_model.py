"""Trains an NNX model with its nnx.Optimizer, sharded by ZeRO stage. This module shows a custom train step over NNX state.

    python examples/nnx_model.py --stage 3 --steps 40

The train step is a plain `jax.jit` over the result of `nnx.split`. `zerojax.where_used` wraps the loss function, and
`partition.shardings` holds the state's shardings. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
from collections.abc import Iterator

import jax
import numpy as np
import optax
import rich
from flax import nnx

import zerojax
from zerojax import display
from zerojax.launch import devices as devices_lib
from zerojax.zero import state_bytes

FEATURES, HIDDEN, LAYERS, CLASSES, BATCH = 64, 256, 3, 16, 64


class Classifier(nnx.Module):
    """A residual MLP with batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.inputs = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs) for _ in range(LAYERS)])
        self.norms = nnx.List([nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs) for _ in range(LAYERS)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outputs = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.inputs(x))
        for layer, norm in zip(self.layers, self.norms):
            x = x + self.dropout(nnx.relu(norm(layer(x))))
        return self.outputs(x)


def create(key: jax.Array) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the graph definition and the state of the model and its optimizer."""
    model = Classifier(nnx.Rngs(key))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    return nnx.split((model, optimizer))


def loss_fn(model: Classifier, batch: dict) -> jax.Array:
    """Returns the mean loss. Updates the batch statistics and the dropout count in the model."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["features"]), batch["label"]).mean()


def batches() -> Iterator[dict]:
    """Yields points around one centre per class."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES))
    while True:
        label = rng.integers(0, CLASSES, BATCH).astype(np.int32)
        features = 0.4 * centres[label] + rng.normal(size=(BATCH, FEATURES))
        yield {"features": features.astype(np.float32), "label": label}


def train(stage: int, steps: int, compute_dtype: str | None = None, devices: list | None = None):
    """Trains, and returns the losses, the last model, optimizer and state, and the partition."""
    mesh = zerojax.make_mesh(devices=devices)
    (graph, state), partition = zerojax.shard_train_state(create, jax.random.key(0), mesh=mesh, stage=stage)
    _, shardings = partition.shardings
    sharded_loss = zerojax.where_used(loss_fn, partition.placements, compute_dtype=compute_dtype)

    def train_step(state: nnx.State, batch: dict) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(sharded_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    train_step = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(shardings, partition.batch_sharding),
        out_shardings=(shardings, None),
    )
    losses = []
    for _, batch in zip(range(steps), batches()):
        state, loss = train_step(state, batch)
        losses.append(float(loss))
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
    rich.print(zerojax.memory_table(partition, baseline))
    here = display.human(state_bytes.measured_bytes(state, partition.mesh.devices.flat[0]))
    replicated = display.human(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    print(f"stage {args.stage} on {partition.mesh.size} devices: {here} of state on each, {replicated} at stage 0")
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
