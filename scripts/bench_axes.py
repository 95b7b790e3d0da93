"""Measures attention over tokens that are sharded over all GPUs of this machine, by each way of zerojax.ops.context_attention.

    python scripts/bench_axes.py --out runs/axes --limit_s 570
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/bench_axes.py --out runs/axes --tiny

First compares the values and gradients of each way, in bfloat16 by cuDNN, with those of the whole sequence on one device. An error is
relative to the root mean square, and some 0.004 where blocks are added up. The first row, `blocks`, needs one device: it adds up the
blocks of two halves of the keys there. Then times both passes of one layer of 8B (32 heads, 8 of keys and values, 128 wide), one row a way
and length: milliseconds (the median of --repeats after a warm-up), TFLOP/s of a device by the scores that a mask leaves, GB that a device
sends, and GiB planned for temporaries. Writes axes.json and prints a table. The rows of one device are the floor. A row that would begin
after the limit is left out.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zerojax.ops import attention_blocks as blocks  # noqa: E402
from zerojax.ops import context_attention, token_order  # noqa: E402

AXIS = "context"
# way, order, window; the first of a length is one device with a sequence of its share
ROWS = (
    ("one device", "contiguous", 0),
    ("ulysses", "contiguous", 0),
    ("gather", "zigzag", 0),
    ("ring", "zigzag", 0),
    ("ring", "contiguous", 0),
    ("one device", "contiguous", 4096),
    ("halo", "contiguous", 4096),
    ("ulysses", "contiguous", 4096),
)
ERRORS = ("value", "dq", "dk", "dv")


def both_passes(way: str, order: str, window: int, mesh: Mesh, kernel: str):
    """Returns a jitted function of q, k, v and dy, sharded over tokens: attention and its gradients."""

    def attend(q, k, v):
        chosen = context_attention.Way("gather" if way == "halo" else way, order, "", halo=way == "halo")
        return context_attention.attend(
            q, k, v, kernel, axis=AXIS, way=chosen, order=order, is_causal=True, window=window
        )

    def run(q, k, v, dy):
        out, gradients = jax.vjp(attend, q, k, v)
        return out, *gradients(dy)

    tokens = P(None, AXIS)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False))


def inputs(mesh: Mesh, length: int, heads: int, kv_heads: int, width: int, places: np.ndarray | None = None) -> list:
    """Returns q, k, v and dy in bfloat16, sharded over tokens; the same for each mesh."""
    sharding, found = NamedSharding(mesh, P(None, AXIS)), []
    for seed, count in enumerate((heads, kv_heads, kv_heads, heads)):
        x = jax.jit(lambda key, count=count: jax.random.normal(key, (1, length, count, width), jnp.bfloat16))(
            jax.random.key(seed)
        )
        found.append(jax.device_put(x if places is None else x[:, places], sharding))
    return found


def of_blocks(kernel: str):
    """Returns a jitted function of q, k, v and dy on one device: causal attention, and its gradients, of two halves of the keys."""

    def run(q, k, v, dy):
        half, scale = q.shape[1] // 2, q.shape[3] ** -0.5
        early, late = slice(None, half), slice(half, None)
        # queries and keys of each block, and whether its queries see its keys up to their own place or all
        cases = ((early, early, True), (late, early, False), (late, late, True))
        taken = [((q[:, rows], k[:, keys], v[:, keys]), rows, keys, is_causal) for rows, keys, is_causal in cases]
        form = blocks.BlockForm(kernel, scale)
        forms = [dataclasses.replace(form, is_causal=is_causal) for *_, is_causal in taken]
        made = [blocks.forward(form, *arrays, None) for form, (arrays, *_) in zip(forms, taken)]
        sums = [blocks.finished(made[0]), blocks.finished(blocks.merged(made[1], made[2]))]
        dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for form, (arrays, rows, keys, _) in zip(forms, taken):
            y, l = sums[rows is late]
            found = blocks.backward(form, *arrays, None, y, l, dy[:, rows])
            dq = dq.at[:, rows].add(found[0].astype(jnp.float32))
            dk, dv = (x.at[:, keys].add(part.astype(jnp.float32)) for x, part in zip((dk, dv), found[1:]))
        return jnp.concatenate([y for y, _ in sums], axis=1), dq, dk, dv

    return jax.jit(run)


def errors(way: str, order: str, window: int, devices: list, kernel: str, length: int, shape: tuple) -> dict:
    """Returns the errors of values and gradients beside the whole sequence on one device."""
    one, all_ = (Mesh(np.asarray(part), (AXIS,)) for part in (devices[:1], devices))
    expected = both_passes("ulysses", "contiguous", window, one, kernel)(*inputs(one, length, *shape))
    if way == "blocks":
        places, found = np.arange(length), of_blocks(kernel)(*inputs(one, length, *shape))
    else:
        places = token_order.permutation(length, len(devices), order)
        found = both_passes(way, order, window, all_, kernel)(*inputs(all_, length, *shape, places))
    result = {}
    for name, a, b in zip(ERRORS, found, expected):
        a, b = np.asarray(a, np.float32)[:, np.argsort(places)], np.asarray(b, np.float32)
        result[name] = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
    return result


def measure(
    way: str, order: str, window: int, devices: list, kernel: str, length: int, shape: tuple, repeats: int
) -> dict:
    """Returns the figures of a row."""
    if way == "one device":
        way, length, devices = "ulysses", length // len(devices), devices[:1]
    mesh = Mesh(np.asarray(devices), (AXIS,))
    args = inputs(mesh, length, *shape)
    program = both_passes(way, order, window, mesh, kernel).lower(*args).compile()
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - began)
    heads, kv_heads, width = shape
    cost = context_attention.cost(
        way,
        order,
        heads=heads,
        kv_heads=kv_heads,
        ways=len(devices),
        length=length,
        is_causal=True,
        window=window,
        head_dim=width,
    )
    seen = length * min(window or length, length / 2) * heads / len(devices)
    seconds = statistics.median(times)
    return {
        "ms": 1e3 * seconds,
        "tflops": 3.5 * 4 * width * seen / seconds / 1e12,  # the backward pass has five matmuls, the forward pass two
        "sent_gb": (cost.forward + cost.backward) / 1e9,
        "temp_gib": program.memory_analysis().temp_size_in_bytes / 2**30,
    }


def main() -> None:
    """Prints the errors and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of axes.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072, 262144], help="tokens of a sequence")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit_s", type=float, default=570)
    parser.add_argument("--tiny", action="store_true", help="on emulated devices: small shapes by XLA's kernel")
    options = parser.parse_args()
    if not options.tiny:  # NVLink multicast is off, because not every machine offers it
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        flags = f"--xla_gpu_experimental_use_collective_kernels= {os.environ.get('XLA_FLAGS', '')}"
        os.environ["XLA_FLAGS"] = flags.strip()
    kernel, shape, check, rows = "cudnn", (32, 8, 128), 8192, ROWS
    if options.tiny:
        kernel, shape, check, options.lengths, options.repeats = "xla", (4, 2, 8), 64, [128], 1
        rows = [(way, order, min(window, 16)) for way, order, window in ROWS]
    began, devices, found = time.monotonic(), jax.devices(), {"device": jax.devices()[0].device_kind, "rows": []}
    todo = [("check", check, row) for row in (("blocks", "contiguous", 0), *rows) if row[0] != "one device"]
    todo += [("time", length, row) for length in options.lengths for row in rows]
    options.out.mkdir(parents=True, exist_ok=True)
    for part, length, (way, order, window) in todo:
        if time.monotonic() - began > options.limit_s:
            print(f"the limit is reached before {part} {way} {length}", flush=True)
            break
        where = f"| {part} | {way} | {order} | {window} | {length:,} |"
        try:
            if part == "check":
                figures = errors(way, order, min(window, length // 8), devices, kernel, length, shape)
            else:
                figures = measure(way, order, window, devices, kernel, length, shape, options.repeats)
        except Exception as error:  # such as memory: the other rows follow
            figures = {"error": " ".join(str(error).split())[:300]}
        found["rows"].append({"part": part, "way": way, "order": order, "window": window, "length": length, **figures})
        (options.out / "axes.json").write_text(json.dumps(found, indent=1) + "\n")
        shown = (f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in figures.items())
        print(where, " | ".join(shown), "|", flush=True)


if __name__ == "__main__":
    main()
