"""Measures the speed and the accuracy of the fused optimizers on one GPU. Figures and conclusions: docs/benchmarks/optimizer.md.

    python scripts/bench_optimizer.py --out runs/optimizer

Writes optimizer.json there and prints a table. Times are medians over batches of steps. Inputs are donated, so steps update in place.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pallas_kernels import update
from zerojax.optim import fused, one_pass

LEAF = (8192, 8192)
BATCHES, STEPS = 15, 5
CHECKED = 100
RAGGED = {
    "a": (1,),
    "b": (255,),
    "c": (1_000_003,),
    "d": (63, 257),
    "e": (128, 1024),
    "f": (3, 5, 300),
    "g": (1030, 2049),
    "h": (1024, 1024),
    "i": (512, 2048),
}
RATE, DECAY = 1e-2, 0.1
HYPER = {"b1": 0.9, "b2": 0.95, "weight_decay": DECAY}
# (params, moments) -> maximum RMS error of params after CHECKED steps, relative to the distance that they moved.
POLICIES = {
    ("float32", "fp32"): 3e-6,
    ("float32", "bf16"): 0.01,
    ("float32", "int8"): 0.04,
    ("bfloat16", "fp32"): 0.1,
    ("bfloat16", "bf16"): 0.1,
    ("bfloat16", "int8"): 0.1,
}
# (elements, warps) of a program; the first is that of update.LAUNCHES.
LAUNCHES = [(1024, 8), (512, 4), (2048, 8)]
IN_BLOCKS = [(1024, 4), (2048, 8), (512, 2)]


def check_right(implementation: str) -> list[dict]:
    """Compares CHECKED steps over ragged shapes with float64 numpy for every policy, and checks that a skipped step changes nothing."""
    rng = np.random.default_rng(0)
    start = {k: rng.standard_normal(s).astype(np.float32) for k, s in RAGGED.items()}
    slopes = {k: rng.standard_normal(s).astype(np.float32) for k, s in RAGGED.items()}
    grads = [{k: jnp.asarray(2 * g * factor) for k, g in slopes.items()} for factor in (1, 2, 3)]
    bad = {k: jnp.asarray(g).reshape(-1).at[-1].set(jnp.inf).reshape(g.shape) for k, g in slopes.items()}
    rows = []
    for name in ("adamw", "lion"):
        expected = in_float64(name, start, slopes)
        for (dtype, moments), allowed in POLICIES.items():
            rounds = (dtype, moments) != ("float32", "fp32")
            tx = make(name, moments, implementation, rounds)
            step = jax.jit(functools.partial(tx.apply, scale=0.5))
            params = {k: jnp.asarray(p, dtype) for k, p in start.items()}
            state = tx.init(params)
            for n in range(CHECKED):
                params, state, _ = step(grads[n % 3], state, params, finite=True)
            wrong = sum(np.sum((np.asarray(params[k], np.float64) - expected[k]) ** 2) for k in start)
            error = float(np.sqrt(wrong / sum(np.sum((expected[k] - start[k]) ** 2) for k in start)))
            kept = step(bad, state, params, finite=False)[:2]
            same = all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (kept, (params, state)))))
            rows.append({"what": f"{name} {dtype} {moments}", "implementation": implementation, "error": error})
            rows[-1] |= {"allowed": allowed, "skips": same, "is_right": bool(error <= allowed and same)}
    return rows


def in_float64(name: str, start: dict, slopes: dict) -> dict:
    """Returns params after CHECKED steps, computed in float64."""
    b1, b2, found = HYPER["b1"], HYPER["b2"], {}
    for k, slope in slopes.items():
        p, m, v = start[k].astype(np.float64), 0.0, 0.0
        for n in range(CHECKED):
            g = slope.astype(np.float64) * (n % 3 + 1)
            if name == "lion":
                p, m = p - RATE * (np.sign(b1 * m + (1 - b1) * g) + DECAY * p), b2 * m + (1 - b2) * g
                continue
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            direction = m / (1 - b1 ** (n + 1)) / (np.sqrt(v / (1 - b2 ** (n + 1))) + 1e-8)
            p = p - RATE * (direction + DECAY * p)
        found[k] = p
    return found


def make(name: str, moments: str, implementation: str, rounds: bool) -> one_pass.OnePass:
    maker = fused.fused_adamw if name == "adamw" else fused.fused_lion
    return maker(RATE, **HYPER, moments=moments, stochastic_rounding=rounds, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def normal(count: int, shape: tuple, dtype: str) -> list:
    return [jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(dtype) for n in range(count)]


def clock(step, *carry, steps: int = STEPS, batches: int = BATCHES) -> float:
    """Returns the median seconds of carry = step(*carry)."""
    for _ in range(2):
        carry = jax.block_until_ready(step(*carry))
    times = []
    for _ in range(batches):
        began = time.perf_counter()
        for _ in range(steps):
            carry = step(*carry)
        jax.block_until_ready(carry)
        times.append((time.perf_counter() - began) / steps)
    return statistics.median(times)


def time_copy() -> dict:
    """Returns the bytes/s of two ways to copy 4 GiB."""
    x = normal(1, (2**30,), "float32")[0]
    ways = {"copy": jnp.copy, "negate": lambda x: -x}
    best = {}
    for name, way in ways.items():
        best[name] = 2 * x.nbytes / clock(lambda y, way=jax.jit(way): (way(x),), x)
    return best


def time_update(tx, dtype: str, grad_dtype: str, leaves: int, copies: bool, clips: bool = False) -> tuple[float, float]:
    """Returns (seconds per step, bytes that a step must read and write)."""
    params, grads = normal(leaves, LEAF, dtype), normal(leaves, LEAF, grad_dtype)
    is_fused = isinstance(tx, one_pass.OnePass)
    step = functools.partial(fused_step, tx, copies, clips) if is_fused else functools.partial(optax_step, tx)
    state = jax.jit(tx.init)(params)
    moved = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    moved += sum(leaf.nbytes for leaf in grads) * (2 if clips else 1) + copies * 2 * leaves * LEAF[0] * LEAF[1]
    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    shadows = [p.astype(jnp.bfloat16) for p in params] if copies else None
    return clock(lambda p, s, c: jitted(p, s, c, grads), params, state, shadows), moved


def fused_step(tx, copies: bool, clips: bool, params, state, _, grads):
    scale, finite = jnp.float32(0.5), jnp.isfinite(state.count.astype(jnp.float32))
    if clips:
        size = optax.tree.norm(grads)
        scale, finite = jnp.minimum(1.0, 1.0 / size), jnp.isfinite(size)
    how = {"copy_dtype": jnp.bfloat16} if copies else {}
    return tx.apply(grads, state, params, scale=scale, finite=finite, **how)


def optax_step(tx, params, state, _, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, None


def row(what: str, how: str, seconds: float, moved: float) -> dict:
    return {"what": what, "how": how, "ms": seconds * 1e3, "bytes": moved, "bytes_per_s": moved / seconds}


def cases() -> list[tuple]:
    """Returns (what, how, optimizer, params, gradients, leaves, copies, clips, launch)."""
    found = []

    def add(what, name, moments, rounds, *, tries=(None,), dtype="float32", grads="bfloat16", leaves=16, **does):
        copies, clips = does.get("copies", True), does.get("clips", False)
        for implementation in ("jnp", "pallas"):
            for launch in tries if implementation == "pallas" else (None,):
                how = implementation + ("" if launch is None else " {}/{}".format(*launch))
                tx = make(name, moments, implementation, rounds)
                found.append((what, how, tx, dtype, grads, leaves, copies, clips, launch))

    add("adamw fp32", "adamw", "fp32", False, tries=LAUNCHES[:2])
    clip = "clip + adamw, fp32 gradients, 0.54e9"
    add(clip, "adamw", "fp32", False, grads="float32", leaves=8, copies=False, clips=True, tries=LAUNCHES[:2])
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, **HYPER))
    found.append((clip, "optax", clipped, "float32", "float32", 8, False, True, None))
    add("adamw bf16 moments", "adamw", "bf16", True, tries=LAUNCHES)
    add("adamw bf16 moments, to nearest", "adamw", "bf16", False, tries=LAUNCHES[:1])
    add("adamw int8 moments", "adamw", "int8", True, tries=IN_BLOCKS)
    add("adamw int8 moments, to nearest", "adamw", "int8", False, tries=IN_BLOCKS)
    weights = {"dtype": "bfloat16", "copies": False}
    add("adamw bf16 weights", "adamw", "fp32", True, tries=LAUNCHES[:1], **weights)
    add("adamw bf16 weights, bf16 moments", "adamw", "bf16", True, tries=LAUNCHES[:1], **weights)
    add("adamw bf16 weights, int8 moments", "adamw", "int8", True, tries=IN_BLOCKS, **weights)
    add("lion fp32", "lion", "fp32", False, tries=LAUNCHES[:1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/optimizer")
    parser.add_argument("--match", default="", help="run only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=100, help="start no case after this long")
    args = parser.parse_args()
    began = time.monotonic()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    copies = time_copy()
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "copy_bytes_per_s": copies, "rows": []}

    def save(rows: list[dict], part: str = "rows") -> None:
        report.setdefault(part, []).extend(rows)
        (out / "optimizer.json").write_text(json.dumps(report, indent=1))
        print(f"{time.monotonic() - began:5.0f} s", rows[-1]["what"], rows[-1].get("how", ""))

    defaults = dict(update.LAUNCHES)
    chosen = [case for case in cases() if args.match in case[0]]
    for what, how, tx, dtype, grads, leaves, kept, clips, launch in chosen:
        if time.monotonic() - began > args.seconds:
            print("out of time before", what, how)
            break
        if launch is not None:
            elements, warps = launch
            for kind, default in defaults.items():
                update.LAUNCHES[kind] = dataclasses.replace(default, elements=elements, num_warps=warps)
        save([row(what, how, *time_update(tx, dtype, grads, leaves, kept, clips))])
    update.LAUNCHES.update(defaults)
    for implementation in ("pallas", "jnp"):
        save(check_right(implementation), "right")
    show(report)


def show(report: dict) -> None:
    copies = report["copy_bytes_per_s"]
    print(json.dumps(copies), [r for r in report.get("right", []) if not r["is_right"]] or "none wrong")
    for r in report["rows"]:
        share = r["bytes_per_s"] / max(copies.values())
        print(
            f"{r['what']:38} {r['how']:14} {r['ms']:8.3f} ms {r['bytes_per_s'] / 1e12:6.3f} TB/s {share:6.1%} of copy"
        )


if __name__ == "__main__":
    main()
