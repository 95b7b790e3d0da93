"""Measures how fast texts are read, encoded and packed on this host's CPU, and how much memory that takes.

    python scripts/bench_feed.py --out runs/feed --gb 20 --limit_gb 2
    python scripts/bench_feed.py --out runs/feed --gb 0.01 --batches 20

Writes --gb GB of JSON lines in --out, if they are not there, and trains a tokenizer on some of them. A child process, whose anonymous
memory may have at most --limit_gb GB, opens them as config.data.sources does: three sources of one third each, with --rows rows of
--seq_len tokens, and takes --batches batches. A step takes --step_ms in the meantime. Prints the seconds to the first batch, tokens a
second without steps, the median and the largest wait of a step for its batch, and the largest resident memory after the first batch
and at the end. Writes feed.json.
"""

import argparse
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = 3
IDS = 8192  # of the tokenizer
LINES = 4096  # that differ, which are written again and again


def write(path: pathlib.Path, nbytes: int, seed: int) -> None:
    """Writes JSON lines of about 4 KB each, of words that a tokenizer cuts as it does those of a text."""
    if path.exists() and path.stat().st_size >= nbytes:
        return
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(20_000)]
    lines = [
        json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(10, 1300)))}).encode() + b"\n"
        for _ in range(min(LINES, max(1, nbytes // 2000)))
    ]
    written = 0
    with open(path, "wb") as file:
        while written < nbytes:
            rng.shuffle(lines)
            block = b"".join(lines)
            file.write(block)
            written += len(block)


def train_tokenizer(path: pathlib.Path, texts: Iterator[str]) -> None:
    """Writes a byte-level BPE tokenizer of IDS entries that is trained on texts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": IDS, "special_tokens": ["<s>"], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**how))
    made.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))


def resident() -> float:
    """Returns the most memory that this process had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(chosen: argparse.Namespace) -> dict:
    """Returns the figures of this process."""
    before = resident()
    start = time.perf_counter()
    from zerojax.data import batches, mixture, objectives, tokenizer

    imported = time.perf_counter() - start
    after_import = resident()
    if chosen.limit_gb:
        limit = int(chosen.limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    start = time.perf_counter()
    tokens = tokenizer.load_tokenizer(chosen.tokenizer or f"{chosen.out}/tokenizer.json")
    sources = [
        mixture.MixedSource(path.stem, batches.Places("", "", "", "", str(path)))
        for path in sorted(pathlib.Path(chosen.out).glob("part*.jsonl"))
    ]
    lengths = {"tokens": chosen.seq_len + 1, mixture.SOURCES: chosen.seq_len + 1}
    make = mixture.RowMaker(tokens, objectives.NextToken().form(tokens, chosen.seq_len), None, lengths)
    mixed = mixture.SourceMixture(sources, make, chosen.rows)
    opened = time.perf_counter() - start
    made = mixed.open(True, range(chosen.rows), chosen.rows, 0)
    next(made)
    first, memory = time.perf_counter() - start, [resident()]
    count, start = max(1, chosen.batches // 2), time.perf_counter()
    for _ in range(count):
        next(made)
    rate = count * chosen.rows * chosen.seq_len / (time.perf_counter() - start)
    memory.append(resident())
    waits = []
    for _ in range(chosen.batches - count):
        time.sleep(chosen.step_ms / 1e3)
        start = time.perf_counter()
        next(made)
        waits.append(1e3 * (time.perf_counter() - start))
    memory.append(resident())
    lines = mixed.summary(made)
    made.close()
    return {
        "import_seconds": imported,
        "open_seconds": opened,
        "first_batch_seconds": first,
        "tokens_per_second": rate,
        "step_ms": chosen.step_ms,
        "tokens_per_step": chosen.rows * chosen.seq_len,
        "wait_ms": {"median": statistics.median(waits), "max": max(waits)},
        "resident_mb": {
            "start": before,
            "imported": after_import,
            **dict(zip(("first", "half", "end"), memory)),
        },
        "summary": lines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--seq_len", type=int, default=2048)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--step_ms", type=float, default=200.0)
    parser.add_argument(
        "--tokenizer", default="", help='"bytes" or a tokenizer.json; "": one that is trained on the text'
    )
    parser.add_argument("--limit_gb", type=float, default=0.0, help="of anonymous memory; 0: no limit")
    parser.add_argument("--child", action="store_true")
    chosen = parser.parse_args()
    out = pathlib.Path(chosen.out)
    if chosen.child:
        print(json.dumps(measure(chosen)))
        return
    out.mkdir(parents=True, exist_ok=True)
    for part in range(PARTS):
        write(out / f"part{part}.jsonl", int(chosen.gb * 1e9 / PARTS), part)
    if not chosen.tokenizer:
        with open(out / "part0.jsonl", encoding="utf-8") as file:
            train_tokenizer(out / "tokenizer.json", (json.loads(line)["text"] for line, _ in zip(file, range(1000))))
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child"], stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    (out / "feed.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
