"""Measures forms of the matmul of one row with a weight that is read as it is stored, on one GPU: GB/s of the weight's bytes.

    python scripts/bench_narrow.py
    python scripts/bench_narrow.py --kinds int8 --forms now words-256-16-2-4-2112

Shapes [K, N] are those of an 8B layer and its head, with q, k, v and gate, up as one matmul too. A form is compared with float32 first.
`now` is `pallas_kernels.narrow`, `xla` the compiler's own (bf16). The others are named COLUMNS-TILE-AHEAD-WARPS-PROGRAMS: a program
multiplies COLUMNS with TILE rows at a time, AHEAD tiles are on their way while one is multiplied, and K is split until there are about
PROGRAMS programs. `words` reads four codes of 8 bits as one int32, `codes` reads them one by one. Each weight is one of several copies in
turn, so no cache holds it. The last lines tell what a kernel costs that does next to nothing: launches, with and without a CUDA graph.
"""

import argparse
import concurrent.futures
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import narrow
from zerojax.ops import quantized

BLOCK = 64  # weights of a scale
SHAPES = {
    "k": (4096, 1024),
    "o": (4096, 4096),
    "qkv": (4096, 6144),
    "up": (4096, 14336),
    "gate+up": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
FORMS = (
    "now",
    "xla",
    "codes-64-64-1-4-1056",
    "codes-256-16-2-4-1056",
    "words-64-64-2-4-1056",
    "words-256-16-2-4-1056",
    "words-256-32-1-4-2112",
    "words-512-8-4-4-1056",
    "words-128-32-2-2-2112",
)
WORST = 2e-3  # of the largest value


def main(arguments: list[str]) -> int:
    """Measures and prints a Markdown table of each kind. Returns 1 if a form failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["int8", "fp8", "bf16"], choices=["int8", "fp8", "bf16"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--shapes", nargs="+", default=["o", "gate+up", "down", "head"], choices=SHAPES)
    parser.add_argument("--megabytes", type=int, default=256, help="of all copies of a weight")
    parser.add_argument("--limit_s", type=float, default=85, help="what is left then is not measured")
    parser.add_argument(
        "--interpret", action="store_true", help="compares small shapes without a GPU, and measures nothing"
    )
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.limit_s
    shapes = {"small": (256, 512)} if options.interpret else {name: SHAPES[name] for name in options.shapes}
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    tables: dict[str, dict[str, dict[str, str]]] = {}
    errors = []
    with concurrent.futures.ThreadPoolExecutor(1 if options.interpret else 12) as pool:
        asked = []
        for kind in options.kinds:
            forms = [form for form in options.forms if _has(form, kind)]
            tables[kind] = {form: {} for form in forms}
            for name, shape in shapes.items():
                given = _given(kind, shape, 1 if options.interpret else options.megabytes)
                for form in forms:
                    compiled = pool.submit(_compile, form, kind, given, options.interpret, ends)
                    asked.append((kind, name, form, given, compiled))
        concurrent.futures.wait([compiled for *_, compiled in asked])  # nothing compiles while something is measured
        print(f"compiled, {ends - time.monotonic():.0f} s are left", flush=True)
        if not options.interpret:
            _launches()
        for kind, name, form, given, compiled in asked:
            try:
                rate = _measure(compiled.result(), given, options.interpret)
                tables[kind][form][name] = f"{rate:.0f}"
            except Exception as error:
                errors.append(f"{kind} {name} {form}: {type(error).__name__}: {str(error).strip()[:200]}")
    for kind, rows in tables.items():
        print(f"\n| {kind}, GB/s | " + " | ".join(shapes) + " |\n|" + "---|" * (len(shapes) + 1))
        for form, rates in rows.items():
            print(f"| {form} | " + " | ".join(rates.get(name, "-") for name in shapes) + " |")
    print("\n" + "\n".join(errors))
    return int(bool(errors))


def _has(form: str, kind: str) -> bool:
    return {"xla": kind == "bf16", "words": kind != "bf16"}.get(form.split("-")[0], True)


def _given(kind: str, shape: tuple[int, int], megabytes: int) -> dict[str, Any]:
    """Returns x, copies of the weight and of the same bytes in words, and x times the weight."""
    inputs, outputs = shape
    w_KN = 0.02 * jax.random.normal(jax.random.key(1), shape, jnp.float32)
    x_K = jax.random.normal(jax.random.key(0), (1, inputs), jnp.float32).astype(jnp.bfloat16)
    if kind == "bf16":
        stored = (w_KN.astype(jnp.bfloat16), None)
        wide, unit = stored[0].astype(jnp.float32), 1.0
        in_words = None
    else:
        found = jax.jit(functools.partial(quantized.quantize, kind=kind))(w_KN)
        stored = (found[kind], found[quantized.SCALES])
        wide, unit = quantized.dequantize(found, jnp.float32), 1 / quantized.TOP[kind]
        in_words = jax.lax.bitcast_convert_type(stored[0].reshape(inputs, outputs // 4, 4), jnp.int32)
    expected = np.asarray(jnp.dot(x_K.astype(jnp.float32), wide, precision="highest"))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    count = max(2, min(16, megabytes * 2**20 // nbytes))
    made = {"x": x_K, "codes": stored, "words": None if in_words is None else (in_words, stored[1])}
    del wide, w_KN
    for name in ("codes", "words"):
        first = made[name]
        made[name] = None if first is None else [first, *(jax.tree.map(jnp.copy, first) for _ in range(count - 1))]
    return {**made, "expected": expected, "unit": unit, "nbytes": nbytes, "shape": shape}


def _compile(form: str, kind: str, given: dict[str, Any], interpret: bool, ends: float) -> Any:
    """Returns the compiled program that multiplies with each copy, and the copies."""
    if time.monotonic() > ends:
        raise TimeoutError("no time was left")
    name, *numbers = form.split("-")
    unit = given["unit"]
    multiply: Callable[..., Any]
    if name == "now":
        how = {"unit": unit, "implementation": "interpret" if interpret else "pallas"}
        multiply = functools.partial(narrow.multiply, **how)
    elif name == "xla":

        def multiply(x: Any, w: Any, _: Any) -> Any:
            return jnp.dot(x, w, preferred_element_type=jnp.float32)

    else:
        columns, tile, ahead, warps, programs = map(int, numbers)
        multiply = functools.partial(
            _form,
            kind=kind if name == "words" else "",
            unit=unit,
            sizes=(columns, tile, ahead, warps, programs),
            interpret=interpret,
        )
    weights = given["words" if name == "words" else "codes"]
    run = jax.jit(lambda x, weights: [multiply(x, *weight) for weight in weights])
    return run.lower(given["x"], weights).compile(), weights


def _measure(made: tuple[Any, Any], given: dict[str, Any], interpret: bool) -> float:
    """Compares the first result, and returns GB/s: the median of runs over all copies."""
    run, weights = made
    found = np.asarray(run(given["x"], weights)[-1])
    worst = float(np.abs(found - given["expected"]).max() / np.abs(given["expected"]).max())
    if not worst < WORST:
        raise ValueError(f"differs by {worst:.3g} of the largest value")
    if interpret:
        return 0.0
    times = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready([run(given["x"], weights) for _ in range(4)])
        times.append((time.perf_counter() - start) / 4)
    return given["nbytes"] * len(weights) / statistics.median(times) / 1e9


def _form(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array | None,
    *,
    kind: str,
    unit: float,
    sizes: tuple[int, int, int, int, int],
    interpret: bool,
) -> jax.Array:
    """Returns x w, float32[1, N]. `kind`: "int8" or "fp8" for words of four codes, "" for codes that are their own values."""
    columns, tile, ahead, warps, programs = sizes
    inputs = x.shape[1]
    pack = 4 if kind else 1
    outputs = codes.shape[1] * pack
    columns = min(columns, outputs & -outputs)
    parts, tiles = 1, inputs // tile
    while parts * outputs // columns < programs and tiles % (2 * parts) == 0 and tiles // (2 * parts) >= ahead + 1:
        parts *= 2
    body = functools.partial(_kernel, kind, scales is not None, (inputs, outputs, columns, tile, ahead, parts))
    arrays = [array.reshape(-1) for array in (x, codes, scales) if array is not None]
    y = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((parts * outputs,), jnp.float32),
        grid=(outputs // columns, parts),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="narrow_form",
    )(*arrays)
    return (unit * (256 if kind == "fp8" else 1)) * jnp.sum(y.reshape(parts, outputs), axis=0)[None]


def _kernel(kind: str, is_scaled: bool, sizes: tuple[int, ...], *refs: Any) -> None:
    """Multiplies a program's columns with its part of the rows, tiles of [rows, blocks of a scale, words of a block]."""
    inputs, outputs, columns, tile, ahead, parts = sizes
    x_ref, codes_ref, *scales_ref, y_ref = refs
    block, part = pl.program_id(0), pl.program_id(1)
    pack = 4 if kind else 1
    blocks, width = columns // BLOCK, BLOCK // pack
    count = inputs // tile // parts
    at_S, at_W = jnp.arange(blocks), jnp.arange(width)
    in_row = (block * (columns // pack) + at_S * width)[:, None] + at_W[None, :]

    def read(number: jax.Array) -> tuple[jax.Array, ...]:
        number = jnp.minimum(number, count - 1)
        at_T = (part * count + number) * tile + jnp.arange(tile)
        codes_TSW = pltriton.load(codes_ref.at[(at_T * (outputs // pack))[:, None, None] + in_row[None]])
        x_T = pltriton.load(x_ref.at[at_T])
        if not is_scaled:
            return codes_TSW, x_T
        at_scales = (at_T * (outputs // BLOCK))[:, None] + (block * blocks + at_S)[None, :]
        return codes_TSW, x_T, pltriton.load(scales_ref[0].at[at_scales])

    def add(number: jax.Array, carry: tuple) -> tuple:
        sums, (now, *later) = carry
        later = (*later, read(number + ahead))
        codes_TSW, x_T = now[:2]
        wide_TS = x_T.astype(jnp.float32)[:, None]
        if is_scaled:
            wide_TS = wide_TS * now[2].astype(jnp.float32)
        values = [codes_TSW.astype(jnp.float32)] if not kind else [_value(kind, codes_TSW, n) for n in range(4)]
        return tuple(sum_TSW + wide_TS[:, :, None] * value for sum_TSW, value in zip(sums, values)), later

    zeros = (jnp.zeros((tile, blocks, width), jnp.float32),) * pack
    sums, _ = jax.lax.fori_loop(0, count, add, (zeros, tuple(read(jnp.int32(n)) for n in range(ahead))))
    for number, sum_TSW in enumerate(sums):
        where = part * outputs + in_row * pack + number
        pltriton.store(y_ref.at[where], jnp.sum(sum_TSW, axis=0))


def _value(kind: str, words: jax.Array, number: int) -> jax.Array:
    """Returns one of the four codes of words, float32; of fp8 a 256th, through float16 of the same bits."""
    if kind == "int8":
        return jax.lax.shift_right_arithmetic(jax.lax.shift_left(words, 24 - 8 * number), 24).astype(jnp.float32)
    code = jax.lax.shift_right_logical(words, 8 * number)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _launches() -> None:
    """Prints the time of a small kernel in a row of them."""
    count = 512

    def body(x_ref: Any, y_ref: Any) -> None:
        at = jnp.arange(1024)
        pltriton.store(y_ref.at[at], pltriton.load(x_ref.at[at]) + 1.0)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = pl.pallas_call(body, out_shape=x, compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1))(x)
        return x

    def fused(x: jax.Array) -> jax.Array:
        for _ in range(count // 2):
            x = jax.lax.optimization_barrier(x * 1.5)
            x = jax.lax.optimization_barrier(x + jnp.sum(x))
        return x

    x = jnp.zeros(1024, jnp.float32)
    for name, function in (("Triton", chain), ("XLA's fusions", fused)):
        for label, flags in (("as it is", {}), ("without a graph", {"xla_gpu_enable_command_buffer": ""})):
            try:
                run = jax.jit(function).lower(x).compile(compiler_options=flags)
                jax.block_until_ready(run(x))
                start = time.perf_counter()
                for _ in range(10):
                    last = run(x)
                jax.block_until_ready(last)
                each = (time.perf_counter() - start) / 10 / count
                print(f"a small kernel in a row of {count}: {each * 1e6:.2f} us, {name}, {label}", flush=True)
            except Exception as error:
                print(f"{name}, {label}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
