"""Measures the engine on one GPU, or on `--ways`, with weights of 8B shapes: the first token, tokens a second of one request, and of many.

    python scripts/bench_engine.py --limit_s 230
    python scripts/bench_engine.py --limit_s 230 --variants fp8 nf4
    python scripts/bench_engine.py --limit_s 580 --variants host --preset llama3_70b --requests 96 --together 16 --prompt 256 \
        --new_tokens 32
    python scripts/bench_engine.py --ways 2 --limit_s 145 --variants bf16 int8 --compared_layers 2
    zerojax launch --num_gpus 2 -- python scripts/bench_engine.py --ways 2 --limit_s 145 --variants int8  # a process for each GPU

Weights are random and drawn on the device, so no file is read. A prompt has `--prompt` tokens, and `--new_tokens` are added. `bf16`,
`int8`, `fp8` and `nf4` answer one request after the other; `plain` is bf16 with XLA's own matmuls and attention. `many` answers
`--requests` at once, in bf16 or in `--format`, and `host` does so in bf16 with `--host_fraction` of the weights in host memory. Each
variant runs in a process of its own, one after the other, and another's failure is a row of the table, which comes last. The bound
is the time in which the weights that a token reads pass the memory once, at `--bytes_per_second` (4.15e12: an H200; an H100's memory is
specified at 3.35e12); that of `host` the time in which those in host memory pass their link, at `--host_bytes_per_second`. With
`--compared_layers` each variant of `--ways` first answers with so many layers, and the tokens are compared with those of one GPU; where
they part, the logarithms of the two must be close.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from typing import Any

import bench_child  # in this folder

VARIANTS = ("bf16", "int8", "many", "fp8", "plain", "nf4")
HOST = "host"
COLUMNS = ("variant", "requests", "first token ms", "tokens/s", "ms a step", "of the bound", "peak GB", "ready s")
REPEATS = 3
CLOSE = 0.1  # logits are sums of values of 8 bits


def main(arguments: Sequence[str]) -> int:
    """Measures each variant and prints a Markdown table. Returns 1 if one failed."""
    options = _parser().parse_args(arguments)
    if options.ways > 1 and HOST in options.variants:
        _parser().error(f"--ways: {HOST} streams weights to one GPU; omit --ways, or leave {HOST} out of --variants")
    if options.format != "none" and "many" not in options.variants:
        _parser().error("--format: is that of the variant many; add it to --variants, or omit --format")
    if options.child:
        return _child(options)
    ends = time.monotonic() + options.limit_s
    found: dict[str, dict[str, Any] | None] = {}
    with tempfile.TemporaryDirectory() as turns, concurrent.futures.ThreadPoolExecutor(2) as pool:
        # The next process imports its modules while one measures.
        started: list[concurrent.futures.Future] = []

        def start(number: int) -> None:
            name = options.variants[number]
            words = [__file__, *arguments, "--child", name, "--turn", str(pathlib.Path(turns, str(number)))]
            started.append(pool.submit(bench_child.run, name, words, ends - time.monotonic()))

        start(0)
        for number, name in enumerate(options.variants):
            if number + 1 < len(options.variants):
                start(number + 1)
            pathlib.Path(turns, str(number)).touch()
            found[name] = started[number].result()
    print("\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for name, figures in found.items():
        if figures is None or "error" in figures:
            print(f"| {name} | {(figures or {}).get('error', 'failed or out of time; see its lines above')} |")
        else:
            print("| " + " | ".join([name, *(f"{figures[column]:.4g}" for column in COLUMNS[1:])]) + " |")
    return int(any(figures is None or "error" in figures for figures in found.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), choices=(*VARIANTS, HOST), help="in this order")
    add("--preset", default="llama3_8b", help="a name in the PRESETS tables of zerojax/models")
    add("--layers", type=int, default=0, help="0: the preset's")
    add("--ways", type=int, default=1, help="GPUs over which weights are sharded (tensor parallelism)")
    add("--compared_layers", type=int, default=0, help="of the models whose tokens are compared; 0: none are")
    add("--prompt", type=int, default=1024, help="tokens of a prompt")
    add("--new_tokens", type=int, default=256, help="tokens that are added")
    add("--requests", type=int, default=128, help="of `many` and `host`")
    add("--format", default="none", choices=("none", "int8", "fp8", "nf4"), help="of the kernels of `many`")
    add("--together", type=int, default=4, help="prompts that a program of these reads")
    add("--prefill_tokens", type=int, default=16384, help="tokens of prompts that a step of these reads")
    add("--limit_s", type=float, default=230, help="seconds after which what is left is ended")
    add("--bytes_per_second", type=float, default=4.15e12, help="of the device's memory")
    add("--host_fraction", type=float, default=0.3, help="of the weights of `host`, in host memory")
    add("--host_bytes_per_second", type=float, default=54e9, help="from host memory")
    add("--child", default="", help=argparse.SUPPRESS)
    add("--turn", default="", help=argparse.SUPPRESS)
    return parser


def _child(options: argparse.Namespace) -> int:
    """Measures one variant in this process, when it is its turn."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
    import jax

    if options.ways > 1:  # NVLink multicast is off, because not every machine offers it
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        if jax.__version_info__ >= (0, 11):  # earlier ones have no such flag
            flags = f"--xla_gpu_experimental_use_collective_kernels= {os.environ.get('XLA_FLAGS', '')}"
            os.environ["XLA_FLAGS"] = flags.strip()

    import zerojax  # noqa: F401  while another measures
    from zerojax.launch import processes

    is_launched = processes.launched() is not None
    if is_launched and options.compared_layers:
        _parser().error("--compared_layers: one process has the GPUs of both models; omit it under zerojax launch")

    while not pathlib.Path(options.turn).exists():
        time.sleep(0.05)
    try:
        if is_launched:
            processes.initialize()
        bench_child.tell(_measure(options, jax))
    except Exception as error:
        bench_child.tell({"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"})
        raise
    if is_launched:
        processes.leave(0)
    return 0


def _compare(options: argparse.Namespace, kind: str) -> str:
    """Returns how the tokens of a few layers over several GPUs agree with those of one. Raises if a token that differs is not as likely."""
    import numpy as np

    import zerojax

    random, found, prompts = np.random.default_rng(1), [], None
    for ways in (options.ways, 1):
        model, _ = _model(
            argparse.Namespace(**{**vars(options), "layers": options.compared_layers, "ways": ways}), kind
        )
        engine = zerojax.Engine(model, slots=1, max_len=256, chunk=128, format="none" if ways == 1 else kind)
        prompts = random.integers(model.config.vocab_size, size=(4, 128)) if prompts is None else prompts
        found.append((engine.generate(prompts, max_tokens=24), engine))
    (several, _), (one, engine) = found
    equal, worst = 0, 0.0
    for ours, theirs in zip(several, one):
        same = next((n for n, pair in enumerate(zip(ours.tokens, theirs.tokens)) if pair[0] != pair[1]), 24)
        equal += same
        if same < 24:  # after it the texts differ
            [again] = engine.generate([[*ours.prompt, *ours.tokens[:same]]], max_tokens=1, logprobs=5)
            likely = again.logprobs[0].likeliest
            worst = max(worst, max(likely.values()) - likely.get(ours.tokens[same], -1e9))
    text = f"{equal} of {4 * 24} tokens are those of one GPU; the others' logarithms differ by {worst:.2g} at most"
    assert worst < CLOSE, text
    return text


def _model(options: argparse.Namespace, kind: str) -> tuple[Any, int]:
    """Returns a model with random weights, kernels in a format, and the bytes of the weights that a token reads."""
    import jax
    import jax.numpy as jnp

    import zerojax
    from zerojax import tree
    from zerojax.inference.engine import weights
    from zerojax.models import families
    from zerojax.models import family as family_lib
    from zerojax.ops import quantized

    family = families.PRESETS[options.preset]
    config = family.presets[options.preset]
    config = dataclasses.replace(
        config, vocab_size=config.vocab_size or 320, num_layers=options.layers or config.num_layers
    )
    shapes = family_lib.abstract_params(family.parts, config)
    mesh = zerojax.make_mesh(model=options.ways, devices=jax.devices()[: options.ways])
    is_streamed = options.child == HOST
    how = (
        {"stage": 3, "offload": {"params": "host", "params_fraction": options.host_fraction}}
        if is_streamed
        else {"stage": 0}
    )
    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), shapes)
    partition = zerojax.partition_state({"params": stored}, mesh=mesh, **how)
    shardings = dict(tree.flatten(partition.shardings["params"]))
    linear = weights.linear_modules(family, config, shapes)

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    # One program a shape. Each of several processes draws all weights.
    @functools.partial(jax.jit, static_argnums=(1, 2), out_shardings=None if is_streamed else everywhere)
    def draw(key: jax.Array, shape: tuple[int, ...], is_coded: bool) -> Any:
        drawn = jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(0.02, jnp.bfloat16)
        return quantized.quantize(drawn, kind) if is_coded else drawn

    def make(path: str, leaf: Any) -> Any:
        module, _, name = path.rpartition("/")
        is_linear = module in linear and name == "kernel" and quantized.takes(leaf.shape)
        is_coded = kind != "none" and options.ways == 1 and is_linear
        drawn = draw(jax.random.key(len(path)), leaf.shape, is_coded)
        if is_streamed:  # one at a time: the device does not hold all
            return jax.block_until_ready(jax.device_put(drawn, shardings[path]))
        return drawn

    params = tree.map_with_path(make, shapes)
    jax.block_until_ready(params)
    read = sum(leaf.nbytes for name, part in params.items() if name != "embed" for leaf in jax.tree.leaves(part))
    if options.ways > 1:  # the engine quantizes them
        stored = weights.abstract(family, config, params, mesh, None, kind)
        read = sum(
            leaf.size * leaf.dtype.itemsize
            for name, part in stored.items()
            if name != "embed"
            for leaf in jax.tree.leaves(part)
        )
        read //= options.ways
    if is_streamed:
        leaves = jax.tree.leaves(params)
        read = sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == "pinned_host")
    print(f"weights drawn; a token reads {read / 1e9:.2f} GB", flush=True)
    special = family_lib.SpecialTokens()
    found = types.SimpleNamespace(
        family=family, config=config, partition=partition, params=params, special=special, adapters=None
    )
    return found, read


def _note(times: list[float], _: Any) -> None:
    times.append(time.perf_counter())


def _measure(options: argparse.Namespace, jax: Any) -> dict[str, float]:
    import numpy as np

    import zerojax
    from zerojax.inference.engine import weights

    began = time.perf_counter()
    kind = {"int8": "int8", "fp8": "fp8", "nf4": "nf4", "many": options.format}.get(options.child, "none")
    if options.child == "plain":
        weights.kernels_of = lambda mesh: None
    if options.compared_layers:
        print(_compare(options, kind), flush=True)
    model, read = _model(options, kind)
    is_many = options.child in ("many", HOST)
    requests = options.requests if is_many else 1
    engine = zerojax.Engine(
        model,
        slots=requests,
        max_len=options.prompt + options.new_tokens,
        chunk=options.prompt,
        together=min(options.together, requests),
        prefill_tokens=options.prefill_tokens if is_many else None,
        format="none" if options.ways == 1 else kind,
        reuses=False,
    )
    random = np.random.default_rng(0)

    def prompts(count: int) -> Any:
        return random.integers(model.config.vocab_size, size=(count, options.prompt))

    started = time.perf_counter()
    engine.generate(prompts(requests), max_tokens=4)
    if is_many:  # the program that reads one prompt, if some are left over
        engine.generate(prompts(1), max_tokens=4)
    ready = time.perf_counter() - began
    print(f"compiled in {time.perf_counter() - started:.1f} s", flush=True)
    firsts, steps, rates = [], [], []
    for _ in range(1 if is_many else REPEATS):
        times: list[float] = []
        note = functools.partial(_note, times)
        [prompt] = prompts(1)
        start = time.perf_counter()
        first = engine.submit(prompt, max_tokens=1, on_change=note)
        engine.run()
        firsts.append(times[0] - start)  # the engine is idle a step later, which it sends before it reads the token
        assert len(first.tokens) == len(times) == 1
        times.clear()
        asked = [engine.submit(prompt, max_tokens=options.new_tokens, on_change=note) for prompt in prompts(requests)]
        start = time.perf_counter()
        engine.run()
        total = time.perf_counter() - start
        assert all(len(request.tokens) == options.new_tokens for request in asked)
        # After the first token of the last request every step adds a token to all.
        begin = requests * options.new_tokens // 2
        seconds = times[-1] - times[begin]
        steps.append(seconds * requests / (len(times) - 1 - begin))
        rates.append(requests * options.new_tokens / total if is_many else 1 / steps[-1])
        print(f"first {firsts[-1] * 1e3:.2f} ms, step {steps[-1] * 1e3:.3f} ms, {rates[-1]:.1f} tokens/s", flush=True)
    step = statistics.median(steps)
    return {
        "requests": requests,
        "first token ms": statistics.median(firsts) * 1e3,
        "tokens/s": statistics.median(rates),
        "ms a step": step * 1e3,
        "of the bound": read
        / (options.host_bytes_per_second if options.child == HOST else options.bytes_per_second)
        / step,
        "peak GB": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
        "ready s": ready,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
