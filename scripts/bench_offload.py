"""Measures offload on one device: the link to host memory, the stream of optimizer state, and training steps with and without offload.

    python scripts/bench_offload.py
    python scripts/bench_offload.py --parts link stream --params_millions 537 --chunks_mib 128 256 512

Each part runs in a process of its own, since a device's peak memory counts from the start of the process.

link    copies of chunks to the device, to the host, and both at once, in GB/s for each direction
stream  the update of --params_millions weights with float32 moments in host memory: GB/s each way, its share of the link's rate for both
        directions, and the device memory of the update (the peak without weights and gradients)
train   configs/llama3_1b.py, 1.50B weights, micro-batch 4: on the device, with moments on the host (stage 3), and with master weights and
        moments on the host (stage 2); with one and with four passes a step

The table at the end is a Markdown table. On a CPU host and device memory are the same, so its figures mean nothing there.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import bench_child  # in this folder
import bench_report
import bench_train

ROOT = bench_report.ROOT
PARTS = ("link", "stream", "train")
MIB = 1 << 20
CONFIG = "configs/llama3_1b.py micro_batch_size=4"
HOST = "offload.optimizer=host"
TRAIN = {
    "on the device": CONFIG,
    "moments on the host": f"{CONFIG} {HOST}",
    "masters and moments on the host": f"{CONFIG} {HOST} zero.stage=2",
    "on the device, 4 passes": f"{CONFIG} grad_accum=4",
    "moments on the host, 4 passes": f"{CONFIG} {HOST} grad_accum=4",
    "masters and moments on the host, 4 passes": f"{CONFIG} {HOST} zero.stage=2 grad_accum=4",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the parts and prints the table. Returns the exit status: 1 if a part failed."""
    options = _parser().parse_args(arguments)
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
        return 0
    rows: list[tuple[str, str]] = []
    duplex, failed = None, False
    if "link" in options.parts:
        found = _child("link", arguments)
        failed |= found is None
        if found:
            duplex = found["both"]
            rows += [(f"link, {name}", f"{found[key]:.1f} GB/s") for key, name in LINK.items()]
    if "stream" in options.parts:
        for chunk in options.chunks_mib:
            for in_flight in options.in_flight:
                found = _child("stream", arguments, f"--chunks_mib={chunk}", f"--in_flight={in_flight}")
                failed |= found is None
                rows.append((f"stream, {in_flight} chunks of {chunk} MiB", _shown(found, duplex)))
    if "train" in options.parts:
        folder = options.workdir or ROOT / "runs" / time.strftime("bench-offload-%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, words) in enumerate(TRAIN.items()):
            setting = bench_train.parse(f"run-{number}", " ".join([words, *options.train]))
            found = bench_train.run(setting, folder / setting.name, options.steps, options.limit_s)
            failed |= found["status"] != bench_report.OK
            rows.append((f"train, {name}", bench_report.outcome(found)))
            print(f"{rows[-1][0]}: {rows[-1][1]}", flush=True)
    print("\n| what | measured |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in rows))
    return int(failed)


LINK = {"to_device": "to the device", "to_host": "to the host", "both": "both at once, each way"}


def link(options: argparse.Namespace) -> dict[str, float]:
    """Returns GB/s of copies in chunks: to the device, to the host, and in each direction of both at once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import zerojax
    from zerojax.zero.host import memory_kind

    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    device = NamedSharding(mesh, P())
    host = memory_kind.on_host(device)
    chunk, count = options.chunks_mib[0] * MIB, options.copies
    there = [jax.device_put(np.full(chunk // 4, n, np.float32), host) for n in range(4)]
    here = [jax.block_until_ready(jax.device_put(jnp.full(chunk // 4, n, jnp.float32), device)) for n in range(4)]
    jax.block_until_ready(there)

    def copies(to_device: bool, to_host: bool) -> None:
        running: collections.deque[Any] = collections.deque()
        for n in range(count):
            one = [jax.device_put(there[n % 4], device)] if to_device else []
            one += [jax.device_put(here[n % 4], host)] if to_host else []
            running.append(one)
            if len(running) > 3:
                jax.block_until_ready(running.popleft())
        jax.block_until_ready(list(running))

    def rate(*which: bool) -> float:
        return count * chunk / _best(lambda: copies(*which), options.repeat) / 1e9

    return {"to_device": rate(True, False), "to_host": rate(False, True), "both": rate(True, True)}


def stream(options: argparse.Namespace) -> dict[str, float]:
    """Returns GB/s each way of the optimizer state of a step whose gradients cost nothing, and the device memory of the update."""
    import jax
    import jax.numpy as jnp

    import zerojax
    from zerojax.zero.host import settings

    rows, columns = max(8, int(options.params_millions * 1e6 / 8 / 4096)), 4096
    mesh = zerojax.make_mesh(devices=jax.devices()[:1])
    tx = zerojax.fused_adamw(1e-4)

    def init(key: Any) -> Any:
        params = {f"layer_{n}": jnp.full((rows, columns), 0.01) for n in range(8)}
        return zerojax.TrainState.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key_data(key))

    def loss_fn(params: Any, batch: Any, state: Any) -> Any:
        return sum(jnp.mean(w) for w in params.values()) * jnp.mean(batch)

    chosen = settings.Offload("host", chunk_bytes=options.chunks_mib[0] * MIB, in_flight=options.in_flight[0])
    state, partition = zerojax.shard_train_state(init, jax.random.key(0), mesh=mesh, stage=2, offload=chosen)
    step = zerojax.make_train_step(loss_fn, partition)
    batch = jnp.ones((8, 8))
    held = [state]

    def steps() -> None:
        for _ in range(options.updates):
            held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    steps()  # compiles
    seconds = _best(steps, options.repeat) / options.updates
    each_way = sum(group.nbytes for group in step.updates.groups)
    stats = jax.devices()[0].memory_stats() or {}
    resident = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(held[0].params))  # gradients too
    update = stats["peak_bytes_in_use"] - resident if stats.get("peak_bytes_in_use") else 0
    return {"rate": each_way / seconds / 1e9, "each_way": each_way, "seconds": seconds, "update_bytes": update}


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {"link": link, "stream": stream}


def _best(function: Callable[[], None], repeat: int) -> float:
    """Returns the least seconds of some calls, after one that is not counted."""
    function()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def _child(part: str, arguments: Sequence[str], *more: str) -> dict[str, float] | None:
    """Runs a part in its own process and returns its figures; None if it failed."""
    words = [sys.executable, __file__, *arguments, *more, f"--child={part}"]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": bench_child.python_path()}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(f"{part} {' '.join(more)}: failed with status {done.returncode}", flush=True)
        return None
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{part} {' '.join(more)}: {found}", flush=True)
    return found


def _shown(found: dict[str, float] | None, duplex: float | None) -> str:
    if found is None:
        return "failed"
    share = f", {found['rate'] / duplex:.0%} of both at once" if duplex else ""
    memory = f", update {found['update_bytes'] / 1e9:.2f} GB of device memory" if found["update_bytes"] else ""
    return f"{found['rate']:.1f} GB/s each way{share}{memory}, {found['seconds'] * 1e3:.0f} ms"


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--params_millions", type=float, default=1500.0, help="weights of the stream, in millions")
    parser.add_argument(
        "--chunks_mib", type=int, nargs="+", default=[256], help="sizes of a chunk; link takes the first"
    )
    parser.add_argument("--in_flight", type=int, nargs="+", default=[8], help="chunks on the device at once")
    parser.add_argument("--copies", type=int, default=64, help="chunks copied by link")
    parser.add_argument("--updates", type=int, default=4, help="steps of stream that are timed together")
    parser.add_argument("--repeat", type=int, default=3, help="timings, of which the best counts")
    parser.add_argument("--steps", type=int, default=12, help="steps of each training run")
    parser.add_argument("--train", nargs="+", default=[], metavar="key=value", help="changes to every training run")
    parser.add_argument("--limit_s", type=float, default=300, help="seconds until a training run is ended")
    parser.add_argument("--workdir", type=pathlib.Path, help="folder of the training runs")
    parser.add_argument("--child", choices=list(CHILDREN), default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
