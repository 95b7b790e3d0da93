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
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import flax.core
import flax.errors
import flax.linen as nn
import jax
from flax import nnx
from flax.traverse_util import unflatten_dict

from zerojax import tree
from zerojax.tree import Leaf, PyTree
from zerojax.zero.blocks import (
    alike,
    block_keys,
    block_settings,
    lifted_blocks,
    marks,
    nnx_blocks,
    remat,
    traced_blocks,
)
from zerojax.zero.blocks import stored as stored_lib

# run(body, params, arrays, policy, own) -> outputs, with body(used params, *arrays) -> outputs; `params` are by path in the model, and
# `own` is what is the block's own among blocks that are alike, or None.
Run = Callable[[Callable[..., Any], dict[str, Any], list[jax.Array], remat.Policy, alike.AlikeBlock | None], Any]


def by_block(loss_fn: Callable[..., Any], stored: stored_lib.Stored) -> Callable[..., Any]:
    """Returns `loss_fn` as a function of stored weights, whose blocks gather their own.

    With `stored.run` the loss gets gathered arrays, and a block finds its shards by the identity of these arrays. This relies on JAX
    passing a traced array on as the same Python object. Where it does not, and where no call to a block is found, its trace is cut at its
    blocks (`traced_blocks`); a warning reports the weights that stay gathered.
    """
    gather_leaf, run, is_weight = stored.gather_leaf, stored.run, stored.is_weight

    def loss_of_stored(params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        stacks = set[str]()
        while True:
            inside, outer = begun(stacks, params)
            own_args, own_kwargs = of_this_trace((args, kwargs))
            of_nnx = nnx_blocks.intercepted(inside, params, outer) if holds_nnx(params) else contextlib.nullcontext()
            try:
                with inside.intercepting(), of_nnx:
                    result = loss_fn(outer, *own_args, **own_kwargs)
            except lifted_blocks.StackFound as found:
                assert run is not None and found.path not in stacks
                stacks.add(found.path)
                run.restart()
            else:
                paths = [path for path, _ in tree.flatten(params, is_weight)]
                if inside.reads_outside(paths, moves=stored.moves):
                    of_trace = in_trace(loss_fn, stored, params, args, kwargs)
                    if of_trace is not None:
                        return of_trace
                inside.check_found(paths, moves=stored.moves)
                return result

    def begun(stacks: set[str], params: PyTree) -> tuple[Interceptor, Any]:
        # The stored weight that a gathered array was made from, by the array's identity; holds the array, so that no other takes its id.
        made: dict[int, tuple[Any, tuple[str, Any]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}

        def stored_of(array: Leaf) -> tuple[str, Any] | None:
            found = made.get(id(array))
            return found and found[1]

        layers = lifted_blocks.Stacks(stacks) if stacks else None
        inside = Interceptor(
            stored.how,
            gather_leaf,
            stored.policy,
            run=run,
            stored_of=stored_of if run else None,
            is_leaf=is_weight,
            shape_of=shapes.get if run else None,
            stacks=layers,
            made_of=stored_of,
        )

        def gather_outer(path: str, leaf: Leaf) -> Leaf:
            if not inside.owns(path):
                return gather_leaf(path, leaf)
            # XLA drops the gathered weights that only a block reads.
            gathered = leaf if run is None else run.gather_owned(path, leaf)
            made[id(gathered)] = gathered, (path, leaf)
            return gathered

        outer = tree.map_with_path(gather_outer, params, is_leaf=is_weight)
        if run is not None:
            outer = unboxed(outer)
            shapes.update({path: leaf.shape for path, leaf in tree.flatten(outer)})
        if layers:
            layers.check(params, shapes, is_leaf=is_weight)
        return inside, outer

    return loss_of_stored


def in_trace(
    loss_fn: Callable[..., Any], stored: stored_lib.Stored, params: PyTree, args: tuple, kwargs: dict
) -> PyTree | None:
    """Returns what a loss returns if its trace is cut at its blocks (`traced_blocks`); None where it cannot be."""
    how, run = stored.how, stored.run
    if nnx_blocks.variables(params) or how.recompute or how.offload or how.hooks:
        return None

    def loss_of(used: PyTree) -> PyTree:
        own_args, own_kwargs = of_this_trace((args, kwargs))
        return loss_fn(used if run is None else unboxed(used), *own_args, **own_kwargs)

    return traced_blocks.by_trace(loss_of, params, stored)


def holds_nnx(params: PyTree) -> bool:
    """Returns whether params are variables of NNX."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return any(isinstance(node, nnx.Variable) for node in nodes)


def of_this_trace(value: PyTree) -> PyTree:
    """Returns a value with copies of its NNX variables, which can only be changed in the trace that makes them."""
    return jax.tree.map(lambda leaf: leaf, value)


def unboxed(params: PyTree) -> PyTree:
    """Returns params without Linen's boxes of metadata (`nn.with_partitioning`), which constrain shardings and fail in `jax.shard_map`."""

    def is_box(node: PyTree) -> bool:
        return isinstance(node, nn.meta.AxisMetadata)

    def inside(node: PyTree) -> PyTree:
        return jax.tree.leaves(node, is_leaf=lambda part: part is not node)[0] if is_box(node) else node

    return jax.tree.map(inside, params, is_leaf=is_box)


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
      shape_of: f(path) -> the shape of the weight that the model was given at this path; None: `lifted_blocks.StackFound` is never raised.
      stacks: those of blocks that `nn.scan` or `nn.vmap` runs, as `lifted_blocks.StackFound` told.
      made_of: `stored_of` of the arrays in NNX modules, which are known by their identity in any case.
    """

    def __init__(
        self,
        how: block_settings.Blocks,
        gather_leaf: Callable[[str, Any], Any],
        policy: remat.Policy,
        *,
        run: Run | None = None,
        stored_of: Callable[[Any], tuple[str, Any] | None] | None = None,
        is_leaf: Callable[[Any], bool] | None = None,
        shape_of: Callable[[str], tuple[int, ...] | None] | None = None,
        stacks: lifted_blocks.Stacks | None = None,
        made_of: Callable[[Any], tuple[str, Any] | None] = lambda array: None,
    ):
        self._pattern = stored_lib.pattern(how)
        self.made_of = made_of
        self.marks = marks.Modules(how) if how.recompute or how.offload else None
        self._how, self._gather_leaf, self._policy, self._run = how, gather_leaf, policy, run
        self._is_leaf, self._stored_of, self._shape_of, self._stacks = is_leaf, stored_of, shape_of, stacks
        self._inside: str | None = None  # path of the block that runs
        self._root: tuple[str, ...] = ()  # path of the block's root module while it runs
        self._kinds: dict[Hashable, list[alike.AlikeBlocks]] = {}
        self._held = contextlib.ExitStack()  # while calls are intercepted
        self._claims = len(alike.claims())  # of interceptors around this one
        self.entered: set[str] = set()
        self.with_unknown: set[str] = set()  # blocks with weights for which `stored_of` returns None

    def owns(self, leaf_path: str) -> bool:
        """Returns whether a leaf is inside a block."""
        return tree.block_of(leaf_path, self._pattern) is not None

    def reads_outside(self, paths: Sequence[str], *, moves: bool) -> bool:
        """Returns whether no block was found, or, if weights are gathered, some with weights that are gathered before it."""
        return not self.entered or (moves and bool(self.with_unknown or self._lists(paths)))

    def _lists(self, paths: Sequence[str]) -> set[str]:
        uncalled = {tree.block_of(path, self._pattern) for path in paths} - {None} - self.entered
        return block_settings.lists(paths, self._pattern) & uncalled if uncalled else set()

    def check_found(self, paths: Sequence[str], *, moves: bool) -> None:
        """Raises a UserError for a regex that matched nothing, and warns of weights that stay gathered."""
        if not self.entered or (self._how.heads and not any(map(self._is_head, self.entered))):
            raise block_settings.unmatched(self._how, is_head=bool(self.entered), paths=paths)
        if moves and self.with_unknown:
            blocks = sorted(self.with_unknown)[:3]
            below = [path for path in map(tree.below_params, paths) if f"/{blocks[0]}/" in path]
            nested = f"; if those of {below[0]} are meant, blocks matches that path from its beginning" if below else ""
            warnings.warn(
                f"blocks: weights of {', '.join(blocks)} reach their block changed, or through a jax.jit or "
                f"nn.remat around it; they are gathered before it and stay gathered until the backward pass has used them{nested}",
                stacklevel=2,
            )
        if moves and (uncalled := self._lists(paths)):
            name = min(uncalled)
            warnings.warn(
                f"blocks: {name} is a list of modules, which nothing calls, so all of them are gathered at a time; write '{name}/\\d+' in "
                "its place",
                stacklevel=2,
            )
        if self.marks is not None:
            self.marks.check_found()

    @contextlib.contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercepts calls to modules in its body."""
        with self._held:
            self._held.enter_context(nn.intercept_methods(self._intercept))
            yield

    @contextlib.contextmanager
    def _resting(self) -> Iterator[None]:
        """Intercepts no call in its body, which begins where no other interceptor was added after this one."""
        self._held.close()
        try:
            yield
        finally:
            self._held.enter_context(nn.intercept_methods(self._intercept))

    def _intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs one call of one module."""
        module = context.module
        if module.scope is None or (self._inside is not None and self.marks is None):
            return call(*args, **kwargs)
        if self._inside is not None:
            return self._marked(call, args, kwargs, module)
        path = "/".join(module.path)
        if self._stacks is not None and self._stacks.begin_with(module, context.method_name):
            known = self._known(module, path)
            return self._stacks.run(module, context.method_name, args, kwargs, known, is_leaf=self._is_leaf)
        # A lifted function is a call too; the module's own methods that it calls are intercepted later.
        if not self.matches(path) or not hasattr(type(module), context.method_name):
            return call(*args, **kwargs)
        if context.method_name == "setup":
            return _set_up(call)
        known = self._known(module, path)
        if not all(known.values()) and self._shape_of is not None:
            stacks = [self._shape_of(_join(path, leaf)) for leaf in known]
            if lifted_blocks.is_layer(module.variables["params"], stacks, is_leaf=self._is_leaf):
                raise lifted_blocks.StackFound(path)
        self.enters(path, has_unknown=not all(known.values()))
        is_known = bool(known) and all(known.values())
        if self._run and is_known and is_plain(module) and not _reads_others((args, kwargs), is_field=False):
            block = _LinenBlock(module, context.method_name, known, self._is_leaf)
            return self.run_block(block, path, module.path, args, kwargs, _interceptors(call, context))
        with self._entered_as(path, module.path):  # calls inside a block, also flax's own of the lifted function, pass
            return lifted_blocks.run(
                module,
                context.method_name,
                args,
                kwargs,
                known,
                self._gather_leaf,
                functools.partial(self._inputs, path),
                self._policy_of(path),
                is_leaf=self._is_leaf,
                is_made=self._stored_of is not None,
            )

    def matches(self, path: str) -> bool:
        """Returns whether a module's path is that of a block. The model, whose path is empty, is none, whatever the regex."""
        return path != "" and self._pattern.fullmatch(path) is not None

    @property
    def is_inside(self) -> bool:
        """Returns whether a block runs."""
        return self._inside is not None

    def enters(self, path: str, *, has_unknown: bool) -> None:
        """Notes a call to a block."""
        self.entered.add(path)
        if has_unknown:
            self.with_unknown.add(path)

    def _known(self, module: nn.Module, path: str) -> lifted_blocks.Known:
        leaves = tree.flatten(module.variables.get("params", {}), is_leaf=self._is_leaf)
        if self._stored_of is None:
            return {leaf: (_join(path, leaf), value) for leaf, value in leaves}

        def find(joined: str, value: object) -> tuple[str, Any] | None:
            of_stack = self._stacks and self._stacks.layer(joined, value, self._is_leaf)
            return of_stack or self._stored_of(value)  # type: ignore[misc]

        return {leaf: find(_join(path, leaf), value) for leaf, value in leaves}

    def run_block(
        self,
        block: "_LinenBlock | nnx_blocks.Block",
        path: str,
        root: tuple[str, ...],
        args: tuple,
        kwargs: dict,
        interceptors: int | None = None,
    ) -> Any:
        """Runs a block as a function of its weights and of arrays.

        One may be alike others of whose call it is known how many interceptors of the loss run, and of these what they do.
        """
        given, names, hooks = tree.NonArrays(), list(block.known), self._how.hooks
        arrays = given.take((args, kwargs))
        claims = alike.claims()[self._claims :]
        own = None
        if isinstance(block, _LinenBlock) and interceptors == len(claims):
            own = self._own(block, path, given, arrays, [claim(path, block.leaves) for claim in claims])
        result = own.kind.result if own else tree.NonArrays()
        first, last = len(arrays), len(arrays) + len(block.inputs)
        read, form = jax.tree.flatten([hook.of_block(names) for hook in hooks])

        def body(used: Mapping[str, Any], *values: Any) -> list[Any]:
            inner_args, inner_kwargs = given.give(self._inputs(path, values[:first]))
            with contextlib.ExitStack() as around:
                around.enter_context(self._entered_as(path, root))
                if interceptors == 0 and self.marks is None:
                    around.enter_context(self._resting())
                for hook, known in zip(hooks, jax.tree.unflatten(form, values[last:])):
                    around.enter_context(hook.known(known))
                call = around.enter_context(block.bound(used, values[first:last]))
                return result.take(call(*inner_args, **inner_kwargs))

        run = self._run or lifted_blocks.by_gathers(self._gather_leaf)
        return result.give(run(body, dict(block.known), [*arrays, *block.inputs, *read], self._policy_of(path), own))

    def _own(
        self, block: "_LinenBlock", path: str, given: tree.NonArrays, arrays: list[Any], claimed: Sequence[Hashable]
    ) -> alike.AlikeBlock | None:
        """Returns what is a block's own, of a new kind if none before is alike; None if nothing is known of others."""
        if not block.root or block.inputs:
            return None
        found = alike.description(block.alone, block.method, block.leaves, given)
        if found is None:
            return None
        # What of the result is no array may depend on them
        types = tuple((array.shape, array.dtype) for array in arrays)
        kinds = self._kinds.setdefault((found, types, *claimed, self._is_head(path)), [])
        kind = next((kind for kind in kinds if self._are_alike(kind.first, path)), None)
        if kind is None:
            kind = alike.AlikeBlocks(path, tree.NonArrays())
            kinds.append(kind)
        return alike.AlikeBlock(kind, path.rpartition("/")[2], block.root)

    def _are_alike(self, first: str, path: str) -> bool:
        """Returns whether what a step adds to two blocks of equal modules is equal too."""
        marked = self.marks is None or self.marks.are_equal(first, path)
        return marked and all(hook.are_alike(first, path) for hook in self._how.hooks)

    def _inputs(self, path: str, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays that a block is called with."""
        return values if self.marks is None or self._is_head(path) else self.marks.inputs(path, values)

    def _marked(self, call: Callable, args: tuple, kwargs: dict, module: nn.Module) -> Any:
        """Runs a call inside a block."""
        assert self._inside is not None and self.marks is not None
        path = "/".join((self._inside, *module.path[len(self._root) :]))
        if path == self._inside or self._is_head(self._inside):
            return call(*args, **kwargs)
        return self.marks.call(path, call, args, kwargs, module)

    @contextlib.contextmanager
    def _entered_as(self, path: str, root: tuple[str, ...]) -> Iterator[None]:
        before = self._inside, self._root
        self._inside, self._root = path, root
        try:
            yield
        finally:
            self._inside, self._root = before

    def _policy_of(self, path: str) -> remat.Policy:
        return None if self._is_head(path) else self._policy

    def _is_head(self, path: str | None) -> bool:
        return stored_lib.is_head(self._how, path)


class _LinenBlock:
    """A call that reads the module's own params, its random keys and its inputs alone, as a function of arrays; see `nnx_blocks.Block`."""

    def __init__(self, module: nn.Module, method: str, known: lifted_blocks.Known, is_leaf: tree.IsLeaf):
        self.alone, self._path, self.method, scope = module.clone(parent=None), module.path, method, module.scope
        self._structure = jax.tree.structure(module.variables.get("params", {}), is_leaf=is_leaf)
        found = [weight for weight in known.values() if weight]
        self._names, self.known = [name for name, _ in found], dict(found)
        self.leaves, self.root = list(known), _root({leaf: weight[0] for leaf, weight in known.items() if weight})
        assert scope is not None
        self._streams = block_keys.Streams(scope) if scope.rngs else None
        self.inputs: Sequence[Any] = self._streams.words if self._streams else ()

    @contextlib.contextmanager
    def bound(self, used: Mapping[str, Any], inputs: Sequence[Any]) -> Iterator[Callable[..., Any]]:
        """Yields the method, with these weights and inputs."""
        params = jax.tree.unflatten(self._structure, [used[name] for name in self._names])
        with contextlib.ExitStack() as around:
            module = around.enter_context(bound(self.alone, self._path, params))
            if self._streams:
                around.enter_context(self._streams.running(module.scope, inputs))
            yield getattr(module, self.method)


@contextlib.contextmanager
def bound(alone: nn.Module, path: tuple[str, ...], params: PyTree) -> Iterator[Any]:
    """Yields a module without a parent as the one at a path of a model, with these params."""
    with flax.core.bind({"params": unflatten_dict({path: params})}).temporary() as scope:
        for name in path:  # inner modules and their interceptor read their path in the model
            scope = scope.push(name)
        yield alone.clone(parent=scope)


def _interceptors(call: Callable, context: nn.module.InterceptorContext) -> int | None:
    """Returns how many interceptors of the loss run in a call, as those of adapters do; None if that is not known."""
    count = 0
    while call is not context.orig_method:
        call, count = getattr(call, "__wrapped__", None), count + 1  # type: ignore[assignment]
        if call is None:
            return None
    return count


def _set_up(call: Callable) -> None:
    """Runs a block's `setup`. It fails here if it reads the block's weights, which are still sharded; the block's calls run it again."""
    with contextlib.suppress(flax.errors.ScopeParamShapeError):
        call()


def is_plain(module: nn.Module) -> bool:
    """Returns whether a call reads only the module's own params, its random keys and its inputs, and changes nothing."""
    scope = module.scope
    assert scope is not None
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
    shares = _reads_others([getattr(module, name, None) for name in fields], is_field=True)
    return not (shares or scope.mutable or set(module.variables) - {"params"})


def _reads_others(value: object, *, is_field: bool, seen: set[int] | None = None) -> bool:
    """Returns whether fields or arguments hold other values that the call reads: arrays, or modules elsewhere in the model.

    Functions and objects may hold them too: in a bound method, in a partial, in a closure, or as attributes. `seen` are those that were
    looked into.
    """
    seen = set() if seen is None else seen
    for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nn.Module)):
        if isinstance(leaf, nn.Module):
            if leaf.scope is not None:
                return True
        elif isinstance(leaf, jax.Array):
            if is_field:
                return True
        elif not isinstance(leaf, type | types.ModuleType) and id(leaf) not in seen:
            seen.add(id(leaf))
            cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or ()]
            partial = [getattr(leaf, name, None) for name in ("__self__", "func", "args", "keywords")]
            own = getattr(leaf, "__dict__", {}).values()
            parts = [part for part in (*cells, *partial, *own) if part is not None]
            if parts and _reads_others(parts, is_field=True, seen=seen):
                return True
    return False


def _root(paths: Mapping[str, str]) -> str:
    """Returns the path below which all weights of a module are, from their paths by those in the module; "" if there is none."""
    found = {path.removesuffix(f"/{leaf}") if path.endswith(f"/{leaf}") else "" for leaf, path in paths.items()}
    return found.pop() if len(found) == 1 else ""


def _join(module_path: str, leaf_path: str) -> str:
    return f"{module_path}/{leaf_path}".lstrip("/")
