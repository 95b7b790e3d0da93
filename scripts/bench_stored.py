"""Measures matmuls that read weights as they are stored, on one GPU: experts in MXFP4, and kernels in block-fp8.

    python scripts/bench_stored.py
    python scripts/bench_stored.py --only mxfp4 --tiles 16-64-256-4-3 --long_tiles 128-128-64-8-3 --limit_s 60

Experts are gpt-oss-120b's: 128 of [2880, 5760] ("up", gate and up) and [2880, 2880] ("down"), 4 for a token, drawn evenly. "out" is the
product of 1, 8, 64 and 4,096 tokens, "dlhs" the gradient of 4,096. A form ROWS-COLUMNS-DEPTH-WARPS-STAGES is a tile of
`pallas_kernels.grouped_mxfp4`; "expand" writes all experts in bf16 before their grouped matmul; "bf16" is that matmul alone. Several draws
of experts take turns, so no cache holds those of a call. Block-fp8 kernels [K, N] are multiplied by `pallas_kernels.narrow` ("stored"),
after XLA's dequantization ("expand"), and in bf16.

All programs are compiled first, by several threads. Each result is compared with float32. Rates count the bytes of weights that a call has
to read: those of experts with tokens, as the form stores them. Shares are of 4.8 TB/s. A form that fails has its error below the tables.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped, grouped_mxfp4, narrow
from zerojax.ops import quantized

EXPERTS, TOP_K, SHAPES = 128, 4, {"up": (2880, 5760), "down": (2880, 2880)}
KERNELS = {"V3 o": (16384, 7168), "V3 up": (7168, 18432), "8B up": (4096, 12288)}
FEW, MANY = (1, 8, 64), 4096  # tokens
DRAWS = {1: 8, 8: 4, 64: 2}
TILES = ("16-64-128-4-4", "16-128-128-4-4", "16-64-256-4-3")
LONG_TILES = ("128-128-64-8-3", "64-128-64-4-3")
PEAK = 4.8e12  # bytes/s of an H200's memory
WORST = 5e-3  # of the largest value: results are rounded to bf16, and weights of block-fp8 before the matmul
JUDGED = 256  # rows of a result that are compared


class Case(NamedTuple):
    """One program to measure: `run` takes one of `inputs`. `places` are the rows that are compared with `wanted`, of the last."""

    name: str
    form: str
    run: Callable[..., Any]
    inputs: list[tuple]
    calls: int  # matmuls of a program
    nbytes: float  # of weights, of a matmul
    flops: float
    places: np.ndarray
    wanted: Callable[[], np.ndarray]


def main(arguments: list[str]) -> int:
    """Measures and prints Markdown tables. Returns 1 if a form failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("mxfp4", "fp8"))
    parser.add_argument("--tiles", nargs="+", default=list(TILES), help="of few tokens")
    parser.add_argument("--long_tiles", nargs="+", default=list(LONG_TILES), help="of 4,096 tokens")
    parser.add_argument("--limit_s", type=float, default=90, help="what is left then is not measured")
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument(
        "--interpret", action="store_true", help="compares small shapes without a GPU, and measures nothing"
    )
    options = parser.parse_args(arguments)
    began = time.monotonic()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    cases = [] if options.only == "fp8" else _experts(options)
    cases += [] if options.only == "mxfp4" else _kernels(options.interpret)
    errors, cells = [], {}
    pool = concurrent.futures.ThreadPoolExecutor(options.threads)
    asked = [
        (case, pool.submit(lambda case: jax.jit(case.run).lower(*case.inputs[0]).compile(), case)) for case in cases
    ]
    left = 0.6 * options.limit_s - (time.monotonic() - began)
    concurrent.futures.wait([compiled for _, compiled in asked], None if options.interpret else max(0.0, left))
    pool.shutdown(wait=True, cancel_futures=True)  # nothing compiles while something is measured
    print(f"compiled {sum(one.done() and not one.cancelled() for _, one in asked)} of {len(asked)}, ", end="")
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    for case, compiled in asked:
        if compiled.cancelled() or time.monotonic() - began > options.limit_s:
            errors.append(f"{case.name}, {case.form}: no time was left")
            continue
        try:
            cells[case.name, case.form] = _measured(case, compiled.result(), options.interpret)
        except Exception as error:
            errors.append(f"{case.name}, {case.form}: {type(error).__name__}: {str(error).strip()[:300]}")
        print(case.name, case.form, cells.get((case.name, case.form), "failed"), flush=True)
    names = list(dict.fromkeys(case.name for case in cases))
    for title in dict.fromkeys(name.partition(",")[0] for name in names):
        columns = [name for name in names if name.partition(",")[0] == title]
        forms = dict.fromkeys(case.form for case in cases if case.name in columns)
        print(
            f"\n| {title} | "
            + " | ".join(name.partition(", ")[2] for name in columns)
            + " |\n|"
            + "---|" * (len(columns) + 1)
        )
        for form in forms:
            print(f"| {form} | " + " | ".join(cells.get((name, form), "-") for name in columns) + " |")
    print("\n" + "\n".join(errors))
    return int(bool(errors))


def _measured(case: Case, run: Any, interpret: bool) -> str:
    found = run(*case.inputs[-1])
    found = np.asarray((found[-1] if isinstance(found, list) else found)[case.places], np.float32)
    wanted = case.wanted()
    worst = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not worst < WORST:
        raise ValueError(f"differs by {worst:.3g} of the largest value")
    if interpret:
        return f"{worst:.1e}"

    def some(count: int) -> float:
        start = time.perf_counter()
        for n in range(count):
            last = run(*case.inputs[n % len(case.inputs)])
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / count

    count = max(2, min(50, int(0.01 / some(3))))
    seconds = statistics.median(some(count) for _ in range(5)) / case.calls
    rate, flops = case.nbytes / seconds, case.flops / seconds
    told = f"{flops / 1e12:.0f} TFLOP/s" if flops > 5e13 else f"{rate / 1e12:.2f} TB/s, {100 * rate / PEAK:.0f}%"
    return f"{1e6 * seconds:.1f} us ({told}; {worst:.0e})"


def _experts(options: argparse.Namespace) -> list[Case]:
    count, shapes = (8, {"up": (96, 128)}) if options.interpret else (EXPERTS, SHAPES)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(0)
    cases: list[Case] = []
    for name, (inputs, outputs) in shapes.items():
        keys = jax.random.split(jax.random.key(len(cases)), 4)
        codes = jax.random.bits(keys[0], (count, outputs, inputs // 2), jnp.uint8)
        exponents = 118 + jax.random.bits(keys[1], (count, outputs, inputs // 32), jnp.uint8) % 6
        stored = {quantized.MXFP4: codes, quantized.EXPONENTS: exponents}
        floats = jax.jit(functools.partial(quantized.dequantize, dtype=jnp.bfloat16))(stored)
        for tokens, transposed in [*((few, False) for few in FEW), (MANY, False), (MANY, True)]:
            tokens = min(tokens, 12) if options.interpret else tokens
            rows, draws = tokens * TOP_K, DRAWS.get(tokens, 1)
            chosen = [np.argsort(random.random((tokens, count)))[:, :TOP_K].reshape(-1) for _ in range(draws)]
            expert_of = [np.sort(own) for own in chosen]
            sizes = [jnp.asarray(np.bincount(own, minlength=count), jnp.int32) for own in expert_of]
            contracted = outputs if transposed else inputs
            x = [
                jax.random.normal(jax.random.fold_in(keys[2], n), (rows, contracted), jnp.bfloat16)
                for n in range(draws)
            ]
            places = np.arange(0, rows, max(1, rows // JUDGED))
            wanted = functools.cache(
                functools.partial(_by_float32, x[-1][places], floats, expert_of[-1][places], transposed)
            )
            used = float(np.mean([len(set(own)) for own in expert_of]))
            packed, wide = (used * inputs * outputs * size for size in (0.5 + 1 / 32, 2))
            title = f"experts, {name} {'dlhs' if transposed else 'out'} {tokens}"
            own: dict[str, Any] = {
                "nbytes": packed,
                "flops": 2.0 * rows * inputs * outputs,
                "places": places,
                "wanted": wanted,
            }

            for form in options.tiles if tokens < MANY and not transposed else options.long_tiles:
                given: list[tuple] = [(x, sizes, codes, exponents)]
                tile = grouped.TritonTile(*map(int, form.split("-")))
                how: dict[str, Any] = {"transposed": transposed, "tile": tile, "interpret": options.interpret}
                run = functools.partial(_by_codes, functools.partial(grouped_mxfp4.rows, **how))
                cases.append(Case(title, form, run, given, draws, **own))

            by_floats = functools.partial(_by_floats, transposed)
            mapped = jax.shard_map(by_floats, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            cases.append(Case(title, "expand", mapped, [(*one, stored) for one in zip(x, sizes)], 1, **own))
            given = [(*one, floats) for one in zip(x, sizes)]
            cases.append(Case(title, "bf16", mapped, given, 1, **{**own, "nbytes": wide}))
    return cases


def _by_codes(multiply: Callable[..., Any], x: list, sizes: list, codes: Any, exponents: Any) -> list:
    return [multiply(one, codes, exponents, size) for one, size in zip(x, sizes)]


def _by_floats(transposed: bool, x: Any, sizes: Any, matrices: Any) -> Any:
    if isinstance(matrices, dict):
        matrices = quantized.dequantize(matrices, x.dtype)
    return grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM].rows(x, matrices, sizes, transposed)


def _by_float32(x: Any, matrices: Any, expert_of: np.ndarray, transposed: bool) -> np.ndarray:
    """Returns rows times the matrix of their expert each, in float32."""
    return np.asarray(_each(x, matrices, jnp.asarray(expert_of), transposed))


@functools.partial(jax.jit, static_argnums=3)
def _each(x: jax.Array, matrices: jax.Array, expert_of: jax.Array, transposed: bool) -> jax.Array:
    def one(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, matrix = given[0].astype(jnp.float32), matrices[given[1]].astype(jnp.float32)
        return jnp.sum(matrix * row[None, :] if transposed else matrix * row[:, None], axis=1 if transposed else 0)

    return jax.lax.map(one, (x, expert_of))


def _kernels(interpret: bool) -> list[Case]:
    cases: list[Case] = []
    for name, (inputs, outputs) in ({"small": (256, 128)} if interpret else KERNELS).items():
        keys = jax.random.split(jax.random.key(inputs), 3)
        copies = 1 if interpret else max(2, -(-(2**27) // (inputs * outputs)))  # twice what the cache holds
        stored, floats = [], []
        for n in range(copies):
            bits = jax.random.bits(jax.random.fold_in(keys[0], n), (inputs, outputs), jnp.uint8)
            scales = 1e-3 + 1e-3 * jax.random.uniform(keys[1], quantized.blocks_of((inputs, outputs), 1), jnp.float32)
            codes = jnp.where(bits & 0x7F == 0x7F, 0, bits).astype(jnp.uint8)  # no NaN
            scale_bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
            stored.append({quantized.FP8_BLOCK: codes, quantized.BLOCK_SCALES: scale_bits})
            floats.append(jax.jit(functools.partial(quantized.dequantize, dtype=jnp.bfloat16))(stored[-1]))
        for rows in (1, 8) if interpret else FEW:
            x = jax.random.normal(keys[2], (rows, inputs), jnp.bfloat16)
            wide = functools.partial(quantized.dequantize, stored[-1], jnp.float32)
            wanted = functools.cache(
                lambda x=x, wide=wide: np.asarray(jnp.dot(x.astype(jnp.float32), wide(), precision="highest"))
            )
            own: dict[str, Any] = {"flops": 2.0 * rows * inputs * outputs, "places": np.arange(rows), "wanted": wanted}

            def as_stored(x: Any, kernels: Any) -> list:
                how: dict[str, Any] = {"implementation": "interpret" if interpret else "pallas"}
                return [narrow.multiply(x, *quantized.values_of(kernel), **how) for kernel in kernels]

            def as_floats(x: Any, kernels: Any) -> list:
                return [
                    jnp.dot(
                        x,
                        quantized.dequantize(one, x.dtype) if isinstance(one, dict) else one,
                        preferred_element_type=jnp.float32,
                    )
                    for one in kernels
                ]

            for form, run, kernels, size in (
                ("stored", as_stored, stored, 1), ("expand", as_floats, stored, 1), ("bf16", as_floats, floats, 2),
            ):  # fmt: skip
                cases.append(
                    Case(
                        f"block-fp8, {name} {rows}",
                        form,
                        run,
                        [(x, kernels)],
                        copies,
                        float(size * inputs * outputs),
                        **own,
                    )
                )
    return cases


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
