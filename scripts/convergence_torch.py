"""Trains transformers' Llama under PyTorch's FSDP2 or DeepSpeed's ZeRO-3 on what `scripts/convergence.py ids` wrote.

    torchrun --nproc_per_node=1 scripts/convergence_torch.py fsdp2 runs/curves/280m  # a process a GPU
    torchrun --nproc_per_node=2 scripts/convergence_torch.py deepspeed runs/curves/280m_two

Each layer is a group of FSDP2, and the rest is one. Weights, moments and sums of gradients are float32, the rest bf16. DeepSpeed has bf16
weights with float32 masters and moments, and its own defaults for the rest. AdamW is PyTorch's, fused, and decays matrices alone. Layers
are compiled under FSDP2. It writes FOLDER/fsdp2/metrics.jsonl, or FOLDER/deepspeed/, in the form of zerojax's.
"""

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

Step = Callable[[torch.Tensor], torch.Tensor]  # updates the weights by a loss, and returns the gradients' norm


def fsdp2(model: torch.nn.Module, optimizer_of: Callable[[], torch.optim.Optimizer]) -> tuple[Any, Any, Step]:
    """Shards a model. Returns what computes its logits, its optimizer, and a step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of()

    def step(loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor()

    return model, optimizer, step


def deep_speed(model: torch.nn.Module, optimizer_of: Callable[[], torch.optim.Optimizer], rows: int) -> Any:
    """Does what `fsdp2` does, for a process of `rows` sequences a step."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": rows, "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    config |= {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(), config=config)

    def step(loss: torch.Tensor) -> torch.Tensor:
        engine.backward(loss)
        engine.step()
        return torch.as_tensor(engine.get_global_grad_norm())

    return engine, optimizer, step


def main(peer: str, folder: pathlib.Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = transformers.AutoModelForCausalLM.from_pretrained(
        next((folder / "first").rglob("*.safetensors")).parent, dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    peak, decay = settings["learning_rate"], settings["weight_decay"]

    def optimizer_of() -> torch.optim.Optimizer:
        of_decay: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for weight in model.parameters():
            of_decay[weight.ndim > 1].append(weight)
        groups = [
            {"params": of_decay[True], "weight_decay": decay},
            {"params": of_decay[False], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=peak, betas=tuple(settings["betas"]), eps=1e-8, fused=True)

    ids = np.load(folder / "ids.npz")
    rows = ids["train"].shape[1] // count
    trained, held_out = (ids[name][:, rank * rows : (rank + 1) * rows] for name in ("train", "held_out"))
    call, optimizer, update = fsdp2(model, optimizer_of) if peer == "fsdp2" else deep_speed(model, optimizer_of, rows)
    cross_entropy = torch.compile(lambda logits, labels: torch.nn.functional.cross_entropy(logits.float(), labels))

    def loss_of(batch: np.ndarray) -> torch.Tensor:
        tokens = torch.from_numpy(batch.astype(np.int64)).to(device)
        logits = call(input_ids=tokens[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def mean_of_ranks(value: torch.Tensor) -> float:
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.SUM)
        return value.item() / count

    out = folder / peer
    out.mkdir(exist_ok=True)
    steps, warm_up = settings["steps"], int(settings["warmup_steps"])
    with open(out / "metrics.jsonl" if rank == 0 else os.devnull, "w", buffering=1) as log:
        for step, batch in enumerate(trained):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, warm_up, peak)
            loss = loss_of(batch)
            norm = update(loss)
            line = {"step": step + 1, "loss": mean_of_ranks(loss.detach()), "grad_norm": norm.item()}
            line["tokens_per_second"] = batch[:, 1:].size * count / (time.perf_counter() - began)
            if (step + 1) % settings["evaluate_every"] == 0:
                with torch.no_grad():
                    line["eval_loss"] = float(np.mean([mean_of_ranks(loss_of(batch)) for batch in held_out]))
            log.write(json.dumps(line) + "\n")
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if has_gpu else 0.0
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(
        f"{peer}: rank {rank}: loss {line['loss']:.4f}, held out {line['eval_loss']:.4f}, {peak_gb:.2f} GB, {versions}"
    )
    torch.distributed.destroy_process_group()


def rate(step: int, steps: int, warm_up: int, peak: float, last: float = 0.1) -> float:
    """Returns the learning rate of a step, counted from 0: a linear warm-up, then a cosine to a tenth."""
    if step < warm_up:
        return peak * step / warm_up
    share = min(1.0, (step - warm_up) / (steps - warm_up))
    return peak * ((1 - last) * 0.5 * (1 + math.cos(math.pi * share)) + last)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
