"""Gives each device and each pass random numbers of its own. This module folds their index into the random keys of a loss function.

A loss function that draws with one key on all devices draws the same mask for the examples of each. Keys are known in four ways:

- by their dtype, in the state and in the batch (`jax.random.key`);
- by their use: raw words (uint32[2]) that the loss passes to `jax.random`. A counter of the same shape is left alone;
- as the field `rng` of `zerojax.TrainState`;
- where Linen draws: whatever key the loss gave to `Module.apply(..., rngs=...)`.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core.scope import LazyRng

from zerojax import specs, train_state, tree
from zerojax.zero.sharded_batch import dependence, inputs


def is_typed(leaf: Any) -> bool:
    """Returns whether a leaf holds random keys by its dtype."""
    return jax.dtypes.issubdtype(tree.dtype_of(leaf), jax.dtypes.prng_key)


def own(
    program: Callable[[], dependence.TracedLoss], layout: inputs.Layout, batch: Any, state: Any
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the paths of the random keys in a state, and of those in a batch that are the same for all examples."""
    shared = {path for path, spec in tree.flatten(layout.specs(batch), is_leaf=inputs.is_spec) if not specs.axes(spec)}
    return _find(state, lambda: program().keys()[0]), _find(batch, lambda: program().keys()[1]) & shared


def _find(values: Any, used_raw: Callable[[], Collection[str]]) -> frozenset[str]:
    """Returns the paths of random keys in a state or a batch.

    Args:
      values: the state or the batch.
      used_raw: returns the paths of raw words that the loss uses as keys; called if a leaf may be one.
    """
    found = {path for path, leaf in tree.flatten(values) if is_typed(leaf)}
    raw = {path for path, leaf in tree.flatten(values) if _may_be_raw(leaf)}
    if isinstance(values, train_state.TrainState) and "rng" in raw:
        raw.remove("rng")
        found.add("rng")
    return frozenset(found | (raw & set(used_raw()) if raw else set()))


def fold(values: Any, paths: Collection[str], number: Any) -> Any:
    """Returns the values with `number` (int32[]) folded into the keys of these paths."""

    def one(path: str, leaf: Any) -> Any:
        if path not in paths:
            return leaf
        width = 0 if is_typed(leaf) else 1  # dims of a key's words
        keys = leaf.reshape(-1, *leaf.shape[leaf.ndim - width :])
        return (
            jax.vmap(lambda key: jax.random.fold_in(key, number))(keys).reshape(leaf.shape)
            if keys.shape[0] > 1
            else (jax.random.fold_in(keys[0], number).reshape(leaf.shape))
        )

    return tree.map_with_path(one, values) if paths else values


@contextlib.contextmanager
def folded_in_linen(number: Any) -> Iterator[None]:
    """Folds `number` into the keys of every Linen module that is applied inside, once for each `apply`."""
    done: dict[int, Any] = {}  # scopes by id; holds them, so that no other takes an id
    depth = 0

    def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal depth
        scope = context.module.scope
        if depth == 0 and scope is not None and scope.rngs and id(scope) not in done:
            done[id(scope)] = scope
            scope.rngs = {
                name: LazyRng(jax.random.fold_in(lazy.rng, number), lazy.suffix) for name, lazy in scope.rngs.items()
            }
        depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1

    with nn.intercept_methods(intercept):
        yield


def _may_be_raw(leaf: Any) -> bool:
    words = jax.eval_shape(jax.random.PRNGKey, 0).shape
    return leaf.dtype == jnp.uint32 and leaf.shape[-1:] == words
