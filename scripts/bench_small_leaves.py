"""Measures the update of 400 leaves of 4,096 elements, and of one leaf of their total size. Figures: docs/benchmarks/optimizer.md.

    python scripts/bench_small_leaves.py --out runs/small-leaves

Writes small_leaves.json there and prints a table with two times for each update. The first is the time in which its kernels run. The
second is the time that the update adds to a program whose other work keeps the GPU busy, so that the host runs ahead, as in training: the
median time between the end of one piece of that work and the start of the next. Both come from a trace of 50 updates in one program.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import tempfile
import time

import bench_optimizer as bench
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import update
from zerojax.profile import phases, traces

NAMES = {"kernels run": "busy_ms", "adds": "adds_ms"}
UPDATES = 50  # of one program
GRAPHS = {"xla_enable_command_buffers_during_profiling": True}
SIDE_BY_SIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
PLAIN = update.LAUNCHES["plain"]
ONE, MANY = (1, (1600, 1024)), (400, (4, 1024))
# leaves, implementation, leaves per launch, XLA options
SETTINGS = [
    (ONE, "jnp", 1, {}),
    (ONE, "pallas", 1, {}),
    (MANY, "pallas", 48, {}),
    (MANY, "jnp", 1, {}),
    (MANY, "pallas", 48, SIDE_BY_SIDE),
    (MANY, "pallas", 32, {}),
    (MANY, "pallas", 32, SIDE_BY_SIDE),
    (MANY, "pallas", 16, {}),
    (MANY, "pallas", 64, {}),
]


def spin(x: jax.Array) -> jax.Array:
    """Returns x after a chain of sums that keeps the GPU busy for about 0.6 ms. Other work does not make it longer."""

    def kernel(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = 0.5 * jax.lax.fori_loop(0, 300_000, lambda _, total: 0.5 * total + x, x)

    params = pltriton.CompilerParams(num_warps=4, num_stages=1)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, grid=(1,), compiler_params=params, name="spin")(x)


def measure(leaves: tuple[int, tuple], implementation: str, group: int, options: dict) -> dict:
    """Returns the times of AdamW with float32 weights and moments, bf16 gradients and bf16 copies of the weights."""
    update.LAUNCHES["plain"] = dataclasses.replace(PLAIN, group=group)
    tx = bench.make("adamw", "fp32", implementation, False)
    (params,), (grads,) = (bench.normal(1, (leaves[0], *leaves[1]), dtype) for dtype in ("float32", "bfloat16"))
    params, grads = list(params), list(grads)  # slices of one array: 400 random generators take minutes to compile
    start = (jnp.ones(128), (params, tx.init(params), [p.astype(jnp.bfloat16) for p in params]))

    def once(_, carry):
        spun, (params, state, _) = spin(carry[0]), carry[1]
        # The update depends on the spin, so XLA cannot run both at once.
        return spun, tx.apply(grads, state, params, scale=spun[0], finite=spun[0] > 0, copy_dtype=jnp.bfloat16)

    began = time.perf_counter()
    looped = jax.jit(lambda carry: jax.lax.fori_loop(0, UPDATES, once, carry), donate_argnums=0)
    program = looped.lower(start).compile(compiler_options=options | GRAPHS)
    compiling = time.perf_counter() - began
    kernels = traced(program, jax.block_until_ready(program(start)))
    spins = [kernel for kernel in kernels if "spin" in kernel.name]
    others = [kernel for kernel in kernels if "spin" not in kernel.name]
    return {
        "launches": len(others) / UPDATES,
        "busy_ms": phases.length(phases.union((kernel.start, kernel.end) for kernel in others)) / UPDATES / 1e6,
        "adds_ms": statistics.median(after.start - spun.end for spun, after in itertools.pairwise(spins)) / 1e6,
        "compile_s": compiling,
    }


def traced(program, carry) -> list[traces.Kernel]:
    """Runs a program and returns its kernels in order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(carry))
        return sorted(traces.read(traces.newest(pathlib.Path(folder))), key=lambda kernel: kernel.start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/small-leaves")
    parser.add_argument("--seconds", type=float, default=200, help="start no measurement after this long")
    args = parser.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "copy_bytes_per_s": bench.time_copy()}
    report["rows"] = []
    began = time.monotonic()
    for leaves, implementation, group, options in SETTINGS:
        what = {"leaves": leaves[0], "implementation": implementation, "group": group, "options": options}
        if time.monotonic() - began > args.seconds:
            print("out of time before", what)
            break
        report["rows"].append(what | measure(leaves, implementation, group, options))
        (out / "small_leaves.json").write_text(json.dumps(report, indent=1))
        show(report["rows"][-1], report["rows"][0])


def show(row: dict, one: dict) -> None:
    how = f"{row['implementation']}, groups of {row['group']}" + (", side by side" if row["options"] else "")
    times = [f"{name} {row[key]:.4f} ms ({row[key] / one[key]:.2f} x)" for name, key in NAMES.items()]
    print(
        f"{row['leaves']:4} leaves, {how:38}",
        *times,
        f"{row['launches']:.0f} launches, compiled in {row['compile_s']:.1f} s",
        sep="  ",
    )


if __name__ == "__main__":
    main()
