"""Fine-tunes a model that transformers saved. This module loads it, trains it, generates with it, and saves it as transformers does.

    python examples/fine_tune_huggingface.py --folder opt/my-llama --stage 3 --steps 30

Without --folder it first writes a tiny model with random weights, which needs no network. The task is to count upwards in steps of 3.
Without an accelerator, 8 CPU devices are emulated.
"""

import argparse
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.interop import huggingface
from zerojax.launch import devices as devices_lib
from zerojax.models import families, family

LENGTH, BATCH, PROMPT = 16, 32, 6


def write_tiny_model(folder: pathlib.Path) -> None:
    """Writes a folder of a small decoder with random weights."""
    chosen = families.PRESETS["test"]
    config = dataclasses.replace(chosen.presets["test"], vocab_size=64)
    random = np.random.default_rng(0)
    shapes = family.abstract_params(chosen.parts, config)
    params = jax.tree.map(lambda leaf: random.normal(0, 0.05, leaf.shape).astype(np.float32), shapes)
    huggingface.export(params, chosen, config, folder, dtype=np.float32, bos_token_id=0)


def batches(vocab_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields rows that count upwards, in the form of transformers: input_ids and labels."""
    rng = np.random.default_rng(0)
    while True:
        rows = (rng.integers(vocab_size, size=(BATCH, 1)) + 3 * np.arange(LENGTH)) % vocab_size
        yield {"input_ids": rows.astype(np.int32), "labels": rows.astype(np.int32)}


def train(folder: pathlib.Path, out: pathlib.Path, stage: int, steps: int) -> tuple[list[float], np.ndarray]:
    """Trains on a folder's model, saves it to `out`, and returns the losses and rows that the trained model continues."""
    mesh = zerojax.make_mesh()
    loaded = zerojax.load_huggingface(folder, mesh=mesh, stage=stage)

    def create(params) -> TrainState:
        return TrainState.create(apply_fn=loaded.apply, params=params, tx=optax.adamw(1e-2))

    state, partition = zerojax.shard_train_state(create, loaded.params, mesh=mesh, stage=stage)
    loaded = dataclasses.replace(loaded, params=None)  # the state holds the weights now
    train_step = zerojax.make_train_step(
        lambda params, batch, state: loaded.loss(params, batch), partition, blocks=loaded.blocks, heads=loaded.heads
    )
    losses = []
    for _, batch in zip(range(steps), batches(loaded.config.vocab_size)):
        state, metrics = train_step(state, jax.device_put(batch, partition.batch_sharding))
        losses.append(float(metrics["loss"]))
    prompts = next(batches(loaded.config.vocab_size))["input_ids"][:2, :PROMPT]
    rows = loaded.generator(max_new_tokens=LENGTH - PROMPT)(state.params, prompts)
    zerojax.export_huggingface(state.params, loaded, out)
    return losses, rows


def main() -> None:
    """Trains with the command line's settings, and prints the losses and what the model continues."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=pathlib.Path, help="a decoder that transformers saved; default: a tiny one, made here"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="where the trained model is saved; default: a temporary folder"
    )
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    args = parser.parse_args()
    devices_lib.emulate_cpu_devices(8)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or pathlib.Path(scratch, "model")
        if args.folder is None:
            write_tiny_model(folder)
        losses, rows = train(folder, args.out or pathlib.Path(scratch, "trained"), args.stage, args.steps)
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    for row in rows.tolist():
        print(row[:PROMPT], "->", row[PROMPT:])


if __name__ == "__main__":
    main()
