"""Measures the rates by which a step's time is foretold. This module is the command line `zerojax calibrate`.

zerojax calibrate --out here.json                                                  the GPUs of this machine, in 300 s at most
zerojax plan --config configs/llama3_8b.py --target h100 --topology 1x8 --rates here.json

A rate of arithmetic is that of kernels among passes over memory, which take a fourth of the time, as in a step: at the clock to which the
GPU then settles. The file is a table of `zerojax/clock/tables`; what was not measured keeps the table's figure, and says so.

Of a collective beside matmuls neither its own time c nor the matmuls' slow-down s can be seen alone. Two programs tell both, since each is
slow only while the other runs: matmuls of t > c seconds take T = t + c (1 - 1/s) with it, and another collective, of C seconds alone, takes
T' = C + s t' (1 - C/c) with short ones of t'.
"""

import argparse
import dataclasses
import datetime
import functools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import grouped
from zerojax import display, errors, files
from zerojax.clock import kernels as kernels_lib
from zerojax.clock import rates as rates_lib
from zerojax.clock import walk
from zerojax.commands import arguments, facts
from zerojax.errors import UserError
from zerojax.hlo import flow, syntax
from zerojax.launch import devices as devices_lib
from zerojax.ops import attention
from zerojax.plan import targets
from zerojax.zero.host import memory_kind
from zerojax.zero.step_programs import xla_options

LIMIT_S = 300.0
LEEWAY = 1.1  # of a measured rate over its link's
GPUS = "gpus"  # the axis of a mesh
_PACKAGES = "jax jaxlib jax-cuda13-plugin jax-cuda12-plugin nvidia-cudnn-cu13 nvidia-nccl-cu13 nvidia-cudnn-cu12 nvidia-nccl-cu12"
_SMALL_KERNELS, _SMALL_COLLECTIVES = 64, 9  # in a row
_SLOWED = "times as long as alone, {} beside matmuls"  # a sample
_UPDATE = 28  # bytes that an update reads and writes for each weight

Figures = dict[str, tuple[float, str]]


class Measurement(NamedTuple):
    """Something to measure, and the function that returns its figures."""

    name: str
    run: Callable[[], Figures]


@dataclasses.dataclass(frozen=True)
class ArraySizes:
    """How large the arrays are, and how long a program runs. On a CPU they are `TINY`.

    Attributes:
      products: (m, n, k) by the name of a figure.
      attention: (head dim, tokens, examples); heads are those of 8B.
      heads: of queries, and of keys and values.
      experts: rows, experts, embed and width.
      wide: the side of the square matrices beside which collectives run, and their number.
      elements: of the arrays of an update.
      sent, short: bytes of collectives.
      copied: bytes of a copy to or from the host.
      program_s: seconds of arithmetic in a program, at least.
      run_s: for which arithmetic runs until its time counts, and again.
      brief_s: the same of what draws less power.
      longest_s: of a case; less time left ends the command.
    """

    products: Mapping[str, tuple[int, int, int]]
    attention: Sequence[tuple[int, int, int]]
    heads: tuple[int, int]
    experts: tuple[int, int, int, int]
    wide: tuple[int, int]
    elements: int
    sent: int
    short: int
    copied: int
    program_s: float
    run_s: float
    brief_s: float
    longest_s: float


REAL = ArraySizes(
    products={
        "matmul.bf16.4096": (16384, 14336, 4096),
        "matmul.bf16.2048": (32768, 8192, 2048),
        "matmul.bf16.1024": (16384, 1024, 4096),
        "matmul.fp8.4096": (16384, 14336, 4096),
        "matmul.bf16.8192": (16384, 28672, 8192),
        "matmul.fp8.1024": (16384, 1024, 4096),
        "matmul.bf16.512": (32768, 512, 2048),
        "matmul.fp32.1024": (16384, 4096, 1024),
    },
    attention=((128, 8192, 2), (64, 4096, 8), (128, 2048, 8), (128, 32768, 1), (64, 16384, 2), (128, 131072, 1)),
    heads=(32, 8),
    experts=(65536, 128, 2048, 768),
    wide=(8192, 8),
    elements=1 << 27,
    sent=1 << 30,
    short=1 << 16,
    copied=1 << 28,
    program_s=0.008,
    run_s=1.0,
    brief_s=0.3,
    longest_s=25.0,
)
TINY = ArraySizes(
    products={name: tuple(size // 256 for size in shape) for name, shape in REAL.products.items()},  # type: ignore[misc]
    attention=((128, 16, 1), (64, 8, 1)),
    heads=(2, 1),
    experts=(64, 4, 16, 8),
    wide=(32, 2),
    elements=1 << 10,
    sent=1 << 14,
    short=1 << 13,
    copied=1 << 12,
    program_s=0.0,
    run_s=0.0,
    brief_s=0.0,
    longest_s=0.0,
)


@arguments.command
def main() -> None:
    """Measures, writes the file and prints a table. A UserError prints one line and ends with status 2."""
    began = time.monotonic()
    given = _parse(sys.argv[1:])
    is_cpu = devices_lib.emulate_cpu_devices(given.emulate_devices)
    bench = Bench(jax.local_devices(), TINY if is_cpu else REAL)
    name = targets.of_device(bench.devices[0])
    known = rates_lib.of(name)
    table = known or rates_lib.of("h200")
    assert table is not None
    found: Figures = {}
    left: dict[str, str] = {}
    link = targets.TARGETS[name].host_link if name else None
    listed = list(cases(bench, table))
    for number, case in enumerate(listed):
        if time.monotonic() - began + bench.sizes.longest_s > given.limit_s:
            left |= {other.name: "no time left" for other in listed[number:]}
            break
        try:
            figures = case.run()
        except Exception as error:  # such as a dtype that the GPU does not multiply: the others follow
            left[case.name] = errors.one_line(error)[:200]
            continue
        left |= (wrong := beyond(figures, link))
        figures = {one: figure for one, figure in figures.items() if one not in wrong}
        found |= {one: (value, rates_lib.MEASURED + how) for one, (value, how) in figures.items()}
        words = ", ".join(f"{one} {value:.4g}" for one, (value, _) in figures.items())
        print(f"{time.monotonic() - began:5.0f} s  {case.name}: {words}", file=sys.stderr, flush=True)
    document = as_document(name or bench.devices[0].platform, table, found, is_known=known is not None)
    document["not measured"] = left
    document["samples"] = bench.samples
    shown = text(document, table, time.monotonic() - began)
    try:
        files.replace(given.out, rates_lib.as_text(document))
    except OSError as error:
        print(shown, flush=True)
        raise UserError(
            f"--out {given.out}: cannot be written ({error.strerror}); make room or choose another path, and measure again"
        ) from error
    print(shown, flush=True)


def beyond(figures: Figures, link: targets.Figure | None) -> dict[str, str]:
    """Returns the rates of copies that no host link carries, each with the reason: such copies were not all made.

    Args:
      figures: of one measurement.
      link: bytes/s of one device's link to host memory; None: unknown.
    """
    if link is None:
        return {}
    found = {}
    for name, (value, _) in figures.items():
        words = name.split(".")
        most = LEEWAY * link.value * (int(words[-1]) if words[0] == "host" else 1)
        if words[0] in ("link", "host") and value > most:
            found[name] = f"{value / 1e9:.0f} GB/s, beyond the {most / 1e9:.0f} of the links"
    return found


def as_document(name: str, table: rates_lib.GpuRates, found: Figures, *, is_known: bool) -> dict[str, Any]:
    """Returns a table of rates: what was measured, and the rest of `table`, which is an H200's if the kind of GPU has none."""
    kept = {one: value for one, value in table.figures.items() if not one.startswith("error.")}
    whose = "not measured" if is_known else "not measured, an H200's"
    figures: Figures = {one: (value, f"{whose}: {table.sources[one]}") for one, value in kept.items()}
    figures |= {one: (float(f"{value:.4g}"), how) for one, (value, how) in found.items()}
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    is_gpu = jax.default_backend() == "gpu"  # else they are hidden, and nothing ran on them
    gpus = facts.lines(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]) if is_gpu else []
    versions = {name: facts.version(name) for name in _PACKAGES.split()}
    machine = f"{len(gpus)} GPUs (name, driver, clock at the end, highest clock, power limit): {'; '.join(gpus)}"
    return {
        "name": name,
        "machine": machine if gpus else f"{jax.local_device_count()} {jax.local_devices()[0].device_kind}",
        "versions": ", ".join(f"{name} {found}" for name, found in versions.items() if found),
        "date": datetime.date.today().isoformat(),
        "figures": dict(sorted(figures.items())),
    }


def text(document: Mapping[str, Any], table: rates_lib.GpuRates, seconds: float) -> str:
    """Returns what was measured beside the table's figures."""
    shown = display.table(f"{document['machine']}, {seconds:.0f} s", ("figure", "measured", "table", "ratio"))
    for name, (value, source) in document["figures"].items():
        if source.startswith(rates_lib.MEASURED):
            own = table.figures.get(name)
            beside = ("", "") if own is None else (f"{own:.4g}", f"{value / own:.3f}")
            shown.add_row(name, f"{value:.4g}", *beside)
    left = [f"not measured: {name} ({why})" for name, why in document["not measured"].items()]
    return "\n".join([display.as_text(shown), *left])


@dataclasses.dataclass
class Bench:
    """Runs programs on devices of this machine. `samples` keeps the times of all programs, in seconds."""

    devices: Sequence[jax.Device]
    sizes: ArraySizes
    samples: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.devices[0].platform == "gpu"

    def among_passes(self, name: str, run: Callable[..., Any], args: Sequence[Any], **how: Any) -> float:
        """Returns the seconds of a program on the first device, run among passes over memory that take a fourth of the time."""
        program = jax.jit(run, **how)
        jax.block_until_ready(program(*args))
        once = self._once(lambda: program(*args))
        passes = round(once / 3 / self._pass_s) if self.is_gpu else 0

        def both() -> Any:
            for _ in range(passes):
                self._passed[0] = self._pass(self._passed[0])
            return program(*args), self._passed[0]

        return self.kept(name, max(self.settled(both, self.sizes.run_s) - passes * self._pass_s, 1e-9))

    def alone(self, name: str, run: Callable[..., Any], args: Sequence[Any], **how: Any) -> float:
        """Returns the seconds of a program that runs again and again, and compiles it first."""
        program = jax.jit(run, **how)
        jax.block_until_ready(program(*args))
        return self.kept(name, self.settled(lambda: program(*args), self.sizes.brief_s))

    def settled(self, send: Callable[[], Any], run_s: float) -> float:
        """Returns the median seconds of what `send` starts, in batches, once it has run for `run_s`, and for as long again."""
        once = max(self._once(send), 1e-6)
        batch = max(1, min(20, round(0.05 / once))) if run_s else 1
        times, began = [], time.perf_counter()
        while True:
            start = time.perf_counter()
            for _ in range(batch):
                out = send()
            jax.block_until_ready(out)
            end = time.perf_counter()
            if start - began >= run_s:
                times.append((end - start) / batch)
            if end - began >= 2 * run_s and times:
                return statistics.median(times)

    def _once(self, send: Callable[[], Any]) -> float:
        jax.block_until_ready(send())
        start = time.perf_counter()
        jax.block_until_ready(send())
        return time.perf_counter() - start

    def kept(self, name: str, seconds: float) -> float:
        """Returns the seconds, and keeps them among the samples."""
        self.samples[name] = seconds
        return seconds

    @functools.cached_property
    def _passed(self) -> list[jax.Array]:
        return [self.normal((self.sizes.elements,), jnp.float32)]  # zeros would draw less power, and clocks be higher

    @functools.cached_property
    def _pass(self) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda x: x + 1, donate_argnums=0)

    @functools.cached_property
    def _pass_s(self) -> float:
        def send() -> jax.Array:
            self._passed[0] = self._pass(self._passed[0])
            return self._passed[0]

        return self.kept("pass over memory", self.settled(send, self.sizes.brief_s))

    def normal(self, shape: Sequence[int], dtype: Any, sharding: Any = None, seed: int = 0) -> jax.Array:
        """Returns random numbers on the first device, or in a sharding."""
        draw = functools.partial(jax.random.normal, shape=tuple(shape), dtype=jnp.bfloat16)
        where = sharding or SingleDeviceSharding(self.devices[0])
        made = jax.jit(lambda key: (draw(key) * 0.1).astype(dtype), out_shardings=where)
        return made(jax.random.key(seed))

    def mesh(self, ways: int) -> Mesh:
        """Returns a mesh of the first devices."""
        return Mesh(np.asarray(self.devices[:ways]), (GPUS,))


def cases(bench: Bench, table: rates_lib.GpuRates) -> Iterator[Measurement]:
    """Yields what is measured, what matters most first."""
    products = [Measurement(name, functools.partial(_product, bench, table, name)) for name in bench.sizes.products]
    attended = [
        Measurement(f"attention, {dim} wide, {length} tokens", functools.partial(_attention, bench, dim, length, batch))
        for dim, length, batch in bench.sizes.attention
    ]
    yield from products[:3]
    yield Measurement("an update", functools.partial(_bandwidth, bench))
    yield from attended[:2]
    kinds = list(_SENT)
    counts = [2**power for power in range(1, 10) if 2**power <= len(bench.devices)]
    if counts:
        most = counts[-1]
        for kind in kinds[:2]:
            yield Measurement(f"{kind} of {most}", functools.partial(_collective, bench, kind, most))
            yield Measurement(f"{kind} beside matmuls", functools.partial(_beside_matmuls, bench, kind, most))
        for kind in kinds[2:]:
            yield Measurement(f"{kind} of {most}", functools.partial(_collective, bench, kind, most))
        yield Measurement("other kernels beside a collective", functools.partial(_slowed, bench, kinds[0], most))
    yield from products[3:4]
    yield Measurement("copies to and from the host", functools.partial(_host, bench, 1))
    if len(bench.devices) > 1:
        yield Measurement("copies of all GPUs at once", functools.partial(_host, bench, len(bench.devices)))
    yield Measurement("products of experts", functools.partial(_experts, bench))
    yield Measurement("small kernels", functools.partial(_small, bench, table))
    yield from attended[2:]
    yield from products[4:]
    for kind in kinds:
        for ways in counts[:-1]:
            yield Measurement(f"{kind} of {ways}", functools.partial(_collective, bench, kind, ways))


def _product(bench: Bench, table: rates_lib.GpuRates, name: str) -> Figures:
    """Measures products of one shape, each of operands of its own."""
    m, n, k = bench.sizes.products[name]
    form = name.split(".")[1]
    dtype = {"fp8": jnp.float8_e4m3fn, "fp32": jnp.float32}.get(form, jnp.bfloat16)
    flops = 2.0 * m * n * k
    count = max(1, min(16, math.ceil(bench.sizes.program_s * 7e14 / flops)))
    left = [bench.normal((m, k), dtype, seed=seed) for seed in range(count)]
    in_fp8 = form == "fp8"  # which cuBLASLt sums over the last dim of both, so that nothing is transposed here
    right = [bench.normal((n, k) if in_fp8 else (k, n), dtype, seed=seed + count) for seed in range(count)]

    def run(left: list[jax.Array], right: list[jax.Array]) -> Any:
        result = jnp.float32 if form == "fp32" else jnp.bfloat16
        return [
            jax.lax.dot_general(x, y, (((1,), (int(in_fp8),)), ((), ())), preferred_element_type=result)
            for x, y in zip(left, right)
        ]

    how = xla_options.for_fp8(bench.mesh(1)) if in_fp8 else {}
    seconds = bench.among_passes(name, run, (left, right), compiler_options=how) / count
    rate = flops / seconds / rates_lib.filled(1, m, n, k, int(table.figures["cores"]))
    return {name: (rate, f"{m} x {n}, summed over {k}")}


def _bandwidth(bench: Bench) -> Figures:
    """Measures an AdamW update of float32 weights by XLA."""
    n = bench.sizes.elements
    held = [bench.normal((n,), jnp.float32, seed=seed) for seed in range(3)]
    grad = bench.normal((n,), jnp.bfloat16, seed=3)

    def run(held: list[jax.Array], grad: jax.Array) -> Any:
        p, mu, nu = held
        g = grad.astype(jnp.float32)
        mu, nu = 0.9 * mu + 0.1 * g, 0.95 * nu + 0.05 * g * g
        p = p - 1e-4 * (mu / (jnp.sqrt(jnp.abs(nu)) + 1e-8) + 0.1 * p)
        return (p, mu, nu), p.astype(jnp.bfloat16)

    seconds = bench.alone("an update", run, (held, grad))
    return {"bandwidth": (_UPDATE * n / seconds, f"an update of {n:,} weights")}


def _attention(bench: Bench, dim: int, length: int, batch: int) -> Figures:
    """Measures causal attention forward, and forward with backward."""
    heads, kv = bench.sizes.heads
    shapes = [(batch, length, count, dim) for count in (heads, kv, kv, heads)]
    q, k, v, dy = (bench.normal(shape, jnp.bfloat16, seed=seed) for seed, shape in enumerate(shapes))
    attend = functools.partial(attention.attend, kernel="cudnn" if bench.is_gpu else "xla", is_causal=True)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(attend, q, k, v)
        return y, pull(dy)

    forward = bench.among_passes(f"attention forward, {dim}, {length}", attend, (q, k, v))
    whole = bench.among_passes(f"attention both ways, {dim}, {length}", both, (q, k, v, dy))
    product = 2.0 * batch * heads * length * length / 2 * dim
    took = {kernels_lib.FORWARD: forward, kernels_lib.BACKWARD: max(whole - forward, 1e-9)}
    how = f"{batch} x {heads} heads"
    return {
        f"attention.{way}.{dim}.{length}": (kernels_lib.ATTENTION_MATMULS[way] * product / seconds, how)
        for way, seconds in took.items()
    }


def _experts(bench: Bench) -> Figures:
    """Measures products of groups of rows, whose sizes a balanced router draws."""
    rows, groups, embed, width = bench.sizes.experts
    sizes = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)).astype(np.int32)
    x, dy = bench.normal((rows, embed), jnp.bfloat16), bench.normal((rows, width), jnp.bfloat16, seed=1)
    w = bench.normal((groups, embed, width), jnp.bfloat16, seed=2)
    ways = grouped.IMPLEMENTATIONS[grouped.BY_PLATFORM]
    runs = {
        "matmul.grouped_rows": lambda x, dy, w: (ways.rows(x, w, sizes, False), ways.rows(dy, w, sizes, True)),
        "matmul.grouped_matrices": lambda x, dy, w: (ways.matrices(x, dy, sizes),),
    }
    found: Figures = {}
    for name, run in runs.items():
        count = 2 if name == "matmul.grouped_rows" else 1
        # Inside a `shard_map`, which says what GPU it is.
        seconds = bench.among_passes(name, _over(bench, 1, run), (x, dy, w)) / count
        room = 1 + groups * rates_lib.HALF_TILE[name.removeprefix("matmul.")] / rows
        found[name] = 2.0 * rows * embed * width / seconds * room, f"{rows} rows of {groups} groups, {embed} x {width}"
    return found


def _small(bench: Bench, table: rates_lib.GpuRates) -> Figures:
    """Measures the time of the smallest kernels, half of which is called the gap before each."""

    def run(matrix: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(_SMALL_KERNELS):
            x = jnp.sum(matrix * x, axis=1)
        return x

    args = bench.normal((128, 128), jnp.float32), bench.normal((128,), jnp.float32)
    program = jax.jit(run).lower(*args).compile()
    spans = walk.walk(flow.flow(syntax.parse(program.as_text())), table).spans
    each = bench.alone("small kernels", run, args) / max(1, len(spans))
    how = f"{len(spans)} kernels in a row"
    return {"gap": (each / 2, how), "least": (each / 2, how)}


def _host(bench: Bench, count: int) -> Figures:
    """Measures copies between devices and pinned host memory: to it, from it, and both at once."""
    size, mesh = bench.sizes.copied, bench.mesh(count)
    device = NamedSharding(mesh, P(GPUS))
    host = memory_kind.on_host(device)
    here = [bench.normal((count, size // 4), jnp.float32, device, seed) for seed in range(2)]
    there = [jax.device_put(x, host) for x in here]
    jax.block_until_ready(there)
    found: Figures = {}
    for name, sent in {"to host": (here, []), "from host": ([], there), "both": (here, there)}.items():
        program = jax.jit(copied).lower(*sent).compile()
        send = functools.partial(program, *sent)
        seconds = bench.kept(f"copies of {count}, {name}", bench.settled(send, bench.sizes.brief_s))
        rate = 2 * size / seconds
        own = f"link.{name}" if count == 1 else f"host.{name}.{count}"
        found[own] = rate * count, f"{count} at once, copies of {size / 1e6:,.0f} MB"
    return found


def copied(here: Sequence[jax.Array], there: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns copies in host memory of arrays of devices, and copies on devices of arrays in host memory, inside a program.

    Of copies that no program made 90 GB/s seemed to pass through a link of 63: not all were made, or waited for.
    """
    memory = jax.memory.Space
    return [jax.device_put(x, memory.Host) for x in here], [jax.device_put(x, memory.Device) for x in there]


# kind -> a function of a device's shard, inside `jax.shard_map`
_SENT: Mapping[str, Callable[..., jax.Array]] = {
    "all-gather": lambda x, ways: jax.lax.all_gather(x, GPUS, tiled=True),
    "reduce-scatter": lambda x, ways: jax.lax.psum_scatter(x, GPUS, tiled=True),
    "all-reduce": lambda x, ways: jax.lax.psum(x, GPUS),
    "all-to-all": lambda x, ways: jax.lax.all_to_all(x, GPUS, 0, 0, tiled=True),
    "collective-permute": lambda x, ways: jax.lax.ppermute(x, GPUS, [(i, (i + 1) % ways) for i in range(ways)]),
}
_RECEIVED: Mapping[str, Callable[[int], float]] = {  # bytes that a device receives, of those that it sends
    "all-gather": lambda ways: ways - 1,
    "reduce-scatter": lambda ways: (ways - 1) / ways,
    "all-reduce": lambda ways: 2 * (ways - 1) / ways,
    "all-to-all": lambda ways: (ways - 1) / ways,
    "collective-permute": lambda ways: 1,
}


def _shard(bench: Bench, kind: str, ways: int, nbytes: int) -> tuple[jax.Array, float]:
    """Returns float32 arrays, one a device, of which a collective's whole array has so many bytes, and what each device receives."""
    rows = nbytes // (512 * ways) if kind == "all-gather" else nbytes // 512 // ways * ways
    sharding = NamedSharding(bench.mesh(ways), P(GPUS))
    return bench.normal((rows * ways, 128), jnp.float32, sharding), 512 * rows * _RECEIVED[kind](ways)


def _over(bench: Bench, ways: int, run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.shard_map(run, mesh=bench.mesh(ways), in_specs=P(GPUS), out_specs=P(GPUS), check_vma=False)


def _sending(bench: Bench, name: str, ways: int, run: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of a program with collectives, compiled as a step is."""
    return bench.alone(name, _over(bench, ways, run), args, compiler_options=xla_options.for_mesh(bench.mesh(ways)))


def _collective(bench: Bench, kind: str, ways: int) -> Figures:
    """Measures a collective alone: the start of small ones, and the rate of a large one."""
    x, received = _shard(bench, kind, ways, bench.sizes.sent)
    name = f"{kind} of {ways}"
    seconds = _sending(bench, name, ways, functools.partial(_SENT[kind], ways=ways), x)
    small, _ = _shard(bench, kind, ways, bench.sizes.short)

    def row(count: int, x: jax.Array) -> jax.Array:
        for _ in range(count):
            y = _SENT[kind](x, ways)
            rows = min(len(x), len(y))
            x = jnp.concatenate([y[:rows], x[rows:]]) * 0.5
        return x

    many, one = (
        _sending(bench, f"{count} small {name}", ways, functools.partial(row, count), small)
        for count in (_SMALL_COLLECTIVES, 1)
    )
    start = max((many - one) / (_SMALL_COLLECTIVES - 1), 1e-7)
    rate = received / max(seconds - start, 1e-9)
    how = f"{received / 1e6:,.0f} MB received"
    return {
        f"beta.alone.{kind}.{ways}": (rate, how),
        f"alpha.{kind}.{ways}": (
            start / max(1.0, math.log2(ways)),
            f"{_SMALL_COLLECTIVES} of {bench.sizes.short:,} bytes in a row",
        ),
    }


def _beside_matmuls(bench: Bench, kind: str, ways: int) -> Figures:
    """Measures a collective beside matmuls that take longer, and beside shorter ones; see the module."""
    side, count = bench.sizes.wide
    long, short = _matmuls(bench, side, count, ways), _matmuls(bench, side, max(1, count // 4), ways)
    less = bench.sizes.sent
    alone_s, both_s, short_s = [], [], []
    for products, nbytes in ((long, less), (short, 4 * less)):
        x, received = _shard(bench, kind, ways, nbytes)
        alone_s.append(_alone(bench, kind, ways, x))
        both_s.append(_both(bench, kind, ways, x, *products))
        short_s.append(
            bench.alone(f"{len(products[1])} matmuls of {ways}", _over(bench, ways, products[0]), products[1:])
        )
        del x
    a, b = both_s[0] - short_s[0], both_s[1] - alone_s[1]
    rate, speed = solved(a, b, alone_s[0], short_s[1])
    if not (0.02 < rate < 1.2 and 0.2 < speed < 1.2):
        if bench.is_gpu:
            raise ValueError(f"times that no rates explain: {rate:.3g} and {speed:.3g} of those alone")
        rate, speed = 1.0, 1.0  # of tiny arrays on a CPU
    bench.kept(_SLOWED.format(kind), 1 / rate)
    how = f"{kind} beside matmuls of {side}"
    return {
        f"beta.{kind}.{ways}": (received / alone_s[1] * rate, how),
        f"slowdown.{kernels_lib.MATMUL}": (1 / speed, how),
    }


def solved(longer: float, later: float, alone: float, short: float) -> tuple[float, float]:
    """Returns the rate of a collective beside matmuls, and the speed of matmuls beside it, both over those alone; see the module.

    Args:
      longer: T - t.
      later: T' - C', where the collective of C' seconds is the longer one.
      alone: C, of the other collective.
      short: t'.
    """
    # From (1 - speed) C = longer x rate, (1 - rate) t' = later x speed
    rate = (short - later) / (short - longer * later / alone)
    return rate, 1 - longer * rate / alone


def _slowed(bench: Bench, kind: str, ways: int) -> Figures:
    """Measures the slow-down of attention and of elementwise work while a collective runs, whose time beside matmuls is known."""
    heads, kv = bench.sizes.heads
    length = bench.sizes.attention[0][1]
    x, _ = _shard(bench, kind, ways, bench.sizes.sent)
    alone = _alone(bench, kind, ways, x)
    sharding = NamedSharding(bench.mesh(ways), P(GPUS))
    wide = bench.normal((ways * bench.sizes.elements,), jnp.float32, sharding)
    q, k, v = (
        bench.normal((2 * ways, length, count, 128), jnp.bfloat16, sharding, seed)
        for seed, count in enumerate((heads, kv, kv))
    )

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        for _ in range(4):
            q = attention.attend(q, k, v, "cudnn" if bench.is_gpu else "xla", is_causal=True)
        return q

    def passes(x: jax.Array) -> Any:
        return [jnp.roll(x, count) for count in range(1, 9)]

    found: Figures = {}
    for name, run, args in ((kernels_lib.ATTENTION, attend, (q, k, v)), (kernels_lib.ELEMENTWISE, passes, (wide,))):
        own = bench.alone(f"{name} of {ways}", _over(bench, ways, run), args)
        both = _both(bench, kind, ways, x, run, *args)
        took = alone * bench.samples[_SLOWED.format(kind)]
        found[f"slowdown.{name}"] = 1 / (1 - min(max(0.0, both - own), took / 2) / took), f"beside {kind}"
    return found


def _matmuls(bench: Bench, side: int, count: int, ways: int) -> tuple[Any, ...]:
    """Returns a function of so many products, and its arguments."""
    sharding = NamedSharding(bench.mesh(ways), P(GPUS))
    left = [bench.normal((side * ways, side), jnp.bfloat16, sharding, seed) for seed in range(count)]
    right = bench.normal((side * ways, side), jnp.bfloat16, sharding, count)
    return lambda left, right: [x @ right for x in left], left, right


def _alone(bench: Bench, kind: str, ways: int, x: jax.Array) -> float:
    return _sending(bench, f"{kind} of {ways}, {x.nbytes:,} bytes", ways, functools.partial(_SENT[kind], ways=ways), x)


def _both(bench: Bench, kind: str, ways: int, x: jax.Array, run: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds of a program with a collective and kernels that do not wait for each other."""
    name = f"{kind} of {ways}, {x.nbytes:,} bytes, beside {len(jax.tree.leaves(args))} arrays"
    return _sending(bench, name, ways, lambda x, *args: (_SENT[kind](x, ways), run(*args)), x, *args)


def _parse(words: list[str]) -> argparse.Namespace:
    parser = arguments.OneLineParser(
        prog="zerojax calibrate",
        description="Measures how fast this machine's GPUs multiply, attend, move memory and send, for `zerojax plan --rates FILE`. On a "
        "CPU it runs tiny arrays, whose rates mean nothing.",
    )
    add = parser.add_argument
    add("--out", metavar="FILE", type=pathlib.Path, required=True, help="a new JSON file")
    add("--force", action="store_true", help="replace the file")
    add("--limit_s", type=float, default=LIMIT_S, help=f"seconds after which it ends ({LIMIT_S:.0f})")
    add("--emulate_devices", type=int, default=1, help="without GPUs: devices (1)")
    given = parser.parse_args(words)
    arguments.check_new(given.out, force=given.force)
    if not 0 < given.limit_s < math.inf:
        raise UserError(f"--limit_s: must be above 0 and finite, and is {given.limit_s}; omit it for {LIMIT_S:.0f}")
    files.check_replaceable(given.out, "--out")
    return given


if __name__ == "__main__":
    main()
