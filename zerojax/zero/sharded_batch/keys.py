"""Gives each device and each pass random numbers of its own. This module folds their index into the random keys of a loss function.

A loss function that draws with one key on all devices draws the same mask for the examples of each. Keys are known in four ways:

- by their dtype, in the state and in the batch (`jax.random.key`);
- by their use: raw words (uint32[2]) that the loss passes to `jax.random`. A counter of the same shape is left alone;
- as the field `rng` of `zerojax.TrainState`;
- where Flax draws: whatever key the loss gave to `Module.apply(..., rngs=...)` of Linen or to `nnx.Rngs`.

For the last, this module puts functions of its own in the place of two of Flax: the one that makes the root scope of every `apply` and
`bind`, before any module has a scope of its own, and the one by which a stream of `nnx.Rngs` draws. Outside of `folded_in_flax` and
`stream` they are Flax's. Calls to modules could be intercepted without that, but then a module has copied the keys into those that are
its attributes.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import flax.core
import flax.core.scope
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.scope import LazyRng

from zerojax import specs, traces, train_state, tree
from zerojax.train_state import State
from zerojax.tree import Leaf, PyTree
from zerojax.zero.sharded_batch import dependence, inputs

Paths = tuple[Collection[str], Collection[str]]  # of random keys in the state, and in the batch


def own(program: Callable[[], dependence.TracedLoss], layout: inputs.Layout, batch: PyTree, state: State) -> Paths:
    """Returns the paths of the random keys in a state, and of those in a batch that are the same for all examples."""
    shared = {path for path, spec in tree.flatten(layout.specs(batch), is_leaf=inputs.is_spec) if not specs.axes(spec)}
    return _find(state, lambda: program().keys()[0]), _find(batch, lambda: program().keys()[1]) & shared


def _find(values: PyTree, used_raw: Callable[[], Collection[str]]) -> frozenset[str]:
    """Returns the paths of random keys in a state or a batch.

    Args:
      values: the state or the batch.
      used_raw: returns the paths of raw words that the loss uses as keys; called if a leaf may be one.
    """
    found = {path for path, leaf in tree.flatten(values) if tree.is_key(leaf)}
    raw = {path for path, leaf in tree.flatten(values) if _may_be_raw(leaf)}
    if isinstance(values, train_state.TrainState) and "rng" in raw:
        raw.remove("rng")
        found.add("rng")
    return frozenset(found | (raw & set(used_raw()) if raw else set()))


def fold(values: PyTree, paths: Collection[str], number: jax.Array) -> PyTree:
    """Returns the values with `number` (int32[]) folded into the keys of these paths."""

    def one(path: str, leaf: Leaf) -> Leaf:
        if path not in paths:
            return leaf
        width = 0 if tree.is_key(leaf) else 1  # dims of a key's words
        keys = leaf.reshape(-1, *leaf.shape[leaf.ndim - width :])
        several = keys.shape[0] > 1
        found = (
            jax.vmap(jax.random.fold_in, (0, None))(keys, number) if several else jax.random.fold_in(keys[0], number)
        )
        return found.reshape(leaf.shape)

    return tree.map_with_path(one, values) if paths else values


def folded_in_flax(*numbers: jax.Array) -> contextlib.AbstractContextManager[None]:
    """Folds numbers (int32[]) into the keys that Linen and NNX draw with inside, once for each `apply` and each draw of a stream.

    The weights of an `init` inside stay equal on all devices.
    """
    return folding((*numbers, *_numbers.get()))


def folding(numbers: tuple[Any, ...]) -> contextlib.AbstractContextManager[None]:
    """Makes `numbers` those that `folded_in_flax` folds, in place of others. A block that is traced on its own has them as inputs."""
    return _holding(_numbers, numbers)


def stream(name: str, key: jax.Array | None) -> contextlib.AbstractContextManager[None]:
    """Gives every `apply` of Linen inside a random stream of this name, unless it has one; `numbers` are folded in. None: no stream."""
    others = {other: own for other, own in _streams.get().items() if other != name}
    return _holding(_streams, others if key is None else {**others, name: key})


def has_stream(name: str) -> bool:
    """Returns whether `stream` gives a stream of this name here."""
    return name in _streams.get()


def numbers() -> tuple[Any, ...]:
    """Returns the numbers that are folded into the keys of Flax here."""
    return _numbers.get()


def folded(key: jax.Array) -> jax.Array:
    """Returns a random key with `numbers` folded in."""
    for number in _numbers.get():
        key = jax.random.fold_in(key, number)
    return key


_numbers: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("zerojax_key_numbers", default=())
_streams: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("zerojax_streams", default={})  # noqa: B039
# A jitted function is traced anew for other numbers and streams.
_traces, _trace_numbers = jax.make_user_context(0), itertools.count(1)
_bind, _draw = flax.core.scope.bind, nnx.RngStream.__call__


@contextlib.contextmanager
def _holding(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    with traces.held(variable, value), _traces(next(_trace_numbers)):
        yield


def _bind_folded(variables: PyTree, rngs: Any = None, mutable: Any = False, flags: Mapping | None = None) -> Any:
    scope = _bind(variables, rngs=rngs, mutable=mutable, flags=flags)
    if scope.flags.get("initializing"):
        return scope
    if _numbers.get():
        scope.rngs = {name: LazyRng(folded(lazy.rng), lazy.suffix) for name, lazy in scope.rngs.items()}
    for name, key in _streams.get().items():
        if name not in scope.rngs:
            scope.rngs = {**scope.rngs, name: LazyRng.create(folded(key))}
            scope.rng_counters.setdefault(name, 0)
    return scope


flax.core.scope.bind = flax.core.bind = _bind_folded
nnx.RngStream.__call__ = lambda stream: folded(_draw(stream))  # type: ignore[method-assign, assignment]


def _may_be_raw(leaf: Leaf) -> bool:
    return leaf.dtype == jnp.uint32 and leaf.shape[-1:] == jax.eval_shape(jax.random.PRNGKey, 0).shape
