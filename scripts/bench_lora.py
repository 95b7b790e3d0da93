"""Measures steps of LoRA on one device: BART-large as PEFT's example, Llama 3's 8B shapes beside full training, and QLoRA.

    python scripts/bench_lora.py                                   all cases, some 5 minutes on an H200; the table comes last
    python scripts/bench_lora.py --cases bart bart_offload

Each case runs in a process of its own, since a device reports the peak of its process. Weights and batches are random. A step is timed from
the start of the first to the end of the last of `--steps`, after 3 others.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

LLAMA = {"data.name": "random", "data.eval_split": "", "steps": 1000}
BART = {"epochs": 0.0, "steps": 1000, "data.eval_split": ""}
# case -> (config, changes, steps)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bart": ("lora_bart", BART, 50),
    "bart_offload": ("lora_bart", BART | {"offload.params": "host", "model.remat": "full"}, 20),
    "llama_8_layers": ("lora_llama3_8b", LLAMA | {"model.num_layers": 8}, 10),
    "llama_8_layers_full": (
        "lora_llama3_8b",
        LLAMA
        | {"model.num_layers": 8, "lora.r": 0, "lora.alpha": 0.0, "lora.target_modules": "", "export.format": "none"},
        10,
    ),
    "qlora_8b": (
        "lora_llama3_8b",
        LLAMA | {"lora.quantize": "nf4", "micro_batch_size": 1, "model.remat": "full"},
        5,
    ),
}
BARS = {
    "bart": "25 ms, 2,300 MiB",
    "bart_offload": "85 ms, 1,300 MiB",
    "qlora_8b": "10 GB",
    "llama_8_layers": "1.4 x full",
}


def main() -> None:
    """Runs the cases and prints the table, or runs one case and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--here", action="store_true", help="run the one case in this process")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, such as model.num_layers=2")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(run(options.cases[0], options.set)))
        return
    rows = []
    for case in options.cases:
        words = [sys.executable, __file__, "--here", "--cases", case, "--set", *options.set]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{case}: failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{case}: {found}", flush=True)
        rows.append((case, found))
    print(f"{'case':<22}{'ms a step':>10}{'tokens/s':>10}{'peak MiB':>10}{'state MiB':>10}{'host MiB':>10}  bar")
    for case, found in rows:
        print(
            f"{case:<22}{found['ms']:>10.2f}{found['tokens_per_second']:>10.0f}{found['peak_mib']:>10.0f}{found['state_mib']:>10.0f}"
            f"{found['host_mib']:>10.0f}  {BARS.get(case, '')}"
        )


def run(case: str, more: list[str]) -> dict[str, float]:
    """Runs one case and returns its figures."""
    root = pathlib.Path(__file__).parents[1]
    sys.path.insert(0, str(root))
    import importlib

    import jax

    from zerojax.launch import start_up
    from zerojax.trainer import config as config_lib
    from zerojax.trainer import program as program_lib
    from zerojax.zero.offload import budget

    name, changes, steps = CASES[case]
    raw = importlib.import_module(f"configs.{name}").get_config()
    raw.update_from_flattened_dict(changes | dict(_parsed(raw, word) for word in more))
    config = config_lib.from_dict(raw)
    if pinned := program_lib.most_pinned_bytes(config):
        start_up.size_pinned_pool(budget.pool_size_gb(pinned))
    began = time.perf_counter()
    program = program_lib.build(config, devices=jax.devices()[:1])
    state = program_lib.init_state(program)
    batch = _batch(program)
    made = time.perf_counter()
    step = program.train_step
    state, metrics = step(state, batch)
    first = float(metrics["loss"])
    compiled = time.perf_counter()
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    start = time.perf_counter()
    for _ in range(steps):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - start) / steps
    leaves = jax.tree.leaves(state)
    on_host = sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == "pinned_host")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "ms": seconds * 1e3,
        "tokens_per_second": program.sizes.global_batch_size * config.seq_len / seconds,
        "peak_mib": peak / 2**20,
        "state_mib": (sum(leaf.nbytes for leaf in leaves) - on_host) / 2**20,
        "host_mib": on_host / 2**20,
        "made_s": made - began,
        "first_step_s": compiled - made,
        "first_loss": first,
        "last_loss": float(metrics["loss"]),
    }


def _batch(program: Any) -> dict[str, Any]:
    """Returns a batch of random tokens; masks are full."""
    import jax
    import numpy as np

    rng, masks = np.random.default_rng(0), ("mask", "labeled", "segments")
    return {
        key: jax.device_put(
            np.ones(like.shape, np.int32) if key in masks else rng.integers(4, 256, like.shape).astype(np.int32),
            like.sharding,
        )
        for key, like in program.abstract_batch.items()
    }


def _parsed(raw: Any, word: str) -> tuple[str, Any]:
    """Returns a setting given as name=value, in the type that it has in the config."""
    name, _, text = word.partition("=")
    value = raw
    for part in name.split("."):
        value = value[part]
    return name, type(value)(text) if not isinstance(value, bool) else text == "True"


if __name__ == "__main__":
    main()
