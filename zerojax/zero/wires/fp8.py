"""Gathers weights in fp8. This module casts a weight's shard before it is sent, and hands the fp8 weight to the matmul that reads it.

A gather sends one byte an element, half of bf16's. The scale is that of the weight, not of the shard: the shards' largest magnitudes are
reduced over devices, those of all weights in one collective a step. A matmul takes the gathered fp8 weight, and a transposed copy of it
where the GPU wants one; no 16-bit copy is made. What else reads the weight sees these fp8 values in 16 bits. Experts' matrices are sent
with the last two dims swapped too, which a shard of some experts is cast to at once: the forward pass reads these alone, the backward pass
the others (unless it computes the products again), and JAX drops the gather that a pass does not read.

The gradient is that of the weight: the cast has the derivative 1. It has the weight's dtype, and is reduced as any other.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import tree
from zerojax.ops import fp8
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib

WEIGHT = "kernel"


class BlockWeights:
    """The weights in fp8 of the block that is traced, which a step's matmuls find by the paths of their modules."""

    def __init__(self) -> None:
        self._known: Mapping[str, fp8.EightBits] = {}

    @contextlib.contextmanager
    def known(self, weights: Mapping[str, fp8.EightBits]) -> Iterator[None]:
        """Makes weights, by path in the params, known inside."""
        before, self._known = self._known, {**self._known, **weights}
        try:
            yield
        finally:
            self._known = before

    def of_module(self, path: str) -> fp8.EightBits | None:
        """Returns the weight of a module, or None if it was gathered in another dtype.

        Args:
          path: the module's in the model, which may begin later than that of its params.
        """
        return self.of_weight(f"{path}/{WEIGHT}")

    def of_weight(self, path: str) -> fp8.EightBits | None:
        """Returns the same of a weight by its own path."""
        return next((weight for name, weight in self._known.items() if f"/{name}".endswith(f"/{path}")), None)


def marked(
    partition: partition_lib.Partition, paths: Collection[str], weights: BlockWeights
) -> partition_lib.Partition:
    """Returns a partition in which blocks gather the sharded weights of these paths in fp8, as `weights` of the step's matmuls. Experts
    that live on different devices are gathered as before, if at all."""
    return partition.with_wires(
        {
            path: InFp8(weights=weights, is_stack=not path.endswith(f"/{WEIGHT}"))
            for path, weight in partition.placements.items()
            if tree.below_params(path) in paths and gather.is_gathered(weight) and not weight.is_experts
        }
    )


@dataclasses.dataclass(frozen=True)
class InFp8(gather.Plain):
    """The wire of a weight that blocks gather in fp8; see `placement.Wire`. Outside of blocks it is plain. A stack is one of experts'
    matrices."""

    weights: BlockWeights = dataclasses.field(default_factory=BlockWeights)
    is_stack: bool = False

    def known(self, shards: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Returns the weights' scales."""
        with jax.named_scope("fp8_scales"):
            amax = jax.lax.pmax(jnp.stack([fp8.amax_of(shard) for shard in shards.values()]), gather.STATE)
            found = fp8.scale_of_amax(amax, fp8.FORWARD)
            return {path: found[number] for number, path in enumerate(shards)}

    def send(
        self, shard: jax.Array, known: jax.Array, placement: placement.Placement, dtype: DTypeLike | None
    ) -> fp8.EightBits:
        values, swapped = fp8.quantized(shard, fp8.FORWARD, known).values, None
        if self.is_stack and not any(placement.stored.spec[1:]) and not placement.padding:
            # One row a matrix: XLA would send three dims as they are, in another layout, and transpose all that arrives.
            rows = values.swapaxes(1, 2).reshape(len(values), -1)
            swapped = gather.all_gather(rows, placement, None).reshape(-1, *values.shape[:0:-1])
        return fp8.EightBits(gather.all_gather(values, placement, None), known, swapped)

    def differentiated(self, sent: fp8.EightBits, dtype: DTypeLike | None) -> jax.Array:
        return jnp.zeros(sent.values.shape, dtype)  # a sink: the gradient of the fp8 array itself would be fp8

    @contextlib.contextmanager
    def used(self, path: str, sent: fp8.EightBits, differentiated: jax.Array) -> Iterator[jax.Array]:
        with self.weights.known({path: sent}):
            yield widened(sent, differentiated)


@jax.custom_vjp
def widened(weight: fp8.EightBits, sink: jax.Array) -> jax.Array:
    """Returns a gathered weight in the dtype of its sink, which gets its gradient."""
    return weight.values.astype(sink.dtype) * (1.0 / weight.scale).astype(sink.dtype)


def _backward(_: None, grad: jax.Array) -> tuple[None, jax.Array]:
    return None, grad


widened.defvjp(lambda weight, sink: (widened(weight, sink), None), _backward)
