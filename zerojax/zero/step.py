"""One training step: gather, gradients, clip, update, metrics. This module builds it from a loss function and a partition.

With loss scaling a step whose gradients are not all finite is skipped: only the scale changes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import mesh as mesh_lib
from zerojax import precision, tree, xla_flags
from zerojax.errors import UserError
from zerojax.zero import accumulate, explicit, placement, where_used, xla_options
from zerojax.zero import loss_scale as loss_scale_lib
from zerojax.zero import update as update_lib
from zerojax.zero.offload import kept, streamed


def make_train_step(
    loss_fn: Callable[..., Any],
    partition: Any,
    *,
    clip_norm: float = 0.0,
    grad_accum: int = 1,
    compute_dtype: Any = None,
    loss_scale: loss_scale_lib.LossScale | None = None,
    blocks: str = "",
    heads: str = "",
    remat: str = "dots",
    recompute: str = "",
    offload: str = "",
    reduce_dtype: Any = None,
    donate: bool = True,
) -> Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, compiled, from a loss function written for one device and unsharded weights.

    Args:
      loss_fn: `loss_fn(params, batch, state) -> loss`, or `-> (loss, {"state": {field: value}, "metrics": {name: value}})`, both
        keys optional, and the loss is a mean over the batch. `state` holds the other inputs of the forward pass (batch statistics,
        `step`, a random key). The returned fields replace the state's.
      partition: from `shard_train_state`. Weights that it freezes have no gradient and stay bitwise unchanged.
      clip_norm: the upper limit of the gradients' global norm; 0 for no limit.
      grad_accum: forward and backward passes a step; above 1 the batch's leaves are [grad_accum, examples, ...].
      compute_dtype: dtype of floating weights and inputs in the forward pass; None keeps them.
      loss_scale: a `DynamicLossScale` or `StaticLossScale`, for float16; the state's field `loss_scale` then holds its state. The
        optimizer gets unscaled gradients in float32.
      blocks, heads, remat, recompute, offload: see `where_used.where_used`.
      reduce_dtype: the dtype in which gradients are summed over devices. The loss function then sees one device's examples, and its
        means are averaged, as in DDP, FSDP and DeepSpeed. None: it sees the global batch, and the compiler sums in the matmuls' dtype.
      donate: whether the step reuses the old state's memory; the old state is then deleted.

    Returns:
      The step: a compiled function, or a `streamed.StreamedStep` if the partition has offloaded leaves. Its metrics are scalars: loss,
      grad_norm and the metrics that the loss function returned. With loss scaling there are also loss_scale (of this step), skipped_steps
      (so far), overflow_leaf (the index of the first gradient that was not finite, or -1) and is_exhausted. The state must have
      `params` and `apply_gradients(grads=...)`, as flax's TrainState and its subclasses do. If weights
      are frozen, `apply_gradients` gets params and gradients with `optax.MaskedNode()` in their place.

    Raises:
      UserError: settings that contradict each other or the state.

    >>> train_step = make_train_step(loss_fn, partition, clip_norm=1.0)
    >>> state, metrics = train_step(state, batch)
    """
    if grad_accum < 1:
        raise UserError(f"grad_accum: must be at least 1, and is {grad_accum}")
    compute_dtype = precision.floating("compute_dtype", compute_dtype)
    reduce_dtype = precision.floating("reduce_dtype", reduce_dtype)
    scaling = update_lib.in_step(loss_scale, partition.abstract_state)
    how = where_used.How(blocks, heads, remat, recompute, offload)
    how.check()
    gradients = _gradients(_with_aux(loss_fn, scaling), partition, how, grad_accum, reduce_dtype, compute_dtype)
    constrain = functools.partial(_constrain_for_update, partition.placements)
    updates = streamed.updates_of(partition, may_skip=loss_scale is not None)
    resident = partition if updates is None else updates.rest.partition
    update = update_lib.make(resident)

    def train_step(state: Any, batch: Any) -> tuple[Any, ...]:
        batch = precision.cast_floating(_shard_batch(partition.mesh, batch, grad_accum), compute_dtype)
        with jax.named_scope("gradients"):
            (_, aux), grads = gradients(state.params, batch, state)
        with jax.named_scope("clip"):
            grads, unscale = constrain(grads), 1.0 / scaling.scale(state)
            squares = jax.tree.map(lambda g: _sum_of_squares(g, unscale), grads, is_leaf=placement.is_frozen)
            norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
            # A norm of 0 gives inf, and so 1.
            factor = unscale * jnp.minimum(1.0, clip_norm / norm) if clip_norm else unscale
            verdict = scaling.verdict(squares)
        with jax.named_scope("update"):
            own, after = resident.trainable_part(grads), state.replace(**aux.get("state", {}))
            new_state = update(state, after, own, factor, verdict.finite, numbers=updates and updates.rest.numbers)
            new_state, scaling_metrics = scaling.adjust(new_state, verdict)
            # Cast and add on the shards, then gather, so that 16-bit params are sent.
            new_state = new_state.replace(params=constrain(new_state.params))
        metrics = {**aux["metrics"], "grad_norm": norm, **scaling_metrics}
        return new_state, metrics, *(updates.handed(state, grads, factor, verdict.finite) if updates else ())

    step = xla_options.jit(
        train_step,
        _compiler_options(partition, blocks, reduce_dtype, compute_dtype),
        donate_argnums=(0,) if donate else (),
        in_shardings=(resident.shardings, None),
        out_shardings=(resident.shardings, None, *([updates.handed_shardings] if updates else [])),
    )
    if not donate:
        kept.check_copies(partition)
    return step if updates is None else streamed.StreamedStep(step, updates, donate=donate)


def _sum_of_squares(grad: Any, unscale: jax.Array) -> jax.Array:
    """Returns float32[]; 0 for a frozen weight, which has no gradient."""
    if placement.is_frozen(grad):
        return jnp.zeros((), jnp.float32)
    if jnp.iscomplexobj(grad):
        return _sum_of_squares(grad.real, unscale) + _sum_of_squares(grad.imag, unscale)
    return jnp.sum(jnp.square(grad.astype(jnp.float32) * unscale))


def _compiler_options(partition: Any, blocks: str, reduce_dtype: Any, compute_dtype: Any) -> dict[str, Any]:
    """Returns XLA's options for a step with explicit collectives; none if the compiler inserts them."""
    if reduce_dtype is None:
        return {}
    weights = where_used.largest_block(partition.placements, blocks)
    gathered = weights * jnp.dtype(compute_dtype or jnp.float32).itemsize
    summed = weights * jnp.dtype(reduce_dtype).itemsize
    scattered = summed // partition.mesh.shape[mesh_lib.DATA]
    return xla_options.for_mesh(partition.mesh, gathered=gathered, summed=summed, kept=scattered, but=xla_flags.names())


def _gradients(
    loss_fn: Callable[..., Any], partition: Any, how: where_used.How, passes: int, reduce_dtype: Any, compute_dtype: Any
) -> Callable[..., Any]:
    """Returns f(params, batch, state) -> ((loss, aux), grads of the trainable part), summed by the compiler or by `explicit`."""
    if reduce_dtype is not None:
        return explicit.value_and_grad(
            loss_fn, partition, how, passes=passes, reduce_dtype=reduce_dtype, compute_dtype=compute_dtype
        )
    loss_of_stored = where_used.with_gathers(loss_fn, partition.placements, how, compute_dtype)

    def gradients(params: Any, batch: Any, state: Any) -> Any:
        def loss_of_part(part: Any, batch: Any, state: Any) -> tuple[Any, dict]:
            return loss_of_stored(placement.with_frozen(part, params), batch, state)

        return accumulate.value_and_grad(loss_of_part, passes)(partition.trainable_part(params), batch, state)

    return gradients


def _shard_batch(mesh: Any, batch: Any, grad_accum: int) -> Any:
    """Shards examples over replica and data."""
    dim = 0 if grad_accum == 1 else 1
    ways = mesh_lib.ways(mesh)

    def shard(path: str, leaf: Any) -> Any:
        if grad_accum > 1 and (leaf.ndim == 0 or leaf.shape[0] != grad_accum):
            raise UserError(f"batch/{path}: shape {leaf.shape} must begin with grad_accum={grad_accum}, then examples")
        if leaf.ndim <= dim:
            return leaf
        if leaf.shape[dim] % ways:
            raise UserError(
                f"batch/{path}: dim {dim} of {leaf.shape} does not divide by data * replica = {ways}; "
                f"use a multiple of {ways} examples"
            )
        return jax.lax.with_sharding_constraint(leaf, mesh_lib.batch_sharding(mesh, dim))

    return tree.map_with_path(shard, batch)


def _with_aux(loss_fn: Callable[..., Any], scaling: update_lib.Unscaled) -> Callable[..., tuple[Any, dict]]:
    """Returns a loss function that always returns (scaled loss, aux); the unscaled loss is a metric."""

    def with_aux(params: Any, batch: Any, state: Any) -> tuple[Any, dict]:
        result = loss_fn(params, batch, state)
        loss, aux = result if isinstance(result, tuple) else (result, {})
        unknown = set(aux) - {"state", "metrics"}
        if unknown:
            raise UserError(f"loss_fn: returned {sorted(unknown)} beside the loss; allowed are 'state' and 'metrics'")
        loss = loss.astype(jnp.float32)
        return loss * scaling.scale(state), {**aux, "metrics": {"loss": loss, **aux.get("metrics", {})}}

    return with_aux


def _constrain_for_update(placements: Mapping[str, placement.Placement], params_like: Any) -> Any:
    """Constrains a tree like params to the update's sharding, so that the update is local; frozen weights are unchanged."""
    index = tree.suffix_index(placements)

    def constrain(path: str, leaf: Any) -> Any:
        found = tree.longest_suffix(index, path)
        if found is None or not placements[found].trainable:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, placements[found].update)

    return tree.map_with_path(constrain, params_like)
