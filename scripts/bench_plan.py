"""Compares planned with measured peak memory: each setting is compiled, run for a few steps of random tokens, and read.

    python scripts/bench_plan.py --settings one --out plan_one.jsonl
    python scripts/bench_plan.py --settings several --out plan_several.jsonl

All GPUs that are there are used.
Each setting runs in a process of its own, since a device's peak is counted over a process's life. A line of JSON a setting goes to --out,
a table to stdout.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parent.parent

ONE_B = {"model.preset": "llama3_1b", "seq_len": 4096}
EIGHT_B = {"model.preset": "llama3_8b", "seq_len": 8192}
SETTINGS = {
    "one": [
        {**ONE_B, "micro_batch_size": 8, "model.remat": "dots"},
        {**ONE_B, "micro_batch_size": 8, "model.remat": "full"},
        {**ONE_B, "micro_batch_size": 2, "model.remat": "none"},
        {**ONE_B, "micro_batch_size": 2, "grad_accum": 4, "model.remat": "dots"},
        {**ONE_B, "micro_batch_size": 4, "zero.stage": 0, "model.remat": "dots"},
        {**EIGHT_B, "model.num_layers": 4, "micro_batch_size": 2, "model.remat": "dots"},
    ],
    "several": [
        {**ONE_B, "micro_batch_size": 8, "zero.stage": 0, "model.remat": "dots"},
        {**ONE_B, "micro_batch_size": 8, "zero.stage": 1, "model.remat": "dots"},
        {**ONE_B, "micro_batch_size": 8, "zero.stage": 2, "model.remat": "full"},
        {**ONE_B, "micro_batch_size": 2, "grad_accum": 4, "zero.stage": 3, "model.remat": "dots"},
        {**EIGHT_B, "micro_batch_size": 2, "zero.stage": 3, "model.remat": "dots"},
        {**EIGHT_B, "micro_batch_size": 2, "zero.stage": 3, "model.remat": "full"},
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", choices=sorted(SETTINGS), default="one", help="for one GPU, or for several")
    parser.add_argument("--out", default="plan.jsonl")
    parser.add_argument("--seconds", type=float, default=500, help="start no setting after this long")
    parser.add_argument("--one", help="a setting as JSON: measure it in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one))))
        return
    began, rows = time.monotonic(), []
    with open(args.out, "w") as out:
        for setting in SETTINGS[args.settings]:
            if time.monotonic() - began > args.seconds:
                print(f"out of time before {setting}")
                break
            command = [sys.executable, __file__, "--one", json.dumps(setting)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                print(f"failed: {setting}\n{done.stderr[-1500:]}")
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    print(
        "| setting | devices | planned GB | measured GB | difference | step ms | bound ms |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        name = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in row["setting"].items())
        print(
            f"| {name} | {row['devices']} | {row['planned'] / 1e9:.2f} | {row['measured'] / 1e9:.2f} | "
            f"{row['measured'] / row['planned'] - 1:+.2%} | {row['step_ms']:.0f} | {row['bound_ms'] or 0:.0f} |"
        )


def measure(setting: dict) -> dict:
    """Returns planned and measured peak bytes of the fullest device, with the median time of a step."""
    sys.path.insert(0, str(ROOT))
    import jax
    import jax.numpy as jnp

    from configs import base
    from zerojax import config as config_lib
    from zerojax import planning, program

    raw = base.get_config()
    raw.global_batch_size = 0
    with raw.unlocked():
        raw.update_from_flattened_dict(setting)
    built = program.build(config_lib.from_dict(raw))
    plan = planning.plan_program(built, "here")
    state = program.init_state(built)
    shape = built.abstract_batch["tokens"].shape
    vocab = built.model.vocab_size
    draw = jax.jit(lambda key: jax.random.randint(key, shape, 0, vocab, jnp.int32), out_shardings=built.batch_sharding)
    times = []
    for step in range(4):
        batch = {"tokens": draw(jax.random.key(step))}
        jax.block_until_ready((state, batch))
        start = time.perf_counter()
        state, numbers = plan.compiled(state, batch)
        jax.block_until_ready((state, numbers))
        times.append(time.perf_counter() - start)
    return {
        "setting": setting,
        "devices": jax.device_count(),
        "device_kind": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "planned": plan.peak,
        "measured": max(device.memory_stats()["peak_bytes_in_use"] for device in jax.local_devices()),
        "step_ms": sorted(times[1:])[1] * 1e3,
        "bound_ms": plan.bound.step_seconds * 1e3 if plan.bound else None,
        "loss": float(numbers["loss"]),
        "plan_seconds": plan.compile_seconds,
        "findings": [finding.rule for finding in plan.findings],
        "collectives_params": sum(total["params"] for total in plan.ledger.totals().values()),
        "theory_params": sum(plan.theory.values()),
    }


if __name__ == "__main__":
    main()
