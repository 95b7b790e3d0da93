"""Measures copies between all GPUs of this machine and host memory, all GPUs at once, a process each.

    python scripts/bench_copies.py --devices 8

Each process copies an array of 470 MB, the output of the widest matmul of a layer in configs/llama3_8b.py, to pinned host memory again and
again for some seconds, and then back. Two rows differ in where a process runs when it pins its memory: anywhere, or on the cores that are
near its GPU (its NUMA node). The rates are those of all GPUs together, in GB/s.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

NBYTES = 470 << 20


def near(number: int) -> set[int]:
    """Returns the cores of the NUMA node of a GPU, or an empty set if the machine does not tell."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id={number}"]
    bus = subprocess.run(query, capture_output=True, text=True).stdout.strip().lower()[-12:]
    try:
        node = int(pathlib.Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        parts = pathlib.Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except (OSError, ValueError):
        return set()
    ends = [[int(end) for end in part.split("-")] for part in parts]
    return {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}


def one(number: int, start: float, seconds: float, is_bound: bool) -> None:
    """Copies in this process, which sees one GPU, from the time `start` on; prints GB/s out and in."""
    cores = near(number) & os.sched_getaffinity(0) if is_bound else None
    if is_bound and not cores:
        print("unknown", flush=True)
        return
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    on_device, on_host = (jax.sharding.SingleDeviceSharding(device, memory_kind=k) for k in ("device", "pinned_host"))
    array = jax.device_put(jnp.ones(NBYTES, jnp.int8), on_device)
    there = jax.block_until_ready(jax.device_put(array, on_host))  # pins
    rates = []
    for turn, (source, target) in enumerate(((array, on_host), (there, on_device))):
        time.sleep(max(0.0, start + turn * (seconds + 1) - time.time()))
        began, count = time.time(), 0
        while time.time() - began < seconds:
            jax.block_until_ready(jax.device_put(source, target))
            count += 1
        rates.append(count * NBYTES / (time.time() - began) / 1e9)
    print(*rates, flush=True)


def main() -> None:
    """Prints one row for each placement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each direction")
    parser.add_argument("--start_s", type=float, default=12.0, help="until every process should have started JAX")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--bound", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        return one(options.one, options.at, options.seconds, options.bound)
    for bound in (False, True):
        words = [
            sys.executable,
            __file__,
            "--seconds",
            str(options.seconds),
            "--at",
            str(time.time() + options.start_s),
        ]
        started = [
            subprocess.Popen([*words, "--one", str(n), *["--bound"] * bound], stdout=subprocess.PIPE, text=True)
            for n in range(options.devices)
        ]
        answers = [process.communicate()[0].split() for process in started]
        where = "on the cores near their GPU" if bound else "anywhere"
        if all(len(answer) == 2 for answer in answers):
            out, back = (sum(float(answer[n]) for answer in answers) for n in range(2))
            each = ", ".join(answer[0] for answer in answers)
            print(
                f"{options.devices} GPUs, processes {where}: {out:.1f} GB/s to the host ({each}), {back:.1f} GB/s back",
                flush=True,
            )
        else:
            print(f"{options.devices} GPUs, processes {where}: not measured: {answers}", flush=True)


if __name__ == "__main__":
    main()
