"""Wraps a loss function written for unsharded weights so that it takes sharded ones. This module decides when a weight is gathered.

The time of the gather determines the memory:

- By default every leaf is gathered on its own at the top of the loss. The loss runs under `jax.checkpoint` with a policy that never keeps
  a gathered weight, so the compiler gathers each again in the backward pass.
- With `blocks` (a regex over module paths) calls to the matching modules of Linen and NNX are intercepted. Each runs under its own
  `jax.checkpoint` and gathers its own weights inside it. At any time about one block's weights are gathered. Other models are traced, and
  the trace is cut at its blocks (`traced_blocks`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from zerojax import precision, tree
from zerojax.errors import UserError
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import alike, block_settings, intercept, lifted_blocks, nnx_blocks
from zerojax.zero.blocks import stored as stored_lib
from zerojax.zero.weights import gather, placement
from zerojax.zero.weights import partition as partition_lib

Loss = Callable[..., Any]


def where_used(
    loss_fn: Loss,
    placements: Mapping[str, placement.Placement],
    *,
    compute_dtype: DTypeLike | None = None,
    blocks: str | block_settings.Blocks = "",
    **fields: Any,
) -> Loss:
    """Wraps a loss function written for unsharded weights so that it takes them as they are stored.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`; differentiate the result with respect to `params`. These may be an NNX
        module; the changes that the loss makes to its other variables (batch statistics, random counts) are kept.
      placements: the shardings of each weight, by path (`Partition.placements`). Gradients of frozen weights are 0 and not computed.
      compute_dtype: the dtype of floating weights in the forward pass; None keeps the stored one.
      blocks: a `zerojax.Blocks`, or its regex alone: the modules that gather their own weights.
      **fields: other fields of `Blocks` by their own names: `heads`, `remat`, `recompute`, `offload`.

    Raises:
      UserError: `remat` is unknown; `compute_dtype` is not floating; `blocks`, `heads`, `recompute` or `offload` match no call; or a
        weight's shape is not that of its placement.

    >>> grads = jax.grad(where_used(loss_fn, partition.placements, blocks=r"layer_\\d+"))(state.params, batch)
    """
    if len({own.stored.mesh for own in placements.values()}) > 1:
        raise UserError(
            "placements: the weights are on the groups of a pipeline, and a loss by itself is one program; use make_train_step, or a mesh "
            "without `pipe`"
        )
    compute_dtype = precision.floating("compute_dtype", compute_dtype)
    how = block_settings.Blocks.of(blocks, **fields)
    for name, is_given in (("programs", how.programs != block_settings.ONE), ("activations", how.activations)):
        if is_given:
            raise UserError(f"{name}: is for make_train_step alone, which makes a whole step; omit it in where_used")
    return with_gathers(loss_fn, placements, how, compute_dtype)


def forward_only(
    function: Callable[..., Any],
    placements: Mapping[str, placement.Placement],
    *,
    compute_dtype: DTypeLike | None = None,
    blocks: str,
    heads: str = "",
) -> Callable[..., Any]:
    """Returns `where_used` of a function that is never differentiated; blocks that are alike are one nested function of its trace.

    Args:
      function, placements, compute_dtype, blocks, heads: see `where_used`. Weights without a placement are used as they are.
    """
    how, find = block_settings.Blocks(blocks, heads), _finder(placements)

    def gather_leaf(path: str, leaf: Leaf) -> Leaf:
        found = find(path, leaf)
        return leaf if found is None else gathered(leaf, found, compute_dtype)

    run = alike.ForwardOnly(gather_leaf, find)
    return wrap(function, stored_lib.Stored(gather_leaf, how, placement.moves(placements), run=run))


def _finder(placements: Mapping[str, placement.Placement]) -> Callable[[str, Any], placement.Placement | None]:
    return placement.finder(placements, lambda weight: weight.shape, lifted_blocks.of_layer)


def with_gathers(
    loss_fn: Loss,
    placements: Mapping[str, placement.Placement],
    how: block_settings.Blocks,
    compute_dtype: DTypeLike | None = None,
) -> Loss:
    """Returns `where_used` of a loss, its settings as one value."""
    find = _finder(placements)

    def gather_leaf(path: str, leaf: Leaf) -> Leaf:
        found = find(path, leaf)
        if found is None:
            return leaf
        return gathered(leaf if found.trainable else jax.lax.stop_gradient(leaf), found, compute_dtype)

    def shard_leaf(path: str, leaf: Leaf) -> tuple[Leaf, tuple[str, ...]] | None:
        found = find(path, leaf)
        if found is None or found.padding:
            return None
        in_place = dataclasses.replace(found, used=found.stored)
        return gathered(leaf if found.trainable else jax.lax.stop_gradient(leaf), in_place, compute_dtype), ()

    moves, has_stacks = placement.moves(placements), placement.has_stacks(placements)
    return wrap(loss_fn, stored_lib.Stored(gather_leaf, how, moves, has_stacks=has_stacks, shard_leaf=shard_leaf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(stored: jax.Array, placement: placement.Placement, dtype: DTypeLike | None) -> jax.Array:
    """Returns a weight gathered and in `dtype`; its gradient is reduced to `placement.grad`, in the weight's own dtype.

    `with_sharding_constraint` alone is not enough, because it transposes to itself: a weight constrained to be replicated has a gradient
    constrained to be replicated. Hence a custom_vjp.

    Args:
      stored: the weight, sharded as `placement.stored`.
      placement: the shardings of the weight and its gradient.
      dtype: the dtype of a floating weight in the forward pass; None keeps the stored one.
    """
    return _gathered_forward(stored, placement, dtype)[0]


def _gathered_forward(
    stored: jax.Array, placement: placement.Placement, dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array]:
    # Casting under the stored sharding, before the gather, halves the bytes that are sent.
    weight = gather.cast(stored, placement, dtype)
    if placement.stored != placement.used:
        weight = jax.lax.with_sharding_constraint(weight, placement.stored)
        weight = jax.lax.with_sharding_constraint(weight, placement.used)
    return gather.without_padding(weight, placement), jnp.zeros((0,), stored.dtype)


def _gathered_backward(
    placement: placement.Placement, dtype: DTypeLike | None, like: jax.Array, grad: jax.Array
) -> tuple[jax.Array]:
    grad = gather.with_padding(grad, placement)
    return (jax.lax.with_sharding_constraint(grad, placement.grad).astype(like.dtype),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def wrap(loss_fn: Loss, stored: stored_lib.Stored) -> Loss:
    """Returns `loss_fn` as a function of stored weights; see `where_used`."""
    if stored.how.pattern:
        return intercept.by_block(loss_fn, stored)
    run, policy = stored.run, stored.policy

    def at_top(params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        if stored.has_stacks:
            result = intercept.in_trace(loss_fn, stored, params, args, kwargs)
            if result is not None:
                return result
        has_nnx = intercept.holds_nnx(params)
        gather = nnx_blocks.gathered if has_nnx else tree.map_with_path

        def loss_of(leaves: PyTree) -> tuple[Any, dict[str, Any]]:
            used = gather(stored.gather_leaf, leaves, is_leaf=stored.is_weight)
            own_args, own_kwargs = intercept.of_this_trace((args, kwargs))
            before = nnx_blocks.variables(used) if has_nnx else {}
            result = loss_fn(used if run is None else intercept.unboxed(used), *own_args, **own_kwargs)
            return result, nnx_blocks.changed(used, before) if has_nnx else {}

        result, changed = (loss_of if policy is None else jax.checkpoint(loss_of, policy=policy))(params)
        if has_nnx:
            nnx_blocks.set_variables(params, changed)
        return result

    return at_top


def abstract_used(params: PyTree, partition: partition_lib.Partition, compute_dtype: DTypeLike | None) -> PyTree:
    """Returns params as the loss sees them, as ShapeDtypeStructs: gathered, without padding and boxes, in its dtype."""
    index = tree.suffix_index(partition.placements)

    def used(path: str, leaf: Leaf) -> jax.ShapeDtypeStruct:
        found = tree.longest_suffix(index, path)
        if found is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.eval_shape(
            lambda: gather.without_padding(
                gather.cast(jnp.zeros(leaf.shape, leaf.dtype), partition.placements[found], compute_dtype),
                partition.placements[found],
            )
        )

    return intercept.unboxed(tree.map_with_path(used, params))
