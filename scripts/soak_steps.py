"""Measures what host memory grows by in a long run that nothing disturbs: the trainer's steps, and loops without zerojax as the floor.

    python scripts/soak_steps.py --steps 5000 --out soak_steps.json

Each row is a process of its own: a tiny model on one CPU device, alone, with evaluations, with saves, and with both; a loop of plain JAX;
and the two questions that Orbax asks tensorstore at each save, whose answers are JSON, without a save. Every 50 steps it
reads its resident memory, the bytes that the C library has handed out and those that it keeps free (mallinfo2), and the blocks that Python
has handed out. Growth is the slope of a line over the second half of the steps, with its standard error. At the end the C library gives
back what it keeps (malloc_trim): what it gives back was no leak.
"""

import argparse
import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
EVERY = 50  # steps between two looks
SETTINGS = (
    "model.preset=test model.num_layers=1 model.remat=none precision=fp32 seq_len=32 global_batch_size=24 log_every=1 emulate_devices=1 "
    "optimizer.learning_rate=0.01 optimizer.schedule=constant optimizer.warmup_steps=2 sample.length=0 data.name=random "
    "evaluate.batches=2 evaluate.every=0 checkpoint.every=0 checkpoint.at_end=False data.eval_split="
)
EVALUATES = "data.eval_split=validation evaluate.every=7"
LEAVES, STEPS_OF_A_SAVE = 40, 5  # of the rows with saves
SAVES = f"checkpoint.every={STEPS_OF_A_SAVE}"
PLAIN, JSON = "plain JAX", "tensorstore's JSON"
ROWS = {
    PLAIN: "",
    JSON: "",
    "steps": "",
    "steps, nothing logged": "log_every=1000000 metrics.to=",
    "evaluations every 7 steps": EVALUATES,
    "saves every 5 steps": SAVES,
    "evaluations and saves": f"{EVALUATES} {SAVES}",
}
NAMES = ("step", "resident", "handed_out", "kept_free", "mapped", "blocks")


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def look(step: int) -> tuple[int, ...]:
    """Returns NAMES of this process now, in bytes but for the step and the blocks."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return step, pages * os.sysconf("SC_PAGE_SIZE"), info.uordblks, info.fordblks, info.hblkhd, sys.getallocatedblocks()


def child(row: str, steps: int) -> None:
    """Runs a row in this process, and prints its looks as JSON."""
    looks: list[tuple[int, ...]] = []
    floors = {PLAIN: plain, JSON: answers}
    if row in floors:
        floors[row](steps, looks)
    else:
        train(f"{SETTINGS} {ROWS[row]} steps={steps}", looks)
    objects = len(gc.get_objects())
    found = gc.collect()
    collected = look(steps)
    ctypes.CDLL(None).malloc_trim(0)
    after = {"collected": found, "objects": objects, "after_collection": collected, "after_trim": look(steps)}
    print("looks " + json.dumps({"looks": looks, **after}), flush=True)


def plain(steps: int, looks: list[tuple[int, ...]]) -> None:
    """Takes steps of a function of the trainer's kind: donated arrays, a batch from the host, scalars read one step late."""
    import jax
    import jax.numpy as jnp

    def step(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], dict[str, jax.Array]]:
        out = [weight + 1e-6 * batch.mean() for weight in weights]
        return out, {str(n): jnp.sum(out[n]) for n in range(4)}

    step = jax.jit(step, donate_argnums=0)
    weights, before, random = [jnp.zeros((64, 64)) for _ in range(24)], None, np.random.default_rng(0)
    for n in range(1, steps + 1):
        batch = jax.device_put(random.integers(256, size=(24, 33)))
        weights, numbers = step(weights, batch)
        if before is not None:
            jax.device_get(before)
        before = numbers
        if n % EVERY == 0:
            looks.append(look(n))


def answers(steps: int, looks: list[tuple[int, ...]]) -> None:
    """Asks tensorstore what Orbax asks it at each save: where each leaf is to be, and before and after how much was written."""
    import tensorstore

    with tempfile.TemporaryDirectory(prefix="soak-steps-") as folder:
        place = {"driver": "file", "path": f"{folder}/"}
        tensorstore.KvStore.open(place).result().write("one", b"that there is something to count").result()
        for n in range(1, steps + 1):
            if n % STEPS_OF_A_SAVE == 0:
                for _ in range(2):
                    tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/")
                for _ in range(LEAVES):
                    tensorstore.KvStore.Spec(place).to_json()
            if n % EVERY == 0:
                looks.append(look(n))


def train(settings: str, looks: list[tuple[int, ...]]) -> None:
    """Runs the trainer in this process."""
    from zerojax import train as train_lib
    from zerojax.launch import devices
    from zerojax.trainer import command, recorder
    from zerojax.trainer import config as config_lib

    record = recorder.Recorder._record

    def recorded(self: recorder.Recorder, read: Any) -> None:
        record(self, read)
        if read is not None and read.step % EVERY == 0:
            looks.append(look(read.step))

    recorder.Recorder._record = recorded  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="soak-steps-") as folder:
        words = [f"--config.{word}" for word in settings.split()]
        sys.argv[1:] = [f"--config={ROOT / 'configs/base.py'}", *words]  # the flags of the config are read from there
        config = config_lib.from_dict(command.parse(sys.argv))
        devices.emulate_cpu_devices(config.emulate_devices)
        train_lib.train(config, pathlib.Path(folder))


def growth(looks: list[list[int]], name: str) -> tuple[float, float]:
    """Returns the slope of a line over the second half of the looks, and its standard error."""
    rows = np.array(looks[len(looks) // 2 :], float)
    return line(rows[:, 0], rows[:, NAMES.index(name)])


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns the slope of a line through at least three points, and its standard error."""
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / (x * x).sum()
    rest = y - slope * x
    return float(slope), float(np.sqrt((rest * rest).sum() / (len(x) - 2) / (x * x).sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=tuple(ROWS), metavar="ROW")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file of all looks")
    options = parser.parse_args()
    if options.child:
        child(options.rows[0], options.steps)
        return
    print(
        "| row | resident, bytes a step | handed out by malloc | free | Python's blocks | resident at the end, MB | after malloc_trim |"
    )
    print("|---|---|---|---|---|---|---|")
    found = {}
    for row in options.rows:
        words = [sys.executable, __file__, "--child", "--steps", str(options.steps), "--rows", row]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("looks ")]
        if not lines:
            print(f"{row}: {done.stderr[-600:]}", flush=True)
            continue
        found[row] = json.loads(lines[-1].removeprefix("looks "))
        looks = found[row]["looks"]
        cells = ["{:.0f} ± {:.0f}".format(*growth(looks, name)) for name in ("resident", "handed_out", "kept_free")]
        cells += ["{:.2f} ± {:.2f}".format(*growth(looks, "blocks"))]
        cells += [f"{one[1] / 1e6:.1f}" for one in (looks[-1], found[row]["after_trim"])]
        print(f"| {row} | " + " | ".join(cells) + " |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
