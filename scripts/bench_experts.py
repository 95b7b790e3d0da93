r"""Measures the grouped matmuls of experts on one GPU: each of the three products, by each kernel, beside a dense matmul of the same FLOPs.

    python scripts/bench_experts.py
    python scripts/bench_experts.py --rows 262144 --only dense rows-288-32-128-4-32-2 triton-128x128x64-w8-s3
    python scripts/bench_experts.py --only fp8 --seconds 0.1 --together 8 --limit_s 88

The shapes are those of Qwen3-30B-A3B: 128 experts, D 2,048 and F 768, rows for 4,096 tokens with 8 experts each. "D>F" is the matmul of
gate or up, "F>D" that of down. Groups are of the sizes that a random router gives ("balanced"), and of sizes from 4 to 1 ("4:1"). Each
result is compared with a batched matmul of padded groups first, and with the twin where groups are empty and where one has all rows.
Kernels are compiled by several processes at once and measured one at a time, with the clock and the power meanwhile. The table comes last:
TFLOP/s, and beside them the share of the dense rate. A variant that fails has its error below the table.

"--only fp8" measures products in e4m3 beside those in bf16. "fp8-..." has both operands in e4m3, with the contracted dim last; "wire" casts
the rows first, and turns the matrices of `out`, which have come in e4m3; "cast" casts both operands. They are compared with a
matmul of the rounded values.
"""

import argparse
import fcntl
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# The fields of `grouped_mosaic.RowsTile` and of `MatricesTile`.
ROWS = [(288, 32, 128, 4, 32, 2), (288, 16, 128, 4, 32, 2)]
MATRICES = [(128, 128, 7, 7, 8), (128, 128, 5, 9, 8), (64, 256, 5, 6, 8)]
TRITON = [(128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 256, 64, 8, 3), (64, 128, 64, 4, 4)]
JAX = [(128, 128, 64, 4, 1), (64, 256, 64, 4, 1)]
VARIANTS = [
    "dense",
    *("-".join(map(str, ("rows", *tile))) for tile in ROWS),
    *("-".join(map(str, ("matrices", *tile))) for tile in MATRICES),
    *("triton-{}x{}x{}-w{}-s{}".format(*tile) for tile in TRITON),
    *("jax-{}x{}x{}-{}-{}".format(*tile) for tile in JAX),
    "padded",
]
# Operands of 8 bits are half as large, so that more of a tile's results can be on their way.
FP8 = ["dense", "fp8-288-32-128-4-32-2", "fp8-288-32-128-3-32-8", "fp8-288-32-128-3-32-4", "rows-288-32-128-4-32-2"]
FP8 += ["rows-288-32-128-3-32-8", "wire", "cast"]
CASES = ("D>F out", "D>F dlhs", "D>F drhs", "F>D out", "F>D dlhs", "F>D drhs")
LOADS = ("balanced", "4:1")
WORST = 0.02  # of the largest value: bfloat16 has 8 bits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=32768)
parser.add_argument("--groups", type=int, default=128)
parser.add_argument("--dim", type=int, default=2048)
parser.add_argument("--mlp_dim", type=int, default=768)
parser.add_argument(
    "--only", nargs="+", default=VARIANTS, help="names, as in the table, with the fields of a tile; or fp8"
)
parser.add_argument("--seconds", type=float, default=0.2, help="measured for each figure")
parser.add_argument("--together", type=int, default=5, help="processes that compile")
parser.add_argument("--stuck_s", type=float, default=30.0, help="a variant that computes one case for longer is ended")
parser.add_argument("--limit_s", type=float, default=225.0)
parser.add_argument("--child", help=argparse.SUPPRESS)
parser.add_argument("--lock", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    """Runs each variant in a process of its own, and prints the table."""
    ends = time.monotonic() + options.limit_s
    found: dict[str, dict[str, Any]] = {}
    names = FP8 if options.only == ["fp8"] else list(options.only)
    if "dense" not in names:
        names.insert(0, "dense")
    with tempfile.NamedTemporaryFile() as lock:

        def work() -> None:
            while names:
                name = names.pop(0)
                found[name] = _watch(options, name, lock.name, ends)

        workers = [threading.Thread(target=work) for _ in range(options.together)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    _print(options, found)


def _watch(options: argparse.Namespace, name: str, lock: str, ends: float) -> dict[str, Any]:
    """Runs a variant; returns its figures by case."""
    found: dict[str, Any] = {}
    if time.monotonic() > ends - 10:
        return {"all": "left out: time is up"}
    own = [f"--{key}={getattr(options, key)}" for key in ("rows", "groups", "dim", "mlp_dim", "seconds")]
    command = [sys.executable, __file__, *own, "--child", name, "--lock", lock]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    busy: list[tuple[float, str]] = []
    errors: list[str] = []

    def guard() -> None:
        while child.poll() is None:
            time.sleep(0.5)
            now = time.monotonic()
            if now > ends or (busy and now - busy[-1][0] > options.stuck_s):
                found[busy[-1][1] if busy else "all"] = "left out: time is up" if now > ends else "stuck"
                child.kill()

    threads = [
        threading.Thread(target=guard),
        threading.Thread(target=lambda: errors.extend(child.stderr or ())),
    ]
    for thread in threads:
        thread.start()
    for line in child.stdout or ():
        if line.startswith("BUSY "):
            busy.append((time.monotonic(), line[5:].strip()))
        elif line.startswith("STATE "):
            print(name, line[6:].strip(), flush=True)
        elif line.startswith("DONE "):
            busy.clear()
            case, figures = json.loads(line[5:])
            found[case] = figures
            print(f"{time.strftime('%H:%M:%S')} {name:22} {case}: {figures}", flush=True)
    for thread in threads:
        thread.join()
    if child.wait() and not found:
        last = [line.strip() for line in errors if line.strip()]
        found["all"] = last[-1][:200] if last else f"exit {child.returncode}"
    return found


def _print(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    dense = found.get("dense", {})
    print(
        f"\n{options.rows} rows, {options.groups} groups, D {options.dim}, F {options.mlp_dim}: TFLOP/s (% of dense)\n"
    )
    columns = [(case, load) for case in CASES for load in LOADS]
    print(f"| kernel | {' | '.join(f'{case} {load}' for case, load in columns)} |\n|---|{'---|' * len(columns)}")
    notes: dict[str, None] = {}
    for name in VARIANTS + [name for name in found if name not in VARIANTS]:
        if name not in found:
            continue
        cells = []
        for case, load in columns:
            figures = found[name].get(case, found[name].get("all", "-"))
            if isinstance(figures, dict):
                rate, base = figures[load], dense.get(case)
                share = f" ({100 * rate / base[load]:.0f}%)" if isinstance(base, dict) else ""
                cells.append(f"{rate:.0f}{share}")
            else:
                cells.append("x" if figures != "-" else "-")
        notes |= {
            f"{name}, {case.split()[-1]}: {why}": None for case, why in found[name].items() if isinstance(why, str)
        }
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n".join(["", *notes]), flush=True)


def child(options: argparse.Namespace) -> None:
    """Compiles, checks and measures the products of one variant."""
    import jax

    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    for case in CASES:
        try:
            figures: Any = _case(options, case)
        except Exception as error:  # the other cases are measured all the same
            figures = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"
        if figures is not None:
            print("DONE " + json.dumps((case, figures)), flush=True)


def _case(options: argparse.Namespace, case: str) -> dict[str, float] | None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    way, product = case.split()
    rows, groups = options.rows, options.groups
    contracted, columns = (options.dim, options.mlp_dim) if way == "D>F" else (options.mlp_dim, options.dim)
    shapes = {
        "out": ((rows, contracted), (groups, contracted, columns)),
        "dlhs": ((rows, columns), (groups, contracted, columns)),
        "drhs": ((rows, contracted), (rows, columns)),
    }[product]
    run = _product(options.child, product, rows)
    if run is None:
        return None
    abstract = [
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    ]
    # Not compiled as a whole: XLA leaves out a cast to 8 bits and back, and the judge's operands would not be rounded.
    prepare = functools.partial(_operands, options.child.partition("-")[0], product)
    *operands, _ = jax.eval_shape(prepare, *abstract[:2])
    compiled = jax.jit(run).lower(*operands, abstract[2]).compile()
    flops = 2 * rows * contracted * columns
    random = np.random.default_rng(0)
    weights = {"balanced": np.ones(groups), "4:1": random.permutation(np.linspace(4, 1, groups))}
    sizes = {load: random.multinomial(rows, weight / weight.sum()) for load, weight in weights.items()}
    judge = None
    edges: dict[str, Any] = {}
    if options.child != "dense":
        size = int(-(-max(max(own) for own in sizes.values()) // 64) * 64)
        result = jax.eval_shape(run, *operands, abstract[2])
        judge = jax.jit(functools.partial(_error, product, size)).lower(result, *abstract).compile()
        odd = random.random(groups) * (random.random(groups) < 0.5)
        edges = {
            "empty groups and rows left over": random.multinomial(rows * 15 // 16, odd / odd.sum()),
            "one group": np.where(np.arange(groups) == groups // 2, rows, 0),
        }
        twin = jax.jit(functools.partial(_error, product, 0)).lower(result, *abstract).compile()
    figures = {}
    with open(options.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("BUSY " + case, flush=True)
        keys = jax.random.split(jax.random.key(0))
        inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes)]
        *operands, inputs = prepare(*inputs)

        def check(judge: Any, load: str, sizes: Any) -> float:
            error = float(judge(compiled(*operands, sizes), *inputs, sizes))
            if not error < WORST:
                raise ValueError(f"wrong with {load}: error {error:.3g} of the largest value")
            return error

        for load, each in sizes.items():
            own = jnp.asarray(each, jnp.int32)
            error = 0.0 if judge is None else check(judge, load, own)
            seconds, state = _seconds(functools.partial(compiled, *operands, own), options.seconds)
            figures[load] = flops / seconds / 1e12
            print(f"STATE {case} {load} error {error:.2g} {state} {jax.devices()[0].device_kind}", flush=True)
        for load, each in edges.items():
            check(twin, load, jnp.asarray(each, jnp.int32))
        fcntl.flock(lock, fcntl.LOCK_UN)
    return figures


def _operands(kind: str, product: str, first: Any, second: Any) -> tuple[Any, Any, list[Any]]:
    """Returns both operands of a variant, those in 8 bits as (values, scale), and what they stand for."""
    import jax.numpy as jnp

    from zerojax.ops import fp8

    if kind not in ("fp8", "wire", "cast"):
        return first, second, [first, second]
    rows, matrices = (fp8.quantized(array, fp8.FORWARD, fp8.scale_of(array, fp8.FORWARD)) for array in (first, second))
    known = [(coded.values.astype(jnp.float32) / coded.scale).astype(jnp.bfloat16) for coded in (rows, matrices)]
    if kind == "cast":
        return *known, known
    if kind == "wire":
        return known[0], matrices, known
    return rows, _contracted_last(matrices, product), known


def _contracted_last(matrices: Any, product: str) -> Any:
    return matrices if product == "dlhs" else matrices._replace(values=matrices.values.swapaxes(1, 2))


def _seconds(run: Callable[[], Any], duration: float) -> tuple[float, str]:
    """Returns the median time of a call over rounds of calls, without waiting in between, and the GPU's clock and power meanwhile."""
    import jax

    def some() -> float:
        start = time.perf_counter()
        for _ in range(20):
            last = run()  # the one before is freed: twenty matrices of all groups would be taken from the driver anew
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / 20

    some()
    began = time.monotonic()
    rounds: list[float] = []
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        asked = None
    while len(rounds) < 3 or time.monotonic() - began < duration:
        rounds.append(some())
    while asked is not None and asked.poll() is None and time.monotonic() - began < duration + 1:
        some()
    return statistics.median(rounds), asked.stdout.read().strip() if asked is not None and asked.stdout else ""


def _product(variant: str, product: str, height: int) -> Callable[..., Any] | None:
    """Returns (first, second, sizes) -> the product; None if the variant is one of other products."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import grouped

    kind, _, sizes = variant.partition("-")
    numbers = [int(word.strip("ws")) for word in sizes.replace("x", "-").split("-")] if sizes else []
    if kind == "dense":
        dims = {"out": ((1,), (0,)), "dlhs": ((1,), (1,)), "drhs": ((0,), (0,))}[product]

        def dense(first: Any, second: Any, sizes: Any) -> Any:
            return jax.lax.dot_general(first, second[0] if product != "drhs" else second, (dims, ((), ())))

        return dense
    if kind == "padded":
        size = 640 * -(-height // 32768)  # more than the largest group
        return lambda first, second, sizes: _padded(first, second, sizes, product, size, jnp.bfloat16)
    if kind == "triton":
        tile = grouped.TritonTile(*numbers)
        if product == "drhs":
            return functools.partial(grouped.matrices_by_triton, tile=tile)
        return lambda first, second, sizes: grouped.rows_by_triton(first, second, sizes, product == "dlhs", tile=tile)
    if kind in ("fp8", "wire", "cast"):
        return None if product == "drhs" else functools.partial(_in_fp8, kind, product, numbers)
    if kind in ("rows", "matrices"):
        from pallas_kernels import grouped_mosaic

        if (product == "drhs") != (kind == "matrices"):
            return None
        processors = jax.devices()[0].core_count
        if product == "drhs":
            matrices = grouped_mosaic.MatricesTile(*numbers)
            return functools.partial(grouped_mosaic.grouped_matrices, processors=processors, tile=matrices)
        own, transposed = grouped_mosaic.RowsTile(*numbers), product == "dlhs"
        return functools.partial(grouped_mosaic.grouped_rows, transposed=transposed, processors=processors, tile=own)
    rows, columns, depth, steps, wide = numbers
    how = {"block_m": rows, "block_n": columns, "block_k": depth, "max_concurrent_steps": steps, "grid_block_n": wide}
    if product == "drhs":
        from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

        return lambda first, second, sizes: transposed_ragged_dot_mgpu.transposed_ragged_dot(
            first, second, group_sizes=sizes, **how
        )
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    return lambda first, second, sizes: ragged_dot_mgpu.ragged_dot(
        first, second, group_sizes=sizes, transpose_rhs=product == "dlhs", **how
    )


def _in_fp8(kind: str, product: str, numbers: list[int], first: Any, second: Any, sizes: Any) -> Any:
    import jax
    import jax.numpy as jnp

    from pallas_kernels import grouped_mosaic
    from zerojax.ops import fp8

    def cast(array: Any) -> Any:
        # The barrier: as in `zerojax.ops.expert_matrices`.
        array, scale = jax.lax.optimization_barrier((array, fp8.scale_of(array, fp8.FORWARD)))
        return fp8.quantized(array, fp8.FORWARD, scale)

    rows = first if kind == "fp8" else cast(first)
    matrices = second if kind == "fp8" else _contracted_last(cast(second) if kind == "cast" else second, product)
    how = {"scale": 1.0 / (rows.scale * matrices.scale), "dtype": jnp.bfloat16}
    how |= {"tile": grouped_mosaic.RowsTile(*numbers), "processors": jax.devices()[0].core_count}
    return grouped_mosaic.grouped_rows(rows.values, matrices.values, sizes, transposed=True, **how)


def _padded(first: Any, second: Any, sizes: Any, product: str, size: int, dtype: Any) -> Any:
    """Returns the product by one batched matmul of groups that are padded to `size` rows: the judge of the others."""
    import jax.numpy as jnp

    starts, rows = jnp.cumsum(sizes) - sizes, first.shape[0]
    inside = jnp.arange(size) < sizes[:, None]
    spots = jnp.where(inside, starts[:, None] + jnp.arange(size), rows)  # `rows` is outside

    def spread(x: Any) -> Any:
        return x.at[spots].get(mode="fill", fill_value=0)

    form = {"out": "gsk,gkn->gsn", "dlhs": "gsn,gkn->gsk", "drhs": "gsk,gsn->gkn"}[product]
    other = spread(second) if product == "drhs" else second
    found = jnp.einsum(form, spread(first), other, preferred_element_type=jnp.float32).astype(dtype)
    if product == "drhs":
        return found
    return jnp.zeros((rows, found.shape[-1]), dtype).at[spots].set(found, mode="drop")


def _error(product: str, size: int, result: Any, first: Any, second: Any, sizes: Any) -> Any:
    """Returns the largest difference from a batched matmul of groups padded to `size` rows, or from the twin, over its largest value."""
    import jax.numpy as jnp

    from pallas_kernels import grouped

    if size:
        judge = _padded(first, second, sizes, product, size, jnp.float32)
    elif product == "drhs":
        judge = grouped.matrices_ref(first, second, sizes)
    else:
        judge = grouped.rows_ref(first, second, sizes, product == "dlhs").astype(jnp.float32)
    return jnp.max(jnp.abs(result.astype(jnp.float32) - judge)) / jnp.max(jnp.abs(judge))


if __name__ == "__main__":
    arguments = parser.parse_args()
    child(arguments) if arguments.child else main(arguments)
