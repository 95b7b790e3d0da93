"""Measures training steps of Llama shapes with optimizer state, and params, in host memory or on a disk, on one device.

    python scripts/bench_offload_blocks.py --layers 32 --seq_len 8192 --micro_batch 2 --accum 4 --remat full --state 16bit --params host
    python scripts/bench_offload_blocks.py --preset llama3_1b --layers 16 --micro_batch 4 --clip_norm 1 --state fp32_params --optimizer host
    python scripts/bench_offload_blocks.py --preset qwen2_14b --layers 48 --seq_len 1024 --micro_batch 16 --accum 2 --whole_accum 32 ...
    python scripts/bench_offload_blocks.py --cases late none --preset llama3_1b --layers 16 --micro_batch 4 --accum 4 \\
        --state fp32_params --in_flight 28 --steps 10 --limit_s 250

States: fp32 (16-bit params, float32 masters and moments), 16bit (16-bit params and moments, stochastically rounded), 8bit (16-bit params,
8-bit moments) and fp32_params (float32 params and moments). Weights are random, and the batch is the same in all steps. Each figure is
printed as it comes. The first step compiles. The second may still allocate host memory, which is slow where a machine grows its memory as
it is used. So the rate is that of the median of the later ones. --whole_accum adds one step of more passes than the others, and the rate
is then that of this step.
--plan h100 compiles the programs for that device and prints the plan; it needs no GPU. --kernels 8 adds the 8 kernels of each program,
other than matmuls and attention, that move the most bytes. --limit_s ends the process in time.

--cases compares steps that differ in the optimizer state alone, one after the other, and prints their times over that of "none". The
peak of memory is that of the process so far, so "none" comes last:
    none        on the device, clip 1            early       on the host, no clip: updated beside the backward pass
    clip        on the host, clip 1              clip_block  the same, block by block
    late        on the host, clip 1 by the norm of the step before
    late_few    the same programs with two chunks in flight, so that copies wait: the same bits with --xla_gpu_deterministic_ops=true
    blocks      as early, but for the first weight all on the device: what a program for each block costs
"""

import argparse
import collections
import dataclasses
import functools
import gc
import os
import pathlib
import sys
import tempfile
import threading
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

CASES = {
    "none": {"optimizer": "none", "clip_norm": 1.0},
    "early": {"optimizer": "host", "clip_norm": 0.0},
    "clip": {"optimizer": "host", "clip_norm": 1.0},
    "clip_block": {"optimizer": "host", "clip_norm": 1.0, "by_block": "on"},
    "late": {"optimizer": "host", "clip_norm": 1.0, "late_norm": True},
    "late_few": {"optimizer": "host", "clip_norm": 1.0, "late_norm": True, "in_flight": 2},
    "blocks": {"optimizer": "host", "clip_norm": 0.0, "fraction": 0.01},
}
HOST_BYTES = {
    "fp32": (2, 12),
    "16bit": (2, 4),
    "8bit": (2, 2.04),
    "fp32_params": (4, 8),
}  # of a param, and of its optimizer state

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--preset", default="llama3_8b")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--seq_len", type=int, default=4096)
parser.add_argument("--micro_batch", type=int, default=2)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--whole_accum", type=int, default=0, help="passes of one more step at the end; 0: none")
parser.add_argument("--sums", choices=("fp32", "bf16"), default="fp32", help="dtype in which passes add up")
parser.add_argument("--reduce", choices=("fp32", "bf16"), default="fp32", help="dtype of the gradients of a pass")
parser.add_argument("--remat", default="dots")
parser.add_argument("--recompute", default="")
parser.add_argument("--fp8", action="store_true", help="matmuls of blocks in fp8")
parser.add_argument("--state", choices=tuple(HOST_BYTES), default="fp32")
parser.add_argument("--clip_norm", type=float, default=0.0)
parser.add_argument("--optimizer", choices=("none", "host", "nvme"), default="host")
parser.add_argument("--params", choices=("none", "host", "nvme"), default="none")
parser.add_argument("--nvme_path", default="", help='folder of what is "nvme"')
parser.add_argument("--nvme_buffers", type=int, default=4)
parser.add_argument("--fraction", type=float, default=1.0)
parser.add_argument("--params_fraction", type=float, default=1.0)
parser.add_argument("--params_on_device", default="", help="a regex of params that stay on the device")
parser.add_argument("--chunk_mib", type=int, default=256, help="chunks of the updates")
parser.add_argument("--by_block", choices=("auto", "on", "off"), default="auto")
parser.add_argument("--late_norm", action="store_true")
parser.add_argument("--in_flight", type=int, default=0, help="chunks on the device at once; 0: the default")
parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=[])
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--pool_gb", type=int, default=0, help="XLA's pool of pinned host memory; 0: as the state needs")
parser.add_argument("--plan", default="", metavar="DEVICE", help="plan only, for h100 or h200")
parser.add_argument("--kernels", type=int, default=0, help="with --plan: kernels of each program to list")
parser.add_argument(
    "--disk_gbps", type=float, default=0, help="GB/s of the disk, both ways together, for --plan; 0: 2, assumed"
)
parser.add_argument("--limit_s", type=float, default=0, help="seconds until the process ends itself; 0: never")


def main(options: argparse.Namespace) -> str:
    """Runs the steps and returns the line of figures."""
    began = time.perf_counter()
    if options.limit_s:
        limit = threading.Timer(options.limit_s, _end)
        limit.daemon = True
        limit.start()
    from zerojax.models import families
    from zerojax.models import family as family_lib

    family = families.PRESETS[options.preset]
    model = dataclasses.replace(family.presets[options.preset], num_layers=options.layers)
    model = dataclasses.replace(model, vocab_size=model.vocab_size or 512)
    count = family_lib.count_params(family.parts, model)
    cases = [argparse.Namespace(**{**vars(options), **CASES[name]}) for name in options.cases] or [options]
    pinned = max(_size_pool(case, model, count) for case in cases)
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(options.pool_gb or _pool_gb(pinned)))
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    import jax

    from zerojax.plan import targets

    say = lambda line: print(f"{time.perf_counter() - began:6.1f} s: {line}", flush=True)  # noqa: E731
    say(f"{count / 1e9:.2f}B weights, at most {pinned / 1e9:.1f} GB pinned")
    if options.plan:
        (device,) = targets.devices(options.plan, "1x1")
        lines = [_planned(case, family, model, device, say) for case in cases]
        return "\n".join(f"{name}: {line}" for name, line in zip(options.cases or ["plan"], lines))
    if not jax.config.jax_compilation_cache_dir:  # a step of more passes has the same programs of blocks
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if not options.cases:
        return _measured(options, family, model, count, say)[1]
    found: dict[str, tuple[float, str]] = {}
    for name, case in zip(options.cases, cases):
        found[name] = _measured(case, family, model, count, say)
        gc.collect()
        say(f"{name}: {found[name][1]}")
    base = "none" if "none" in found else options.cases[0]
    return "\n".join(
        f"{name:<10} {seconds * 1e3:5.0f} ms a step, {seconds / found[base][0]:.3f} x {base}: {line}"
        for name, (seconds, line) in found.items()
    )


def _measured(options: argparse.Namespace, family: Any, model: Any, count: int, say: Any) -> tuple[float, str]:
    """Makes the state and runs the steps. Returns the seconds of a step and the line of figures."""
    import jax

    from zerojax.zero.host import storage

    began = time.perf_counter()
    device = jax.devices()[0]
    model = dataclasses.replace(model, attention="cudnn" if device.platform == "gpu" else "xla")
    partition = _partition(options, family, model, device)
    train_step = _step(options, family, model, partition, options.accum)
    state = _random(partition)
    made = time.perf_counter()
    away = [leaf for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == "pinned_host"]
    on_disk = sum(leaf.nbytes for leaf in away if storage.is_on_disk(leaf))
    on_host = sum(leaf.nbytes for leaf in away) - on_disk
    del away
    say(f"the state is made, {on_host / 1e9:.1f} GB of it on the host, {on_disk / 1e9:.1f} GB on the disk")
    batch = {"tokens": jax.device_put(_tokens(options, model.vocab_size, options.accum))}
    times, losses = [], []

    def timed(step: Any, accum: int, batch: Any) -> None:
        nonlocal state
        start = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
        rate = accum * options.micro_batch * options.seq_len / times[-1]
        say(
            f"step of {accum} passes: {times[-1] * 1e3:.0f} ms, {rate:.0f} tokens/s, loss {losses[-1]:.3f}, {_peak(device)}"
        )

    for _ in range(4 if options.cases else options.steps + 1):
        timed(train_step, options.accum, batch)
    jax.block_until_ready(jax.tree.leaves(state))
    if options.cases:
        state, middle, more = _in_a_row(train_step, state, batch, options.steps)
        losses.extend(more)
        say(f"bits of the params: {_bits(state.params):08x}, of the losses: {' '.join(loss.hex() for loss in losses)}")
    else:
        later = sorted(times[2:] or times[1:])
        middle = later[len(later) // 2]
    accum = options.accum
    if options.whole_accum:
        accum = options.whole_accum
        whole_step = _step(options, family, model, partition, accum)
        whole = {"tokens": jax.device_put(_tokens(options, model.vocab_size, accum))}
        whole_step.memory(partition.abstract_state, whole)  # compiles the passes
        whole_step.updates.compile()
        say(f"the step of {accum} passes is compiled")
        timed(whole_step, accum, whole)
        jax.block_until_ready(jax.tree.leaves(state))
        middle = times[-1]
    shown = " ".join(f"{seconds * 1e3:.0f}" for seconds in times[1:])
    return middle, (
        f"{count / 1e9:.2f}B weights, {on_host / 1e9:.1f} GB on the host, {on_disk / 1e9:.1f} GB on the disk, made in "
        f"{made - began:.0f} s; first step {times[0]:.0f} s, then [{shown}] ms; "
        f"{accum * options.micro_batch * options.seq_len / middle:.0f} tokens/s; {_peak(device)}; "
        f"loss {' '.join(f'{loss:.3f}' for loss in losses)}"
    )


def _in_a_row(train_step: Any, state: Any, batch: Any, steps: int) -> tuple[Any, float, list[float]]:
    """Runs steps as a run does: none waits for a loss. Returns the last state, the mean seconds of a step, and the losses."""
    import jax

    began, losses = time.perf_counter(), []
    for _ in range(steps):
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
    jax.block_until_ready((state.params, losses))  # the last stores would run beside the next step
    return state, (time.perf_counter() - began) / steps, [float(loss) for loss in losses]


def _bits(params: Any) -> int:
    """Returns the sum of all params' bits, which tells two runs apart that should be equal."""
    import jax
    import jax.numpy as jnp

    words = {2: jnp.uint16, 4: jnp.uint32}
    add = jax.jit(lambda leaf: jax.lax.bitcast_convert_type(leaf, words[leaf.dtype.itemsize]).sum(dtype=jnp.uint32))
    return sum(int(add(leaf)) for leaf in jax.tree.leaves(params)) % 2**32


def _size_pool(options: argparse.Namespace, model: Any, count: int) -> int:
    """Returns the most bytes that are pinned."""
    from zerojax.zero.host import budget, settings

    of_param, of_state = HOST_BYTES[options.state]
    pinned = count * of_state * options.fraction * (options.optimizer == "host")
    pinned += count * of_param * options.params_fraction * (options.params == "host")
    pinned += (options.in_flight or settings.IN_FLIGHT) * settings.CHUNK_BYTES
    return round(pinned + budget.NEW_PARAMS.get(options.params, 0) * of_param * model.vocab_size * model.embed_dim)


def _pool_gb(pinned: int) -> int:
    from zerojax.zero.host import budget

    return budget.pool_size_gb(pinned, budget.read_host())


def _end() -> None:
    print("ended by --limit_s", flush=True)
    os._exit(3)


def _peak(device: Any) -> str:
    return f"peak {(device.memory_stats() or {}).get('peak_bytes_in_use', 0) / 1e9:.2f} GB"


def _planned(options: argparse.Namespace, family: Any, model: Any, device: Any, say: Any) -> str:
    """Compiles a step for a device that need not be there. Returns its plan."""
    import jax.numpy as jnp

    from zerojax.plan import report, step_plan
    from zerojax.zero.host import budget

    model = dataclasses.replace(model, attention="cudnn")
    partition, passes = _partition(options, family, model, device), options.whole_accum or options.accum
    say(f"pins {budget.pool_bytes(partition) / 1e9:.1f} GB")
    step = _step(options, family, model, partition, passes)
    batch = {"tokens": _tokens(options, model.vocab_size, passes)}
    plan = step_plan.plan_step(
        step,
        partition.abstract_state,
        batch,
        mesh=partition.mesh,
        target=options.plan,
        placement=partition,
        tokens=passes * options.micro_batch * options.seq_len,
        compute_dtype=jnp.bfloat16,
        passes=passes,
        by_hand=True,
        disk_rate=options.disk_gbps * 1e9 or None,
    )
    one_pass = step.one_pass(partition.abstract_state, batch) if options.kernels else None
    return "\n".join([report.text(plan), *(_kernels(one_pass, options.kernels) if one_pass else [])])


def _kernels(one_pass: Any, most: int) -> list[str]:
    """Returns lines of the kernels of a pass's programs, each listed once: the bytes that they move, without matmuls and attention."""
    from zerojax.hlo import buffers, flow, syntax, traffic

    programs = one_pass.schedule.cut.programs
    runs = collections.Counter(id(program.run) for program in programs)
    lines = []
    for program in {id(program.run): program for program in programs}.values():
        found = flow.flow(syntax.parse(buffers.text_of(program.run)))
        others = [
            (kernel.nbytes * kernel.times / 1e6, kernel.instruction)
            for kernel in traffic.kernels(found)
            if not traffic.is_library_call(kernel.instruction)
            and kernel.instruction.opcode != "convolution"
            and not traffic.matmuls(found.module, kernel.where, kernel.instruction)
        ]
        total = sum(megabytes for megabytes, _ in others)
        lines.append(f"{program.name}, {runs[id(program.run)]} times a pass: {total:,.0f} MB")
        for megabytes, instruction in sorted(others, key=lambda pair: -pair[0])[:most]:
            lines.append(f"  {megabytes:9,.1f} MB  {instruction.op_name.partition('/')[2] or instruction.name}")
    return lines


def _partition(options: argparse.Namespace, family: Any, model: Any, device: Any) -> Any:
    """Returns the partition of the state."""
    import jax
    import jax.numpy as jnp

    import zerojax
    from zerojax import train_state
    from zerojax.models import family as family_lib
    from zerojax.optim import registry

    path = options.nvme_path if "nvme" in (options.optimizer, options.params) else ""

    how: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    if options.state in ("16bit", "8bit"):
        how |= {"moments": "bf16" if options.state == "16bit" else "int8", "rounds_weights": True}
    tx = registry.make_optimizer("adamw", 1e-4, **how)
    if options.state == "fp32":
        tx = zerojax.with_master_weights(tx)
    dtype = jnp.float32 if options.state == "fp32_params" else jnp.bfloat16
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), family_lib.abstract_params(family.parts, model)
    )
    offload: dict[str, Any] = {
        "optimizer": options.optimizer,
        "params": options.params,
        "chunk_bytes": options.chunk_mib << 20,
    }
    if options.params != "none":
        offload |= {"params_fraction": options.params_fraction, "params_on_device": options.params_on_device}
    if options.optimizer != "none":
        offload |= {"fraction": options.fraction, "by_block": options.by_block, "late_norm": options.late_norm}
        offload |= {"in_flight": options.in_flight} if options.in_flight else {}
    offload |= {"nvme_path": path, "nvme_buffers": options.nvme_buffers} if path else {}
    fields = {"last_norm": zerojax.first_norm()} if options.late_norm else {}
    return zerojax.partition_state(
        jax.eval_shape(lambda p: train_state.create(p, tx, jax.random.key(0), **fields), params),
        mesh=zerojax.make_mesh(1, 1, devices=[device]),
        stage=3,
        offload=offload,
    )


def _step(options: argparse.Namespace, family: Any, model: Any, partition: Any, accum: int) -> Any:
    """Returns the train step of some passes."""
    import jax.numpy as jnp

    import zerojax
    from zerojax.models import family as family_lib

    def loss_fn(params: Any, batch: Any, state: Any) -> Any:
        return family.loss(model, params, batch)

    return zerojax.make_train_step(
        loss_fn,
        partition,
        clip_norm=options.clip_norm,
        grad_accum=accum,
        compute_dtype=jnp.bfloat16,
        blocks=family.blocks,
        heads=family_lib.heads(family, model),
        remat=options.remat,
        recompute=options.recompute,
        reduce_dtype=jnp.bfloat16 if options.reduce == "bf16" else jnp.float32,
        accum_dtype=jnp.bfloat16 if options.sums == "bf16" else None,
        fp8=zerojax.Fp8() if options.fp8 else None,
    )


def _random(partition: Any) -> Any:
    """Returns a state with random weights and moments of 0. Each leaf is made on the device, and moved to where it lives."""
    import jax
    import jax.numpy as jnp

    from zerojax import tree
    from zerojax.zero.host import memory_kind, storage
    from zerojax.zero.offload import late_norm

    keep, keys = storage.keeper(partition), iter(range(1 << 30))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def drawn(shape: tuple[int, ...], dtype: Any, seed: Any) -> Any:
        return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * 0.02).astype(dtype)

    def value(path: str, leaf: Any) -> Any:
        if path == late_norm.FIELD:
            array = jnp.full(leaf.shape, late_norm.UNKNOWN, leaf.dtype)
        elif {"mu", "nu"} & set(path.split("/")) or leaf.size < 8:
            array = jnp.zeros(leaf.shape, leaf.dtype)
        elif len(leaf.shape) == 1:
            array = jnp.ones(leaf.shape, leaf.dtype)
        else:
            array = drawn(leaf.shape, leaf.dtype, next(keys))
        array = jax.device_put(array, memory_kind.on_device(leaf.sharding))
        return jax.block_until_ready(keep(array, leaf) if memory_kind.is_on_host(leaf) else array)

    return tree.map_with_path(value, partition.abstract_state)


def _tokens(options: argparse.Namespace, vocab_size: int, accum: int) -> Any:
    import numpy as np

    leading = (accum,) if accum > 1 else ()
    shape = (*leading, options.micro_batch, options.seq_len + 1)
    return np.random.default_rng(1).integers(0, min(1000, vocab_size), shape).astype(np.int32)


if __name__ == "__main__":
    print(main(parser.parse_args()), flush=True)
