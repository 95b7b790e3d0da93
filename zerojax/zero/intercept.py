"""Finds the calls to a model's blocks while it runs. This module lets each block gather its own weights, and the model know nothing of it.

Linen lets calls be intercepted. The outermost call of each module whose path matches runs under its own `jax.checkpoint` and gathers
its weights inside it, so at any time about one block's weights are whole.

Where the caller gives `run`, a plain block (params alone: no random keys, no other variables) is handed to it as a function of its
weights and inputs, so that forward and backward pass can be written by hand.

The model may be given weights that are whole already. `stored_of` then says of which stored weight an array was made; a block takes those
that it knows as stored, and others, which the loss has changed or made, as they are.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import numpy as np
from flax.core import Scope
from flax.traverse_util import unflatten_dict

from zerojax import tree
from zerojax.errors import UserError
from zerojax.zero import remat

Policy = Callable[..., bool] | None
# run(body, params, arrays, policy) -> outputs, with body(used params, *arrays) -> outputs; `params` are by path in the model.
Run = Callable[[Callable[..., Any], dict[str, Any], list[jax.Array], Policy], Any]


class Interceptor:
    """Intercepts calls to blocks.

    Args:
      pattern: a regex over Linen module paths that a block's matches in full.
      heads: the same for blocks that are not rematerialised; "" for none.
      gather_leaf: f(path, stored) -> used.
      policy: what a block keeps for its backward pass; None for no rematerialisation.
      recompute: a regex over paths of modules inside blocks, whose products are not kept; "" for none.
      offload: the same for modules whose results are kept in the host's memory.
      run: runs plain blocks; None lifts all of them.
      stored_of: f(array) -> (path, stored), or None where no weight is known to it; None: arrays are as stored, their paths the modules'.
      is_leaf: tells weights as stored from the trees around them.
    """

    def __init__(
        self,
        pattern: str,
        heads: str,
        gather_leaf: Callable[[str, Any], Any],
        policy: Callable[..., bool] | None,
        *,
        recompute: str = "",
        offload: str = "",
        run: Run | None = None,
        stored_of: Callable[[Any], tuple[str, Any] | None] | None = None,
        is_leaf: Callable[[Any], bool] | None = None,
    ):
        self._pattern = re.compile(f"(?:{pattern})|(?:{heads})" if heads else pattern)
        self._heads = re.compile(heads) if heads else None
        self._recompute, self._offload = re.compile(recompute), re.compile(offload)
        self._gather_leaf, self._policy, self._run, self._is_leaf = gather_leaf, policy, run, is_leaf
        self._stored_of = stored_of
        self._inside: str | None = None  # path of the block that runs
        self._root: tuple[str, ...] = ()  # path of the module that stands for it while it runs
        self.entered: set[str] = set()
        self.headed: set[str] = set()
        self.recomputed: set[str] = set()
        self.offloaded: set[str] = set()
        self.strangers: set[str] = set()  # blocks with weights that `stored_of` does not know

    def owns(self, leaf_path: str) -> bool:
        """Says whether a leaf lies inside a block."""
        return block_of(leaf_path, self._pattern) is not None

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs one call of one module; for `flax.linen.intercept_methods`."""
        module = context.module
        if module.scope is None:
            return call(*args, **kwargs)
        if self._inside is not None:
            return self._inner(call, args, kwargs, context)
        path = "/".join(module.path)
        # A lifted function is a call as well; the module's own methods that it calls come by later.
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
            self.strangers.add(path)
        elif (
            known and self._run is not None and _is_plain(module) and not _reads_others((args, kwargs), is_field=False)
        ):
            return self._by_hand(module, context.method_name, path, known, arrays, fill, policy)
        return self._lifted(module, context.method_name, path, known, arrays, fill, policy)

    def _known(self, module: nn.Module, path: str) -> dict[str, tuple[str, Any] | None]:
        """Returns for each of a module's weights, by its path in the module, its path in the params and itself as stored, or None."""
        leaves = tree.flatten(module.variables.get("params", {}))
        if self._stored_of is None:
            return {leaf: (_join(path, leaf), value) for leaf, value in leaves}
        return {leaf: self._stored_of(value) for leaf, value in leaves}

    def _by_hand(
        self, module: nn.Module, method: str, path: str, known: dict, arrays: list, fill: Callable, policy: Any
    ) -> Any:
        alone, place = module.clone(parent=None), module.path
        structure = jax.tree.structure(module.variables.get("params", {}))
        names, result = [name for name, _ in known.values()], _Result()

        def body(used: dict[str, Any], *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(values)
            params = jax.tree.unflatten(structure, [used[name] for name in names])

            def call(scope: Scope) -> Any:
                for name in place:  # modules inside, and who intercepts their calls, read their path in the model
                    scope = scope.push(name)
                return getattr(alone.clone(parent=scope), method)(*inner_args, **inner_kwargs)

            with self._entered_as(path, place):
                return result.take(flax.core.apply(call)({"params": unflatten_dict({place: params})}))

        assert self._run is not None
        return result.give(self._run(body, dict(known.values()), arrays, policy))

    def _lifted(
        self, module: nn.Module, method: str, path: str, known: dict, arrays: list, fill: Callable, policy: Any
    ) -> Any:
        result = _Result()

        def run(bound: nn.Module, *values: Any) -> list[Any]:
            inner_args, inner_kwargs = fill(values)
            return result.take(getattr(bound, method)(*inner_args, **inner_kwargs))

        def as_stored(variables: Any) -> Any:
            return tree.map_with_path(
                lambda leaf, value: known[_inside(leaf)][1] if known.get(_inside(leaf)) else value, variables
            )

        def gather_block(variables: Any) -> Any:
            def gather(leaf: str, value: Any) -> Any:
                found = known.get(_inside(leaf))
                return self._gather_leaf(found[0], value) if found else value

            return tree.map_with_path(gather, variables, is_leaf=self._is_leaf)

        block = nn.map_variables(run, "params", trans_in_fn=gather_block)
        if policy is not None:
            block = nn.remat(block, policy=policy)
        if self._stored_of is not None:
            block = nn.map_variables(block, "params", trans_in_fn=as_stored)
        with self._entered_as(path, module.path):  # calls inside a block, flax's own of `run` too, are left alone
            return result.give(block(module, *arrays))

    @contextlib.contextmanager
    def _entered_as(self, path: str, root: tuple[str, ...]) -> Iterator[None]:
        before = self._inside, self._root
        self._inside, self._root = path, root
        try:
            yield
        finally:
            self._inside, self._root = before

    def _inner(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs a call inside a block, its products or its result marked where `recompute` or `offload` names the module."""
        path = "/".join((self._inside or "", *context.module.path[len(self._root) :]))
        is_block = path == self._inside
        if is_block or self._is_head(self._inside):  # heads keep all that they compute
            return call(*args, **kwargs)
        if self._recompute.fullmatch(path):
            self.recomputed.add(path)
            result = _recomputed(call, args, kwargs, path, context.module)
        else:
            result = call(*args, **kwargs)
        if not self._offload.fullmatch(path):
            return result
        self.offloaded.add(path)
        return remat.for_host(result)

    def _is_head(self, path: str | None) -> bool:
        return self._heads is not None and path is not None and bool(self._heads.fullmatch(path))


def _recomputed(call: Callable, args: tuple, kwargs: dict, path: str, module: nn.Module) -> Any:
    """Runs a call whose matmuls the backward pass computes again."""
    scope = module.scope
    assert scope is not None
    result, before = _Result(), jax.tree.leaves(scope.mutable_variables())

    def run() -> list[jax.Array]:
        arrays = result.take(call(*args, **kwargs))
        after = jax.tree.leaves(scope.mutable_variables())
        if len(before) != len(after) or any(old is not new for old, new in zip(before, after)):
            raise UserError(
                f"recompute: {path} changes variables (batch statistics, sown values), and cannot be computed again; name modules "
                "inside it, or leave it out"
            )
        return arrays

    return result.give(remat.not_kept(run))


def block_of(leaf_path: str, pattern: re.Pattern) -> str | None:
    """Returns the path of the outermost module around a leaf that a pattern matches in full, or None."""
    parts = _inside(leaf_path).split("/")
    prefixes = ("/".join(parts[:end]) for end in range(1, len(parts)))
    return next((prefix for prefix in prefixes if pattern.fullmatch(prefix)), None)


def _set_up(call: Callable) -> None:
    """Runs a block's `setup`; where it asks for weights of its own, which are not whole here, the block's calls run it again."""
    with contextlib.suppress(flax.errors.ScopeParamShapeError):
        call()


class _Result:
    """Brings what a block returns beside arrays (a flag, a name) out of it as it is, which JAX's transformations would trace or refuse."""

    def take(self, value: Any) -> list[Any]:
        arrays, self._fill = _arrays_of(value)
        return arrays

    def give(self, arrays: list[Any]) -> Any:
        return self._fill(arrays)


def _arrays_of(value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Returns the arrays in a value, and the function that puts others in their place."""
    leaves, structure = jax.tree.flatten(value)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]  # a numpy scalar may be a static argument
    others = [leaf for array, leaf in zip(is_array, leaves) if not array]

    def fill(values: Any) -> Any:
        given, rest = iter(values), iter(others)
        return jax.tree.unflatten(structure, [next(given if array else rest) for array in is_array])

    return [leaf for array, leaf in zip(is_array, leaves) if array], fill


def _is_plain(module: nn.Module) -> bool:
    """Says whether a call depends on the module's own params and its inputs alone, and changes nothing."""
    scope = module.scope
    assert scope is not None
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
    shares = _reads_others([getattr(module, name, None) for name in fields], is_field=True)
    return not (shares or scope.rngs or scope.mutable or set(module.variables) - {"params"})


def _reads_others(value: Any, *, is_field: bool) -> bool:
    """Says whether fields or arguments bring in values that are no arguments: arrays, or modules that live elsewhere in the model.

    They may hide in functions: in what these are bound to, and in what they close over.
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


def _inside(leaf_path: str) -> str:
    return leaf_path.removeprefix("params/")


def _join(module_path: str, leaf_path: str) -> str:
    return f"{module_path}/{_inside(leaf_path)}"
