"""Trains a vision transformer (NNX) on a dataset of tensorflow-datasets, sharded by ZeRO. This module shows its two lines beside tfds.

    python examples/vit_tensorflow_datasets.py --steps 60

The dataset is built here, without a download: images of bars, whose label is their direction. `as_data_source` reads it, and any other of
tfds, without TensorFlow. Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tensorflow_datasets as tfds
from flax import nnx

import zerojax
from zerojax.launch import devices as devices_lib
from zerojax.plan import report
from zerojax.plan.own_step import plan_own_step

SIZE, PATCH, WIDTH, HEADS, LAYERS, CLASSES, BATCH, IMAGES = 16, 4, 64, 4, 4, 4, 64, 512
HOW = {"blocks": r"layers/\d+", "reduce_dtype": jnp.float32}


class Bars(tfds.core.GeneratorBasedBuilder):
    """Images of noisy bars in one of four directions."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        image = tfds.features.Tensor(shape=(SIZE, SIZE, 1), dtype=np.uint8)
        features = {"image": image, "label": tfds.features.ClassLabel(num_classes=CLASSES)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict]]:
        random, (row, column) = np.random.default_rng(0), np.indices((SIZE, SIZE))
        for number in range(IMAGES):
            label = number % CLASSES
            along = (row, column, row + column, row - column)[label] + random.integers(SIZE)
            image = 128 * (along % 8 < 4) + random.integers(0, 128, (SIZE, SIZE))
            yield number, {"image": image[..., None].astype(np.uint8), "label": label}


class Layer(nnx.Module):
    """Attention and an MLP."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Vit(nnx.Module):
    """A vision transformer with a mean over its tokens."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, WIDTH, (PATCH, PATCH), (PATCH, PATCH), rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((SIZE // PATCH) ** 2, WIDTH)))
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images.astype(jnp.float32) / 255 - 0.5)
        x = x.reshape(len(images), -1, WIDTH) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def batches(data_dir: str) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of the dataset, in another order each time through it."""
    builder = Bars(data_dir=data_dir, file_format="array_record")
    builder.download_and_prepare()
    source, random = builder.as_data_source(split="train"), np.random.default_rng(0)
    while True:
        order = random.permutation(len(source))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            rows = source.__getitems__([int(row) for row in order[first : first + BATCH]])
            yield {name: np.stack([row[name] for row in rows]) for name in ("image", "label")}


def own_code() -> tuple[Any, Any]:
    """Returns the init function and the loss."""
    graph, _, rest = nnx.split(nnx.eval_shape(lambda: Vit(nnx.Rngs(0))), nnx.Param, ...)

    def init(key: jax.Array) -> zerojax.TrainState:
        params = nnx.state(Vit(nnx.Rngs(key)), nnx.Param)
        return zerojax.TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def loss_fn(params: Any, batch: dict[str, jax.Array], state: Any) -> jax.Array:
        scores = nnx.merge(graph, params, rest)(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean()

    return init, loss_fn


def train(steps: int, data_dir: str, stage: int = 3, devices: list | None = None) -> tuple[list[float], Any]:
    """Trains, and returns the losses and the partition."""
    (init, loss_fn), mesh = own_code(), zerojax.make_mesh(devices=devices)
    # The two lines.
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=stage)
    train_step = zerojax.make_train_step(loss_fn, partition, **HOW)

    losses = []
    for _, batch in zip(range(steps), batches(data_dir)):
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, partition


def plan(mesh: Any, batch: Any, stage: int) -> str:
    """Returns what a step needs of each device; allocates nothing."""
    (init, loss_fn), key = own_code(), jax.random.key(0)
    found = plan_own_step(init, key, loss_fn=loss_fn, batch=batch, mesh=mesh, shard={"stage": stage}, **HOW)
    return f"stage {stage}: {report.verdict(found)}"


def main(argv: list[str] | None = None) -> None:
    """Plans and trains with the command line's settings, and prints the memory and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    args = parser.parse_args(argv)
    devices_lib.emulate_cpu_devices(8)
    tfds.disable_progress_bar()
    with tempfile.TemporaryDirectory() as data_dir:
        batch = next(batches(data_dir))
        print(*(plan(zerojax.make_mesh(), batch, stage) for stage in (0, 3)), sep="\n")
        losses, partition = train(args.steps, data_dir)
    baseline = zerojax.partition_state(partition.abstract_state, mesh=partition.mesh, stage=0)
    rich.print(zerojax.memory_table(partition, baseline))
    print(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
