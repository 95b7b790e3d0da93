"""Intercepts the calls to blocks of NNX models. This module lets each block gather its own weights, as `intercept` does for Linen.

NNX has no interceptors, so while a loss is traced the `__call__` of all NNX classes is wrapped. A module does not know its path: a block
is found by the identity of the arrays in its `nnx.Param`s, which are those that the loss was given, whether it was given a module or
merges one from a state. A block becomes a function of its weights, of its other variables (statistics, counts of draws) and of its
arguments; what it changes in those variables is a result.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from zerojax import tree
from zerojax.errors import UserError
from zerojax.tree import PyTree
from zerojax.zero.sharded_batch import keys as keys_lib

# f(module, call, args, kwargs) -> result; see `_wrapping`
_around: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("zerojax_nnx_around", default=None)


@contextlib.contextmanager
def intercepted(blocks: Any, params: PyTree, used: PyTree) -> Iterator[None]:
    """Runs the calls of NNX modules inside that are blocks as such, and then gives `params` the variables that changed in `used`.

    Args:
      blocks: the `intercept.Interceptor`.
      params: the stored weights and other variables.
      used: those that the loss is given.
    """
    before = variables(used)

    def around(module: nnx.Module, call: Any, args: tuple, kwargs: dict) -> Any:
        block = None if blocks.is_inside else Block(module, call, blocks.made_of)
        if block is None or not block.known or not blocks.matches(block.path):
            return call.__get__(module, type(module))(*args, **kwargs)
        blocks.enters(block.path, has_unknown=block.has_unknown)
        check_arguments(block.path, (args, kwargs))
        result, changed = blocks.run_block(block, block.path, (), args, kwargs)
        block.set_changed(changed)
        return result

    with _wrapping(around):
        yield
    set_variables(params, changed(used, before))


@contextlib.contextmanager
def _wrapping(around: Callable[..., Any]) -> Iterator[None]:
    """Runs `around(module, call, args, kwargs)` in place of each call `module(*args, **kwargs)` of an NNX module inside."""
    wrapped = [cls for cls in _classes(nnx.Module) if "__call__" in vars(cls)]
    own = {cls: vars(cls)["__call__"] for cls in wrapped}
    token = _around.set(around)
    try:
        for cls, call in own.items():
            cls.__call__ = _wrapped(call)
        yield
    finally:
        for cls, call in own.items():
            cls.__call__ = call
        _around.reset(token)


def _classes(cls: type) -> set[Any]:
    below: list[Any] = cls.__subclasses__()
    return {cls}.union(*(_classes(sub) for sub in below))


def _wrapped(call: Any) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        bound, around = call.__get__(module, type(module)), _around.get()
        return bound(*args, **kwargs) if around is None else around(module, call, args, kwargs)

    return wrapper


def variables(params: PyTree) -> dict[str, Any]:
    """Returns the values of the NNX variables other than params; a forward pass may change these in place."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_other_variable)
    return {tree.path_string(path): node.get_raw_value() for path, node in nodes if is_other_variable(node)}


def is_other_variable(node: PyTree) -> bool:
    """Returns whether a node is an NNX variable other than a param."""
    return isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def check_summed(params: PyTree) -> None:
    """Raises a UserError for params with variables that devices would change each in its own way."""
    if variables(params):
        raise UserError(
            "reduce_dtype: NNX params with other variables (batch statistics, random counts) would differ between devices; hold "
            "them in a field of the state, which the loss returns, or omit reduce_dtype"
        )


def changed(params: PyTree, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `variables` that are others than before."""
    return {path: value for path, value in variables(params).items() if value is not before[path]}


def gathered(gather_leaf: Callable[[str, Any], Any], stored: PyTree, is_leaf: Callable[[Any], bool]) -> PyTree:
    """Returns params with every weight gathered, and with copies of the other variables, which a loss may change."""

    def gather_node(path: tuple, node: PyTree) -> PyTree:
        if is_other_variable(node):
            return jax.tree.map(lambda leaf: leaf, node)
        return gather_leaf(tree.path_string(path), node)

    def is_node(node: PyTree) -> bool:
        return is_other_variable(node) or is_leaf(node)

    return jax.tree_util.tree_map_with_path(gather_node, stored, is_leaf=is_node)


def set_variables(params: PyTree, values: Mapping[str, Any]) -> None:
    """Sets the variables of the caller's NNX module that the loss changed in its copy."""
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_other_variable):
        if tree.path_string(path) in values:
            node.set_value(values[tree.path_string(path)])


class Block:
    """A call of an NNX module as a function of arrays.

    Attributes:
      known: {path in the params: stored weight}, of its weights that are those of the params.
      has_unknown: whether it has other weights, which the loss has changed.
      path: of the module in the params; "" if it has no such weight.
      inputs: the arrays of its other variables, and the numbers that are folded into its random keys.

    Args:
      module: the NNX module.
      call: the `__call__` of its class.
      stored_of: f(array) -> (path, stored), or None for an unknown array.
    """

    def __init__(self, module: nnx.Module, call: Any, stored_of: Callable[[Any], tuple[str, Any] | None]):
        self._module, self._call = module, call
        self._graph, params, rest = _split(module)
        named, self._params = tree.flatten(params), jax.tree.structure(params)
        found = [stored_of(value) for _, value in named]
        self.known = {weight[0]: weight[1] for weight in found if weight}
        self._weights = [weight[0] if weight else None for weight in found]
        self.has_unknown = not all(found)
        roots = [w[0].removesuffix(f"/{leaf}") for w, (leaf, _) in zip(found, named) if w and w[0].endswith(f"/{leaf}")]
        self.path = tree.below_params(roots[0]) if roots else ""
        others = [value for (_, value), weight in zip(named, found) if not weight]
        self._before, self._rest = jax.tree.leaves(rest), _structure(rest)
        self._impls = [*map(tree.key_impl, self._before)]
        self._count = len(others), len(self._before)
        has_keys = any(impl is not None for impl in self._impls)
        self.inputs = [*others, *map(tree.key_words, self._before), *(keys_lib.numbers() if has_keys else ())]
        self._changed: list[int] = []

    def bound(self, used: Mapping[str, Any], inputs: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Returns a context with the call, with these weights and inputs; it also returns the variables that it changed."""
        return contextlib.nullcontext(functools.partial(self._run, used, inputs))

    def _run(self, used: Mapping[str, Any], inputs: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        others, rest = inputs[: self._count[0]], inputs[self._count[0] : sum(self._count)]
        numbers, given = tuple(inputs[sum(self._count) :]), iter(others)
        params = [next(given) if weight is None else used[weight] for weight in self._weights]
        before = [*map(tree.keys_again, rest, self._impls)]
        module = nnx.merge(
            self._graph, jax.tree.unflatten(self._params, params), jax.tree.unflatten(self._rest, before)
        )
        with keys_lib.folding(numbers) if numbers else contextlib.nullcontext():
            result = self._call.__get__(module, type(module))(*args, **kwargs)
        _, after_params, after = _split(module)
        if _structure(after) != self._rest or any(a is not b for a, b in zip(jax.tree.leaves(after_params), params)):
            raise UserError(
                f"blocks: {self.path} adds variables while it runs (sown values), or changes its params, which no block can; match other "
                "modules, or gather leaf by leaf (blocks='')"
            )
        leaves = jax.tree.leaves(after)
        self._changed = [n for n, (old, new) in enumerate(zip(before, leaves)) if old is not new]
        return result, [tree.key_words(leaves[n]) for n in self._changed]

    def set_changed(self, values: list[Any]) -> None:
        """Gives the caller's module the values that the call returned."""
        leaves = list(self._before)
        for number, value in zip(self._changed, values):
            leaves[number] = tree.keys_again(value, self._impls[number])
        if self._changed:
            nnx.update(self._module, jax.tree.unflatten(self._rest, leaves))


def _structure(value: PyTree) -> jax.tree_util.PyTreeDef:
    return jax.tree.structure(value)


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Returns a module's graph, its params, and its other variables."""
    parts: Any = nnx.split(module, nnx.Param, ...)
    return parts


def check_arguments(path: str, value: PyTree) -> None:
    """Raises a UserError for arguments that hold NNX modules or variables, whose changes a block would lose."""
    kinds = (nnx.Module, nnx.Variable)
    if any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kinds))):
        raise UserError(
            f"blocks: {path} is called with an NNX module or variable, whose changes a block would lose; match other modules, or "
            "gather leaf by leaf (blocks='')"
        )
