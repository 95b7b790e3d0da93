"""Trains one model in many ways on the same text, and judges their losses beside those of other seeds, of FSDP2 and of DeepSpeed.

    python scripts/convergence.py text runs/curves
    python scripts/convergence.py train runs/curves --model 280m --rows seed0 seed1 seed2 fp8 --limit_s 570
    python scripts/convergence.py ids runs/curves --model 280m
    torchrun --nproc_per_node=1 scripts/convergence_torch.py fsdp2 runs/curves/280m
    python scripts/convergence.py judge runs/curves --model 280m --raw curves.json --picture curves.png

`text` writes documents of the files of the packages beside this Python, one in twenty of them held out, and a tokenizer of 8,192 tokens.
`train` trains rows with `zerojax train`, `--together` of them at once; a row that is done is not run again. With `--turns` one of them
takes steps at a time while the others compile. Rows differ from `seed0` as their settings below say; with one seed they have the same
first weights and text. `ids` writes the batches of seed 0 and first weights,
in the form of transformers, for the peer. `judge` prints a table. A band is the difference between the highest and the lowest seed, in the
mean loss of the last third of the steps and in the held-out loss. A row is within the bands if it differs from seed0 by no more in both.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zerojax.trainer import metrics  # noqa: E402

VOCABULARY, MOST_BYTES = 8192, 2**18  # tokens; bytes of a document
HELD_OUT_OF = 20  # documents, of which one is held out
ENDINGS = {".py", ".pyi", ".md", ".rst", ".h", ".hpp", ".cuh", ".txt", ".js", ".css"}
TRAIN, HELD_OUT, TOKENIZER = "train.jsonl", "held_out.jsonl", "tokenizer.json"
END = "<|endoftext|>"
OF_ALL = {
    "log_every": 1,
    "evaluate.batches": 16,
    "checkpoint.every": 0,
    "checkpoint.at_end": False,
    "sample.length": 0,
    "optimizer.weight_decay": 0.1,
    "optimizer.schedule": "cosine",
}
MODELS: dict[str, dict[str, Any]] = {
    # 277M weights, 32,768 tokens a step
    "280m": {
        "model.preset": "llama3_1b",
        "model.num_layers": 4,
        "model.vocab_size": VOCABULARY,
        "seq_len": 1024,
        "global_batch_size": 32,
        "steps": 1000,
        "evaluate.every": 250,
        "optimizer.learning_rate": 6e-4,
        "optimizer.warmup_steps": 50,
        "emulate_devices": 1,
    },
    # The same, on two GPUs in fewer steps
    "280m_two": {
        "model.preset": "llama3_1b",
        "model.num_layers": 4,
        "model.vocab_size": VOCABULARY,
        "seq_len": 1024,
        "global_batch_size": 32,
        "steps": 400,
        "evaluate.every": 0,  # at the end alone, so that it compiles while another row trains
        "optimizer.learning_rate": 6e-4,
        "optimizer.warmup_steps": 40,
        "emulate_devices": 2,
    },
    # 3,000 steps of that
    "280m_long": {
        "model.preset": "llama3_1b",
        "model.num_layers": 4,
        "model.vocab_size": VOCABULARY,
        "seq_len": 1024,
        "global_batch_size": 32,
        "steps": 3000,
        "evaluate.every": 0,
        "optimizer.learning_rate": 6e-4,
        "optimizer.warmup_steps": 50,
        "emulate_devices": 2,
    },
    # 1.0B weights, 32,768 tokens a step
    "1b_two": {
        "model.preset": "llama3_1b",
        "model.vocab_size": VOCABULARY,
        "seq_len": 1024,
        "global_batch_size": 32,
        "steps": 200,
        "evaluate.every": 0,
        "optimizer.learning_rate": 4e-4,
        "optimizer.warmup_steps": 20,
        "emulate_devices": 2,
    },
    # A minute on a CPU, to try the script
    "try": {
        "model.preset": "tiny",
        "model.num_layers": 4,
        "model.vocab_size": VOCABULARY,
        "global_batch_size": 8,
        "steps": 20,
        "evaluate.every": 0,
        "optimizer.warmup_steps": 5,
        "emulate_devices": 2,
    },
    # 1M weights over bytes, 4,096 tokens a step, on eight emulated devices
    "small": {"steps": 600, "evaluate.every": 300, "precision": "fp32"},
    "experts": {"steps": 600, "evaluate.every": 300, "precision": "fp32", "model.preset": "moe_test"},
}
SEEDS = ("seed0", "seed1", "seed2")
ROWS: dict[str, dict[str, Any]] = {
    "seed0": {},
    "seed1": {"seed": 1},
    "seed2": {"seed": 2},
    "stage 0": {"zero.stage": 0},
    "stage 1": {"zero.stage": 1},
    "4 passes": {"grad_accum": 4},
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
    "bf16_sr, int8 moments": {"precision": "bf16_sr", "optimizer.moments": "int8"},
    "optimizer on the host": {"offload.optimizer": "host"},
    "all on the host": {"offload.optimizer": "host", "offload.params": "host"},
    "kinds": {"model.programs": "kinds"},
    "hybrid": {"mesh.replica": 2},
    "model=2": {"mesh.model": 2},
    "context=2": {"mesh.context": 2},
    "1F1B": {"mesh.pipe": 2, "grad_accum": 4},
    "interleaved": {"mesh.pipe": 2, "grad_accum": 4, "pipeline.schedule": "interleaved", "pipeline.chunks": 2},
    "pipe, model and data": {"mesh.pipe": 2, "mesh.model": 2, "grad_accum": 4},
    "packed wires": {
        "wire.weights": "int8",
        "wire.gradients": "int4",
    },
    "packed wires, error fed back": {
        "wire.weights": "int8",
        "wire.gradients": "int4",
        "wire.error_feedback": True,
    },
    "expert=2": {"mesh.expert": 2},
}


def write_text(folder: pathlib.Path, most: int) -> None:
    """Writes documents of `most` characters or all, and the tokenizer. The machine's packages decide what they are: a hash is printed."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    digest, counts = hashlib.sha256(), {TRAIN: [0, 0], HELD_OUT: [0, 0]}
    with open(folder / TRAIN, "w") as train, open(folder / HELD_OUT, "w") as held_out:
        for text in _documents():
            if counts[TRAIN][1] >= most:
                break
            digest.update(text.encode())
            is_held_out = hashlib.sha256(text.encode()).digest()[0] * HELD_OUT_OF < 256
            (held_out if is_held_out else train).write(json.dumps({"text": text}) + "\n")
            count = counts[HELD_OUT if is_held_out else TRAIN]
            count[0], count[1] = count[0] + 1, count[1] + len(text)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        (json.loads(line)["text"] for line in (folder / TRAIN).read_text().splitlines()[::8]),
        tokenizers.trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    for name, (documents, characters) in counts.items():
        print(f"{name}: {documents} documents, {characters} characters")
    print(f"sha256 of the text: {digest.hexdigest()}")


def _documents() -> Iterator[str]:
    """Yields the text of each file once, long ones in pieces, in the order of a hash of their paths."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"]))
    named = {os.path.join(place, name) for root in roots for place, _, names in os.walk(root) for name in names}
    seen = set()
    for path in sorted(named, key=lambda path: hashlib.sha256(path.encode()).digest()):
        if os.path.splitext(path)[1] not in ENDINGS:
            continue
        try:
            text = pathlib.Path(path).read_text()
        except (OSError, UnicodeDecodeError):
            continue
        key = hashlib.sha256(text.encode()).digest()
        if key in seen or len(text) < 200:
            continue
        seen.add(key)
        for first in range(0, len(text), MOST_BYTES):
            yield text[first : first + MOST_BYTES]


def settings(folder: pathlib.Path, model: str, row: str) -> dict[str, Any]:
    """Returns a row's settings, by name."""
    found = {**OF_ALL, **MODELS[model], **ROWS[row]}
    if "model.vocab_size" in found:
        files = {"train_file": TRAIN, "eval_file": HELD_OUT, "tokenizer": TOKENIZER}
        found |= {f"data.{key}": str(folder.absolute() / name) for key, name in files.items()}
    if "wire.weights" in found:
        of_host = max(1, found.get("emulate_devices", 8) // 2)  # of two hosts
        found |= {"wire.host_devices": of_host, "wire.second_copy": of_host > 1}
    return found


def train(options: argparse.Namespace) -> None:
    """Trains the rows that are not done."""
    ends = time.monotonic() + options.limit_s
    turn = threading.Semaphore() if options.turns else None
    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        rows = [pool.submit(_train, options, row, ends, turn) for row in options.rows]
        for row in concurrent.futures.as_completed(rows):
            print(row.result(), flush=True)


def _train(options: argparse.Namespace, row: str, ends: float, turn: threading.Semaphore | None) -> str:
    """Trains a row until `ends`, and returns a line of it. It takes its first step at once, and the others while it holds `turn`."""

    def wait(step: int) -> None:
        while process.poll() is None and not _has_done(workdir, step) and time.monotonic() < ends:
            time.sleep(0.05)

    workdir = options.folder / options.model / row.replace(" ", "_").replace(",", "")
    if _has_done(workdir, MODELS[options.model]["steps"], '"eval_loss"'):
        return f"{row}: done before"
    changes = settings(options.folder, options.model, row) | dict(word.split("=", 1) for word in options.set)
    flags = [f"--config.{key}={value}" for key, value in changes.items()]
    command = [sys.executable, "-m", "zerojax.train", "--config", "configs/base.py", "--workdir", str(workdir), *flags]
    workdir.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if began > ends:
        return f"{row}: no time is left"
    waits = 0.0
    with open(workdir.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            if turn is not None:
                wait(1)
                asks = time.monotonic()
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(process.pid, signal.SIGSTOP)
                    with turn:
                        os.killpg(process.pid, signal.SIGCONT)
                        waits = time.monotonic() - asks
                        wait(MODELS[options.model]["steps"])
            status: int | str = process.wait(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "time is up"
    last = "" if status == 0 else workdir.with_suffix(".log").read_text()[-1500:]
    return f"{row}: {status}, {time.monotonic() - began:.0f} s, {waits:.0f} of them stopped {last}"


def _has_done(workdir: pathlib.Path, step: int, name: str = "") -> bool:
    path = workdir / "metrics.jsonl"
    return path.exists() and f'"step": {step}, {name}' in path.read_text()


def write_ids(options: argparse.Namespace) -> None:
    """Writes the peer's batches, `train` [steps, batch, tokens + 1] and `held_out`, and the first weights in transformers' form."""
    out = options.folder / options.model
    changes = settings(options.folder, options.model, "seed0")
    # One step at a rate that changes no weight
    still = {**changes, "steps": 1, "evaluate.every": 0, "optimizer.learning_rate": 1e-12, "optimizer.warmup_steps": 0}
    still |= {"export.format": "huggingface", "export.dtype": "fp32", "precision": "fp32", "seq_len": 64}
    flags = [f"--config.{key}={value}" for key, value in still.items()]
    command = [sys.executable, "-m", "zerojax.train", "--config", "configs/base.py", "--workdir", str(out / "first")]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    import jax  # which takes the GPU

    from configs import base
    from zerojax.data import tokenizer as tokenizer_lib
    from zerojax.trainer import config as config_lib
    from zerojax.trainer import program as program_lib

    raw = base.get_config()
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        (raw[group] if group else raw)[key] = value
    config = config_lib.from_dict(raw)
    tokenizer = tokenizer_lib.load_tokenizer(config.data.tokenizer)
    program = program_lib.build(config, tokenizer_vocab=VOCABULARY, devices=jax.devices()[:1])
    feed = program_lib.open_feed(program, tokenizer, options.folder)
    held_out: list[np.ndarray] = []

    def keep(batch: dict[str, jax.Array]) -> jax.Array:
        held_out.append(np.asarray(batch["tokens"], np.uint16))
        return jax.numpy.zeros(())

    feed.held_out_mean(keep, config.evaluate.batches)
    trained = [np.asarray(feed.next()["tokens"], np.uint16) for _ in range(config.steps)]
    feed.close()
    np.savez(out / "ids.npz", train=np.stack(trained), held_out=np.stack(held_out))
    rate = config.optimizer
    of_peer = {
        "steps": config.steps,
        "evaluate_every": config.evaluate.every or config.steps,
        "betas": [rate.b1, rate.b2],
    }
    of_peer |= {
        "learning_rate": rate.learning_rate,
        "weight_decay": rate.weight_decay,
        "warmup_steps": rate.warmup_steps,
    }
    (out / "settings.json").write_text(json.dumps(of_peer))
    print(f"{out / 'ids.npz'}: {len(trained)} batches, {len(held_out)} held out")


def read(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns a row's losses and norms by step, held-out losses, and the median of its tokens/s."""
    lines = metrics.read(workdir)
    steps = {line["step"]: line for line in lines if "loss" in line}
    return {
        "loss": [steps[n]["loss"] for n in sorted(steps)],
        "grad_norm": [steps[n]["grad_norm"] for n in sorted(steps)],
        "held_out": {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line},
        "tokens_per_second": statistics.median(
            [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")] or [0.0]
        ),
    }


def judge(options: argparse.Namespace) -> None:
    """Prints the table, and writes the raw curves and the picture."""
    folder, steps = options.folder / options.model, MODELS[options.model]["steps"]
    done = {path.parent.name: read(path.parent) for path in sorted(folder.glob("*/metrics.jsonl"))}
    rows = {name: row for name, row in done.items() if len(row["loss"]) == steps and steps in row["held_out"]}
    for name in done.keys() - rows.keys():
        print(f"{name}: {len(done[name]['loss'])} steps, left out")
    last = slice(steps - steps // 3, steps)
    ends = {name: statistics.fmean(row["loss"][last]) for name, row in rows.items()}
    held_out = {name: row["held_out"][steps] for name, row in rows.items()}
    seeds = [name for name in SEEDS if name in rows]
    bands = [max(one[name] for name in seeds) - min(one[name] for name in seeds) for one in (ends, held_out)]
    print(f"\nthe last third is {steps // 3} steps; the bands are {bands[0]:.4f} and, held out, {bands[1]:.4f}\n")
    print(
        "| row | loss, last third | minus seed0 | held out | minus seed0 | within | tokens/s |\n|---|---|---|---|---|---|---|"
    )
    for name, row in rows.items():
        gaps = [one[name] - one["seed0"] for one in (ends, held_out)]
        within = "" if name in seeds else "yes" if all(abs(gap) <= band for gap, band in zip(gaps, bands)) else "no"
        cells = f"{ends[name]:.4f} | {gaps[0]:+.4f} | {held_out[name]:.4f} | {gaps[1]:+.4f} ({gaps[1] / held_out['seed0']:+.2%})"
        print(f"| {name} | {cells} | {within} | {'' if options.beside else round(row['tokens_per_second'])} |")
    if options.raw:
        note = {"tokens_per_second": "not told: rows shared the devices"} if options.beside else {}
        raw = {name: _rounded(row) | note for name, row in rows.items()}
        options.raw.write_text(json.dumps(raw, indent=None) + "\n")
    if options.picture:
        _draw(rows, options.picture)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with means of ten steps."""
    tens = {
        key: [round(statistics.fmean(row[key][n : n + 10]), 5) for n in range(0, len(row[key]), 10)]
        for key in ("loss", "grad_norm")
    }
    return row | tens


def _draw(rows: dict[str, Any], path: pathlib.Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    first = _smooth(rows["seed0"]["loss"])
    for name, row in rows.items():
        losses = _smooth(row["loss"])
        style = {"linewidth": 1.0, "linestyle": ":" if name in SEEDS[1:] else "-"}
        above.plot(losses, label=name, **style)
        below.plot(losses - first, label=name, **style)
    above.set_ylabel("loss, mean of 20 steps")
    below.set_ylabel("minus seed0")
    below.set_ylim(-0.06, 0.06)
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="#e3e3e3")
    above.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path)


def _smooth(losses: list[float], count: int = 20) -> np.ndarray:
    return np.convolve(losses, np.ones(count) / count, "valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("text", "train", "ids", "judge"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--model", choices=tuple(MODELS), default="280m")
    parser.add_argument(
        "--rows", nargs="+", default=list(SEEDS), choices=tuple(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the config for all rows")
    parser.add_argument("--together", type=int, default=1, help="rows that run at once")
    parser.add_argument("--turns", action="store_true", help="one of them takes steps at a time, the others compile")
    parser.add_argument("--characters", type=int, default=2**40, help="of the text to train on, at most")
    parser.add_argument("--beside", action="store_true", help="rows ran beside others: tokens/s are not told")
    parser.add_argument("--limit_s", type=float, default=570.0)
    parser.add_argument("--raw", type=pathlib.Path, help="a JSON file of all curves")
    parser.add_argument("--picture", type=pathlib.Path, help="a PNG")
    options = parser.parse_args()
    parts = {"text": lambda: write_text(options.folder, options.characters), "train": lambda: train(options)}
    parts |= {"ids": lambda: write_ids(options), "judge": lambda: judge(options)}
    parts[options.part]()


if __name__ == "__main__":
    main()
