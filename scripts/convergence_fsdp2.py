"""Trains transformers' Llama under PyTorch's FSDP2 on the batches and first weights that `scripts/convergence.py ids` wrote.

    torchrun --nproc_per_node=1 scripts/convergence_fsdp2.py runs/curves/280m  # a process a GPU

Each layer is a group of FSDP2, and the rest is one. Weights, moments and sums of gradients are float32, the rest bf16. AdamW is PyTorch's,
fused, and decays matrices alone. Layers are compiled. It writes FOLDER/fsdp2/metrics.jsonl in the form of zerojax's.
"""

import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main(folder: pathlib.Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if has_gpu:
        torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = transformers.AutoModelForCausalLM.from_pretrained(
        next((folder / "first").rglob("*.safetensors")).parent, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    of_decay = {True: [], False: []}
    for weight in model.parameters():
        of_decay[weight.ndim > 1].append(weight)
    peak, decay = settings["learning_rate"], settings["weight_decay"]
    optimizer = torch.optim.AdamW(
        [{"params": of_decay[True], "weight_decay": decay}, {"params": of_decay[False], "weight_decay": 0.0}],
        lr=peak,
        betas=tuple(settings["betas"]),
        eps=1e-8,
        fused=True,
    )
    ids = np.load(folder / "ids.npz")
    own = slice(rank * ids["train"].shape[1] // count, (rank + 1) * ids["train"].shape[1] // count)
    trained, held_out = (ids[name][:, own].astype(np.int64) for name in ("train", "held_out"))
    cross_entropy = torch.compile(lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels))

    def loss_of(batch: np.ndarray) -> torch.Tensor:
        tokens = torch.from_numpy(batch).to(device)
        logits = model(input_ids=tokens[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def mean_of_ranks(value: torch.Tensor) -> float:
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.SUM)
        return value.item() / count

    out = folder / "fsdp2"
    out.mkdir(exist_ok=True)
    steps, warm_up = settings["steps"], int(settings["warmup_steps"])
    with open(out / "metrics.jsonl" if rank == 0 else os.devnull, "w", buffering=1) as log:
        for step, batch in enumerate(trained):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, warm_up, peak)
            loss = loss_of(batch)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            line = {"step": step + 1, "loss": mean_of_ranks(loss.detach()), "grad_norm": norm.full_tensor().item()}
            line["tokens_per_second"] = batch[:, 1:].size * count / (time.perf_counter() - began)
            if (step + 1) % settings["evaluate_every"] == 0:
                with torch.no_grad():
                    line["eval_loss"] = float(np.mean([mean_of_ranks(loss_of(batch)) for batch in held_out]))
            log.write(json.dumps(line) + "\n")
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(
        f"fsdp2: rank {rank}: loss {line['loss']:.4f}, held out {line['eval_loss']:.4f}, {peak_gb:.2f} GB, {versions}"
    )
    torch.distributed.destroy_process_group()


def rate(step: int, steps: int, warm_up: int, peak: float, last: float = 0.1) -> float:
    """Returns the learning rate of a step, counted from 0: a linear warm-up, then a cosine to a tenth."""
    if step < warm_up:
        return peak * step / warm_up
    share = min(1.0, (step - warm_up) / (steps - warm_up))
    return peak * ((1 - last) * 0.5 * (1 + math.cos(math.pi * share)) + last)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
