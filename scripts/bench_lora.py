"""Measures steps of LoRA on one device: BART-large as PEFT's example, Llama 3's 8B shapes beside full training, QLoRA, and Qwen3-30B's.

    python scripts/bench_lora.py                                   all cases; the table comes last
    python scripts/bench_lora.py --cases bart bart_offload --limit_s 200

Each case runs in a process of its own, since a device reports the peak of its process, and prints what it knows as it comes. After
`--limit_s` seconds it is ended, and the next case begins. Weights and batches are random. A step is timed from the start of the first to
the end of the last of several, after 3 others. Planned: what XLA assigned to the step, or for params in host memory the programs' sum.

`--profile` then traces 3 steps and prints where their time goes. `--small_mib` changes which arrays of params in host memory a program
copies (`zero.offload.fetched_params`): 0 sends each as a copy of its own.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import bench_child  # in this folder

LLAMA = {"data.name": "random", "data.eval_split": "", "steps": 1000}
ALL_WEIGHTS = {"lora.r": 0, "lora.alpha": 0.0, "lora.target_modules": "", "export.format": "none"}
EXPERTS = {
    "lora.r": 8,
    "lora.alpha": 16.0,
    "lora.target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}
BART = {"epochs": 0.0, "steps": 1000, "data.eval_split": ""}
# case -> (config, changes, steps)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bart": ("lora_bart", BART, 50),
    "bart_offload": ("lora_bart", BART | {"offload.params": "host", "model.remat": "full"}, 20),
    "bart_offload_part": (  # as many weights stay on the device as the bar of the memory allows
        "lora_bart",
        BART | {"offload.params": "host", "offload.params_fraction": 0.65, "model.remat": "full"},
        20,
    ),
    "llama_8_layers": ("lora_llama3_8b", LLAMA | {"model.num_layers": 8}, 10),
    "llama_8_layers_full": (
        "lora_llama3_8b",
        LLAMA | ALL_WEIGHTS | {"model.num_layers": 8},
        10,
    ),
    "qlora_8b": (
        "lora_llama3_8b",
        LLAMA | {"lora.quantize": "nf4", "micro_batch_size": 1, "model.remat": "full"},
        5,
    ),
    "qwen3_30b": ("lora_qwen3_30b", LLAMA, 10),
    "qwen3_8_layers": ("lora_qwen3_30b", LLAMA | {"model.num_layers": 8}, 10),
    "qwen3_8_layers_experts": ("lora_qwen3_30b", LLAMA | EXPERTS | {"model.num_layers": 8}, 10),
    "qlora_qwen3_8_layers": ("qlora_qwen3_30b", LLAMA | {"model.num_layers": 8}, 10),
    "qlora_qwen3_30b": ("qlora_qwen3_30b", LLAMA, 10),
    "qwen3_8_layers_full": (
        "lora_qwen3_30b",
        LLAMA | ALL_WEIGHTS | {"model.num_layers": 8},
        10,
    ),
}
BARS = {
    "bart": "25 ms, 2,300 MiB",
    **dict.fromkeys(("bart_offload", "bart_offload_part"), "85 ms, 1,300 MiB"),
    "qlora_8b": "10 GB",
    "llama_8_layers": "1.4 x full",
}


def main() -> None:
    """Runs the cases and prints the table, or runs one case and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--limit_s", type=float, default=240, help="seconds after which a case is ended")
    parser.add_argument("--here", action="store_true", help="run the one case in this process")
    parser.add_argument("--set", nargs="*", default=[], help="further settings, such as model.num_layers=2")
    parser.add_argument("--profile", action="store_true", help="trace 3 more steps")
    parser.add_argument("--small_mib", type=float, default=None, help="programs copy smaller arrays from host memory")
    options = parser.parse_args()
    if options.here:
        return bench_child.tell(run(options.cases[0], options.set, options.profile, options.small_mib))
    rows = []
    for case in options.cases:
        words = [__file__, "--here", "--cases", case, "--set", *options.set]
        words += ["--profile"] if options.profile else []
        words += [] if options.small_mib is None else ["--small_mib", str(options.small_mib)]
        found = bench_child.run(case, words, options.limit_s)
        if found is not None:
            rows.append((case, found))
    columns = ("case", "ms a step", "host ms", "tokens/s", "peak MiB", "planned", "state MiB", "host MiB", "compiled s")
    print(f"{columns[0]:<22}" + "".join(f"{column:>12}" for column in columns[1:]) + "  bar")
    for case, found in rows:
        cells = ("ms", "host_ms", "tokens_per_second", "peak_mib", "planned_mib", "state_mib", "host_mib", "compile_s")
        print(f"{case:<22}" + "".join(f"{found[cell]:>12,.1f}" for cell in cells) + f"  {BARS.get(case, '')}")


def run(case: str, more: list[str], is_profiled: bool, small_mib: float | None) -> dict[str, float]:
    """Runs one case and returns its figures. Host: the median time in which a step's call returns."""
    import importlib

    import jax

    from zerojax.launch import start_up
    from zerojax.trainer import config as config_lib
    from zerojax.trainer import program as program_lib
    from zerojax.trainer import state as state_lib
    from zerojax.trainer.checks import host
    from zerojax.zero.host import budget
    from zerojax.zero.offload import fetched_params

    if small_mib is not None:
        fetched_params.SMALL = int(small_mib * 2**20)
    name, changes, steps = CASES[case]
    raw = importlib.import_module(f"configs.{name}").get_config()
    raw.update_from_flattened_dict(changes | dict(_parsed(raw, word) for word in more))
    config = config_lib.from_dict(raw)
    if pinned := host.most_pinned_bytes(config):
        start_up.size_pinned_pool(budget.pool_size_gb(pinned, budget.read_host()))
    program = program_lib.build(config, devices=jax.devices()[:1])
    clock = _Clock()
    step, planned = _compiled(program)
    compile_s = clock.lap(
        "compiled", f"planned peak {planned / 2**20:,.0f} MiB, {_peak_mib():,.0f} in use at most so far"
    )
    state, batch = state_lib.first(program), _batch(program)
    made_s = clock.lap("made the state", f"{_peak_mib():,.0f} MiB in use at most so far")
    state, metrics = step(state, batch)
    first = float(metrics["loss"])
    first_step_s = clock.lap("first step", f"loss {first:.4f}, {_peak_mib():,.0f} MiB in use at most so far")
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    start_up.spare_collector()  # as the trainer does
    clock.lap("2 steps", f"{_peak_mib():,.0f} MiB in use at most so far")
    calls, start = [], time.perf_counter()
    for _ in range(steps):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        calls.append(time.perf_counter() - began)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - start) / steps
    if is_profiled:
        state, metrics = _profiled(step, state, batch)
    leaves = jax.tree.leaves(state)
    on_host = sum(leaf.nbytes for leaf in leaves if leaf.sharding.memory_kind == "pinned_host")
    return {
        "ms": seconds * 1e3,
        "host_ms": statistics.median(calls) * 1e3,
        "tokens_per_second": program.sizes.global_batch_size * config.seq_len / seconds,
        "peak_mib": _peak_mib(),
        "planned_mib": planned / 2**20,
        "state_mib": (sum(leaf.nbytes for leaf in leaves) - on_host) / 2**20,
        "host_mib": on_host / 2**20,
        "compile_s": compile_s,
        "made_s": made_s,
        "first_step_s": first_step_s,
        "first_loss": first,
        "last_loss": float(metrics["loss"]),
    }


def _profiled(step: Any, state: Any, batch: Any, steps: int = 3) -> tuple[Any, Any]:
    """Traces some steps, and prints what the copies to the device and the kernels of a step take. Returns the new state and metrics."""
    import pathlib

    import jax

    from zerojax.profile import phases, traces

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        began = time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds = time.perf_counter() - began
        jax.profiler.stop_trace()
        path = traces.newest(pathlib.Path(folder))
        found = traces.read(path) if path else []
    copies = [(kernel.start, kernel.end) for kernel in found if "MemcpyH2D" in kernel.name]
    kernels = [(kernel.start, kernel.end) for kernel in found if "Memcpy" not in kernel.name]
    copying, computing = phases.union(copies), phases.union(kernels)
    both = phases.length(copying) - phases.length(phases.subtract(copying, computing))
    gaps = sorted(following[0] - before[1] for before, following in itertools.pairwise(copying))
    times = {
        "in all": seconds * 1e9,
        f"{len(copies) // steps} copies to the device": phases.length(copying),
        f"{len(kernels) // steps} kernels": phases.length(computing),
        "copies beside kernels": both,
        f"{len(gaps) // steps} gaps between copies": sum(gaps),
        "the 10 longest gaps of a step": sum(gaps[-10 * steps :]),
    }
    print(
        "a step, traced, ms: " + ", ".join(f"{name} {ns / steps / 1e6:.2f}" for name, ns in times.items()), flush=True
    )
    return state, metrics


class _Clock:
    """Prints what a part of a case took, as soon as it is over."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self, what: str, figures: str) -> float:
        """Returns the seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        print(f"{what}: {seconds:.2f} s, {figures}", flush=True)
        return seconds


def _compiled(program: Any) -> tuple[Any, int]:
    """Returns the compiled step and its planned peak in bytes on the device."""
    from zerojax.trainer.checks import memory_guard

    plan = memory_guard.compile_step(program)
    return plan.compiled, plan.peak


def _peak_mib() -> float:
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**20


def _batch(program: Any) -> dict[str, Any]:
    """Returns a batch of random tokens; masks are full."""
    import jax
    import numpy as np

    rng, masks = np.random.default_rng(0), ("mask", "labeled", "segments")
    return {
        key: jax.device_put(
            np.ones(like.shape, np.int32) if key in masks else rng.integers(4, 256, like.shape).astype(np.int32),
            like.sharding,
        )
        for key, like in program.abstract_batch.items()
    }


def _parsed(raw: Any, word: str) -> tuple[str, Any]:
    """Returns a setting given as name=value, in the type that it has in the config."""
    name, _, text = word.partition("=")
    value = raw
    for part in name.split("."):
        value = value[part]
    return name, type(value)(text) if not isinstance(value, bool) else text == "True"


if __name__ == "__main__":
    main()
