"""Lifts blocks by Linen's own transformations. This module runs those that are not plain: they change variables, read arrays or modules
from elsewhere, or are layers of a stack, which `nn.scan` runs.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax

from zerojax import tree
from zerojax.tree import Leaf, PyTree
from zerojax.zero import remat

Known = Mapping[
    str, tuple[str, Any] | None
]  # {path in the module: (path in the params, stored weight), or None if it is unknown}


class StackFound(Exception):
    """A block with this path is a layer of a stack, run by `nn.scan`. The loss is to be traced again, by an `Interceptor` that knows it."""

    def __init__(self, path: str):
        super().__init__(path)
        self.path = path


def run(
    module: nn.Module,
    method: str,
    args: tuple,
    kwargs: dict,
    known: Known,
    gather_leaf: Callable[[str, Any], Any],
    inputs: Callable[[Sequence[Any]], Sequence[Any]],
    policy: remat.Policy,
    *,
    is_leaf: tree.IsLeaf,
    is_made: bool,
) -> Any:
    """Runs a block that gathers its known weights inside.

    Args:
      inputs: f(arrays of the arguments) -> those that the block is called with.
      is_made: whether the module's weights are arrays that were made from stored ones, which take their place here.
    """
    called, arrays, result = _of_arrays(method, args, kwargs, inputs)

    def gather_block(variables: PyTree) -> PyTree:
        def gather(leaf: str, value: object) -> Leaf:
            weight = known.get(tree.below_params(leaf))
            return gather_leaf(weight[0], value) if weight else value

        return tree.map_with_path(gather, variables, is_leaf=is_leaf)

    block = nn.map_variables(called, "params", trans_in_fn=gather_block)
    if policy is not None:
        block = nn.remat(block, policy=policy)
    if is_made:
        block = nn.map_variables(block, "params", trans_in_fn=functools.partial(_as_stored, known, is_leaf=is_leaf))
    return result.give(block(module, *arrays))


def is_layer(params: PyTree, stacks: Collection[tuple[int, ...] | None], *, is_leaf: tree.IsLeaf) -> bool:
    """Returns whether a block with unknown weights is a layer of a stack: each weight lacks the first dim of the one at its path."""
    leaves = jax.tree.leaves(params, is_leaf=is_leaf)
    return all(stack and stack[1:] == leaf.shape for stack, leaf in zip(stacks, leaves))


def run_with_stacks(
    module: nn.Module, method: str, args: tuple, kwargs: dict, stacks: Known, *, is_leaf: tree.IsLeaf
) -> Any:
    """Runs a model with the stacks that `nn.scan` cuts into layers as they are stored, so that each layer gathers its own slice."""
    called, arrays, result = _of_arrays(method, args, kwargs, lambda values: values)
    as_stored = functools.partial(_as_stored, stacks, is_leaf=is_leaf)
    return result.give(nn.map_variables(called, "params", trans_in_fn=as_stored)(module, *arrays))


def _of_arrays(
    method: str, args: tuple, kwargs: dict, inputs: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[Callable[..., list[Any]], list[Any], tree.NonArrays]:
    """Returns a call as a function of a module and arrays, these arrays, and what of its result is none."""
    given, result = tree.NonArrays(), tree.NonArrays()
    arrays = given.take((args, kwargs))

    def called(bound: nn.Module, *values: Any) -> list[Any]:
        inner_args, inner_kwargs = given.give(inputs(values))
        return result.take(getattr(bound, method)(*inner_args, **inner_kwargs))

    return called, arrays, result


def _as_stored(known: Known, variables: PyTree, *, is_leaf: tree.IsLeaf) -> PyTree:
    """Returns variables with the stored weights in place of the known ones."""

    def stored(leaf: str, value: object) -> Leaf:
        weight = known.get(tree.below_params(leaf))
        return weight[1] if weight else value

    return tree.map_with_path(stored, variables, is_leaf=is_leaf)
