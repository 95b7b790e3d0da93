"""Marks what a backward pass recomputes, or keeps in host memory. This module knows the modules that `recompute` and `offload` name.

A policy (`remat`) sees a primitive and its parameters, but not its module. `not_kept` therefore rewrites the matmuls of a traced function.
It replaces their precision, a pair, by an equal pair of the class `remat.NotKept`. JAX reads the values and the policy reads the class, so
the arithmetic and the compiled program do not change. Models cannot set this mark. It requires that JAX passes the pair on unchanged; tests
of this module fail if it does not. Arrays for host memory have a name.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax import traces, tree
from zerojax.errors import UserError
from zerojax.ops import residuals, tiles
from zerojax.tree import PyTree
from zerojax.zero.blocks import block_settings, remat

HOST = "zerojax: in the host's memory"
_to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[HOST], offload_src="device", offload_dst="pinned_host"
)
_PRODUCT_NOT_KEPT = "zerojax: a matmul by kernels of its own that is not kept"


class Modules:
    """The modules inside blocks that `recompute` and `offload` name, and those of them that were called."""

    def __init__(self, how: block_settings.Blocks):
        self._how, self._recompute, self._offload = how, re.compile(how.recompute), re.compile(how.offload)
        self._called: set[str] = set()  # paths of modules inside blocks
        self._running = ""  # the path of the module whose call runs
        self.recomputed: set[str] = set()
        self.offloaded: set[str] = set()

    def check_found(self) -> None:
        """Raises a UserError for a regex that matched nothing, and for a module that both match."""
        how = self._how
        for name, pattern, found in (
            ("recompute", how.recompute, self.recomputed),
            ("offload", how.offload, self.offloaded),
        ):
            if pattern and not found:
                raise UserError(
                    f"{name}: {pattern!r} matches no module called inside a block; it is a regex over full module paths"
                    f"{tree.such_as(pattern, self._called)}"
                )
        if both := self.recomputed & self.offloaded:
            raise UserError(
                f"recompute: {how.recompute!r} and offload: {how.offload!r} both match {min(both)}, and a result is either computed again "
                "or kept in host memory; let one of them match it"
            )

    def are_equal(self, block: str, other: str) -> bool:
        """Returns whether the same modules are named in two blocks, of which the first has run."""

        def of(path: str) -> tuple[bool, bool]:
            return self._recompute.fullmatch(path) is not None, self._offload.fullmatch(path) is not None

        inside = [path.removeprefix(block) for path in self._called if path.startswith(f"{block}/")]
        return all(of(block + name) == of(other + name) for name in ("", *inside))

    def inputs(self, path: str, values: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays that a block is called with, kept in host memory if `offload` matches the block."""
        if not self._offload.fullmatch(path):
            return values
        self.offloaded.add(path)
        return [for_host(v) if jnp.issubdtype(v.dtype, jnp.floating) else v for v in values]

    def call(self, path: str, call: Callable, args: tuple, kwargs: dict, module: nn.Module) -> Any:
        """Runs a call inside a block; marks its matmuls if `recompute` matches the module, and its result if `offload` does.

        Methods that a module's call uses are part of it: what they return may be its weights.
        """
        if path == self._running:
            return call(*args, **kwargs)
        self._called.add(path)
        before, self._running = self._running, path
        try:
            if self._recompute.fullmatch(path):
                self.recomputed.add(path)
                result = _recomputed(call, args, kwargs, path, module)
            else:
                result = call(*args, **kwargs)
        finally:
            self._running = before
        if not self._offload.fullmatch(path):
            return result
        if tiles.is_inside():
            raise UserError(
                f"offload: {path} runs in tiles (`over_tiles`), which keep nothing for the backward pass; name modules outside of them"
            )
        self.offloaded.add(path)
        return for_host(result)


def _recomputed(call: Callable, args: tuple, kwargs: dict, path: str, module: nn.Module) -> Any:
    """Runs a call whose matmuls are recomputed in the backward pass."""
    scope = module.scope
    assert scope is not None
    others, before = tree.NonArrays(), jax.tree.leaves(scope.mutable_variables())

    def run() -> list[jax.Array]:
        arrays = others.take(call(*args, **kwargs))
        after = jax.tree.leaves(scope.mutable_variables())
        if len(before) != len(after) or any(old is not new for old, new in zip(before, after)):
            raise UserError(
                f"recompute: {path} changes variables (batch statistics, sown values), and cannot be recomputed; name modules inside "
                "it, or omit it"
            )
        return arrays

    return others.give(not_kept(run))


def not_kept(function: Callable[[], list[jax.Array]]) -> list[jax.Array]:
    """Returns the result of `function`, with its matmuls marked so that "dots" does not keep them.

    Raises:
      UserError: a matmul has a dot algorithm instead of a precision, and cannot be marked.
    """
    marked = traces.replaced(jax.make_jaxpr(function)(), lambda eqn: eqn.replace(params=_marked_params(eqn)))
    return jex.jaxpr_as_fun(marked)()


def _marked_params(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """Returns an equation's parameters with the mark."""
    params = dict(eqn.params)
    if eqn.primitive.name in traces.MATMULS:
        precision = params["precision"] or (jax.lax.Precision.DEFAULT,) * 2
        if not isinstance(precision, tuple) or not all(isinstance(part, jax.lax.Precision) for part in precision):
            raise UserError(
                f"recompute: a matmul of a module that it matches has the dot algorithm {precision}, and only a matmul with a precision "
                "can be marked; give a jax.lax.Precision or none, set recompute to '', or remat to 'full'"
            )
        params["precision"] = remat.NotKept(precision)
    if eqn.primitive.name == "name" and params["name"] == residuals.PRODUCT:
        params["name"] = _PRODUCT_NOT_KEPT
    return params


@dataclasses.dataclass(frozen=True)
class Offloads:
    """Keeps arrays named by `for_host` in host memory, and applies another policy to the rest."""

    rest: Callable[..., Any]

    def __call__(self, primitive: jex.Primitive, *args: Any, **params: Any) -> Any:
        is_for_host = primitive.name == "name" and params["name"] == HOST
        return (_to_host if is_for_host else self.rest)(primitive, *args, **params)


def without_offload(policy: remat.Policy) -> remat.Policy:
    """Returns a policy that keeps nothing in host memory, because JAX cannot differentiate offloaded arrays twice."""
    return policy.rest if isinstance(policy, Offloads) else policy


def for_host(value: PyTree) -> PyTree:
    """Names a module's arrays, so that a policy that offloads keeps them in host memory until the backward pass reads them."""
    if isinstance(value, jax.Array):
        return checkpoint_name(value, HOST)
    if isinstance(value, (dict, flax.core.FrozenDict)):  # JAX does not keep their order
        named = {key: for_host(part) for key, part in value.items()}
        if isinstance(value, flax.core.FrozenDict):
            return flax.core.FrozenDict(named)
        same = copy.copy(value)
        same.update(named)
        return same

    def is_part(node: PyTree) -> bool:
        return node is not value

    is_leaf = jax.tree_util.treedef_is_leaf(jax.tree.structure(value, is_leaf=is_part))
    return value if is_leaf else jax.tree.map(for_host, value, is_leaf=is_part)
