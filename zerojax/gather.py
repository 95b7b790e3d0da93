"""Gathers split weights where they are used. This module holds the one operation that makes stage 3 work on any model.

A weight is stored split, used whole, and its gradient leaves split again:

    forward   w_used = all_gather(cast(w_stored))        2 bytes an element travel in bf16
    backward  g = reduce_scatter(g_used)                 an all-reduce where gradients stay whole

`with_sharding_constraint` alone cannot say this, because it transposes to itself: a weight constrained to be whole forces
its gradient to be whole. A custom_vjp says it (ZeRO, arXiv:1910.02054, section 5; FSDP, arXiv:2304.11277, section 3).

Where the gather happens decides the memory. `where_used` wraps a loss function that somebody wrote for whole weights:

- by default every leaf is gathered on its own at the top of the loss, and the loss runs under `jax.checkpoint` with a policy
  that never keeps a gathered weight, so the compiler gathers each again in the backward pass;
- with `blocks` (a regex over module paths) Linen calls to the matching modules are intercepted: each runs under its own
  `jax.checkpoint` and gathers its own weights inside it. At any time about one block's weights are whole.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from zerojax import tree
from zerojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one weight lives: as stored, as used in the forward pass, where its gradient goes, where its moments are.

    `padding` says how many elements longer the stored array is than what the model sees, dim by dim; () for none. `shape` is the
    stored array's; a weight of another shape is not the one meant. None fits any.
    """

    stored: NamedSharding
    used: NamedSharding
    grad: NamedSharding
    opt_state: NamedSharding
    padding: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None


# Values that are a weight moved or cast, or are cheap to move again: keeping one would keep a gathered weight.
_MOVES = frozenset(
    "sharding_constraint convert_element_type transpose reshape broadcast_in_dim squeeze slice copy copy_p "
    "expand_dims rev custom_vjp_call optimization_barrier".split()
)
_PRODUCTS = frozenset("dot_general conv_general_dilated ragged_dot ragged_dot_general".split())


def _keep_all_but_weights(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _MOVES


def _keep_products(primitive: Any, *_: Any, **__: Any) -> bool:
    # cuDNN's forward also returns the softmax statistics, so that the backward pass need not run it again.
    return primitive.name in _PRODUCTS or "dot_product_attention_fwd" in primitive.name


# What the backward pass keeps of the forward pass; the rest, gathered weights always, is computed again.
REMAT: dict[str, Callable[..., bool]] = {
    "none": _keep_all_but_weights,
    "dots": _keep_products,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(stored: jax.Array, placement: Placement, dtype: Any) -> jax.Array:
    """Returns a weight whole and in `dtype`; its gradient is reduced onto `placement.grad`, in the weight's own dtype.

    Args:
      stored: the weight as `placement.stored` lays it out.
      placement: where the weight and its gradient live.
      dtype: the dtype of a floating weight in the forward pass; None keeps the stored one.
    """
    return _gather_forward(stored, placement, dtype)[0]


def _gather_forward(stored: jax.Array, placement: Placement, dtype: Any) -> tuple[jax.Array, jax.Array]:
    # Casting under the stored sharding, before the gather, halves the bytes that travel.
    weight = stored.astype(dtype) if _casts(stored, dtype) else stored
    if placement.stored != placement.used:
        weight = jax.lax.with_sharding_constraint(weight, placement.stored)
        weight = jax.lax.with_sharding_constraint(weight, placement.used)
    if placement.padding:
        weight = jax.lax.slice(weight, (0,) * weight.ndim, [n - p for n, p in zip(weight.shape, placement.padding)])
    return weight, jnp.zeros((0,), stored.dtype)


def _gather_backward(placement: Placement, dtype: Any, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    if placement.padding:
        grad = jnp.pad(grad, [(0, extra) for extra in placement.padding])
    return (jax.lax.with_sharding_constraint(grad, placement.grad).astype(like.dtype),)


gather.defvjp(_gather_forward, _gather_backward)


def _casts(weight: jax.Array, dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(weight.dtype, jnp.floating)


def where_used(
    loss_fn: Callable[..., Any],
    placements: Mapping[str, Placement],
    *,
    compute_dtype: Any = None,
    blocks: str = "",
    remat: str = "dots",
) -> Callable[..., Any]:
    """Wraps a loss written for whole weights so that it takes them as stored.

    Args:
      loss_fn: called as `loss_fn(params, *args, **kwargs)`; differentiate the result with respect to `params`. These may be
        an NNX module, whose other variables (batch statistics, random counts) change as the loss changes them.
      placements: where each weight lives, by path (`Partition.placements`).
      compute_dtype: the dtype of floating weights in the forward pass; None keeps the stored one.
      blocks: a regex over Linen module paths ("layer_\\d+"); calls to a matching module gather their own weights and are
        rematerialised one by one. Empty: leaf by leaf at the top, and the whole loss is rematerialised by `remat`.
      remat: what the backward pass keeps: "none" (all but weights), "dots" (matrix products), "full" (nothing).

    Raises:
      UserError: an unknown `remat`, `blocks` matches no call, or a weight's shape is not that of its placement.

    >>> grads = jax.grad(where_used(loss_fn, partition.placements, blocks=r"layer_\\d+"))(state.params, batch)
    """
    if remat not in REMAT:
        raise UserError(f"remat: must be one of {', '.join(REMAT)}, and is {remat!r}")
    try:
        re.compile(blocks)
    except re.error as error:
        raise UserError(
            f"blocks: {blocks!r} is no regex: {error}; give one over module paths, such as 'layer_\\d+'"
        ) from error
    index = tree.suffix_index(placements)

    def gather_leaf(path: str, leaf: Any) -> Any:
        found = tree.longest_suffix(index, path)
        if found is None:
            return leaf
        if placements[found].shape not in (None, leaf.shape):
            raise UserError(
                f"{path}: has shape {leaf.shape}, and the weight placed as {found} has {placements[found].shape}; where several "
                f"models share a state, pass the placements of this one alone; a block inside nn.scan or nn.vmap cannot be in `blocks`"
            )
        return gather(leaf, placements[found], compute_dtype)

    moves = any(place.stored != place.used for place in placements.values())

    def whole(params: Any, *args: Any, **kwargs: Any) -> Any:
        def loss_of(stored: Any) -> tuple[Any, dict[str, Any]]:
            used = _gather_params(stored, gather_leaf)
            before = _variables(used)
            result = loss_fn(used, *args, **kwargs)
            return result, {path: value for path, value in _variables(used).items() if value is not before[path]}

        is_kept = remat == "none" and not moves
        result, changed = (loss_of if is_kept else jax.checkpoint(loss_of, policy=REMAT[remat]))(params)
        _set_variables(params, changed)
        return result

    def by_block(params: Any, *args: Any, **kwargs: Any) -> Any:
        inside = _Blocks(blocks, gather_leaf, REMAT[remat] if moves or remat != "none" else None)
        outer = tree.map_with_path(lambda path, leaf: leaf if inside.owns(path) else gather_leaf(path, leaf), params)
        with nn.intercept_methods(inside.intercept):
            result = loss_fn(outer, *args, **kwargs)
        if not inside.entered:
            raise UserError(
                f"blocks: {blocks!r} matches no Linen module called in the loss; it is a regex over module paths such as "
                f"'layer_0' or 'decoder/block_3', or '' to gather leaf by leaf"
            )
        return result

    return by_block if blocks else whole


def _is_other_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def _gather_params(stored: Any, gather_leaf: Callable[[str, Any], Any]) -> Any:
    """Gathers every leaf, save NNX variables that are no params (batch statistics, random keys): these are copied."""

    def gather_node(path: tuple, node: Any) -> Any:
        if _is_other_variable(node):
            return jax.tree.map(lambda leaf: leaf, node)
        return gather_leaf(tree.path_string(path), node)

    return jax.tree_util.tree_map_with_path(gather_node, stored, is_leaf=_is_other_variable)


def _variables(params: Any) -> dict[str, Any]:
    """Returns the values of the NNX variables that are no params, which a forward pass may change in place."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_other_variable)
    return {tree.path_string(path): node.get_raw_value() for path, node in nodes if _is_other_variable(node)}


def _set_variables(params: Any, values: Mapping[str, Any]) -> None:
    """Changes the caller's NNX module as the loss changed its copy."""
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_other_variable):
        if tree.path_string(path) in values:
            node.set_value(values[tree.path_string(path)])


class _Blocks:
    """Intercepts the outermost call of each module whose path matches, gathers its weights and rematerialises it."""

    def __init__(self, blocks: str, gather_leaf: Callable[[str, Any], Any], policy: Callable[..., bool] | None):
        self._pattern = re.compile(blocks)
        self._gather_leaf = gather_leaf
        self._policy = policy
        self._depth = 0
        self.entered: set[str] = set()

    def owns(self, leaf_path: str) -> bool:
        """Says whether a leaf lies inside a matching module."""
        parts = leaf_path.removeprefix("params/").split("/")
        return any(self._pattern.fullmatch("/".join(parts[:end])) for end in range(1, len(parts)))

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        path = "/".join(module.path)
        if self._depth or module.scope is None or not self._pattern.fullmatch(path):
            return call(*args, **kwargs)
        self.entered.add(path)
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array) or hasattr(leaf, "__array__") for leaf in leaves]

        def run(bound: nn.Module, *arrays: Any) -> Any:
            given = iter(arrays)
            filled = [next(given) if array else leaf for array, leaf in zip(is_array, leaves)]
            inner_args, inner_kwargs = jax.tree.unflatten(structure, filled)
            return getattr(bound, context.method_name)(*inner_args, **inner_kwargs)

        def gather_block(variables: Any) -> Any:
            return tree.map_with_path(lambda leaf, value: self._gather_leaf(_join(path, leaf), value), variables)

        block = nn.map_variables(run, "params", trans_in_fn=gather_block)
        if self._policy is not None:
            block = nn.remat(block, policy=self._policy)
        self._depth += 1  # calls inside a block, flax's own of `run` too, are left alone
        try:
            return block(module, *[leaf for array, leaf in zip(is_array, leaves) if array])
        finally:
            self._depth -= 1


def _join(module_path: str, leaf_path: str) -> str:
    return f"{module_path}/{leaf_path.removeprefix('params/')}"
