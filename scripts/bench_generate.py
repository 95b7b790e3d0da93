"""Measures generation on one device: milliseconds from prompts of token ids to the new tokens, and the device's peak memory.

    python scripts/bench_generate.py
    python scripts/bench_generate.py --presets bart_large --new_tokens 10 --rows 8 --prompt 64 --dtypes fp32

Each preset has random weights and runs in a process of its own, which is ended after `--limit_s` seconds. A call is timed from numpy arrays
to a numpy array, and printed as it ends. The table comes last: the median of `--repeats` calls after the first two, which compile, and the
time a token beside the time in which the weights that a token reads pass the memory once, at 4.15 TB/s (an H200).
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Sequence

import bench_child  # in this folder

BYTES_PER_SECOND = 4.15e12


def main(arguments: Sequence[str]) -> int:
    """Measures each preset and dtype and prints a Markdown table. Returns 1 if one failed."""
    options = _parser().parse_args(arguments)
    if options.child:
        bench_child.tell(_measure(options.child, options.dtypes[0], options))
        return 0
    columns = (
        "preset",
        "dtype",
        "rows",
        "prompt",
        "new tokens",
        "ms",
        "ms a token",
        "of memory alone",
        "peak GB",
        "first call s",
    )
    rows, status = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)], 0
    for preset in options.presets:
        for dtype in options.dtypes:
            words = [__file__, *arguments, "--child", preset, "--dtypes", dtype]
            found = bench_child.run(f"{preset} {dtype}", words, options.limit_s)
            if found is None:
                status = 1
                continue
            sizes = (preset, dtype, options.rows, options.prompt, options.new_tokens)
            cells = (*sizes, *(f"{found[name]:.4g}" for name in ("ms", "token_ms", "memory_ms", "peak_gb", "first_s")))
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    print("\n".join(rows), flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--presets",
        nargs="+",
        default=["bart_large", "llama3_1b"],
        help="names in the PRESETS tables of zerojax/models",
    )
    add("--dtypes", nargs="+", default=["fp32", "bf16"], help="of the weights: fp32, bf16")
    add("--rows", type=int, default=8, help="prompts")
    add("--prompt", type=int, default=64, help="tokens of a prompt")
    add("--new_tokens", type=int, default=10, help="tokens that are added to each; no token ends a row")
    add("--repeats", type=int, default=10, help="timed calls")
    add("--limit_s", type=float, default=150, help="seconds after which a preset is ended")
    add("--child", default="", help=argparse.SUPPRESS)
    return parser


def _measure(preset: str, dtype: str, options: argparse.Namespace) -> dict[str, float]:
    """Times one preset in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import zerojax
    from zerojax.inference import generate
    from zerojax.models import families
    from zerojax.models import family as family_lib

    family = families.PRESETS[preset]
    config = family.presets[preset]
    config = dataclasses.replace(config, vocab_size=config.vocab_size or 320)
    stored = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[dtype]
    shapes = family_lib.abstract_params(family.parts, config)
    mesh = zerojax.make_mesh()
    partition = zerojax.partition_state({"params": shapes}, mesh=mesh, stage=0)

    @functools.partial(
        jax.jit, static_argnums=1
    )  # one program a shape: with a generator for each leaf, it compiles long
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, stored) * jnp.asarray(0.02, stored)

    leaves, structure = jax.tree.flatten(shapes)
    drawn = [draw(jax.random.key(number), leaf.shape) for number, leaf in enumerate(leaves)]
    params = jax.device_put(jax.tree.unflatten(structure, drawn), partition.shardings["params"])
    jax.block_until_ready(params)
    print(f"weights drawn: {sum(leaf.nbytes for leaf in drawn) / 1e9:.2f} GB", flush=True)
    generator = generate.make_generator(
        family, config, partition, new_tokens=options.new_tokens, special=family_lib.SpecialTokens()
    )
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(options.rows, options.prompt), dtype=np.int32)
    took = []
    for _ in range(2 + options.repeats):
        began = time.perf_counter()
        generator(params, prompts)
        took.append(time.perf_counter() - began)
        print(f"call {len(took)}: {took[-1] * 1e3:.2f} ms", flush=True)
    read = sum(
        leaf.size for name, part in shapes.items() if not name.startswith("encoder") for leaf in jax.tree.leaves(part)
    )
    median = statistics.median(took[2:]) * 1e3
    return {
        "ms": median,
        "token_ms": median / options.new_tokens,
        "memory_ms": read * jnp.dtype(stored).itemsize / BYTES_PER_SECOND * 1e3,
        "peak_gb": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9,
        "first_s": took[0],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
