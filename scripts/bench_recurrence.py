r"""Measures the gated delta rule and Mamba-2's scan on one GPU: by XLA, by the kernels of this project, and by flash-linear-attention.

    python scripts/bench_recurrence.py
    python scripts/bench_recurrence.py --only plain float32 bfloat16 --cases delta-4x4096

The shapes are those of Qwen3-Next (16 heads of keys, 32 of values, width 128), and of Mamba-2 with 64 heads of 64 and states of 128.
Queries, keys and values have 16 bits. "plain" is `zerojax.ops.recurrence` without kernels; "float32" and "bfloat16" are the kernels with
such operands of matmuls, on Hopper GPUs; "fla" is `chunk_gated_delta_rule` and `chunk_simple_gla` of the package flash-linear-attention, if
it is installed. Each runs in a process of its own. First come errors: the norm of the difference from the recurrence token by token in
float32, over the norm, of the results and of all gradients, for a text of 512 tokens. There arrays of "fla" have 16 bits, others 32. Then
times: a forward pass alone, and with a backward pass, the median of several rounds.

flash-linear-attention refuses its backward pass where Triton is known to compile it wrongly; its line says so then.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SYSTEMS = ("plain", "float32", "bfloat16", "fla")
CASES = ("delta-1x8192", "delta-4x4096", "mamba-1x8192", "mamba-4x4096")
SIZES = {"delta": (16, 32, 128, 128), "mamba": (1, 64, 128, 64)}  # groups, heads, widths of keys and of values
SHORT = 512  # tokens of the text whose results are compared
NAMES = ("q", "k", "v", "g", "beta")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--only", nargs="+", default=SYSTEMS, choices=SYSTEMS)
parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
parser.add_argument("--rounds", type=int, default=5, help="of 5 calls each")
parser.add_argument("--limit_s", type=float, default=120.0, help="for each system")
parser.add_argument("--child", help=argparse.SUPPRESS)
parser.add_argument("--truth", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    """Runs each system in a process of its own, and prints its lines."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    print(f"{'system':10} {'case':14} figures", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for system in ("truth", *options.only):
            own = ["--child", system, "--truth", folder, "--rounds", str(options.rounds), "--cases", *options.cases]
            command = [sys.executable, __file__, *own]
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            try:
                out, errors = child.communicate(timeout=options.limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                out, errors = child.communicate()[0], "time is up"
            lines = [json.loads(line[5:]) for line in out.splitlines() if line.startswith("DONE ")]
            if child.returncode:
                lines.append((system, "all", "failed: " + (errors.strip().splitlines() or ["no error"])[-1][:200]))
            for name, case, figures in lines:
                print(f"{name:10} {case:14} {figures}", flush=True)


def drawn(case: str, length: int | None = None) -> dict[str, np.ndarray]:
    """Returns the arguments of a case, float32, and the gradient of the results, by name."""
    kind, size = case.split("-")
    groups, heads, width, value_width = SIZES[kind]
    batch, full = (int(number) for number in size.split("x"))
    batch, length = (1, length) if length else (batch, full)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal((batch, length, *shape), np.float32)

    def rounded(array: np.ndarray) -> np.ndarray:
        """Returns what bfloat16 has of them, towards 0."""
        return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)

    q, k = normal(groups, width), normal(groups, width)
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    found = {"q": rounded(q * width**-0.5), "k": rounded(k), "v": rounded(normal(heads, value_width))}
    found["g"] = -np.exp(normal(heads) - 1)
    if kind == "delta":
        found["beta"] = 1 / (1 + np.exp(-normal(heads)))
    return found | {"dy": rounded(normal(heads, value_width))}


def _by_jax(system: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns f(arguments) -> results, and f(arguments, dy) -> results and gradients, both of arrays by name."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from zerojax.ops import recurrence

    def terms(given: dict[str, Any]) -> recurrence.Terms:
        return recurrence.Terms(*(given[name] for name in NAMES if name in given))

    def scan(given: dict[str, Any]) -> jax.Array:
        return recurrence.scan(terms(given))[0]

    def steps(given: dict[str, Any]) -> jax.Array:
        def add(state: jax.Array, token: recurrence.Terms) -> tuple[jax.Array, jax.Array]:
            y, state = recurrence.step(jax.tree.map(lambda array: array[:, None], token), state)
            return state, y[:, 0]

        (batch, _, heads, values), width = given["v"].shape, given["k"].shape[-1]
        turned = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), terms(given))
        return jnp.moveaxis(jax.lax.scan(add, jnp.zeros((batch, heads, width, values)), turned)[1], 0, 1)

    function = steps if system == "truth" else scan
    if system in ("float32", "bfloat16"):  # kernels run on the shards of a mesh
        mesh = jax.make_mesh((1,), ("data",))
        function = jax.shard_map(scan, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    precision = {"truth": "highest", "float32": "tensorfloat32", "bfloat16": "bfloat16"}.get(system)

    def with_gradients(given: dict[str, Any], dy: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(function, given)
        return y, pull(dy)[0]

    def run(compiled: Callable[..., Any], *arrays: Any) -> Any:
        with jax.default_matmul_precision(precision):
            return compiled(*arrays)

    return functools.partial(run, jax.jit(function)), functools.partial(run, jax.jit(with_gradients))


def _by_fla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the same of flash-linear-attention."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    def forward(given: dict[str, Any]) -> Any:
        arrays = [given[name] for name in NAMES if name in given]
        if "beta" in given:
            return chunk_gated_delta_rule(*arrays, scale=1.0)[0]
        heads = given["v"].shape[2]
        q, k = (array.expand(-1, -1, heads, -1).contiguous() for array in arrays[:2])
        return chunk_simple_gla(q, k, *arrays[2:], scale=1.0)[0]

    def alone(given: dict[str, Any]) -> Any:
        with torch.no_grad():
            return forward(given)

    def with_gradients(given: dict[str, Any], dy: Any) -> tuple[Any, dict[str, Any]]:
        leaves = {name: array.detach().requires_grad_() for name, array in given.items()}
        y = forward(leaves)
        return y, dict(zip(leaves, torch.autograd.grad(y, tuple(leaves.values()), dy), strict=True))

    return alone, with_gradients


def run(options: argparse.Namespace) -> None:
    """Measures one system, or computes what others are compared with."""
    system = options.child
    if system == "fla":
        import torch

        def put(name: str, array: np.ndarray) -> Any:
            return torch.tensor(array, device="cuda").to(torch.float32 if name in NAMES[3:] else torch.bfloat16)

        def numbers(array: Any) -> np.ndarray:
            return array.detach().float().cpu().numpy()

        def wait(_: Any) -> None:
            torch.cuda.synchronize()

        forward, both = _by_fla()
    else:
        import jax
        import jax.numpy as jnp

        def put(name: str, array: np.ndarray) -> Any:
            return jnp.asarray(array, jnp.bfloat16 if array.shape[1] > SHORT and name in NAMES[:3] else jnp.float32)

        def numbers(array: Any) -> np.ndarray:
            return np.asarray(array, np.float32)

        wait = jax.block_until_ready
        forward, both = _by_jax(system)

    for case in options.cases if system != "truth" else sorted({f"{case.split('-')[0]}-1x1" for case in options.cases}):
        kind, at = case.split("-")[0], pathlib.Path(options.truth)
        if system == "truth" or not (at / f"{kind}.{system}").exists():
            given = {name: put(name, array) for name, array in drawn(case, SHORT).items()}
            dy = given.pop("dy")
            y, grads = both(given, dy)
            found = {"y": numbers(y)} | {name: numbers(array) for name, array in grads.items()}
            if system == "truth":
                np.savez(at / f"{kind}.npz", **found)
                continue
            (at / f"{kind}.{system}").touch()
            truth = np.load(at / f"{kind}.npz")
            errors = {
                name: float(f"{np.linalg.norm(own - truth[name]) / np.linalg.norm(truth[name]):.1e}")
                for name, own in found.items()
            }
            print("DONE", json.dumps((system, kind, f"errors {errors}")), flush=True)
        given = {name: put(name, array) for name, array in drawn(case).items()}
        dy = given.pop("dy")
        alone = _milliseconds(functools.partial(forward, given), wait, options.rounds)
        print("DONE", json.dumps((system, case, f"forward {alone:.3f} ms")), flush=True)
        together = _milliseconds(functools.partial(both, given, dy), wait, options.rounds)
        print("DONE", json.dumps((system, case, f"forward and backward {together:.3f} ms")), flush=True)


def _milliseconds(call: Callable[[], Any], wait: Callable[[Any], Any], rounds: int, calls: int = 5) -> float:
    for _ in range(2):
        wait(call())
    found = []
    for _ in range(rounds):
        begins = time.perf_counter()
        last = [call() for _ in range(calls)][-1]
        wait(last)
        found.append((time.perf_counter() - begins) / calls)
    return 1e3 * statistics.median(found)


if __name__ == "__main__":
    arguments = parser.parse_args()
    run(arguments) if arguments.child else main(arguments)
