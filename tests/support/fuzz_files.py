"""Feeds the readers files that a fuzzer makes. This module follows which lines each input reaches (needs `pip install atheris`).

    python tests/support/fuzz_files.py "records .jsonl" adapter --seconds 120

It begins with the small files of `odd_files.KINDS`, changes them, and keeps what reaches a new line. A fault is printed once for each place
that raises it, with the file that shows it. All runs in one process: what computes or grows without end is found by `odd_files.py`.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import atheris

sys.path[:0] = [str(pathlib.Path(__file__).parents[2]), str(pathlib.Path(__file__).parent)]
os.environ |= {"JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
with atheris.instrument_imports(include=["zerojax"], enable_loader_override=False):
    import odd_files

ODD = (
    None,
    True,
    False,
    "",
    "no",
    "a",
    "\ud800",
    [],
    {},
    [1],
    ["a"],
    [[]],
    {"a": 1},
    -1,
    0,
    1,
    3,
    64,
    2**31,
    2**64,
    10**306,
)
ODD += (0.5, 1e308, -1e-320, float("inf"), float("nan"), "default", "x" * 300, [None, "b"])
LARGEST = 1 << 16  # bytes of a file
SECONDS = 30  # of one input


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each place, (a list or a table, a key), below a value of JSON."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _nodes(value[key])


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """Returns a text of JSON with some values, keys and places changed; other bytes, and half of all, as the fuzzer changes them."""
    rng = random.Random(seed)
    try:
        value = json.loads(data) if rng.random() < 0.7 else None
    except (ValueError, RecursionError):
        value = None
    for _ in range(rng.choice([1, 1, 2, 5])):
        try:
            places = list(_nodes(value))
        except RecursionError:
            places = []
        if not places:
            return atheris.Mutate(data, most)
        inside, key = rng.choice(places)
        other, others = rng.choice(places)
        how = rng.randrange(5)
        if how == 0:
            inside[key] = json.loads(json.dumps(other[others]))
        elif how == 1 and isinstance(inside, dict):
            inside[rng.choice([*inside, "", "9", "name", "type"])] = inside.pop(key)
        elif how == 2:
            del inside[key]
        elif how == 3 and isinstance(inside[key], int | float) and abs(inside[key]) < 2**63:
            inside[key] = rng.choice([-1, 0, 1, 0.5, 2, 3, 7]) * inside[key]
        else:
            inside[key] = copy.deepcopy(rng.choice(ODD))
    found = json.dumps(value).encode()
    return found if len(found) <= most else atheris.Mutate(data, most)


def fuzz(kind: str, seconds: int, found: pathlib.Path) -> int:
    """Runs a kind's reader in a process of its own, which the fuzzer ends. Returns that process's number."""
    child = os.fork()
    if child:
        return child
    file, read, makers, beside = odd_files.KINDS[kind]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm"))
    path, seeds = folder / "read" / file, folder / "seeds"
    path.parent.mkdir(parents=True)
    seeds.mkdir()
    for number, make in enumerate(makers.values()):
        with contextlib.suppress(OSError):
            make(path)
            if path.is_file() and path.stat().st_size <= LARGEST:
                shutil.copyfile(path, seeds / str(number))
        shutil.rmtree(path.parent)
        path.parent.mkdir(parents=True)
    for number, sound in enumerate(odd_files.GOLDEN.rglob(pathlib.Path(file).name)):
        if sound.stat().st_size <= LARGEST:
            shutil.copyfile(sound, seeds / f"sound-{number}")
    if beside is not None:
        beside(path)
    known: set[str] = set()

    def one(data: bytes) -> None:
        path.write_bytes(data)
        error: BaseException | None = None
        try:
            with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
                read(path)
        except BaseException as caught:
            error = caught
        if why := odd_files.fault(error):
            place = "no line" if error is None else str(traceback.extract_tb(error.__traceback__)[-1][:2])
            if (place := f"{type(error).__name__} {place}") not in known:
                known.add(place)
                shown = found / f"{kind.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
                shown.write_bytes(data)
                print(f"FAULT {kind}: {why} ({place}; {shown})", flush=True)

    options = [f"-max_total_time={seconds}", f"-timeout={SECONDS}", "-rss_limit_mb=6000", f"-max_len={LARGEST}"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={found}/", "-print_final_stats=1", str(seeds)],
        one,
        custom_mutator=mutated,
    )
    atheris.Fuzz()
    os._exit(0)


def main() -> None:
    """Fuzzes kinds one after the other, and prints their faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="of odd_files.KINDS; by default all")
    parser.add_argument("--seconds", type=int, default=60, help="of each")
    parser.add_argument("--found", type=pathlib.Path, default=pathlib.Path("/tmp/fuzz-found"), help="where inputs go")
    given = parser.parse_args()
    given.found.mkdir(exist_ok=True)
    for kind in given.kinds or odd_files.KINDS:
        print(f"{kind}: status {os.waitpid(fuzz(kind, given.seconds, given.found), 0)[1]}", flush=True)


if __name__ == "__main__":
    main()
