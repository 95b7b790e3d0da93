r"""Measures matmuls in fp8 inside the train step: time and memory of some of the 8B layers, and the loss of small models beside bf16.

    python scripts/bench_fp8.py --part step --layers 2 8 --runs bf16 tensorwise --limit_s 280
    python scripts/bench_fp8.py --part step --preset llama3_1b --layers 4 16 --seq_len 4096 --micro_batch 8 --runs bf16 tensorwise
    python scripts/bench_fp8.py --part loss --steps 3000 --seeds 0 1 2 --together 9 --limit_s 280 \
        --runs bf16 "nudged:bf16 optimizer.b1=0.9001" tensorwise
    python scripts/bench_fp8.py --part loss --model 300m --runs bf16 tensorwise --steps 1200 --limit_s 280

`step` runs each setting at two depths on the devices of this process. The difference of the step times over that of the depths is the
time of a layer. For orientation, on an H200 the matmuls of one 8B layer at 16,384 tokens take 31 to 32 ms in bf16, and in fp8 20.1 ms with
casts, 21.0 ms with amax too. The clock settles first: warm-up steps are not counted. `--width` scales a preset's widths.

`loss` trains the trainer's own program on text from the same start and data with each seed, `--together` of them at once, and prints the
gap of the mean loss of the last tenth to that of the first run. A run is bf16 or a recipe, and words after a colon change the config:
"edges:tensorwise fp8.first=1 fp8.last=1". A second run in bf16 with a slightly other optimizer ("nudged" above) shows what a gap is by
chance. A part that would pass the limit is left out, and a run that would is ended. The table comes last.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MODELS = {
    "small": {"model.preset": "tiny", "seq_len": 128, "global_batch_size": 32, "optimizer.learning_rate": 3e-3},
    # 304M weights over bytes
    "300m": {
        "model.preset": "llama3_1b",
        "model.num_layers": 5,
        "model.vocab_size": 320,
        "seq_len": 1024,
        "global_batch_size": 16,
        "optimizer.learning_rate": 6e-4,
    },
}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--part", choices=("step", "loss"), required=True)
parser.add_argument(
    "--runs", nargs="+", default=["bf16", "tensorwise"], help='bf16, a recipe, or "name:recipe key=value ..."'
)
parser.add_argument("--preset", default="llama3_8b")
parser.add_argument(
    "--width", type=int, help="of the states in `step`; the preset's other widths and heads are scaled alike"
)
parser.add_argument("--layers", type=int, nargs="+", default=[2, 8], help="depths of `step`")
parser.add_argument("--seq_len", type=int, default=8192)
parser.add_argument("--micro_batch", type=int, default=2)
parser.add_argument(
    "--seconds", type=float, default=8.0, help="measured in each setting of `step`, after as long a warm-up"
)
parser.add_argument("--model", choices=tuple(MODELS), default="small", help="of `loss`")
parser.add_argument("--steps", type=int, default=3000, help="of `loss`")
parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of `loss`")
parser.add_argument("--together", type=int, default=1, help="runs of `loss` at once")
parser.add_argument("--limit_s", type=float, default=280.0)
parser.add_argument("--out", type=pathlib.Path, help="a JSON file of all figures, with the losses")


def main(options: argparse.Namespace) -> None:
    """Runs a part and prints its table."""
    ends = time.monotonic() + options.limit_s
    figures = (_steps if options.part == "step" else _losses)(options, ends)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"arguments": sys.argv[1:], **figures}, indent=1) + "\n")


def _changes(run: str) -> tuple[str, dict[str, str]]:
    """Returns a run's name and its changes of the config."""
    name, _, words = run.partition(":")
    recipe, *rest = (words or name).split()
    precision = {"precision": "bf16"} if recipe == "bf16" else {"precision": "fp8", "fp8.recipe": recipe}
    return name, precision | dict(word.split("=", 1) for word in rest)


def _steps(options: argparse.Namespace, ends: float) -> dict[str, Any]:
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.94")
    if options.width:
        _scale_preset(options.preset, options.width)
    found: dict[str, dict] = {}
    for run in options.runs:
        name, changes = _changes(run)
        rows = found[name] = {}
        for layers in options.layers:
            began = time.monotonic()
            if ends - began < 2 * options.seconds + 30:
                rows[layers] = {"left out": "time is up"}
                continue
            try:
                rows[layers] = _one_depth(options, changes, layers)
            except Exception as error:  # the other settings are measured all the same
                rows[layers] = {"left out": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"{name}, {layers} layers, {time.monotonic() - began:.0f} s: {rows[layers]}", flush=True)
    tokens = options.micro_batch * options.seq_len
    depths = " | ".join(f"{n} layers: ms, GB" for n in options.layers)
    print(f"\n| run | {depths} | ms a layer | tokens/s of all layers |\n|---|{'---|' * (len(options.layers) + 2)}")
    for name, rows in found.items():
        cells = [f"{row['ms']:.1f}, {row['GB']:.2f}" if "ms" in row else row["left out"][:60] for row in rows.values()]
        first, last = options.layers[0], options.layers[-1]
        both = all("ms" in rows[n] for n in (first, last)) and last > first
        layer = f"{(rows[last]['ms'] - rows[first]['ms']) / (last - first):.2f}" if both else "-"
        rate = f"{tokens / rows[last]['ms'] * 1e3:.0f}" if "ms" in rows[last] else "-"
        print(f"| {name} | {' | '.join(cells)} | {layer} | {rate} |", flush=True)
    return {"steps": found}


def _scale_preset(name: str, width: int) -> None:
    """Scales the widths and the numbers of heads of a preset, in this process."""
    from zerojax.models.llama import family

    preset = family.PRESETS[name]
    scaled = {
        field: getattr(preset, field) * width // preset.embed_dim
        for field in ("embed_dim", "mlp_dim", "num_heads", "num_kv_heads")
    }
    family.PRESETS[name] = dataclasses.replace(preset, **scaled)


def _one_depth(options: argparse.Namespace, changes: dict[str, str], layers: int) -> dict[str, Any]:
    import jax

    from zerojax.trainer import program as program_lib
    from zerojax.trainer import state as state_lib

    raw = {
        "model.preset": options.preset,
        "model.num_layers": layers,
        "seq_len": options.seq_len,
        "micro_batch_size": options.micro_batch,
        "global_batch_size": 0,
        "grad_accum": 1,
        "data.name": "random",
        "sample.length": 0,
    }
    program = program_lib.build(_config(raw | changes), tokenizer_vocab=320)
    state = state_lib.first(program)
    tokens = program.abstract_batch["tokens"]
    batch = {"tokens": jax.device_put(jax.random.randint(jax.random.key(0), tokens.shape, 0, 320), tokens.sharding)}
    began = time.perf_counter()
    compiled = program.train_step.lower(state, batch).compile()
    compile_s = time.perf_counter() - began
    in_fp8 = compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"')
    times: list[float] = []
    start = time.perf_counter()
    losses = []
    while time.perf_counter() - start < 2 * options.seconds:
        before = time.perf_counter()
        state, metrics = compiled(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - before)
    memory = compiled.memory_analysis()
    held = (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )
    for leaf in jax.tree.leaves((state, batch)):
        leaf.delete()
    half = times[len(times) // 2 :]
    return {
        "ms": statistics.median(half) * 1e3,
        "GB": held / 1e9,
        "steps": len(times),
        "compile_s": compile_s,
        "fp8 calls": in_fp8,
        "loss": [losses[0], losses[min(10, len(losses) - 1)], losses[-1]],
    }


def _config(changes: dict[str, Any]) -> Any:
    from configs import base
    from zerojax.trainer import config as config_lib

    c = base.get_config()
    for key, value in changes.items():
        group, _, leaf = key.rpartition(".")
        node = c[group] if group else c
        kind = type(node[leaf])
        node[leaf] = kind(value) if kind in (int, float) else value
    return config_lib.from_dict(c)


def _losses(options: argparse.Namespace, ends: float) -> dict[str, Any]:
    from zerojax.data import source

    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_fp8_"))
    source.prepare("python_stdlib", folder / "datasets")
    jobs = [(_changes(run), seed) for seed in options.seeds for run in options.runs]
    found: dict[str, dict[int, list[float]]] = {name: {} for (name, _), _ in jobs}
    waves = -(-len(jobs) // options.together)
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        for first in range(0, len(jobs), options.together):
            share = (ends - time.monotonic()) / (waves - first // options.together)
            wave = [(job, pool.submit(_train, options, folder, job, share)) for job in jobs[first:][: options.together]]
            for ((name, _), seed), run in wave:
                found[name][seed] = run.result()
    _print_gaps(found)
    return {
        "mean losses of 10 steps": {
            name: {seed: _means(losses) for seed, losses in of_seeds.items()} for name, of_seeds in found.items()
        }
    }


def _train(options: argparse.Namespace, folder: pathlib.Path, job: tuple, limit: float) -> list[float]:
    """Returns the losses of one run of the trainer, which is killed after `limit` seconds."""
    (name, changes), seed = job
    config = {
        "seed": seed,
        "steps": options.steps,
        "log_every": 1,
        "evaluate.every": 0,
        "data.eval_split": "",
        "checkpoint.every": 0,
        "checkpoint.at_end": False,
        "optimizer.warmup_steps": min(20, options.steps // 2),
        "sample.length": 0,
        "data.dir": folder / "datasets",
        **MODELS[options.model],
        **changes,
    }
    flags = [f"--config.{key}={value}" for key, value in config.items()]
    workdir = folder / f"{name}-{seed}"
    command = [sys.executable, "-m", "zerojax.train", "--config", "configs/base.py", "--workdir", str(workdir), *flags]
    began, log = time.monotonic(), workdir.with_suffix(".log")
    _run(command, limit, log, {"XLA_CLIENT_MEM_FRACTION": f"{0.6 / options.together:.3f}"})
    metrics = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [line["loss"] for line in lines if "loss" in line]
    last = f"{statistics.fmean(losses[-100:]):.4f}" if losses else log.read_text()[-600:]
    print(f"{name}, seed {seed}: {len(losses)} steps in {time.monotonic() - began:.0f} s, loss {last}", flush=True)
    return losses


def _print_gaps(found: dict[str, dict[int, list[float]]]) -> None:
    """Prints each run's mean loss of the last tenth, and its gap to the first run with the same seed."""
    common = min(len(losses) for of_seeds in found.values() for losses in of_seeds.values())
    if not common:
        return print("a run logged no step within its share of --limit_s; give more time")
    tail = slice(common - max(1, common // 10), common)
    first = next(iter(found))
    print(
        f"\nmean loss of steps {tail.start} to {tail.stop}\n| run | loss | minus {first} | of each seed |\n|---|---|---|---|"
    )
    for name, of_seeds in found.items():
        ends = {seed: statistics.fmean(losses[tail]) for seed, losses in of_seeds.items()}
        gaps = [end - statistics.fmean(found[first][seed][tail]) for seed, end in ends.items()]
        error = f" +- {statistics.stdev(gaps) / len(gaps) ** 0.5:.4f}" if len(gaps) > 1 else ""
        each = " ".join(f"{gap:+.4f}" for gap in gaps)
        print(
            f"| {name} | {statistics.fmean(ends.values()):.4f} | {statistics.fmean(gaps):+.4f}{error} | {each} |",
            flush=True,
        )


def _means(losses: list[float], count: int = 10) -> list[float]:
    return [round(statistics.fmean(losses[n : n + count]), 5) for n in range(0, len(losses), count)]


def _run(command: list[str], limit: float, log: pathlib.Path, variables: dict[str, str]) -> None:
    """Runs a command until it ends or the limit is reached."""
    with open(log, "w") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(1.0, limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main(parser.parse_args())
