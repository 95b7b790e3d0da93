"""Measures training steps of Llama shapes with optimizer state, and params, in host memory, on one device.

    python scripts/bench_offload_blocks.py --layers 32 --seq_len 8192 --micro_batch 2 --accum 4 --remat full --state 16bit --params host
    python scripts/bench_offload_blocks.py --preset llama3_1b --layers 16 --micro_batch 4 --clip_norm 1 --state fp32_params --optimizer host

States: fp32 (16-bit params, float32 masters and moments), 16bit (16-bit params and moments, stochastically rounded) and fp32_params
(float32 params and moments). Weights are random, and the batch is the same in all steps. The first step compiles. The second may still
allocate host memory, which is slow where a machine grows its memory as it is used. So the rate is that of the median of the later ones.
"""

import argparse
import dataclasses
import os
import time
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--preset", default="llama3_8b")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--seq_len", type=int, default=4096)
parser.add_argument("--micro_batch", type=int, default=2)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--remat", default="dots")
parser.add_argument("--state", choices=("fp32", "16bit", "fp32_params"), default="fp32")
parser.add_argument("--clip_norm", type=float, default=0.0)
parser.add_argument("--optimizer", choices=("none", "host"), default="host")
parser.add_argument("--params", choices=("none", "host"), default="none")
parser.add_argument("--params_fraction", type=float, default=1.0)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--pool_gb", type=int, default=118, help="XLA's pool of pinned host memory")


def main(options: argparse.Namespace) -> str:
    """Runs the steps and returns the line of figures."""
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(options.pool_gb))
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    import jax

    from zerojax.models import families

    began = time.perf_counter()
    family = families.PRESETS[options.preset]
    shape = family.presets[options.preset]
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    model = dataclasses.replace(shape, num_layers=options.layers, attention=kernel, vocab_size=shape.vocab_size or 512)
    state, train_step = _step(options, family, model)
    made = time.perf_counter()
    on_host = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.sharding.memory_kind == "pinned_host")
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    batch = {"tokens": jax.device_put(_tokens(options, model.vocab_size))}
    times, losses = [], []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        state, metrics = train_step(state, batch)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    jax.block_until_ready(jax.tree.leaves(state))
    later = sorted(times[2:] or times[1:])
    middle = later[len(later) // 2]
    tokens = options.accum * options.micro_batch * options.seq_len
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    shown = " ".join(f"{seconds * 1e3:.0f}" for seconds in times[1:])
    return (
        f"{count / 1e9:.2f}B weights, {on_host / 1e9:.1f} GB on the host, made in {made - began:.0f} s; first step {times[0]:.0f} s, then "
        f"[{shown}] ms; {tokens / middle:.0f} tokens/s; peak {peak / 1e9:.2f} GB; loss {' '.join(f'{loss:.3f}' for loss in losses)}"
    )


def _step(options: argparse.Namespace, family: Any, model: Any) -> tuple[Any, Any]:
    """Returns a state with random weights, and its train step."""
    import jax
    import jax.numpy as jnp
    from flax.training.train_state import TrainState

    import zerojax
    from zerojax.models import family as family_lib
    from zerojax.optim import registry

    how: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    if options.state == "16bit":
        how |= {"moments": "bf16", "rounds_weights": True}
    tx = registry.make_optimizer("adamw", 1e-4, **how)
    if options.state == "fp32":
        tx = zerojax.with_master_weights(tx)
    dtype = jnp.float32 if options.state == "fp32_params" else jnp.bfloat16
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), family_lib.abstract_params(family.parts, model)
    )
    partition = zerojax.partition_state(
        jax.eval_shape(lambda p: TrainState.create(apply_fn=None, params=p, tx=tx), params),
        mesh=zerojax.make_mesh(1, 1, devices=jax.devices()[:1]),
        stage=3,
        offload={
            "optimizer": options.optimizer,
            "params": options.params,
            **({"params_fraction": options.params_fraction} if options.params == "host" else {}),
        },
    )

    def loss_fn(params: Any, batch: Any, state: Any) -> Any:
        return family.loss(model, params, batch)

    train_step = zerojax.make_train_step(
        loss_fn,
        partition,
        clip_norm=options.clip_norm,
        grad_accum=options.accum,
        compute_dtype=jnp.bfloat16,
        blocks=family.blocks,
        heads=family_lib.heads(family, model),
        remat=options.remat,
        reduce_dtype=jnp.float32,
    )
    return _random(partition.abstract_state), train_step


def _random(abstract_state: Any) -> Any:
    """Returns a state with random weights and moments of 0, made leaf by leaf where each is stored."""
    import jax
    import numpy as np

    from zerojax import tree

    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(1 << 24) * 0.02

    def value(path: str, leaf: Any) -> Any:
        if {"mu", "nu"} & set(path.split("/")) or leaf.size < 8:
            array = np.zeros(leaf.shape, leaf.dtype)
        elif len(leaf.shape) == 1:
            array = np.ones(leaf.shape, leaf.dtype)
        else:
            array = np.resize(drawn.astype(leaf.dtype), leaf.size).reshape(leaf.shape)
        return jax.block_until_ready(jax.device_put(array, leaf.sharding))

    return tree.map_with_path(value, abstract_state)


def _tokens(options: argparse.Namespace, vocab_size: int) -> Any:
    import numpy as np

    leading = (options.accum,) if options.accum > 1 else ()
    shape = (*leading, options.micro_batch, options.seq_len + 1)
    return np.random.default_rng(1).integers(0, min(1000, vocab_size), shape).astype(np.int32)


if __name__ == "__main__":
    print(main(parser.parse_args()), flush=True)
