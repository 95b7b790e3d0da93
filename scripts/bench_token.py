"""Measures the kernels of `pallas_kernels.one_token` on one GPU: a decoder's layer for one new token, and the engine's step with them.

    python scripts/bench_token.py --limit_s 460

First a copy and a sum of a large array give the memory's rate here. Then each kernel, in each of several forms, is compared with its twin,
and twice with itself, for bf16, int8 and fp8 at the shapes of an 8B layer. A form that was not compared, or differs, is not among the best.
Then whole layers run in a row on the device; "of the copy" is a layer's bytes a second over the copy's. Each product is timed alone too. In
int8 on a Hopper GPU the four products in one launch (`one_token_mosaic`) are compared and timed as well. At the end
`scripts/bench_engine.py` measures the engine in processes of its own. What is left when the time is over is not measured. `--tiny` runs
everything small and interpreted, without a GPU and without that launch.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the engine's processes need memory too

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cached_attention, grouped, one_token
from zerojax.ops import quantized

KINDS = ("int8", "bf16", "fp8")
# warps, ahead, most programs, columns; None: `one_token.form`'s own
FORMS: tuple[tuple[int, int, int, int] | None, ...] = (
    None,
    (8, 4, 528, 128),
    (4, 2, 1056, 128),
    (8, 4, 264, 128),
    (4, 4, 1056, 256),
)
PRODUCTS = ("project", "attend", "o", "gate", "down", "head")
LAUNCH = "launch"  # o, gate and up, down and a projection
WORST = {"bf16": 0.02, "int8": 0.02, "fp8": 0.02}  # of the largest value: results are rounded to 8 bits
LAYERS = 4  # in turn, so that no cache holds the weights


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a layer and its cache."""

    embed: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dims: int = 128
    mlp: int = 14336
    vocab: int = 128256
    slots: int = 1280
    text: int = 1152

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Returns the shapes of the weights."""
        d, q, kv, f = self.embed, self.heads * self.dims, self.kv_heads * self.dims, self.mlp
        return {"q": (d, q), "k": (d, kv), "v": (d, kv), "o": (q, d), "gate": (d, f), "up": (d, f), "down": (f, d)}


TINY = Sizes(256, 4, 2, 64, 512, 512, 128, 70)


def main(arguments: list[str]) -> int:
    """Measures and prints tables. Returns 1 if a result was wrong or something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--limit_s", type=float, default=460, help="of everything")
    parser.add_argument("--engine_s", type=float, default=260, help="of which the engine has this")
    parser.add_argument("--engine", nargs="*", default=["bf16", "int8", "fp8"], help="variants of bench_engine.py")
    parser.add_argument("--forms", type=int, default=len(FORMS), help="how many of the forms")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.limit_s
    sizes, how = (TINY, "interpret") if options.tiny else (Sizes(), "pallas")
    lines = [f"jax {jax.__version__}, {jax.devices()[0].device_kind}"]
    copied = 1.0
    if not options.tiny:
        copied, summed = _memory()
        lines.append(f"copy {copied / 1e12:.2f} TB/s (read and written), sum {summed / 1e12:.2f} TB/s (read)")
    print(*lines, sep="\n", flush=True)
    failed = False
    for kind in options.kinds:
        if time.monotonic() > ends - options.engine_s:
            lines.append(f"{kind}: no time was left")
            continue
        found, is_wrong = _measure(kind, sizes, how, copied, options, ends - options.engine_s)
        lines += found
        failed |= is_wrong
    for flags in ("", "--xla_gpu_enable_pdl_launch=true") if options.engine and not options.tiny else ():
        left = ends - time.monotonic() - 3
        if left < 40:
            break
        script = pathlib.Path(__file__).with_name("bench_engine.py")
        run = subprocess.run(
            [sys.executable, str(script), "--limit_s", f"{left:.0f}", "--variants", *options.engine],
            capture_output=True,
            text=True,
            env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"},
        )
        print(run.stdout[-1500:], run.stderr[-1500:], flush=True)
        lines += ["", f"engine {flags}", *(line for line in run.stdout.splitlines() if line.startswith("|"))]
    print("\n" + "\n".join(lines))
    return int(failed)


def _memory() -> tuple[float, float]:
    """Returns bytes a second of a copy, and of a sum."""
    x = jnp.ones(2**30, jnp.bfloat16)
    copy, total = jax.jit(lambda x: x + jnp.bfloat16(1)), jax.jit(lambda x: jnp.sum(x.reshape(2**12, -1), axis=1))
    return 2 * x.nbytes / _time(copy, x), x.nbytes / _time(total, x)


def _time(run: Callable[..., Any], *given: Any) -> float:
    """Returns the median seconds of a call, of calls in a row."""
    jax.block_until_ready(run(*given))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(*given) for _ in range(4)])
        times.append((time.perf_counter() - start) / 4)
    return statistics.median(times)


def _weights(kind: str, sizes: Sizes, seed: int) -> dict[str, tuple[jax.Array, ...]]:
    made = {}
    for number, (name, shape) in enumerate([*sizes.shapes().items()]):
        made[name] = _weight(kind, shape, 100 * seed + number)
    return made


@functools.partial(jax.jit, static_argnums=(0, 1))
def _weight(kind: str, shape: tuple[int, int], seed: int) -> tuple[jax.Array, ...]:
    w_KN = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.asarray(0.02, jnp.bfloat16)
    if kind == "bf16":
        return (w_KN,)
    stored = quantized.quantize(w_KN, kind)
    transposed = (stored[quantized.SCALES].T,) if kind == "int8" else ()
    return stored[kind], stored[quantized.SCALES], *transposed


def _as(kind: str, stored: tuple[jax.Array, ...]) -> one_token.Weight:
    codes, *scales = stored
    scale, transposed = (*scales, None, None)[:2]
    return one_token.Weight(codes, scale, 1 / quantized.TOP.get(kind, 1), transposed)


def _form(form: Any, inputs: int, columns: list[int], itemsize: int, **more: int) -> one_token.Portions | None:
    if form is None:
        return None
    warps, ahead, programs, width = form
    given = {"width": width, "ahead": ahead, "warps": warps, "programs": programs, **more}
    return one_token.form(inputs, columns, itemsize, **given)


def _part(name: str, kind: str, sizes: Sizes, how: str, form: Any) -> Callable[..., Any]:
    """Returns f(weights, state) -> state with what one kernel changes. The state: x, h, q, y, squares, counters, cache."""
    itemsize = 2 if kind == "bf16" else 1
    d, q, kv, f = sizes.embed, sizes.heads * sizes.dims, sizes.kv_heads * sizes.dims, sizes.mlp

    def run(weights: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        norm = one_token.Norm(state["scale"], 1e-5)
        w = {name: _as(kind, stored) for name, stored in weights.items()}
        given = {"counts": state["counts"], "implementation": how}
        normed = {"norm": norm, "squares": state["squares"]}
        if name == "project":
            shape = _form(form, d, [q, kv, kv], itemsize, width=sizes.dims)
            three = [w["q"], w["k"], w["v"]]
            found = one_token.project(
                state["x"], three, state["keys"], state["turn"], state["slot"], **normed, **given, how=shape
            )
            return {**state, "q": found[1], "keys": found[2], "counts": found[3]}
        if name == "attend":
            keys = tuple(key[None] for key in state["keys"])
            heads = state["q"].reshape(1, sizes.heads, sizes.dims)
            y, counts = cached_attention.attend_counted(
                heads, *keys, state["end"], state["counts"], scale=sizes.dims**-0.5, implementation=how
            )
            return {**state, "y": y.reshape(-1), "counts": counts}
        if name in ("o", "down"):
            inputs, read = (q, "y") if name == "o" else (f, "h")
            shape = _form(form, inputs, [d], itemsize)
            x, squares, counts = one_token.add(state["x"], state[read], w[name], **given, how=shape)
            return {**state, "x": x, "squares": squares, "counts": counts}
        if name == LAUNCH:
            from pallas_kernels.one_token_mosaic import Product
            from pallas_kernels.one_token_mosaic import run as launch

            products = [
                Product("add", (w["o"],)),
                Product("gate", (w["gate"], w["up"]), norm),
                Product("add", (w["down"],)),
                Product("project", (w["q"], w["k"], w["v"]), norm),
            ]
            place = state["keys"], state["turn"], state["slot"]
            processors = jax.devices()[0].core_count
            row = launch(products, state["x"], y_K=state["y"], place=place, processors=processors, **given)
            return {**state, "x": row.x_D, "q": row.q, "keys": row.keys, "counts": row.counts}
        if name == "gate":
            shape = _form(form, d, [f, f], itemsize)
            _, h, counts = one_token.gate(state["x"], [w["gate"], w["up"]], **normed, **given, how=shape)
            return {**state, "h": h, "counts": counts}
        shape = _form(form, d, [sizes.vocab], itemsize)
        scores, counts = one_token.multiply(state["x"], [w["head"]], **normed, **given, how=shape)
        return {**state, "scores": scores, "counts": counts}

    return run


def _state(sizes: Sizes) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(9), 8)
    bf16 = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    angle = jax.random.normal(keys[6], (sizes.dims // 2,))
    x = bf16(keys[0], (sizes.embed,))
    return {
        "x": x,
        "h": bf16(keys[1], (sizes.mlp,)),
        "q": bf16(keys[2], (sizes.heads * sizes.dims,)),
        "y": bf16(keys[3], (sizes.heads * sizes.dims,)),
        "scale": 1 + bf16(keys[4], (sizes.embed,)) / 8,
        "squares": one_token.squares_of(x, one_token_groups(sizes)),
        "counts": one_token.counters(),
        "keys": tuple(bf16(key, (sizes.slots, sizes.kv_heads, sizes.dims)) for key in jax.random.split(keys[5])),
        "turn": jnp.concatenate([jnp.cos(angle), jnp.sin(angle)]),
        "slot": jnp.asarray([sizes.text - 1], jnp.int32),
        "end": jnp.asarray([sizes.text], jnp.int32),
    }


def one_token_groups(sizes: Sizes) -> int:
    """Returns the parts of which `add` returns the sums of squares."""
    return sizes.embed // min(128, sizes.embed)


def _label(form: Any) -> str:
    return "now" if form is None else "-".join(map(str, form))


def _differences(kind: str, wanted: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """Returns in what the runs of a kernel differ from the twin or from each other, and whether counters are left."""
    lines, worst = [], 0.0
    for key in ("x", "h", "q", "y", "scores", "keys", "squares"):
        if key not in wanted:
            continue
        for leaves in zip(*(jax.tree.leaves(out[key]) for out in (wanted, *runs))):
            truth, *found = (np.asarray(leaf, np.float32).reshape(-1) for leaf in leaves)
            if key == "squares":
                truth, *found = (leaf.sum() for leaf in (truth, *found))
            difference = float(np.abs(found[0] - truth).max() / np.abs(truth).max())
            worst = difference if not difference <= worst else worst
            if any(np.any(other != found[0]) for other in found[1:]):
                lines.append(f"differs from run to run ({key})")
    is_left = any(np.any(np.asarray(out["counts"])) for out in runs)
    if not worst < WORST[kind] or is_left:
        lines.append(f"differs by {worst:.2g} of the largest value; counters left: {is_left}")
    return lines


def _measure(
    kind: str, sizes: Sizes, how: str, copied: float, options: argparse.Namespace, ends: float
) -> tuple[list[str], bool]:
    """Returns lines of results for a kind, and whether one was wrong."""
    layers = [_weights(kind, sizes, seed) for seed in range(1 if options.tiny else LAYERS)]
    head = {"head": _weight(kind, (sizes.embed, sizes.vocab), 7)}
    state = _state(sizes)
    nbytes = {
        name: sum(leaf.nbytes for part in parts for leaf in ({**layers[0], **head})[part][:2])
        for name, parts in {
            "project": ("q", "k", "v"),
            "attend": (),
            "o": ("o",),
            "gate": ("gate", "up"),
            "down": ("down",),
            "head": ("head",),
        }.items()
    }
    nbytes[LAUNCH] = sum(nbytes.values()) - nbytes["head"]
    nbytes["attend"] = 2 * sizes.text * sizes.kv_heads * sizes.dims * 2
    lines, failed = [f"\n{kind}"], False
    forms = FORMS[: options.forms]
    pool = concurrent.futures.ThreadPoolExecutor(1 if options.tiny else 12)

    def unrolled(names: tuple[str, ...]) -> int:
        """Returns how often the body of a loop runs its layers: so many kernels that they are a graph."""
        return 1 if options.tiny or len(names) > 1 else 8 if names == ("head",) else 3

    def chain(names: tuple[str, ...], form: Any) -> Any:
        """Returns a compiled program: (layers, state) -> state after each part of each layer in turn, `times` times."""
        weights = [head] if names == ("head",) else layers

        def once(weights: Any, state: Any) -> Any:
            for layer in list(weights) * unrolled(names):
                for name in names:
                    kept = {name: state[name] for name in ("x", "squares")}
                    state = _part(name, kind, sizes, how, form)(layer, state)
                    state = {**state, **kept} if len(names) == 1 else state
                    state.pop("scores", None)
            return state

        def run(weights: Any, state: Any) -> Any:
            return jax.lax.fori_loop(0, times(names), lambda _, state: once(weights, state), state)

        return jax.jit(run).lower(weights, state).compile(), weights

    def times(names: tuple[str, ...]) -> int:
        """Returns how often a program runs its layers: for some 4 ms."""
        if options.tiny:
            return 1
        total = sum(nbytes[name] for name in names) * (1 if names == ("head",) else LAYERS)
        return max(2, round(4e-3 / unrolled(names) / (total / 2e12 + 4e-6 * LAYERS * len(names))))

    def compiled(name: str, implementation: str, form: Any) -> Any:
        part = _part(name, kind, sizes, implementation, form)
        return jax.jit(part).lower(head if name == "head" else layers[0], state).compile()

    is_launched = kind == "int8" and how == "pallas" and grouped.HOPPER.search(jax.devices()[0].device_kind)
    launched = (LAUNCH,) if is_launched else ()
    # Each kernel beside its twin, and again: a race would show.
    twins = {name: pool.submit(compiled, name, "jnp", None) for name in (*PRODUCTS, *launched)}
    kernels = {
        (name, form): pool.submit(compiled, name, how, form)
        for form in forms
        for name in (*PRODUCTS, *(launched if form is None else ()))
        if form is None or name != "attend"
    }
    agreed = set()
    for (name, form), job in kernels.items():
        label = f"{name}, {_label(form)}"
        if time.monotonic() > ends:
            lines.append(f"{label}: not compared, no time was left")
            continue
        try:
            given = head if name == "head" else layers[0], state
            twin, kernel = (job.result(max(1.0, ends - time.monotonic())) for job in (twins[name], job))
            wrong = _differences(kind, twin(*given), [kernel(*given) for _ in range(3)])
        except TimeoutError:
            lines.append(f"{label}: not compared, no time was left")
            continue
        except Exception as error:
            wrong = [f"{type(error).__name__}: {str(error).strip()[:300]}"]
        if not wrong:
            agreed.add((name, form))
        lines += [f"{label}: {text}" for text in wrong]
        failed |= bool(wrong)
    lines.append(f"{len(agreed)} of {len(kernels)} kernels agree with their twins and with themselves")
    print(*lines, sep="\n", flush=True)
    layer = PRODUCTS[:5]
    asked = {(layer, None): pool.submit(chain, layer, None)}
    if launched:
        asked[("attend", LAUNCH), None] = pool.submit(chain, ("attend", LAUNCH), None)
    for form in forms:
        for name in PRODUCTS:
            if form is None or name != "attend":
                asked[(name,), form] = pool.submit(chain, (name,), form)
    # Nothing compiles while something is measured.
    concurrent.futures.wait(list(asked.values()), timeout=max(1.0, ends - time.monotonic()))
    print(f"{kind}: compiled, {ends - time.monotonic():.0f} s are left", flush=True)
    took: dict[Any, float] = {}
    for (names, form), job in asked.items():
        if time.monotonic() > ends or not job.done():
            break
        try:
            run, weights = job.result()
            took[names, form] = _time(run, weights, state) / times(names) / unrolled(names) / len(weights)
        except Exception as error:
            lines.append(f"{names} {form}: {type(error).__name__}: {str(error).strip()[:200]}")
            failed = True
    pool.shutdown(wait=False, cancel_futures=True)
    best: dict[str, Any] = {}
    lines.append("| us (TB/s) | " + " | ".join(PRODUCTS) + " |\n|" + "---|" * (len(PRODUCTS) + 1))
    for form in forms:
        cells = []
        for name in PRODUCTS:
            seconds = took.get(((name,), form))
            cells.append("-" if seconds is None else f"{seconds * 1e6:.1f} ({nbytes[name] / seconds / 1e12:.2f})")
            if (name, form) not in agreed:
                cells[-1] += "" if seconds is None else " not agreed"
            elif seconds is not None and seconds <= took.get(((name,), best.get(name)), 1e9):
                best[name] = form
        lines.append(f"| {_label(form)} | " + " | ".join(cells) + " |")
    total = sum(nbytes[name] for name in layer)
    if seconds := took.get((layer, None)):
        rate = total / seconds
        lines.append(f"layer, now: {seconds * 1e6:.1f} us, {rate / 1e12:.2f} TB/s, {rate / copied:.0%} of the copy")
    if seconds := took.get((("attend", LAUNCH), None)):
        rate = total / seconds
        lines.append(
            f"layer, launched: {seconds * 1e6:.1f} us, {rate / 1e12:.2f} TB/s, {rate / copied:.0%} of the copy"
        )
    parts = [took.get(((name,), best.get(name))) for name in layer]
    if all(parts):
        least = sum(parts)  # type: ignore[arg-type]
        lines.append(f"layer, sum of the best forms: {least * 1e6:.1f} us, {total / least / 1e12:.2f} TB/s")
    return lines, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
