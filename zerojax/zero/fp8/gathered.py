"""Gathers weights in fp8. This module casts a weight's shard before it is sent, and hands the fp8 weight to the matmul that reads it.

A gather sends one byte an element, half of bf16's. The scale is that of the weight, not of the shard: the shards' largest magnitudes are
reduced over devices, those of all weights in one collective a step. A matmul takes the gathered fp8 weight, and a transposed copy of it
where the GPU wants one; no 16-bit copy is made. What else reads the weight sees these fp8 values in 16 bits.

The gradient is that of the weight: the cast has the derivative 1. It has the weight's dtype, and is reduced as any other.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import tree
from zerojax.ops import fp8
from zerojax.zero import gather, placement

WEIGHT = "kernel"
_IN_BLOCK: contextvars.ContextVar[Mapping[str, fp8.EightBits] | None] = contextvars.ContextVar("in_fp8", default=None)


def marked(partition: placement.Partition, modules: Collection[str]) -> placement.Partition:
    """Returns a partition in which the sharded kernels of these modules are gathered in fp8."""

    def mark(path: str, weight: placement.Placement) -> placement.Placement:
        below = tree.below_params(path)
        in_fp8 = below.endswith(f"/{WEIGHT}") and below.removesuffix(f"/{WEIGHT}") in modules
        return dataclasses.replace(weight, in_fp8=in_fp8 and gather.is_gathered(weight))

    return dataclasses.replace(
        partition, placements={path: mark(path, weight) for path, weight in partition.placements.items()}
    )


def scales(params: Any, find: Callable[[str, Any], placement.Placement]) -> dict[str, jax.Array]:
    """Returns the scales of the weights that are gathered in fp8, by path; call it inside `jax.shard_map` over replica and data.

    Args:
      params: the shards.
      find: f(path, shard) -> the weight's placement.
    """
    shards = {path: leaf for path, leaf in tree.flatten(params) if find(path, leaf).in_fp8}
    if not shards:
        return {}
    with jax.named_scope("fp8_scales"):
        amax = jax.lax.pmax(jnp.stack([fp8.amax_of(shard) for shard in shards.values()]), mesh_lib.DATA)
        found = fp8.scale_of_amax(amax, fp8.FORWARD)
        return {path: found[number] for number, path in enumerate(shards)}


def sent(shard: jax.Array, scale: jax.Array, weight: placement.Placement) -> fp8.EightBits:
    """Returns a gathered weight in fp8 from this device's shard."""
    return fp8.EightBits(gather.all_gather(fp8.quantized(shard, fp8.FORWARD, scale).values, weight, None), scale)


def sink(weight: fp8.EightBits, dtype: Any) -> jax.Array:
    """Returns zeros of a weight's shape, with respect to which the loss is differentiated."""
    return jnp.zeros(weight.values.shape, dtype)


@jax.custom_vjp
def widened(weight: fp8.EightBits, sink: jax.Array) -> jax.Array:
    """Returns a gathered weight in the dtype of its sink, which gets its gradient."""
    return weight.values.astype(sink.dtype) * (1.0 / weight.scale).astype(sink.dtype)


def _backward(_: None, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, grad


widened.defvjp(lambda weight, sink: (widened(weight, sink), None), _backward)


@contextlib.contextmanager
def known(weights: Mapping[str, fp8.EightBits]) -> Iterator[None]:
    """Makes a block's weights in fp8, by path in the params, known to its matmuls while it is traced."""
    token = _IN_BLOCK.set(weights)
    try:
        yield
    finally:
        _IN_BLOCK.reset(token)


def of_module(path: str) -> fp8.EightBits | None:
    """Returns the weight in fp8 of a module of the block that is traced, or None if it was gathered in another dtype.

    Args:
      path: the module's in the model, which may begin later than that of its params.
    """
    own = f"{path}/{WEIGHT}"
    weights = _IN_BLOCK.get() or {}
    return next((weight for name, weight in weights.items() if f"/{name}".endswith(f"/{own}")), None)
