"""Drops a model's own sharding constraints where each device runs it on its own examples. This module takes out the axes of the batch.

A constraint over an axis that `jax.shard_map` has mapped has no meaning inside, and JAX refuses it. Models call
`jax.lax.with_sharding_constraint` themselves or through Flax (logical constraints, NNX's shardings), so this module puts a function of its
own in its place. Outside of `dropped` it is JAX's.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Collection, Iterator

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import specs, traces
from zerojax.tree import PyTree


@contextlib.contextmanager
def dropped(axes: Collection[str]) -> Iterator[None]:
    """Drops these axes of a mesh from the sharding constraints inside; what is left of a constraint holds."""
    with traces.held(_mapped, frozenset(axes)):
        yield


_mapped: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("zerojax_mapped_axes", default=frozenset())
_constrain = jax.lax.with_sharding_constraint


def _constrained(x: PyTree, shardings: PyTree) -> PyTree:
    axes = _mapped.get()
    found = jax.tree.leaves(shardings, is_leaf=_is_sharding)
    own = [node.spec if isinstance(node, NamedSharding) else node for node in found]
    lost = [spec for spec in own if isinstance(spec, P) and specs.axes(spec) & axes]
    if not lost:
        return _constrain(x, shardings)
    names = ", ".join(sorted(specs.axes(lost[0]) & axes))
    warnings.warn(
        f"with_sharding_constraint: {lost[0]} has no effect over {names}, because with reduce_dtype each device runs the model on its own "
        "examples; remove it, or omit reduce_dtype",
        stacklevel=2,
    )

    def constrain(node: PyTree, part: PyTree) -> PyTree:
        spec = node.spec if isinstance(node, NamedSharding) else node
        rest = specs.only(spec, specs.axes(spec) - axes) if isinstance(spec, P) else P()
        return _constrain(part, rest) if specs.axes(rest) else part

    return jax.tree.map(constrain, shardings, x, is_leaf=_is_sharding)


def _is_sharding(node: PyTree) -> bool:
    return node is None or isinstance(node, (P, NamedSharding))


jax.lax.with_sharding_constraint = _constrained
