"""PEFT's script of a sequence-to-sequence model with LoRA, ZeRO stage 3 and offload, line by line in zerojax.

    python examples/lora_seq2seq.py
    python examples/lora_seq2seq.py --folder opt/bart-large --offload --epochs 5
    zerojax launch --num_gpus 2 -- python examples/lora_seq2seq.py --offload nvme

It is peft_lora_seq2seq_accelerate_ds_zero3_offload.py: an encoder-decoder learns to label short texts. Each epoch prints the memory of
both phases, the training loss and perplexity, and the accuracy of generated answers. Then come answers beside labels, and a folder that
PEFT loads. Without --folder there are no pre-trained weights, since this needs no network: a tiny BART is pre-trained first, on the same
sentences without their labels, which a second start finds. The texts are zerojax's own short reviews. Without an accelerator, 2 CPU
devices are emulated.
"""

import argparse
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax.training import train_state

import zerojax
from zerojax.data import short_reviews
from zerojax.launch import devices, processes
from zerojax.trainer.tuning import phases

# What the model answers: words that it tells apart from all others (see configs/lora_tiny.py).
WORDS = {"negative": " waste", "positive": " pleasure"}
ANSWER_TOKENS = 4


class TrainState(train_state.TrainState):
    """The state of a step, with the random key of dropout."""

    rng: Any


def pretrain(workdir: pathlib.Path, steps: int) -> pathlib.Path:
    """Pre-trains a tiny BART on sentences without labels, and returns its folder."""
    from zerojax import train
    from zerojax.configs import bart_tiny
    from zerojax.trainer import config as config_lib

    settings = bart_tiny.get_config()
    settings.steps, settings.log_every = steps, max(1, steps // 4)
    train.train(config_lib.from_dict(settings), workdir)
    return workdir / "export"


def preprocess(
    texts: list[tuple[str, str]], tokenizer: tokenizers.Tokenizer, loaded: Any, length: int
) -> dict[str, np.ndarray]:
    """Returns the arrays of all examples: padded prompts, their mask, and answers of which padding is no label."""
    special, count = loaded.special, len(texts)
    arrays = {"inputs": (count, length), "mask": (count, length)}
    arrays |= dict.fromkeys(("targets", "labeled"), (count, ANSWER_TOKENS + 1))
    found = {name: np.zeros(shape, np.int32) for name, shape in arrays.items()}
    for row, (text, label) in enumerate(texts):
        prompt = tokenizer.encode(text).ids[:length]
        answer = [token for token in tokenizer.encode(WORDS[label]).ids if token not in special.stops]
        answer = [special.start, *answer[: ANSWER_TOKENS - 1], special.stops[0]]
        found["inputs"][row, : len(prompt)], found["mask"][row, : len(prompt)] = prompt, 1
        found["targets"][row, : len(answer)], found["labeled"][row, 1 : len(answer)] = answer, 1
    return found


def batches(data: dict[str, np.ndarray], size: int, order: np.ndarray) -> Any:
    """Yields batches of `size` rows in an order; the last rows, which fill no batch, are left out."""
    for at in range(0, len(order) - size + 1, size):
        yield {name: array[order[at : at + size]] for name, array in data.items()}


def evaluate(
    generate: Any, params: Any, data: dict[str, np.ndarray], tokenizer: tokenizers.Tokenizer, size: int
) -> list[str]:
    """Returns the generated answer to each example, with the same batches on every process."""
    found: list[str] = []
    count = len(data["inputs"])
    for at in range(0, count, size):
        rows = np.arange(at, at + size) % count  # the last batch has the same shape
        tokens = generate(params, data["inputs"][rows], data["mask"][rows])
        found += [tokenizer.decode(row[1:].tolist()).strip() for row in tokens]
    return found[:count]


def run(folder: pathlib.Path, out: pathlib.Path, args: argparse.Namespace) -> float:
    """Trains adapters on a folder's model, writes them to `out`, and returns the accuracy on held-out texts."""
    targets = args.target_modules or None
    lora = zerojax.Lora(r=args.r, alpha=4 * args.r, dropout=args.dropout, target_modules=targets)
    mesh = zerojax.make_mesh()
    loaded = zerojax.load_huggingface(folder, mesh=mesh, stage=3, lora=lora)

    with zerojax.main_process_first():  # a data set would be downloaded, and found in the cache by the others
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        texts = list(short_reviews.sentences())
    train, held = (
        [pair for pair in texts if short_reviews.is_held_out(pair[0]) == is_held] for is_held in (False, True)
    )
    train_data, held_data = (preprocess(part, tokenizer, loaded, args.length) for part in (train, held))
    zerojax.wait_for_everyone()

    steps = args.epochs * (len(train) // args.batch)
    tx = optax.adamw(optax.linear_schedule(args.lr, 0.0, steps), b2=0.95, weight_decay=0.01)

    def create(params: Any) -> TrainState:
        return TrainState.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key_data(jax.random.key(42)))

    def loss_fn(params: Any, batch: Any, state: TrainState) -> zerojax.Mean:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        labels = batch["labeled"][:, 1:].sum()
        return zerojax.Mean(loaded.family.loss(loaded.config, params, batch, key) * labels, labels)

    where = {"optimizer": args.offload, "params": args.offload} if args.offload else None
    if args.offload == "nvme":
        where["nvme_path"] = str(out.parent)
    state, partition = zerojax.shard_train_state(
        create, loaded.params, mesh=mesh, stage=3, trainable=lora.trainable, offload=where
    )
    how = {"blocks": loaded.blocks, "heads": loaded.heads, "reduce_dtype": jnp.float32, "clip_norm": 1.0}
    train_step = zerojax.make_train_step(loss_fn, partition, **how)
    generate = loaded.generator(max_new_tokens=ANSWER_TOKENS, partition=partition)
    trained, every = (
        sum(leaf.size for leaf in jax.tree.leaves(part))
        for part in (partition.trainable_part(state.params), state.params)
    )
    say(f"trainable params: {trained:,} || all params: {every:,} || trainable%: {100 * trained / every:.4f}")

    accuracy, random = 0.0, np.random.default_rng(42)
    for epoch in range(1, args.epochs + 1):
        losses = []
        with phases.measured() as memory:
            for batch in batches(train_data, args.batch, random.permutation(len(train))):
                state, metrics = train_step(state, jax.device_put(batch, partition.batch_sharding))
                losses.append(metrics["loss"])
            mean = float(np.mean(jax.device_get(losses)))
        say(*(phases.unreported(memory) if epoch == 1 else []), *phases.lines(f"epoch {epoch}, training", memory))
        say(f"epoch {epoch}: train_ppl={math.exp(min(mean, 700)):.4f} train_epoch_loss={mean:.4f}")
        with phases.measured() as memory:
            found = evaluate(generate, state.params, held_data, tokenizer, args.batch)
        say(*phases.lines(f"epoch {epoch}, evaluation", memory))
        accuracy = float(np.mean([answer == WORDS[label].strip() for answer, (_, label) in zip(found, held)]))
        say(f"epoch {epoch}: accuracy={accuracy:.1%}")
    say(f"answers: {found[:10]}", f"labels:  {[WORDS[label].strip() for _, label in held[:10]]}")

    zerojax.export_adapter(state.params, loaded, out)
    say(f"the adapter is in {out}; PeftModel.from_pretrained(model, {str(out)!r}) loads it")
    return accuracy


def say(*lines: str) -> None:
    """Prints lines on the main process."""
    if processes.is_primary():
        print(*lines, sep="\n", flush=True)


def main() -> None:
    """Pre-trains a tiny model where none is given, and trains adapters on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--folder",
        type=pathlib.Path,
        help="an encoder-decoder that transformers saved, with tokenizer.json; default: a tiny one, made here",
    )
    add("--out", type=pathlib.Path, default=pathlib.Path("runs/lora_seq2seq"), help="where the adapter is written")
    add("--epochs", type=int, default=18, help="passes over the training texts")
    add("--batch", type=int, default=16, help="texts in a batch")
    add("--length", type=int, default=24, help="tokens of a prompt")
    add("--lr", type=float, default=3e-3, help="learning rate of the first step; it falls linearly to 0")
    add("--r", type=int, default=8, help="rank of the adapters; alpha is 4 r")
    add("--dropout", type=float, default=0.1, help="of the adapters' inputs")
    add("--target_modules", default="all-linear", help='modules with adapters; "": the usual ones of the model')
    where = {"nargs": "?", "const": "host", "choices": ["host", "nvme"]}
    add("--offload", **where, help="keeps optimizer state and weights in host memory, or on the disk of --out")
    add("--pretraining_steps", type=int, default=300, help="steps of pre-training without --folder")
    args = parser.parse_args()
    devices.emulate_cpu_devices(2)
    processes.initialize()  # does nothing without a launcher
    folder = args.folder
    if folder is None:
        say("no --folder: a tiny BART is pre-trained first, on sentences without labels")
        folder = pretrain(args.out.with_name(f"{args.out.name}-model"), args.pretraining_steps)
    run(folder, args.out, args)


if __name__ == "__main__":
    main()
