"""Intercepts the calls to a model's blocks. This module lets each block gather its own weights, in models that know nothing of it.

Linen lets calls be intercepted. The outermost call of each module whose path matches runs under its own `jax.checkpoint` and gathers its
weights inside it. At any time about one block's weights are gathered.

If the caller passes `run`, it gets each plain block (params and random keys, no other variables) as a function of the block's weights
and inputs, which include the keys. `run` then defines the block's forward and backward pass.

The params of the model may already be gathered. `stored_of` then returns the stored weight that an array was made from. A block takes the
stored weight if there is one. Arrays that the loss has changed or made have none, and the block uses them as they are.
"""

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import Scope
from flax.core.scope import LazyRng
from flax.traverse_util import unflatten_dict

from zerojax import tree
from zerojax.errors import UserError
from zerojax.ops import tiles
from zerojax.tree import Leaf, PyTree
from zerojax.zero import block_settings, nnx_blocks, remat
from zerojax.zero.sharded_batch import keys as keys_lib

# run(body, params, arrays, policy) -> outputs, with body(used params, *arrays) -> outputs; `params` are by path in the model.
Run = Callable[[Callable[..., Any], dict[str, Any], list[jax.Array], remat.Policy], Any]


def by_block(
    loss_fn: Callable[..., Any],
    gather_leaf: Callable[[str, Any], Any],
    how: block_settings.How,
    *,
    moves: bool,
    run: Any = None,
    is_weight: Callable[[Any], bool] = lambda leaf: False,
) -> Callable[..., Any]:
    """Returns `loss_fn` as a function of stored weights, whose blocks gather their own; its arguments are those of `where_used.wrap`.

    With `run` the loss gets gathered arrays, and a block finds its shards by the identity of these arrays. This relies on JAX passing a
    traced array on as the same Python object. Where it does not, a warning reports the weights that stay gathered.
    """
    policy = remat.policy(
        how.remat, offloads=bool(how.offload), in_place=not (how.recompute or how.offload), moves=moves
    )

    def loss_of_stored(params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        stacks: set[str] = set()
        while True:
            inside, outer = begun(stacks, params)
            before = nnx_blocks.variables(outer)
            try:
                with nn.intercept_methods(inside.intercept), nnx_blocks.intercepted(inside.intercept_nnx):
                    own_args, own_kwargs = nnx_blocks.of_this_trace((args, kwargs))
                    result = loss_fn(outer, *own_args, **own_kwargs)
            except StackFound as found:
                assert run is not None and found.path not in stacks
                stacks.add(found.path)
                run.restart()
            else:
                inside.check_found(moves=moves)
                changed = {path: own for path, own in nnx_blocks.variables(outer).items() if own is not before[path]}
                nnx_blocks.set_variables(params, changed)
                return result

    def begun(stacks: set[str], params: PyTree) -> tuple[Interceptor, Any]:
        made, shapes = _Made(), dict[str, tuple[int, ...]]()
        inside = Interceptor(
            how,
            gather_leaf,
            policy,
            run=run,
            stored_of=made.stored_of if run else None,
            nnx_stored_of=made.stored_of,
            is_leaf=is_weight,
            shape_of=shapes.get if run else None,
            stacks=stacks,
        )

        def gather_outer(path: str, leaf: Leaf) -> Leaf:
            if not inside.owns(path):
                return gather_leaf(path, leaf)
            # XLA drops the gathered weights that only a block reads.
            return made.add(leaf if run is None else gather_leaf(path, leaf), path, leaf)

        outer = tree.map_with_path(gather_outer, params, is_leaf=is_weight)
        if run is not None:
            outer = unboxed(outer)
            shapes.update({path: leaf.shape for path, leaf in tree.flatten(outer)})
        return inside, outer

    return loss_of_stored


class _Made:
    """Maps a gathered array, by its identity, to the stored weight that it was made from."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, str, Any]] = {}  # holds the array, so that no other takes its id

    def add(self, gathered: Leaf, path: str, stored: Leaf) -> Leaf:
        self._by_id[id(gathered)] = gathered, path, stored
        return gathered

    def stored_of(self, array: Leaf) -> tuple[str, Any] | None:
        found = self._by_id.get(id(array))
        return found and found[1:]


def unboxed(params: PyTree) -> PyTree:
    """Returns params without Linen's boxes of metadata (`nn.with_partitioning`), which constrain shardings and fail in `jax.shard_map`."""

    def is_box(node: PyTree) -> bool:
        return isinstance(node, nn.meta.AxisMetadata)

    def inside(node: PyTree) -> PyTree:
        return jax.tree.leaves(node, is_leaf=lambda part: part is not node)[0] if is_box(node) else node

    return jax.tree.map(inside, params, is_leaf=is_box)


class StackFound(Exception):
    """A block with this path is a layer of a stack, run by `nn.scan`. The loss is to be traced again, by an `Interceptor` that knows it."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


class Interceptor:
    """Intercepts calls to blocks.

    Args:
      how: which modules are blocks and heads, what is kept of their results, and what hooks add to modules; a plain block has the values
        that hooks read as inputs.
      gather_leaf: f(path, stored) -> used.
      policy: the `jax.checkpoint` policy of a block; None for no rematerialisation.
      run: runs plain blocks; None: all blocks are lifted by Linen.
      stored_of: f(array) -> (path, stored), or None for an unknown array. None: arrays are as stored, and their paths are the modules'.
      is_leaf: returns whether a node of the params is one stored weight.
      shape_of: f(path) -> the shape of the weight that the model was given at this path; None: `StackFound` is never raised.
      stacks: paths of blocks that `nn.scan` runs, as `StackFound` told. Their layers gather their own slices.
      nnx_stored_of: `stored_of` of the arrays in NNX modules, which are known by their identity in any case.
    """

    def __init__(
        self,
        how: block_settings.How,
        gather_leaf: Callable[[str, Any], Any],
        policy: remat.Policy,
        *,
        run: Run | None = None,
        stored_of: Callable[[Any], tuple[str, Any] | None] | None = None,
        is_leaf: Callable[[Any], bool] | None = None,
        shape_of: Callable[[str], tuple[int, ...] | None] | None = None,
        stacks: Collection[str] = (),
        nnx_stored_of: Callable[[Any], tuple[str, Any] | None] = lambda array: None,
    ):
        self._pattern = re.compile(f"(?:{how.blocks})|(?:{how.heads})" if how.heads else how.blocks)
        self._heads = re.compile(how.heads) if how.heads else None
        self._recompute, self._offload = re.compile(how.recompute), re.compile(how.offload)
        self._how, self._gather_leaf, self._policy, self._run = how, gather_leaf, policy, run
        self._is_leaf, self._stored_of, self._nnx_stored_of = is_leaf, stored_of, nnx_stored_of
        self._inside: str | None = None  # path of the block that runs
        self._root: tuple[str, ...] = ()  # path of the block's root module while it runs
        self._shape_of = shape_of
        self._path_of: dict[str, str] = {}  # the path in the params of a weight in a stack, by its path in the model
        self._stacks = re.compile("|".join(map(re.escape, stacks)) or r"(?!)")
        self._stacked = not stacks  # whether the model that runs has its stacks as they are stored
        self.entered: set[str] = set()
        self.headed: set[str] = set()
        self.recomputed: set[str] = set()
        self.offloaded: set[str] = set()
        self.with_unknown: set[str] = set()  # blocks with weights for which `stored_of` returns None

    def owns(self, leaf_path: str) -> bool:
        """Returns whether a leaf is inside a block."""
        return tree.block_of(leaf_path, self._pattern) is not None

    def check_found(self, *, moves: bool) -> None:
        """Raises a UserError for a regex that matched nothing, and warns of weights that stay gathered."""
        how = self._how
        if not self.entered:
            raise UserError(
                f"blocks: {how.blocks!r} matches no module of Linen or NNX called in the loss; it is a regex over module paths such as "
                f"'layer_0' or 'layers/3', or '' to gather leaf by leaf"
            )
        if moves and self.with_unknown:
            warnings.warn(
                f"blocks: weights of {', '.join(sorted(self.with_unknown)[:3])} reach their block changed, or through a jax.jit or "
                "nn.remat around it; they are gathered before it and stay gathered until the backward pass has used them",
                stacklevel=2,
            )
        if how.heads and not self.headed:
            raise UserError(
                f"heads: {how.heads!r} matches no module of Linen or NNX called in the loss outside of blocks; it is a regex over full "
                "module paths such as 'head', or '' for none"
            )
        for name, pattern, found in (
            ("recompute", how.recompute, self.recomputed),
            ("offload", how.offload, self.offloaded),
        ):
            if pattern and not found:
                raise UserError(
                    f"{name}: {pattern!r} matches no module called inside a block; it is a regex over full module paths "
                    f"such as 'layer_\\d+/mlp/up'"
                )
        if both := self.recomputed & self.offloaded:
            raise UserError(
                f"recompute: {how.recompute!r} and offload: {how.offload!r} both match {min(both)}, and a result is either computed again "
                "or kept in host memory; let one of them match it"
            )

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs one call of one module; for `flax.linen.intercept_methods`."""
        module = context.module
        if module.scope is None:
            return call(*args, **kwargs)
        path = "/".join(module.path)
        if self._inside is not None:
            path = "/".join((self._inside, *module.path[len(self._root) :]))
            keeps_all = path == self._inside or self._is_head(self._inside)
            is_named = self._recompute.fullmatch(path) or self._offload.fullmatch(path)
            return call(*args, **kwargs) if keeps_all or not is_named else self._inner(path, call, args, kwargs, module)
        if not self._stacked and context.method_name != "setup" and hasattr(type(module), context.method_name):
            return self._with_stacks(module, context.method_name, args, kwargs)
        # A lifted function is a call too; the module's own methods that it calls are intercepted later.
        if not self._pattern.fullmatch(path) or not hasattr(type(module), context.method_name):
            return call(*args, **kwargs)
        if context.method_name == "setup":
            return _set_up(call)
        self.entered.add(path)
        if self._is_head(path):
            self.headed.add(path)
        arrays, fill = _arrays_of((args, kwargs))
        policy = None if self._is_head(path) else self._policy
        known = self._known(module, path)
        if not all(known.values()):
            if self._is_layer(path, module):
                raise StackFound(path)
            self.with_unknown.add(path)
        elif (
            known and self._run is not None and _is_plain(module) and not _reads_others((args, kwargs), is_field=False)
        ):
            return self._run_plain(module, context.method_name, path, known, arrays, fill, policy)
        return self._lifted(module, context.method_name, path, known, arrays, fill, policy)

    def intercept_nnx(self, module: nnx.Module, call: Any, args: tuple, kwargs: dict) -> Any:
        """Runs one call of one NNX module; for `nnx_blocks.intercepted`."""

        def plain() -> Any:
            return call.__get__(module, type(module))(*args, **kwargs)

        if self._inside is not None:
            return plain()
        block = nnx_blocks.Block(module, call, self._nnx_stored_of)
        path = block.path
        if not block.known or not self._pattern.fullmatch(path):
            return plain()
        self.entered.add(path)
        if self._is_head(path):
            self.headed.add(path)
        if block.has_unknown:
            self.with_unknown.add(path)
        if nnx_blocks.holds_variables((args, kwargs)):
            raise UserError(
                f"blocks: {path} is called with an NNX module or variable, whose changes a block would lose; match other modules, or "
                "gather leaf by leaf (blocks='')"
            )
        arrays, fill = _arrays_of((args, kwargs))
        policy = None if self._is_head(path) else self._policy
        result, names, given = _Result(), list(block.known), [*arrays, *block.inputs]
        read, form = jax.tree.flatten([hook.of_block(names) for hook in self._how.hooks])

        def body(used: Mapping[str, Any], *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(self._inputs(path, values[: len(arrays)]))
            with contextlib.ExitStack() as around:
                around.enter_context(self._entered_as(path, ()))
                for hook, own in zip(self._how.hooks, jax.tree.unflatten(form, values[len(given) :])):
                    around.enter_context(hook.known(own))
                return result.take(block.run(used, list(values[len(arrays) : len(given)]), inner_args, inner_kwargs))

        def gathered(stored: dict[str, Any], *values: Any) -> list[Any]:
            return body({name: self._gather_leaf(name, weight) for name, weight in stored.items()}, *values)

        if self._run is not None:
            outputs = self._run(body, dict(block.known), [*given, *read], policy)
        else:
            outputs = nnx_blocks.rematerialised(gathered, policy)(block.known, *given, *read)
        own, changed = result.give(outputs)
        block.set_changed(changed)
        return own

    def _known(self, module: nn.Module, path: str) -> dict[str, tuple[str, Any] | None]:
        """Returns {path in the module: (path in the params, stored weight), or None if it is unknown} for a module's weights."""
        leaves = tree.flatten(module.variables.get("params", {}), is_leaf=self._is_leaf)
        if self._stored_of is None:
            return {leaf: (_join(path, leaf), value) for leaf, value in leaves}
        is_stored = self._is_leaf or (lambda value: False)  # as layers of a stack are

        def find(joined: str, value: Any) -> tuple[str, Any] | None:
            return (self._path_of[joined], value) if is_stored(value) else self._stored_of(value)  # type: ignore[misc]

        return {leaf: find(_join(path, leaf), value) for leaf, value in leaves}

    def _is_layer(self, path: str, module: nn.Module) -> bool:
        """Returns whether a block with unknown weights is a layer of a stack: each weight lacks the first dim of the one at its path."""
        leaves = tree.flatten(module.variables.get("params", {}), is_leaf=self._is_leaf)
        stacks = [self._shape_of(_join(path, leaf)) for leaf, _ in leaves] if self._shape_of else []
        return bool(stacks) and all(stack and stack[1:] == value.shape for stack, (_, value) in zip(stacks, leaves))

    def _with_stacks(self, module: nn.Module, method: str, args: tuple, kwargs: dict) -> Any:
        """Runs the model with the stacks that `nn.scan` cuts into layers as they are stored, so that each layer gathers its own slice."""
        known, result = self._known(module, "/".join(module.path)), _Result()
        stacks = {leaf: weight for leaf, weight in known.items() if weight and tree.block_of(weight[0], self._stacks)}
        self._path_of |= {_join("/".join(module.path), leaf): weight[0] for leaf, weight in stacks.items()}
        arrays, fill = _arrays_of((args, kwargs))

        def run(bound: nn.Module, *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(values)
            return result.take(getattr(bound, method)(*inner_args, **inner_kwargs))

        self._stacked = True
        try:
            as_stored = functools.partial(_as_stored, stacks, is_leaf=self._is_leaf)
            return result.give(nn.map_variables(run, "params", trans_in_fn=as_stored)(module, *arrays))
        finally:
            self._stacked = False

    def _run_plain(
        self, module: nn.Module, method: str, path: str, known: dict, arrays: list, fill: Callable, policy: remat.Policy
    ) -> Any:
        alone, module_path = module.clone(parent=None), module.path
        structure = jax.tree.structure(module.variables.get("params", {}), is_leaf=self._is_leaf)
        names, result, streams = [name for name, _ in known.values()], _Result(), _Streams(module.scope)
        given = [*arrays, *streams.words]
        read, form = jax.tree.flatten([hook.of_block(names) for hook in self._how.hooks])

        def body(used: dict[str, Any], *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(self._inputs(path, values[: len(arrays)]))
            params = jax.tree.unflatten(structure, [used[name] for name in names])

            def call(scope: Scope) -> Any:
                for name in module_path:  # inner modules and their interceptor read their path in the model
                    scope = scope.push(name)
                with streams.running(scope, values[len(arrays) : len(given)]):
                    return getattr(alone.clone(parent=scope), method)(*inner_args, **inner_kwargs)

            with contextlib.ExitStack() as around:
                around.enter_context(self._entered_as(path, module_path))
                for hook, own in zip(self._how.hooks, jax.tree.unflatten(form, values[len(given) :])):
                    around.enter_context(hook.known(own))
                return result.take(flax.core.apply(call)({"params": unflatten_dict({module_path: params})}))

        assert self._run is not None
        return result.give(self._run(body, dict(known.values()), [*given, *read], policy))

    def _lifted(
        self, module: nn.Module, method: str, path: str, known: dict, arrays: list, fill: Callable, policy: remat.Policy
    ) -> Any:
        result = _Result()

        def run(bound: nn.Module, *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(self._inputs(path, values))
            return result.take(getattr(bound, method)(*inner_args, **inner_kwargs))

        def gather_block(variables: PyTree) -> PyTree:
            def gather(leaf: str, value: Any) -> Leaf:
                weight = known.get(tree.below_params(leaf))
                return self._gather_leaf(weight[0], value) if weight else value

            return tree.map_with_path(gather, variables, is_leaf=self._is_leaf)

        block = nn.map_variables(run, "params", trans_in_fn=gather_block)
        if policy is not None:
            block = nn.remat(block, policy=policy)
        if self._stored_of is not None:
            block = nn.map_variables(
                block, "params", trans_in_fn=functools.partial(_as_stored, known, is_leaf=self._is_leaf)
            )
        with self._entered_as(path, module.path):  # calls inside a block, also flax's own of `run`, pass
            return result.give(block(module, *arrays))

    def _inputs(self, path: str, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays that a block is called with, kept in host memory if `offload` matches the block."""
        if self._is_head(path) or not self._offload.fullmatch(path):
            return values
        self.offloaded.add(path)
        return [remat.for_host(v) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in values]

    @contextlib.contextmanager
    def _entered_as(self, path: str, root: tuple[str, ...]) -> Iterator[None]:
        before = self._inside, self._root
        self._inside, self._root = path, root
        try:
            yield
        finally:
            self._inside, self._root = before

    def _inner(self, path: str, call: Callable, args: tuple, kwargs: dict, module: nn.Module) -> Any:
        """Runs a call inside a block; marks its matmuls if `recompute` matches the module, and its result if `offload` does."""
        if self._recompute.fullmatch(path):
            self.recomputed.add(path)
            result = _recomputed(call, args, kwargs, path, module)
        else:
            result = call(*args, **kwargs)
        if not self._offload.fullmatch(path):
            return result
        if tiles.is_inside():
            raise UserError(
                f"offload: {path} runs in tiles (`over_tiles`), which keep nothing for the backward pass; name modules outside of them"
            )
        self.offloaded.add(path)
        return remat.for_host(result)

    def _is_head(self, path: str | None) -> bool:
        return self._heads is not None and path is not None and bool(self._heads.fullmatch(path))


def _as_stored(known: Mapping[str, Any], variables: PyTree, *, is_leaf: tree.IsLeaf) -> PyTree:
    """Returns variables with the stored weights in place of the known ones."""

    def stored(leaf: str, value: Any) -> Leaf:
        weight = known.get(tree.below_params(leaf))
        return weight[1] if weight else value

    return tree.map_with_path(stored, variables, is_leaf=is_leaf)


def _recomputed(call: Callable, args: tuple, kwargs: dict, path: str, module: nn.Module) -> Any:
    """Runs a call whose matmuls are recomputed in the backward pass."""
    scope = module.scope
    assert scope is not None
    result, before = _Result(), jax.tree.leaves(scope.mutable_variables())

    def run() -> list[jax.Array]:
        arrays = result.take(call(*args, **kwargs))
        after = jax.tree.leaves(scope.mutable_variables())
        if len(before) != len(after) or any(old is not new for old, new in zip(before, after)):
            raise UserError(
                f"recompute: {path} changes variables (batch statistics, sown values), and cannot be recomputed; name modules inside "
                "it, or omit it"
            )
        return arrays

    return result.give(remat.not_kept(run))


def _set_up(call: Callable) -> None:
    """Runs a block's `setup`. It fails here if it reads the block's weights, which are still sharded; the block's calls run it again."""
    with contextlib.suppress(flax.errors.ScopeParamShapeError):
        call()


class _Result:
    """Passes non-arrays that a block returns (a flag, a name) around JAX's transformations, which would trace or refuse them."""

    def take(self, value: Any) -> list[Any]:
        arrays, self._fill = _arrays_of(value)
        return arrays

    def give(self, arrays: list[Any]) -> Any:
        return self._fill(arrays)


class _Streams:
    """The random streams of a block's scope. Inside the block they draw what they would draw without it, also if it is traced again.

    Attributes:
      words: inputs of the block: the words of the streams' keys, and the numbers that are folded into the keys of an `apply` inside.
    """

    def __init__(self, scope: Any):
        self._scope, self._before = scope, _copied(scope.rng_counters)
        self._lazy = dict(scope.rngs)
        keys = [lazy.rng for lazy in self._lazy.values()]
        self._impls = [
            jax.random.key_impl(key) if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) else None for key in keys
        ]
        words = [key if impl is None else jax.random.key_data(key) for key, impl in zip(keys, self._impls)]
        self.words = [*words, *keys_lib.numbers()] if words else []

    @contextlib.contextmanager
    def running(self, scope: Any, words: Sequence[jax.Array]) -> Iterator[None]:
        """Gives the streams to another scope of the same module. Afterwards the block's own scope has drawn as often."""
        count = len(self._impls)
        keys = [
            word if impl is None else jax.random.wrap_key_data(word, impl=impl)
            for word, impl in zip(words[:count], self._impls)
        ]
        scope.rngs = {name: LazyRng(key, lazy.suffix) for key, (name, lazy) in zip(keys, self._lazy.items())}
        scope.rng_counters = _copied(self._before)
        counters = scope.rng_counters
        with keys_lib.folding(tuple(words[count:])) if words else contextlib.nullcontext():
            yield
        self._scope.rng_counters.update(_copied(counters))


def _copied(counters: Any) -> Any:
    """Returns a copy of Linen's counts of draws, of a scope and those inside it."""
    return {key: _copied(count) if isinstance(count, dict) else count for key, count in counters.items()}


def _arrays_of(value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Returns the arrays in a value, and a function that replaces them by others."""
    leaves, structure = jax.tree.flatten(value)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]  # a numpy scalar may be a static argument
    others = [leaf for array, leaf in zip(is_array, leaves) if not array]

    def fill(values: PyTree) -> Any:
        arrays, rest = iter(values), iter(others)
        return jax.tree.unflatten(structure, [next(arrays if array else rest) for array in is_array])

    return [leaf for array, leaf in zip(is_array, leaves) if array], fill


def _is_plain(module: nn.Module) -> bool:
    """Returns whether a call reads only the module's own params, its random keys and its inputs, and changes nothing."""
    scope = module.scope
    assert scope is not None
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
    shares = _reads_others([getattr(module, name, None) for name in fields], is_field=True)
    return not (shares or scope.mutable or set(module.variables) - {"params"})


def _reads_others(value: Any, *, is_field: bool) -> bool:
    """Returns whether fields or arguments hold other values that the call reads: arrays, or modules elsewhere in the model.

    Functions may hold them too: in a bound method, in a partial or in a closure.
    """
    for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nn.Module)):
        if isinstance(leaf, nn.Module):
            if leaf.scope is not None:
                return True
        elif isinstance(leaf, jax.Array):
            if is_field:
                return True
        elif callable(leaf):
            cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or ()]
            partial = [getattr(leaf, name, None) for name in ("__self__", "func", "args", "keywords")]
            if any(_reads_others(part, is_field=True) for part in (*cells, *partial) if part is not leaf):
                return True
    return False


def _join(module_path: str, leaf_path: str) -> str:
    return f"{module_path}/{tree.below_params(leaf_path)}".lstrip("/")
