"""Wraps a loss function written for unsharded weights so that it takes sharded ones. This module decides when a weight is gathered.

The time of the gather determines the memory:

- By default every leaf is gathered on its own at the top of the loss. The loss runs under `jax.checkpoint` with a policy that never keeps
  a gathered weight, so the compiler gathers each again in the backward pass.
- With `blocks` (a regex over module paths) Linen calls to the matching modules are intercepted. Each runs under its own `jax.checkpoint`
  and gathers its own weights inside it. At any time about one block's weights are gathered.

With explicit collectives the loss gets gathered arrays, and a block finds its shards by the identity of these arrays. This relies
on JAX passing a traced array on as the same Python object. Where it does not, a warning reports the weights that stay gathered.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import block_settings, gather, intercept, placement, remat

Loss = Callable[..., Any]


def where_used(
    loss_fn: Loss,
    placements: Mapping[str, placement.Placement],
    *,
    compute_dtype: Any = None,
    blocks: str = "",
    heads: str = "",
    remat: str = "dots",
    recompute: str = "",
    offload: str = "",
) -> Loss:
    """Wraps a loss function written for unsharded weights so that it takes them as they are stored.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`; differentiate the result with respect to `params`. These may be an NNX
        module; the changes that the loss makes to its other variables (batch statistics, random counts) are kept.
      placements: the shardings of each weight, by path (`Partition.placements`). Gradients of frozen weights are 0 and not computed.
      compute_dtype: the dtype of floating weights in the forward pass; None keeps the stored one.
      blocks: a regex over Linen module paths ("layer_\\d+"); each call to a matching module gathers its own weights and is
        rematerialised on its own. Empty: leaves are gathered one by one at the top, and `remat` applies to the whole loss function.
      heads: a regex over paths of modules that gather their own weights as blocks do, but are not rematerialised, such as an output
        projection that computes its gradients together with the loss. Empty: none.
      remat: the residuals that the backward pass keeps: "none" (all but weights), "dots" (results of matmuls), "attention" (inputs of
        blocks, and results of fused attention, whose backward pass then does not run it again), "full" (inputs of blocks).
      recompute: a regex over paths of modules inside blocks (r"layer_\\d+/mlp/up"), whose matmuls remat="dots" does not keep. Empty: none.
      offload: a regex over paths of modules inside blocks whose results are kept in pinned host memory until the backward pass, and of
        blocks whose inputs are. They
        take no device memory and are not computed again. Results that the backward pass does not read, such as that of the last matmul
        of a residual branch, are not kept. With reduce_dtype the copies overlap the arithmetic of neighbouring blocks. Without it, a
        loss that differentiates its own gradient cannot be offloaded. Empty: none.

    Raises:
      UserError: `remat` is unknown; `blocks`, `heads`, `recompute` or `offload` match no call; or a weight's shape is not that of its
        placement.

    >>> grads = jax.grad(where_used(loss_fn, partition.placements, blocks=r"layer_\\d+"))(state.params, batch)
    """
    return with_gathers(
        loss_fn, placements, block_settings.How(blocks, heads, remat, recompute, offload), compute_dtype
    )


def with_gathers(
    loss_fn: Loss, placements: Mapping[str, placement.Placement], how: block_settings.How, compute_dtype: Any = None
) -> Loss:
    """Returns `where_used` of a loss, its settings as one value."""
    find = finder(placements, lambda leaf: leaf.shape, lambda weight: weight.shape)

    def gather_leaf(path: str, leaf: Any) -> Any:
        found = find(path, leaf)
        if found is None:
            return leaf
        return gather.gather(leaf if found.trainable else jax.lax.stop_gradient(leaf), found, compute_dtype)

    return wrap(loss_fn, gather_leaf, how, moves=moves(placements))


def wrap(
    loss_fn: Loss,
    gather_leaf: Callable[[str, Any], Any],
    how: block_settings.How,
    *,
    moves: bool,
    run: Any = None,
    is_weight: Callable[[Any], bool] = lambda leaf: False,
) -> Loss:
    """Returns `loss_fn` as a function of stored weights, which `gather_leaf(path, leaf)` gathers; see `where_used`.

    Args:
      moves: whether any weight is gathered: its stored and its used sharding differ.
      run: see `intercept.Interceptor`; its `restart` is called where the loss must be traced again.
      is_weight: returns whether a node of the params is one stored weight, if stored weights are not arrays.
    """
    policy = remat.policy(how.remat, offloads=bool(how.offload), in_place=not (how.recompute or how.offload))
    keeps_all = how.remat == "none" and not moves

    def at_top(params: Any, *args: Any, **kwargs: Any) -> Any:
        def loss_of(stored: Any) -> tuple[Any, dict[str, Any]]:
            used = _gather_params(stored, gather_leaf, is_weight)
            before = variables(used)
            own_args, own_kwargs = jax.tree.map(lambda leaf: leaf, (args, kwargs))  # NNX variables belong to one trace
            result = loss_fn(used if run is None else unboxed(used), *own_args, **own_kwargs)
            return result, {path: value for path, value in variables(used).items() if value is not before[path]}

        result, changed = (loss_of if keeps_all else jax.checkpoint(loss_of, policy=policy))(params)
        _set_variables(params, changed)
        return result

    if not how.blocks:
        return at_top
    return _by_block(loss_fn, gather_leaf, how, None if keeps_all else policy, moves, run, is_weight)


def _by_block(
    loss_fn: Loss,
    gather_leaf: Callable[[str, Any], Any],
    how: block_settings.How,
    policy: Any,
    moves: bool,
    run: Any,
    is_weight: Callable[[Any], bool],
) -> Loss:
    """Returns `wrap` of a loss whose blocks gather their own weights."""

    def by_block(params: Any, *args: Any, **kwargs: Any) -> Any:
        stacks: set[str] = set()
        while True:
            inside, outer = begun(stacks, params)
            try:
                with nn.intercept_methods(inside.intercept):
                    result = loss_fn(outer, *args, **kwargs)
            except intercept.StackFound as found:
                assert run is not None and found.path not in stacks
                stacks.add(found.path)
                run.restart()
            else:
                _check_found(inside, how, moves)
                return result

    def begun(stacks: set[str], params: Any) -> tuple[intercept.Interceptor, Any]:
        made, shapes = _Made(), dict[str, tuple[int, ...]]()
        inside = intercept.Interceptor(
            how.blocks,
            how.heads,
            gather_leaf,
            policy,
            recompute=how.recompute,
            offload=how.offload,
            hooks=how.hooks,
            run=run,
            stored_of=made.stored_of if run else None,
            is_leaf=is_weight,
            shape_of=shapes.get if run else None,
            stacks=stacks,
        )

        def gather_outer(path: str, leaf: Any) -> Any:
            if not inside.owns(path):
                return gather_leaf(path, leaf)
            # XLA drops the gathered weights that only a block reads.
            return leaf if run is None else made.add(gather_leaf(path, leaf), path, leaf)

        outer = tree.map_with_path(gather_outer, params, is_leaf=is_weight)
        if run is not None:
            outer = unboxed(outer)
            shapes.update({path: leaf.shape for path, leaf in tree.flatten(outer)})
        return inside, outer

    return by_block


class _Made:
    """Maps a gathered array, by its identity, to the stored weight that it was made from."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, str, Any]] = {}  # holds the array, so that no other takes its id

    def add(self, gathered: Any, path: str, stored: Any) -> Any:
        self._by_id[id(gathered)] = gathered, path, stored
        return gathered

    def stored_of(self, array: Any) -> tuple[str, Any] | None:
        found = self._by_id.get(id(array))
        return found and found[1:]


def finder(
    placements: Mapping[str, placement.Placement],
    shape_of: Callable[[Any], Any],
    expected: Callable[[placement.Placement], Any],
) -> Callable[[str, Any], placement.Placement | None]:
    """Returns f(path, leaf) -> the placement of that weight, or None. It refuses a leaf of another shape than `expected`."""
    index = tree.suffix_index(placements)

    def find(path: str, leaf: Any) -> placement.Placement | None:
        found = tree.longest_suffix(index, path)
        if found is None:
            return None
        weight = placements[found]
        if leaf is None or weight.shape is None or shape_of(leaf) == expected(weight):
            return weight
        if tuple(shape_of(leaf)) == tuple(expected(weight)[1:]):
            return _layer(found, weight)
        raise UserError(
            f"{path}: has shape {shape_of(leaf)}, and the weight stored as {found} has {expected(weight)}; where several "
            f"models share a state, pass the placements of this one alone; a block inside nn.vmap cannot be in `blocks`"
        )

    return find


def _layer(path: str, stack: placement.Placement) -> placement.Placement:
    """Returns the placement of one layer of a stack of `nn.scan`, whose first dim counts layers."""
    if any(sharding.spec and sharding.spec[0] for sharding in (stack.stored, stack.grad, stack.update)):
        raise UserError(
            f"blocks: {path} of shape {stack.shape} is sharded on its first dim, which counts the layers of nn.scan, so no layer can be "
            f'gathered alone; pass overrides=[("{tree.below_params(path)}", PartitionSpec(None, "data"))] to shard_train_state'
        )
    if any(stack.padding[:1]):
        raise UserError(
            f"blocks: {path} is padded on its first dim, which counts the layers of nn.scan; override its spec"
        )
    assert stack.shape is not None
    shardings = {
        name: NamedSharding(
            getattr(stack, name).mesh, P(*getattr(stack, name).spec[1:]), memory_kind=getattr(stack, name).memory_kind
        )
        for name in ("stored", "used", "grad", "opt_state", "update")
    }
    return dataclasses.replace(stack, padding=stack.padding[1:], shape=stack.shape[1:], **shardings)  # type: ignore[arg-type]


def unboxed(params: Any) -> Any:
    """Returns params without Linen's boxes of metadata (`nn.with_partitioning`), which constrain shardings and fail in `jax.shard_map`."""

    def is_box(node: Any) -> bool:
        return isinstance(node, nn.meta.AxisMetadata)

    def inside(node: Any) -> Any:
        return jax.tree.leaves(node, is_leaf=lambda part: part is not node)[0] if is_box(node) else node

    return jax.tree.map(inside, params, is_leaf=is_box)


def abstract_used(params: Any, partition: placement.Partition, compute_dtype: Any) -> Any:
    """Returns params as the loss sees them, as ShapeDtypeStructs: gathered, without padding and boxes, in its dtype."""
    index = tree.suffix_index(partition.placements)

    def used(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
        found = tree.longest_suffix(index, path)
        if found is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return jax.eval_shape(
            lambda: gather.without_padding(
                gather.cast(jnp.zeros(leaf.shape, leaf.dtype), partition.placements[found], compute_dtype),
                partition.placements[found],
            )
        )

    return unboxed(tree.map_with_path(used, params))


def moves(placements: Mapping[str, placement.Placement]) -> bool:
    """Returns whether any weight is gathered: its stored and its used sharding differ."""
    return any(weight.stored != weight.used for weight in placements.values())


def variables(params: Any) -> dict[str, Any]:
    """Returns the values of the NNX variables other than params; a forward pass may change these in place."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_other_variable)
    return {tree.path_string(path): node.get_raw_value() for path, node in nodes if _is_other_variable(node)}


def _check_found(inside: intercept.Interceptor, how: block_settings.How, moves: bool) -> None:
    if not inside.entered:
        raise UserError(
            f"blocks: {how.blocks!r} matches no Linen module called in the loss; it is a regex over module paths such as "
            f"'layer_0' or 'decoder/block_3', or '' to gather leaf by leaf"
        )
    if moves and inside.with_unknown:
        warnings.warn(
            f"blocks: weights of {', '.join(sorted(inside.with_unknown)[:3])} reach their block changed, or through a jax.jit or nn.remat "
            "around it; they are gathered before it and stay gathered until the backward pass has used them",
            stacklevel=2,
        )
    if how.heads and not inside.headed:
        raise UserError(
            f"heads: {how.heads!r} matches no Linen module called in the loss outside of blocks; it is a regex over full module paths "
            "such as 'head', or '' for none"
        )
    for name, pattern, found in (
        ("recompute", how.recompute, inside.recomputed),
        ("offload", how.offload, inside.offloaded),
    ):
        if pattern and not found:
            raise UserError(
                f"{name}: {pattern!r} matches no module called inside a block; it is a regex over full module paths "
                f"such as 'layer_\\d+/mlp/up'"
            )
    if both := inside.recomputed & inside.offloaded:
        raise UserError(
            f"recompute: {how.recompute!r} and offload: {how.offload!r} both match {min(both)}, and a result is either computed again "
            "or kept in host memory; let one of them match it"
        )


def _is_other_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def _gather_params(stored: Any, gather_leaf: Callable[[str, Any], Any], is_weight: Callable[[Any], bool]) -> Any:
    """Gathers every weight; copies NNX variables other than params (batch statistics, random keys)."""

    def gather_node(path: tuple, node: Any) -> Any:
        if _is_other_variable(node):
            return jax.tree.map(lambda leaf: leaf, node)
        return gather_leaf(tree.path_string(path), node)

    def is_leaf(node: Any) -> bool:
        return _is_other_variable(node) or is_weight(node)

    return jax.tree_util.tree_map_with_path(gather_node, stored, is_leaf=is_leaf)


def _set_variables(params: Any, values: Mapping[str, Any]) -> None:
    """Sets the variables of the caller's NNX module that the loss changed in its copy."""
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_other_variable):
        if tree.path_string(path) in values:
            node.set_value(values[tree.path_string(path)])
