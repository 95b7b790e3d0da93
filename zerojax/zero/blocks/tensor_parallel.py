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
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax import errors, roles, specs, tree
from zerojax import mesh as mesh_lib
from zerojax.errors import UserError
from zerojax.zero.blocks import hooks, intercept, ring_matmuls
from zerojax.zero.weights import placement

# Ordered: (regex over full module paths, spec) of the array that a module returns, or the first of several. A third entry is the spec
# inside the module: its floating positional arguments arrive, and its result leaves, sharded as outside. A spec that
# names one axis for both first dims, ("model", "model"), shards the one that `mesh.dim_of_rest` chooses. A fourth entry is a regex over
# the paths of weights inside the module: with these alone it treats each example on its own, so examples may travel along a ring
# (`ring_matmuls`).
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
      placements: of the weights of modules that may run in rings, by path.
    """

    def __init__(self, table: Table, mesh: Mesh, placements: Mapping[str, placement.Placement]):
        self._table = [(re.compile(row[0]), [tuple(spec) for spec in row[1:3]], row[3:]) for row in table]
        self._mesh, self._placements = mesh, placements
        self._is_entered = self._in_ring = self._is_found = False
        self._rows: dict[str, Any] = {}  # the row of each module that was called, by its path; None for no row
        # whether a module has run in a ring, by the regex of the row that asks for one
        self._has_run: dict[str, bool] = {}

    @contextlib.contextmanager
    def known(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        if self._is_entered:  # around the loss; a block that is traced alone enters it itself
            yield
            return
        self._is_entered = True
        try:
            with nn.intercept_methods(self._intercept):
                yield
            if not self._is_found:
                first = self._table[0][0].pattern
                raise UserError(
                    f"activations: no row matches a module of Linen called in the loss, and the first is {first!r}; rows begin with "
                    "a regex over full module paths such as 'layer_\\d+/mlp'; omit them for NNX, which overrides alone shard"
                )
            for pattern in (pattern for pattern, has_run in self._has_run.items() if not has_run):
                warnings.warn(
                    f"activations: no module that {pattern!r} matches runs in a ring, which takes examples that the axis divides, plain "
                    "weights that it shards, and no random keys; omit the ring",
                    stacklevel=2,
                )
        finally:
            self._is_entered = False

    def _intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name != "__call__":
            return call(*args, **kwargs)
        path = "/".join(module.path)
        row = self._rows[path] = self._row(path)
        if row is None:
            return call(*args, **kwargs)
        regex, given, weights = row
        self._is_found = True
        outside, inside = given[0], given[-1]
        if self._in_ring:
            _shard_features(module, outside, self._mesh)
            return call(*args, **kwargs)
        if weights and self._placements:
            specs_of = self._specs_in_ring(module, weights[0], args, kwargs)
            self._has_run[regex.pattern] = bool(specs_of) or self._has_run.get(regex.pattern, False)
            if specs_of:
                return self._around(module, specs_of, args, kwargs)
        if len(given) > 1:
            args = tuple(self._moved(arg, outside, inside) if _is_floating(arg) else arg for arg in args)
        result = call(*args, **kwargs)
        if isinstance(result, tuple) and result and _is_floating(result[0]):
            return (self._moved(result[0], inside, outside), *result[1:])
        return self._moved(result, inside, outside) if _is_floating(result) else result

    def are_alike(self, first: str, path: str) -> bool:
        called = ((own, row) for own, row in self._rows.items() if own == first or own.startswith(f"{first}/"))
        return all(self._row(path + own.removeprefix(first)) is row for own, row in called)

    def _row(self, path: str) -> Any:
        """Returns the row that holds for a module; None for none."""
        return next((row for row in self._table if row[0].fullmatch(path)), None)

    def _specs_in_ring(self, module: nn.Module, pattern: str, args: tuple, kwargs: dict) -> dict[str, P]:
        """Returns the specs of a module's weights over the axis of a ring that it may run in; {} if it may not.

        It may not with random keys, which would be the same for all examples, with arguments that are of no example, with modules from
        elsewhere, and with weights that the row does not know or that are not sharded. A norm of one head serves all heads, and one matrix
        of an adapter is not sharded.
        """
        axes, scope, examples = mesh_lib.rest(), module.scope, [arg for arg in args if _is_floating(arg)]
        assert scope is not None
        if len(axes) != 1 or scope.rngs or not intercept.is_plain(module) or not module.variables or not examples:
            return {}
        arrays, number = tree.NonArrays().take((args, kwargs)), len(examples[0])
        if any(array.ndim == 0 or len(array) != number for array in arrays) or mesh_lib.dim_of_rest(examples[0].shape):
            return {}
        if number % mesh_lib.ways_of_rest() or sum(map(_is_floating, arrays)) != len(examples):
            return {}
        found = {}
        for name, weight in tree.flatten(module.variables["params"]):
            placed = self._placements.get("/".join(("params", *module.path, name)))
            if placed is None or not _is_floating(weight) or not re.fullmatch(pattern, name):
                return {}
            found[name] = specs.only(placed.used.spec, axes)
            serves_all = re.search(r"/lora_[ab]$", name) or (name.endswith("_norm/scale") and weight.ndim == 1)
            if not specs.axes(found[name]) and not serves_all:
                return {}
        return found

    def _around(self, module: nn.Module, specs_of: Mapping[str, P], args: tuple, kwargs: dict) -> Any:
        """Runs a module in a ring (`ring_matmuls`): its floating arguments travel, and what it returns is summed."""
        (axis,), given, result, params = mesh_lib.rest(), tree.NonArrays(), tree.NonArrays(), module.variables["params"]
        arrays, weights, alone = given.take((args, kwargs)), dict(tree.flatten(params)), module.clone(parent=None)
        dtype = next(iter(weights.values())).dtype
        ring = ring_matmuls.RingOfExamples(axis, mesh_lib.ways_of_rest(), mesh_lib.platform(self._mesh), dtype)

        def of_examples(
            weights: Mapping[str, jax.Array], own: list[jax.Array], rows: list[jax.Array]
        ) -> list[jax.Array]:
            of_own, of_rows = iter(own), iter(rows)
            args, kwargs = given.give(next(of_own if _is_floating(array) else of_rows) for array in arrays)
            own_params = jax.tree.unflatten(jax.tree.structure(params), [*weights.values()])
            with intercept.bound(alone, module.path, own_params) as own_module:
                self._in_ring = True
                try:
                    return result.take(own_module(*args, **kwargs))
                except flax.errors.ScopeParamShapeError as error:
                    raise UserError(
                        f"activations: {'/'.join(module.path)} runs in a ring, and a module in it has other features than its weight there "
                        f"({errors.one_line(error, 160)}); shard these features by overrides and by a row of that module alike, or omit "
                        "the fourth entry of the ring's row"
                    ) from error
                finally:
                    self._in_ring = False

        run = mesh_lib.manual_over_rest(
            functools.partial(ring_matmuls.around, of_examples, ring),
            in_specs=(specs_of, P(axis), P()),
            out_specs=P(axis),
        )
        wide = {name: weight.astype(jnp.float32) for name, weight in weights.items()}
        moves = [_is_floating(array) for array in arrays]
        own, rows = ([array for array, is_own in zip(arrays, moves) if is_own is kind] for kind in (True, False))
        return result.give(run(wide, own, rows))

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


def _shard_features(module: nn.Module, spec: tuple, mesh: Mesh) -> None:
    """Makes a module return this device's part of its features, [examples, tokens, *features], as its weights are sharded in a ring."""
    features = getattr(module, "features", None)
    if features is not None:
        dims = features if isinstance(features, tuple) else (features,)
        ways = [mesh_lib.size(mesh, specs.names(entry)) for entry in (*spec[2:], *(None,) * len(dims))]
        own = tuple(dim // number for dim, number in zip(dims, ways))
        object.__setattr__(module, "features", own if isinstance(features, tuple) else own[0])


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


def hooks_of(
    table: Table, mesh: Mesh, placements: Mapping[str, placement.Placement] = types.MappingProxyType({})
) -> hooks.Hooks:
    """Returns the hooks that a table asks for on a mesh. Modules whose weights are among `placements` may run in rings.

    Raises:
      UserError: a row has no regex or no spec, or names an axis that the compiler does not shard.
    """
    kept = []
    for row in table:
        try:
            pattern, given, weights = row[0], row[1:3], row[3:]
            assert isinstance(pattern, str) and len(weights) <= 1
            re.compile(pattern)
            _ = [re.compile(pattern) for pattern in weights]
            axes = set().union(*(specs.axes(P(*entries)) for entries in given))
            assert given
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
    return (ShardedActivations(kept, mesh, placements),) if kept else ()
