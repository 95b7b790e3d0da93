"""Makes one pass of a step on each device, for a caller that adds up passes itself. This module has the forms that `explicit` has."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from zerojax import mesh as mesh_lib
from zerojax import specs, tree
from zerojax.train_state import State
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings
from zerojax.zero.gradients import accumulate, explicit
from zerojax.zero.sharded_batch import inputs, keys, outputs
from zerojax.zero.step_programs import blocks
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib


def one_pass(
    loss_fn: Callable[..., Any],
    partition: partition_lib.Partition,
    how: block_settings.Blocks,
    *,
    passes: int,
    reduce_dtype: DTypeLike | None,
    compute_dtype: DTypeLike | None,
    layout: inputs.Layout,
    runner: Callable[..., Any],
    grad_dtype: DTypeLike = jnp.float32,
    at_once: bool = True,
) -> Callable[..., Any]:
    """Returns f(params, batch, state, number) -> ((loss, aux), grads) of one pass, for a caller that adds up passes itself.

    Its arguments are those of `explicit.value_and_grad`, and:
      layout: that of one pass.
      runner: makes what runs the blocks; takes the arguments of `overlap.Chain`.
      grad_dtype: of the gradients of the weights of blocks; others are float32.
      at_once: as of `gather.Reduction`. Gradients that wait are sharded as `unsummed` until `reduced`.

    `aux` has the state's fields, the metrics as `outputs.terms` of all devices, and the weight of the pass (`outputs.objective`) if passes
    differ. `number` is int32[], the number of the pass.
    """
    marked = _with_grad_dtype(partition, how.pattern, grad_dtype)
    reduction = gather.Reduction(reduce_dtype, at_once)
    of_device = explicit.OfDevice(loss_fn, marked, how, reduction, compute_dtype, passes, runner)

    def returned(path: str, grad: jax.Array) -> jax.Array:
        # Devices differ in an unsummed gradient. A spec of `shard_map` tells that only by a sharded dim: the first, which counts devices.
        return grad[None] if reduction.waits(of_device.find(path, None)) else grad

    def of_grad(found: placement.Placement) -> NamedSharding:
        return unsummed(found) if reduction.waits(found) else found.update

    def on_device(
        program: explicit.Program, own_keys: keys.Paths, params: PyTree, batch: PyTree, state: State, number: jax.Array
    ) -> PyTree:
        of_sinks = of_device.of_sinks(program, own_keys, params)
        nothing: list[Any] = [{} for _ in how.hooks]  # no hook that reads the state runs here
        folded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if passes > 1:
            _, aux = jax.eval_shape(of_sinks, (*of_device.sinks(params), nothing), batch, state)
            batch, state = accumulate.of_pass(batch, state, own_keys, aux.get("state", {}), number)
            folded = accumulate.keys_of_pass(own_keys, aux.get("state", {}), number)
        with explicit.leaks_named(), blocks.refused_if_differentiated_otherwise(), folded:
            gradients = jax.value_and_grad(of_sinks, has_aux=True)
            (loss, aux), (grads, tokens, _) = gradients((*of_device.sinks(params), nothing), batch, state)
        grads = explicit.with_tokens((tokens, aux.pop("tokens")), grads)
        aux["metrics"] = outputs.of_all_devices(aux["metrics"])
        return (jax.lax.psum(loss, mesh_lib.SUMMED), aux), tree.map_with_path(returned, grads)

    return of_device.mapped(on_device, layout, of_grad)


def unsummed(weight: placement.Placement) -> NamedSharding:
    """Returns the sharding of a gradient that each device keeps for itself: its first dim counts devices."""
    mesh = weight.used.mesh
    own = specs.axes(weight.used.spec)
    over = tuple(axis for axis in mesh.axis_names if axis in mesh_lib.manual(mesh) and axis not in own)
    return NamedSharding(mesh, P(over, *weight.used.spec))


def reduced(
    grads: Mapping[str, jax.Array], placements: Mapping[str, placement.Placement], reduction: gather.Reduction
) -> dict[str, jax.Array]:
    """Sums over devices the gradients, by path, that passes left unsummed; others are returned as they are."""
    waiting = {path: grad for path, grad in grads.items() if reduction.waits(placements[path])}
    if not waiting:
        return dict(grads)
    mesh = placements[next(iter(waiting))].used.mesh
    axes = mesh_lib.manual(mesh)

    def on_device(grads: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = {}
        for path, grad in grads.items():
            with jax.named_scope(tree.below_params(path)):
                found[path] = gather.reduce_rest(grad[0], placements[path], reduction)
        return found

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=({path: specs.only(unsummed(placements[path]).spec, axes) for path in waiting},),
        out_specs={path: specs.only(placements[path].update.spec, axes) for path in waiting},
        axis_names=axes,
        check_vma=False,
    )
    return {**grads, **run(waiting)}


def _with_grad_dtype(
    partition: partition_lib.Partition, blocks: str, dtype: DTypeLike | None
) -> partition_lib.Partition:
    """Returns a partition in which backward passes return the gradients of the weights of blocks in `dtype`.

    Those of other weights stay float32: a table's adds up rows in float32, and an output layer's adds up chunks of tokens.
    """
    inside = re.compile(blocks)
    of_blocks = {path: own for path, own in partition.placements.items() if tree.block_of(path, inside) is not None}
    wires = {
        # Experts stay where they are; all other weights are sent plainly.
        path: dataclasses.replace(own.wire if own.is_experts else gather.PLAIN, grad_dtype=dtype)  # type: ignore[type-var]  # a Protocol
        for path, own in of_blocks.items()
        if not own.overwritten
    }
    return partition.with_wires(wires)
