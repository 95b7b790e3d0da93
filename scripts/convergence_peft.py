"""Fine-tunes one small model with zerojax and with transformers' Trainer (and PEFT) on the same batches, and compares the curves.

    python scripts/convergence_peft.py train runs/peft
    python scripts/convergence_peft.py peer runs/peft      # in an environment with PyTorch, transformers and PEFT
    python scripts/convergence_peft.py judge runs/peft --raw peft.json

The model is that of configs/bart_tiny.py, the task that of configs/lora_tiny.py: whether a short review is positive. `train` makes the
model and trains the rows at stage 3: all weights, adapters of rank 8 in all linear modules, and DoRA. It also writes the batches, and the
first adapters in PEFT's form. `peer` trains from the same weights and adapters with Trainer's own loop and AdamW. No dropout and no weight
decay on either side, float32, a linear schedule with a warm-up. `judge` prints a table.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

OF_ALL: dict[str, Any] = {"log_every": 1, "optimizer.weight_decay": 0.0, "lora.dropout": 0.0}
ROWS: dict[str, dict[str, Any]] = {
    "full": {"lora.r": 0, "export.format": "none", "optimizer.learning_rate": 1e-3},
    "lora": {},
    "dora": {"lora.dora": True},
}
STILL = {"epochs": 0.0, "steps": 1, "optimizer.learning_rate": 1e-12, "optimizer.warmup_steps": 0}  # changes no weight
TASK = "configs/lora_tiny.py"


def train(folder: pathlib.Path) -> None:
    """Makes the model, trains the rows, and writes what the peer reads."""
    folder = folder.absolute()
    _run("configs/bart_tiny.py", folder / "bart", {})
    for row, own in ROWS.items():
        changes = {**OF_ALL, **own, "init_from": str(folder / "bart" / "export")}
        if row != "full":
            _run(TASK, folder / f"{row}_first", {**changes, **STILL, "evaluate.answers": 0})
        _run(TASK, folder / row, changes)
        _write_batches(folder, row, changes)


def _run(config: str, workdir: pathlib.Path, changes: dict[str, Any]) -> None:
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    command = [sys.executable, "-m", "zerojax.train", "--config", config, "--workdir", str(workdir), *flags]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _write_batches(folder: pathlib.Path, row: str, changes: dict[str, Any]) -> None:
    from configs import lora_tiny
    from zerojax import train as train_lib
    from zerojax.trainer import config as config_lib

    raw = lora_tiny.get_config()
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        (raw[group] if group else raw)[key] = value
    prepared = train_lib.prepare(config_lib.from_dict(raw), folder / f"{row}_batches")
    config = prepared.program.config
    held_out = prepared.pairs.held_out.examples
    batches = [prepared.streams.next() for _ in range(config.steps)]
    prepared.streams.close()
    arrays = {name: np.stack([np.asarray(batch[name]) for batch in batches]) for name in batches[0]}
    longest = arrays["inputs"].shape[-1]
    inputs = np.zeros((len(held_out), longest), np.int32)
    mask = np.zeros_like(inputs)
    for number, example in enumerate(held_out):
        inputs[number, : len(example.inputs)], mask[number, : len(example.inputs)] = example.inputs, 1
    held = {"held_inputs": inputs, "held_mask": mask, "held_targets": np.stack([one.targets for one in held_out])}
    np.savez(folder / f"{row}.npz", **arrays, **held)
    rate = config.optimizer
    of_peer = {"learning_rate": rate.learning_rate, "warmup_steps": rate.warmup_steps, "betas": [rate.b1, rate.b2]}
    (folder / f"{row}.json").write_text(json.dumps(of_peer))


def peer(folder: pathlib.Path) -> None:
    """Trains each row with Trainer and writes its losses by step, and its accuracies by step at the ends of epochs."""
    for row in ROWS:
        of_zerojax = read(folder / row)
        (folder / f"{row}_peer.json").write_text(json.dumps(_peer(folder, row, {*map(int, of_zerojax["accuracy"])})))


def _peer(folder: pathlib.Path, row: str, ends: set[int]) -> dict[str, Any]:
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    settings, arrays = json.loads((folder / f"{row}.json").read_text()), np.load(folder / f"{row}.npz")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "bart" / "export", dtype=torch.float32)
    assert model.config.dropout == model.config.attention_dropout == model.config.activation_dropout == 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = (
                None  # else the padding's row, which is also that of this model's first target, is not trained
            )
    if row != "full":
        model = peft.PeftModel.from_pretrained(model, folder / f"{row}_first" / "export", is_trainable=True)
    steps, count = arrays["inputs"].shape[:2]
    losses: list[float] = []
    accuracy: dict[int, float] = {}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return steps * count

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            own = {name: torch.from_numpy(arrays[name][number // count, number % count]).long() for name in NAMES}
            labels = torch.where(own["labeled"][1:] > 0, own["targets"][1:], -100)
            return {
                "input_ids": own["inputs"],
                "attention_mask": own["mask"],
                "decoder_input_ids": own["targets"][:-1],
                "labels": labels,
            }

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*given, **named)
            losses.append(loss.item())
            return loss

    class AtEnds(transformers.TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step in ends:
                accuracy[state.global_step] = _accuracy(model, arrays)
                model.train()

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings["learning_rate"], betas=settings["betas"], eps=1e-8, weight_decay=0.0
    )
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, int(settings["warmup_steps"]), steps)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"{row}_trainer"),
        per_device_train_batch_size=count,
        num_train_epochs=1,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    InOrder(
        model=model,
        args=arguments,
        train_dataset=Rows(),
        data_collator=transformers.default_data_collator,
        optimizers=(optimizer, schedule),
        callbacks=[AtEnds()],
    ).train()
    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    return {"loss": losses, "accuracy": accuracy, "versions": versions}


NAMES = ("inputs", "mask", "targets", "labeled")  # of a batch, as zerojax's feed has them


def _accuracy(model: Any, arrays: Any) -> float:
    """Returns the share of held-out examples whose greedy answer is the right one."""
    import torch

    model.eval()
    inputs, mask = (torch.from_numpy(arrays[name]).long() for name in ("held_inputs", "held_mask"))
    wanted = arrays["held_targets"]
    with torch.no_grad():
        found = model.generate(
            input_ids=inputs,
            attention_mask=mask,
            max_new_tokens=wanted.shape[1] - 1,
            num_beams=1,
            do_sample=False,
            decoder_start_token_id=int(wanted[0, 0]),
        )
    return float((found.numpy()[:, : wanted.shape[1]] == wanted).all(1).mean())


def read(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns the losses of a run of zerojax by step, and its accuracies by step."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [line["loss"] for line in lines if "loss" in line],
        "accuracy": {line["step"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line},
    }


def judge(folder: pathlib.Path, raw: pathlib.Path | None) -> None:
    """Prints the table, and writes the curves."""
    found = {}
    print(
        "| row | steps | largest difference of a loss, first 100 steps | last epoch, zerojax | Trainer | "
        "accuracies, zerojax | Trainer |\n|---|---|---|---|---|---|---|"
    )
    for row in ROWS:
        own, other = read(folder / row), json.loads((folder / f"{row}_peer.json").read_text())
        pairs = [*zip(own["loss"], other["loss"], strict=True)]
        first = max(abs(a - b) for a, b in pairs[:100])
        epoch = len(pairs) // len(own["accuracy"])
        last = [statistics.fmean(one["loss"][-epoch:]) for one in (own, other)]
        shares = [" ".join(f"{value:.3f}" for value in one["accuracy"].values()) for one in (own, other)]
        print(f"| {row} | {len(pairs)} | {first:.1e} | {last[0]:.5f} | {last[1]:.5f} | {shares[0]} | {shares[1]} |")
        found[row] = {"zerojax": own, "trainer": other}
    if raw:
        raw.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "peer", "judge"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--raw", type=pathlib.Path, help="where judge writes the curves")
    given = parser.parse_args()
    if given.what == "judge":
        judge(given.folder, given.raw)
    else:
        {"train": train, "peer": peer}[given.what](given.folder)
