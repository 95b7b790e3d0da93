"""Applies the tables of tensor parallelism. This module makes overrides of a family's table of weights, and a hook (`hooks.Hook`) that
shards what modules read and return.

The hook is needed: in a matmul of an activation that is sharded over tokens and a weight that is sharded over the same axis, the
compiler must know which of the two it gathers. A module's argument is gathered once, for all matmuls that read it, and a norm casts its
result before that, so that it moves 16 bits.

    forward   x' = all_gather(x)    y = reduce_scatter(y')         (Megatron-LM, arXiv:2205.05198, section 4.2.2)
    backward  dx = reduce_scatter(dx')    dy' = all_gather(dy)
"""

import contextlib
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, roles, specs, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero import hooks

# Ordered: (regex over full module paths, spec) of the array that a module returns, or the first of several. A third entry is the spec
# inside the module: its floating positional arguments arrive, and its result leaves, sharded as outside. A spec that
# names one axis for both first dims, ("model", "model"), shards the one that `mesh.dim_of_rest` chooses.
Table = Sequence[tuple]


def overrides(
    table: Sequence[tuple[str, tuple]], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, but: Collection[str] = ()
) -> tuple[list[tuple[str, tuple]], str]:
    """Returns the rows of a table of weights that hold for a model on a mesh, and a text of the weights that do not divide, "" for none.

    These stay replicated over the axis.

    Args:
      table: of weights.
      shapes: of the weights, by path.
      mesh: the devices; along an axis of size 1 nothing is sharded.
      but: regexes over paths of weights that are not this table's.
    """
    found: list[tuple[str, tuple]] = []
    whole: dict[str, dict[str, None]] = {}
    left = {path: shape for path, shape in shapes.items() if not any(re.search(pattern, path) for pattern in but)}
    for pattern, entries in table:
        own = {path: left.pop(path) for path in [*left] if re.search(pattern, path)}
        named = [mesh_lib.EXPERT if entry in mesh_lib.EXPERT else specs.names(entry) for entry in entries]
        ways = [mesh_lib.size(mesh, axes) for axes in named]
        sharded = [path for path, shape in own.items() if not any(map(operator.mod, shape, ways))]
        if max(ways) > 1 and sharded:
            all_divide = len(sharded) == len(own)
            found += [(pattern, entries)] if all_divide else [(f"{re.escape(path)}$", entries) for path in sharded]
        for path in own.keys() - {*sharded}:
            size, axes = next((size, axes) for size, number, axes in zip(own[path], ways, named) if size % number)
            text = f"{mesh_lib.text(mesh, axes)} does not divide {size}"
            whole.setdefault(text, {})[re.sub(r"\d+", "*", tree.below_params(path))] = None
    return found, "; ".join(
        f"{', '.join(sorted(paths))} stay replicated, because {text}" for text, paths in whole.items()
    )


class ShardedActivations(hooks.Hook):
    """Constrains what modules read and return. The first row that matches a module holds. What an axis does not divide stays as it is.

    Args:
      table: see `Table`.
      mesh: the devices.
    """

    def __init__(self, table: Table, mesh: Mesh):
        self._table = [(re.compile(pattern), [tuple(spec) for spec in given]) for pattern, *given in table]
        self._mesh, self._is_entered = mesh, False

    @contextlib.contextmanager
    def known(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        if self._is_entered:  # around the loss; a block that is traced alone enters it itself
            yield
            return
        self._is_entered = True
        try:
            with nn.intercept_methods(self._intercept):
                yield
        finally:
            self._is_entered = False

    def _intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name != "__call__":
            return call(*args, **kwargs)
        path = "/".join(module.path)
        given = next((given for pattern, given in self._table if pattern.fullmatch(path)), None)
        if given is None:
            return call(*args, **kwargs)
        outside, inside = given[0], given[-1]
        if len(given) > 1:
            args = tuple(self._moved(arg, outside, inside) if _is_floating(arg) else arg for arg in args)
        result = call(*args, **kwargs)
        if isinstance(result, tuple) and result and _is_floating(result[0]):
            return (self._moved(result[0], inside, outside), *result[1:])
        return self._moved(result, inside, outside) if _is_floating(result) else result

    def _moved(self, array: jax.Array, before: tuple, after: tuple) -> jax.Array:
        """Returns an array that is sharded as `before`, sharded as `after`; other dims are left to the compiler."""
        around = jax.sharding.get_abstract_mesh()
        mesh = around if around.manual_axes else self._mesh
        # Where the compiler shards examples too, they stay as it has them.
        dim = mesh_lib.dim_of_rest(array.shape) if around.manual_axes else 1
        before, after = (_one_dim(spec, 1 if dim is None else dim) for spec in (before, after))
        entries: list[list[Any]] = [[], []]
        for dim, length in enumerate(array.shape):
            pair = [entry[dim] if dim < len(entry) else None for entry in (before, after)]
            ways = max(mesh_lib.size(self._mesh, specs.names(entry)) for entry in pair)
            is_open = ways == 1 or length % ways
            for own, entry in zip(entries, pair):
                own.append(P.UNCONSTRAINED if is_open else entry)
        if all(entry is P.UNCONSTRAINED for entry in entries[0]):
            return array
        with jax.named_scope(roles.TENSOR_PARALLEL):
            return _moved(array, *(NamedSharding(mesh, P(*own)) for own in entries))


def _one_dim(spec: tuple, dim: int) -> tuple:
    """Returns a spec without the second name of an axis that it names for both first dims."""
    if len(spec) < 2 or spec[0] is None or spec[0] != spec[1]:
        return spec
    return (*(spec[0] if own == dim else None for own in (0, 1)), *spec[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(array: jax.Array, before: NamedSharding, after: NamedSharding) -> jax.Array:
    # A sum over devices that is to be scattered must not be constrained to be replicated first: it would be an all-reduce.
    if specs.axes(before.spec) and before != after:
        array = jax.lax.with_sharding_constraint(array, before)
    return jax.lax.with_sharding_constraint(array, after)


_moved.defvjp(
    lambda array, before, after: (_moved(array, before, after), None),
    lambda before, after, _, grad: (_moved(grad, after, before),),
)


def _is_floating(arg: object) -> bool:
    return isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating)


def hooks_of(table: Table, mesh: Mesh) -> hooks.Hooks:
    """Returns the hooks that a table asks for on a mesh.

    Raises:
      UserError: a row has no regex or no spec, or names an axis that the compiler does not shard.
    """
    kept = []
    for row in table:
        try:
            pattern, *given = row
            assert isinstance(pattern, str)
            re.compile(pattern)
            axes = set().union(*(specs.axes(P(*entries)) for entries in given))
            assert 1 <= len(given) <= 2
        except (re.error, TypeError, ValueError, AssertionError, OverflowError) as error:
            raise UserError(
                f"activations: each is (regex over module paths, PartitionSpec) or has a second spec, and one is {errors.shown(row)}"
            ) from error
        if unknown := axes - set(mesh_lib.COMPILER):
            raise UserError(
                f"activations: {errors.shown(row)} names {min(unknown)!r}, over which the compiler does not shard; name "
                f"{' or '.join(mesh_lib.COMPILER)}"
            )
        if mesh_lib.size(mesh, axes) > 1:
            kept.append(row)
    return (ShardedActivations(kept, mesh),) if kept else ()
