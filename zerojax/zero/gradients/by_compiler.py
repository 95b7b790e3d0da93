"""Runs forward and backward pass on the global batch. This module leaves the collectives to the compiler.

A model keeps its meaning whatever it computes. The sum over devices has the dtype of the backward matmul, and several passes each reduce.
The other form is `explicit`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings, intercept, where_used
from zerojax.zero.gradients import accumulate
from zerojax.zero.sharded_batch import dependence, inputs, keys, outputs, returned_state
from zerojax.zero.weights import partition as partition_lib


def value_and_grad(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    *,
    passes: int,
    compute_dtype: DTypeLike | None,
    layout: inputs.Layout,
    in_16_bits: bool = False,
) -> Callable[..., Any]:
    """Returns f(params, batch, state) -> ((loss, aux), grads of the trainable part); see `explicit.value_and_grad`."""
    _warn_of_convolutions(partition)
    loss_of_stored = where_used.with_gathers(loss_fn, partition.placements, how, compute_dtype)

    def gradients(params: PyTree, batch: PyTree, state: State) -> PyTree:
        used = functools.partial(where_used.abstract_used, params, partition, compute_dtype)
        program = functools.cache(lambda: dependence.of_loss(loss_fn, used(), batch, state, layout))
        if partition.freezes:  # a loss that trains all weights is traced once
            trained = intercept.unboxed(partition.trainable_part(params))
            dependence.refuse_unread(loss_fn, used(), batch, state, layout, trained)
        own_keys = keys.own(program, layout, batch, state) if passes > 1 else ((), ())

        def loss_of_part(inputs: tuple[Any, Any], batch: PyTree, state: State) -> tuple[Any, dict]:
            part, given = inputs
            with contextlib.ExitStack() as around:
                for hook, own in zip(how.hooks, given):
                    around.enter_context(hook.known(own))
                loss, aux = loss_of_stored(partition_lib.with_frozen(part, params), batch, state)
            loss, weight = outputs.objective(loss, passes)
            metrics = aux["metrics"] if passes == 1 else outputs.terms(aux["metrics"], state, program, passes)
            return loss, {"metrics": metrics, "state": returned_state.of_batch(aux.get("state", {}), state), **weight}

        sums = jax.value_and_grad(loss_of_part, has_aux=True)
        if passes > 1:
            sums = accumulate.value_and_grad(loss_of_part, passes, own_keys, in_16_bits=in_16_bits)
        given = [hook.inputs(state) for hook in how.hooks]
        (loss, aux), (grads, seen) = sums((partition.trainable_part(params), given), batch, state)
        fields = dict(aux["state"])
        for hook, own in zip(how.hooks, seen):
            fields |= hook.renewed(state, own)
        return (loss, {**aux, "state": fields, "metrics": outputs.values(aux["metrics"])}), grads

    return gradients


def _warn_of_convolutions(partition: partition_lib.Partition) -> None:
    """Warns of weights that look like kernels of convolutions beside others that the compiler shards.

    XLA's partitioner multiplies some of their gradients by the size of that axis (JAX 0.10 to 0.12, on CPUs, in plain `jax.jit` too).
    """
    ways = mesh_lib.size(partition.mesh, mesh_lib.COMPILER)
    found = [
        path for path, leaf in partition.leaves.items() if path in partition.placements and _is_kernel(path, leaf.shape)
    ]
    if ways > 1 and found:
        warnings.warn(
            f"overrides: without reduce_dtype XLA may make the gradient of a convolution's kernel {ways} times too large beside weights "
            f"that are sharded over {' or '.join(mesh_lib.COMPILER)}: {', '.join(found[:3])}; give reduce_dtype=jnp.float32",
            stacklevel=2,
        )


def _is_kernel(path: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a weight looks like a convolution's kernel: its first dims are small, and they are two or its path says so."""
    return len(shape) >= (3 if "conv" in path.lower() else 4) and max(shape[:-2], default=0) <= 32
