"""Finds the calls to a model's blocks while it runs. This module lets each block gather its own weights, and the model know nothing of it.

Linen lets calls be intercepted. The outermost call of each module whose path matches runs under its own `jax.checkpoint` and gathers
its weights inside it, so at any time about one block's weights are whole.

Where the caller gives `run`, a plain block (params alone: no random keys, no other variables) is handed to it as a function of its
weights and inputs, so that forward and backward pass can be written by hand.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from zerojax import remat, tree

Policy = Callable[..., bool] | None
# run(body, params, arrays, policy) -> outputs, with body(used params, *arrays) -> outputs; `params` are by path in the model.
Run = Callable[[Callable[..., Any], dict[str, Any], list[jax.Array], Policy], Any]


class Blocks:
    """Intercepts calls to blocks.

    Args:
      pattern: a regex over Linen module paths that a block's matches in full.
      heads: the same for blocks that are not rematerialised; "" for none.
      gather_leaf: f(path, stored) -> used.
      policy: what a block keeps for its backward pass; None for no rematerialisation.
      recompute: a regex over paths of modules inside blocks, whose products are not kept; "" for none.
      run: runs plain blocks; None lifts all of them.
      is_leaf: tells weights from the trees around them.
    """

    def __init__(
        self,
        pattern: str,
        heads: str,
        gather_leaf: Callable[[str, Any], Any],
        policy: Callable[..., bool] | None,
        *,
        recompute: str = "",
        run: Run | None = None,
        is_leaf: Callable[[Any], bool] | None = None,
    ):
        self._pattern = re.compile(f"(?:{pattern})|(?:{heads})" if heads else pattern)
        self._heads = re.compile(heads) if heads else None
        self._recompute = re.compile(recompute)
        self._gather_leaf, self._policy, self._run, self._is_leaf = gather_leaf, policy, run, is_leaf
        self._inside: str | None = None  # path of the block that runs
        self._root: tuple[str, ...] = ()  # path of the module that stands for it while it runs
        self.entered: set[str] = set()
        self.recomputed: set[str] = set()

    def owns(self, leaf_path: str) -> bool:
        """Says whether a leaf lies inside a block."""
        parts = leaf_path.removeprefix("params/").split("/")
        return any(self._pattern.fullmatch("/".join(parts[:end])) for end in range(1, len(parts)))

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
        arrays, fill = _arrays_of(args, kwargs)
        policy = None if self._heads is not None and self._heads.fullmatch(path) else self._policy
        if self._run is not None and _is_plain(module):
            return self._by_hand(module, context.method_name, path, arrays, fill, policy)
        return self._lifted(module, context.method_name, path, arrays, fill, policy)

    def _by_hand(self, module: nn.Module, method: str, path: str, arrays: list, fill: Callable, policy: Any) -> Any:
        alone = module.clone(parent=None)
        params = module.variables["params"]
        stored = {_join(path, leaf): value for leaf, value in tree.flatten(params, is_leaf=self._is_leaf)}
        structure = jax.tree.structure(params, is_leaf=self._is_leaf)

        def body(used: dict[str, Any], *values: Any) -> Any:
            inner_args, inner_kwargs = fill(values)
            params = jax.tree.unflatten(structure, [used[name] for name in stored])
            with self._entered_as(path, ()):
                return alone.apply({"params": params}, *inner_args, **inner_kwargs, method=method)

        assert self._run is not None
        return self._run(body, stored, arrays, policy)

    def _lifted(self, module: nn.Module, method: str, path: str, arrays: list, fill: Callable, policy: Any) -> Any:
        def run(bound: nn.Module, *values: Any) -> Any:
            inner_args, inner_kwargs = fill(values)
            return getattr(bound, method)(*inner_args, **inner_kwargs)

        def gather_block(variables: Any) -> Any:
            return tree.map_with_path(
                lambda leaf, value: self._gather_leaf(_join(path, leaf), value), variables, is_leaf=self._is_leaf
            )

        block = nn.map_variables(run, "params", trans_in_fn=gather_block)
        if policy is not None:
            block = nn.remat(block, policy=policy)
        with self._entered_as(path, module.path):  # calls inside a block, flax's own of `run` too, are left alone
            return block(module, *arrays)

    @contextlib.contextmanager
    def _entered_as(self, path: str, root: tuple[str, ...]) -> Iterator[None]:
        before = self._inside, self._root
        self._inside, self._root = path, root
        try:
            yield
        finally:
            self._inside, self._root = before

    def _inner(self, call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        """Runs a call inside a block, its products marked where `recompute` names the module."""
        path = "/".join((self._inside or "", *context.module.path[len(self._root) :]))
        if path == self._inside or not self._recompute.fullmatch(path):
            return call(*args, **kwargs)
        self.recomputed.add(path)
        with remat.not_kept():
            return call(*args, **kwargs)


def _set_up(call: Callable) -> None:
    """Runs a block's `setup`; where it asks for weights of its own, which are not whole here, the block's calls run it again."""
    with contextlib.suppress(flax.errors.ScopeParamShapeError):
        call()


def _arrays_of(args: tuple, kwargs: dict) -> tuple[list[Any], Callable[[Any], tuple[tuple, dict]]]:
    """Returns a call's arrays, and the function that puts values in their place."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array) or hasattr(leaf, "__array__") for leaf in leaves]

    def fill(values: Any) -> tuple[tuple, dict]:
        given = iter(values)
        return jax.tree.unflatten(structure, [next(given) if array else leaf for array, leaf in zip(is_array, leaves)])

    return [leaf for array, leaf in zip(is_array, leaves) if array], fill


def _is_plain(module: nn.Module) -> bool:
    """Says whether a call depends on the module's own params and its inputs alone, and changes nothing."""
    scope = module.scope
    assert scope is not None
    fields = [field.name for field in dataclasses.fields(module) if field.name not in ("parent", "name")]
    shares = any(_is_bound(getattr(module, name, None)) for name in fields)
    return not (shares or scope.rngs or scope.mutable or set(module.variables) - {"params"})


def _is_bound(value: Any) -> bool:
    """Says whether a field holds a module that lives elsewhere in the model."""
    modules = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nn.Module))
    return any(isinstance(node, nn.Module) and node.scope is not None for node in modules)


def _join(module_path: str, leaf_path: str) -> str:
    return f"{module_path}/{leaf_path.removeprefix('params/')}"
